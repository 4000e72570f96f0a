"""What every controller is: one frozen model whose fields are its parameters."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from entropic_control.errors import ConfigError

Array = NDArray[Any]
"""A numpy array; shape and unit are given where it is used."""

Rows = Array | Sequence[Array]
"""Logits of several sequences: an array of shape (rows, vocab), or rows of shape (vocab,)."""


_SCALARS = ("bool", "int", "float", "str")


def _make_strict(schema: Any) -> None:
    """Have the scalars in a schema take their own type alone: no `true` for 1, no "5" for 5.

    An integer is a number where one with a fraction is wanted. Containers stay as they are, since a file
    has lists where a field is a tuple.
    """
    if isinstance(schema, dict):
        if schema.get("type") in _SCALARS:
            schema["strict"] = True
        for inner in schema.values():
            _make_strict(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            _make_strict(inner)


def _plain(value: Any) -> Any:
    """A number of numpy's, or a list of them, as Python's own."""
    if isinstance(value, np.number):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        return value.tolist()
    if isinstance(value, list | tuple) and any(isinstance(inner, np.number) for inner in value):
        return [_plain(inner) for inner in value]
    return value


class Strict(BaseModel):
    """A frozen model that refuses unknown keys and says which keys it knows."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="strings"
    )

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        _make_strict(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _name_known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    raise unknown_name("key", key, cls.model_fields)
            return {key: _plain(value) for key, value in data.items()}
        return data

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed."""
        return type(self).model_validate({**dict(self), **changes})


def unknown_name(what: str, name: object, known: Any) -> PydanticCustomError:
    """The error for a name that is not one of `known`, with the nearest one suggested."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return PydanticCustomError(
        "unknown_name",
        "unknown {what} '{name}'{hint} (known: {known})",
        {"what": what, "name": str(name), "hint": hint, "known": ", ".join(sorted(known))},
    )


class Linear(NamedTuple):
    """A discrete state-space model, one step a token: x' = A x + B v, y = C x + D v.

    `inputs` and `outputs` name the signals with their units; all are deviations from an operating
    point.
    """

    A: Array
    B: Array
    C: Array
    D: Array
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def respond(self, inputs: Array) -> Array:
        """Outputs, shape (steps, outputs), for `inputs`, shape (steps, inputs), from rest."""
        x = np.zeros(self.A.shape[0])
        out = np.empty((len(inputs), self.C.shape[0]))
        for step, v in enumerate(inputs):
            out[step] = self.C @ x + self.D @ v
            x = self.A @ x + self.B @ v
        return out


def static(inputs: str, outputs: str, gain: float = 0.0) -> Linear:
    """A memoryless linear model with one input and one output."""
    empty = np.zeros((0, 0))
    return Linear(
        empty, np.zeros((0, 1)), np.zeros((1, 0)), np.array([[gain]]), (inputs,), (outputs,)
    )


class Kinded(Strict):
    """A model that configurations name by `kind`, within a family."""

    family: ClassVar[str]

    kind: str

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        from entropic_control.controllers import kinds

        kind = cls.model_fields["kind"].default
        inherited = any(kind == base.model_fields["kind"].default for base in _kinded(cls))
        if isinstance(kind, str) and not inherited:  # a subclass that keeps a kind is no new one
            kinds.register(cls)


def _kinded(cls: type[Kinded]) -> list[type[Kinded]]:
    """The bases of a class that have a kind."""
    return [base for base in cls.__mro__[1:] if issubclass(base, Kinded)]


class Controller(Kinded):
    """Base of all controllers.

    A subclass adds its parameters as fields, a `kind` literal that names it in configurations, and
    the methods of its family. The methods are pure: state goes in, new state comes out. `family` says
    which loop it serves: 'temperature', 'priority', 'pruning', 'speculation', 'estimator' or 'truncation'.
    """

    overridable: ClassVar[frozenset[str]] = frozenset()
    """Fields that a single request may set for itself; they become rows of the state."""

    def overridden(
        self, rows: int, dtype: Any, overrides: dict[str, ArrayLike], field: str
    ) -> Array:
        """The column of an overridable field: the request's own value, or this object's.

        Raises
        ------
        ConfigError
            If a value is out of this field's domain or has the wrong number of rows.
        """
        default = getattr(self, field)
        if field not in overrides:
            return np.full(rows, default, dtype)
        try:
            given = overrides[field]
            if any(isinstance(value, bool | str) for value in np.ravel(np.asarray(given, object))):
                raise TypeError(f"{given!r} is no number")
            column = np.broadcast_to(np.asarray(given, dtype), (rows,)).copy()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.family} '{self.kind}': {field} must be a number or {rows} of them: {error}"
            ) from None
        for value in column:
            validate_field(self, field, float(value))
        return column

    def check_overrides(self, overrides: dict[str, ArrayLike]) -> None:
        """Refuse overrides of fields that are not rows of this controller's state."""
        for name in overrides:
            if name not in self.overridable:
                allowed = ", ".join(sorted(self.overridable)) or "none"
                raise ConfigError(
                    f"{self.family} '{self.kind}' has no per-request setting {name!r} "
                    f"(it has: {allowed})"
                )


def validate_field(controller: Controller, field: str, value: float) -> None:
    """Run the validation of one field on a per-request value."""
    try:
        controller.replace(**{field: value})
    except ValueError as error:
        raise ConfigError(f"{controller.family} '{controller.kind}': {error}") from None
