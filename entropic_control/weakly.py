"""Calling back without keeping alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of an object that whoever calls it does not keep alive.

    What an engine lends its parts comes back to it, and such a ring keeps the model in memory until the
    garbage collector finds it, which counts objects and not megabytes.

    Raises
    ------
    ReferenceError
        When called after the object is gone.
    """
    if not isinstance(method, MethodType):
        return method
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any, **named: Any) -> Any:
        alive = reference()
        if alive is None:
            raise ReferenceError("the engine that this belongs to is gone")
        return alive(*arguments, **named)

    return call
