"""What a closed backend becomes: the same object, whose every method is a typed error."""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

from entropic_control.errors import EngineClosed


def close_off(backend: Any) -> None:
    """Let every public method and property of a backend raise, `close` excepted.

    The object changes its class, so that a step of an open one pays nothing for it. Attributes such as
    `capabilities` stay: reports are made of them.
    """
    kind: Any = type(backend)
    backend.__class__ = _closed(kind)


class _Closed:
    """Stands where a closed backend held its engine; to ask it for anything is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        raise EngineClosed("the backend was closed; open a new one")


CLOSED: Any = _Closed()


@cache
def _closed(cls: type) -> type:
    if getattr(cls, "closed", False):
        return cls
    members: dict[str, Any] = {"closed": True, "close": _nothing, "__module__": cls.__module__}
    for name in dir(cls):
        member = getattr(cls, name)
        if name.startswith("_") or name in members:
            continue
        if callable(member):
            members[name] = _refusal(cls.__name__, name)
        elif hasattr(member, "__get__"):
            members[name] = property(_refusal(cls.__name__, name))
    return type(cls.__name__, (cls,), members)


def _nothing(_: Any) -> None:
    """Closing twice is fine."""


def _refusal(owner: str, name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise EngineClosed(f"{owner}.{name}: the backend was closed; open a new one")

    return refuse
