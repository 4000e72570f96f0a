"""Who is calling: what a logits processor is not told, and has to know to refuse what it cannot do."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A function at work."""

    name: str
    variables: dict[str, Any]
    """Its arguments and local variables, as they are now."""
    frame: int = 0
    """Names this one call of the function as long as it is at work."""


def innermost(module: str, *names: str) -> Call | None:
    """The innermost function of a module that led here; None if none did.

    The libraries hand a processor its logits and nothing else, and their hooks for settings come before
    their own processors are made. The call stack is the one place that knows both.

    Parameters
    ----------
    module : str
        The module that defines the function.
    names : str
        The functions looked for; by default any.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") == module and (not names or name in names):
            return Call(name, dict(frame.f_locals), id(frame))
        frame = frame.f_back  # type: ignore[assignment]
    return None
