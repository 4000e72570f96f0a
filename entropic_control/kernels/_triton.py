"""Triton, or a stand-in that lets kernel files be imported (not run) where it is missing."""

from __future__ import annotations

from typing import Any

__all__ = ["AVAILABLE", "INTERPRETED", "tl", "triton"]


class _Absent:
    """Answers every attribute with itself and decorates functions into themselves."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args else self


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Absent()
    AVAILABLE = False
    INTERPRETED = False
else:
    AVAILABLE = True
    # Triton decides by function, when it is decorated; its own library was decorated on import.
    INTERPRETED = not isinstance(tl.sum, triton.JITFunction)
