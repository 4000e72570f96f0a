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

from entropic_control.controllers.base import Kinded, Strict, unknown_name
from entropic_control.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue

ENTRY_POINTS = ("entropic_control.controllers", "entropic_control.backends")
_registry: dict[str, dict[str, type[Kinded]]] = {}
_describing: ContextVar[frozenset[str]] = ContextVar("_describing", default=frozenset())


def register(cls: type[Kinded]) -> None:
    """Make `cls` known under its family and kind.

    The same class, defined again as in a notebook's cell, takes the earlier one's place. So does another
    class of a user, with a warning.

    Raises
    ------
    ConfigError
        If the kind is one of this package's own.
    """
    kind = cls.model_fields["kind"].default
    known = _registry.setdefault(cls.family, {})
    taken = known.get(kind)
    if taken is not None and _name(taken) != _name(cls):
        words = f"{cls.family} kind {kind!r} of {_name(cls)} is that of {_name(taken)}"
        if taken.__module__.partition(".")[0] == __name__.partition(".")[0]:
            raise ConfigError(f"{words}, which comes with this package: give it another kind")
        warnings.warn(f"{words}, and takes its place", stacklevel=4)
    known[kind] = cls


def _name(cls: type[Kinded]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _named_by_its_kind(model: Kinded) -> bool:
    """Whether a configuration that names the model's kind gives its class."""
    cls = _registry.get(model.family, {}).get(model.kind)
    return cls is not None and _name(cls) == _name(type(model))


def fields_of(model: Strict) -> dict[str, Any]:
    """A part of a configuration as the mapping that gives it.

    Raises
    ------
    ConfigError
        If its kind gives another class, as a subclass has that keeps the kind of its parent.
    """
    if isinstance(model, Kinded) and not _named_by_its_kind(model):
        raise ConfigError(
            f"{model.family} kind {model.kind!r} does not give a {_name(type(model))}, which keeps the "
            f"kind of its parent: give the class a kind of its own"
        )
    return dict(model)


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
            serialization=core_schema.plain_serializer_function_ser_schema(_dumped),
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
        kind = value.get("kind", "(none given)") if isinstance(value, dict) else value
        if not isinstance(kind, str) or kind not in known:
            raise unknown_name(f"{self.family} kind", kind, known)
        return known[kind].model_validate(value)


def _dumped(model: Kinded) -> Any:
    fields_of(model)
    return model.model_dump(mode="json")
