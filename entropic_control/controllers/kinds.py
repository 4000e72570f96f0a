"""The registry of kinds: which class a `kind` in a configuration names.

Classes register themselves when they are defined. Other distributions offer theirs through the entry
point groups `entropic_control.controllers` and `entropic_control.backends`; those are loaded the first
time a kind is looked up.
"""

from __future__ import annotations

import warnings
from contextvars import ContextVar
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from entropic_control.controllers.base import Kinded, unknown_name

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue

ENTRY_POINTS = ("entropic_control.controllers", "entropic_control.backends")
_registry: dict[str, dict[str, type[Kinded]]] = {}
_describing: ContextVar[frozenset[str]] = ContextVar("_describing", default=frozenset())


def register(cls: type[Kinded]) -> None:
    """Make `cls` known under its family and kind; a later definition replaces an earlier one."""
    kind = cls.model_fields["kind"].default
    _registry.setdefault(cls.family, {})[kind] = cls


@lru_cache(maxsize=1)
def load_entry_points() -> None:
    """Import what other distributions offer; a broken one is a warning, not a crash."""
    for point in (point for group in ENTRY_POINTS for point in entry_points(group=group)):
        try:
            point.load()
        except Exception as error:  # noqa: BLE001 (third-party code may raise anything at import)
            warnings.warn(
                f"entry point {point.name!r} of {point.group} failed: {error}", stacklevel=2
            )


def kinds_of(family: str) -> dict[str, type[Kinded]]:
    """The known classes of a family, by kind."""
    load_entry_points()
    return dict(sorted(_registry.get(family, {}).items()))


def families() -> list[str]:
    """The names of the known families."""
    load_entry_points()
    return sorted(_registry)


class KindOf:
    """Annotation that resolves a mapping with a `kind` to the class it names.

    A pydantic discriminated union is fixed when its model is built; this one asks the registry at
    each validation, so that a class defined in a notebook works in the next line.
    """

    def __init__(self, family: str) -> None:
        self.family = family

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self._resolve,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda model: model.model_dump(mode="json")
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        known = kinds_of(self.family)
        if self.family in _describing.get():
            # A wrapper holds its own family: below the first level the kinds are named only.
            kind = {"type": "string", "enum": list(known)}
            return {"type": "object", "properties": {"kind": kind}, "required": ["kind"]}
        token = _describing.set(_describing.get() | {self.family})
        try:
            described = [cls.model_json_schema() for cls in known.values()]
        finally:
            _describing.reset(token)
        return {"oneOf": described, "discriminator": {"propertyName": "kind"}}

    def _resolve(self, value: Any) -> Kinded:
        known = kinds_of(self.family)
        if isinstance(value, Kinded):
            if value.family != self.family:
                raise unknown_name(f"{self.family} kind", value.kind, known)
            return value
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, dict) or "kind" not in value:
            raise unknown_name(f"{self.family} kind", _missing_kind(value), known)
        kind = value["kind"]
        if kind not in known:
            raise unknown_name(f"{self.family} kind", kind, known)
        return known[kind].model_validate(value)


def _missing_kind(value: Any) -> object:
    return "(none given)" if isinstance(value, dict) else value
