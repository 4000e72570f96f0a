"""Asking a controller: what it raises, or returns and may not, becomes a fault that names it.

Controllers are written by users. A fault is found where it is made, before its value has gone anywhere, so
that the row it belongs to can fail by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from entropic_control.controllers.base import Array
from entropic_control.controllers.temperature.base import Command
from entropic_control.errors import ControllerFault

Hook = Callable[..., Any]
"""A method of a controller."""

_REAL = "fiu"
"""Kinds of arrays of real numbers."""


def ask(hook: Hook, *args: Any, **settings: Any) -> Any:
    """What a controller's method returns.

    Raises
    ------
    ControllerFault
        If it raises.
    """
    try:
        return hook(*args, **settings)
    except Exception as error:
        raise fault(hook, f"raised {error!r}") from error


def fault(hook: Hook, what: str) -> ControllerFault:
    """The fault that a controller's method did `what`."""
    controller = getattr(hook, "__self__", None)
    name = getattr(hook, "__name__", "a method")
    if controller is None:
        return ControllerFault(f"a controller's {name} {what}")
    kind = getattr(controller, "kind", type(controller).__name__)
    return ControllerFault(f"{controller.family} '{kind}': {name} {what}")


def column(hook: Hook, value: Any, rows: int, kinds: str = _REAL) -> Array:
    """An array of shape (rows,) of certain kinds of numbers, by numpy's letters.

    Raises
    ------
    ControllerFault
        If it is anything else.
    """
    if isinstance(value, np.ndarray) and value.shape == (rows,) and value.dtype.kind in kinds:
        return value
    raise fault(hook, f"returned {described(value)}, not an array of {rows} numbers")


def mask(hook: Hook, value: Any, rows: int) -> Array:
    """A mask of shape (rows,); `ControllerFault` if it is none."""
    if isinstance(value, np.ndarray) and value.shape == (rows,) and value.dtype == np.bool_:
        return value
    raise fault(hook, f"returned {described(value)}, not a mask of {rows}")


def integer(hook: Hook, value: Any) -> int:
    """A whole number; `ControllerFault` if it is none."""
    if isinstance(value, (int, np.integer)):
        return int(value)
    raise fault(hook, f"returned {described(value)}, not a whole number")


def finite(hook: Hook, value: Any, rows: int) -> Array:
    """An array of shape (rows,) of finite numbers; `ControllerFault` if it is none."""
    found = column(hook, value, rows)
    if not np.isfinite(found).all():
        raise fault(hook, f"returned {described(value)}, which are not finite")
    return found


def temperatures(hook: Hook, value: Any, rows: int) -> Array:
    """Temperatures that rows can be drawn at, shape (rows,).

    Raises
    ------
    ControllerFault
        If one is NaN, infinite or negative, or they are no array of that shape.
    """
    found = column(hook, value, rows)
    # Of a few rows: two reductions in numpy take five times as long.
    bad = [t for t in found.tolist() if not 0.0 <= t < math.inf]
    if bad:
        raise fault(hook, f"gave the temperature {bad[0]:g}: it must be 0 or more, and finite")
    return found


def command(hook: Hook, value: Any, rows: int) -> Command:
    """A command under which rows can be drawn.

    Raises
    ------
    ControllerFault
        If it is none; if a temperature is NaN, infinite or negative, or a cut NaN or negative; or if
        they are no arrays of shape (rows,).
    """
    if not isinstance(value, Command):
        raise fault(hook, f"returned {described(value)}, not a Command")
    temperatures(hook, value.temperature, rows)
    if value.max_surprisal is not None:
        limits = column(hook, value.max_surprisal, rows)
        bad = [limit for limit in limits.tolist() if not limit >= 0.0]
        if bad:
            raise fault(hook, f"gave the max_surprisal {bad[0]:g}: it must be 0 nats or more")
    return value


def moved(hook: Hook, value: Any, before: Any, rows: int) -> tuple[Array, Any]:
    """What an `update` returned: a column, shape (rows,), and a state like the one before.

    Raises
    ------
    ControllerFault
        If it is anything else.
    """
    if not (isinstance(value, tuple) and len(value) == 2):
        raise fault(hook, f"returned {described(value)}, not a column and a state")
    told, state = value
    return column(hook, told, rows, _REAL + "b"), alike(hook, state, before)


def alike(hook: Hook, state: Any, before: Any) -> Any:
    """A state of the structure and rows that another has; `ControllerFault` if it is none."""
    if not _alike(state, before):
        raise fault(
            hook, f"returned the state {described(state)}, which is not like {described(before)}"
        )
    return state


def fresh(hook: Hook, state: Any) -> Any:
    """The state of one fresh sequence: a tree of tuples of arrays of one row; else `ControllerFault`."""
    if not _of_one_row(state):
        raise fault(hook, f"returned {described(state)}, which is no state of one row")
    return state


def _alike(state: Any, before: Any) -> bool:
    if type(state) is not type(before):
        return False
    if isinstance(before, tuple):
        return len(state) == len(before) and all(map(_alike, state, before))
    if isinstance(before, np.ndarray):
        same = state.dtype == before.dtype or state.dtype.kind in _REAL + "b"
        return bool(same and state.shape == before.shape)
    return True


def _of_one_row(state: Any) -> bool:
    if isinstance(state, np.ndarray):
        return bool(state.shape[:1] == (1,))
    return isinstance(state, tuple) and all(map(_of_one_row, state))


def described(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, np.ndarray):
        shown = np.array2string(value, threshold=6, edgeitems=2)
        return f"{shown} of shape {value.shape} and type {value.dtype}"
    text = repr(value)
    return f"{text[:60]}..." if len(text) > 64 else text
