"""entropic-control: control how a language model decodes, by its own uncertainty."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from entropic_control.certification import certify
    from entropic_control.config import Config, load_config
    from entropic_control.engine import Engine
    from entropic_control.persistence import restore
    from entropic_control.report import Completion, Report
    from entropic_control.request import Request

__version__ = "0.1.0"

_HOMES = {
    "Completion": "report",
    "Config": "config",
    "Engine": "engine",
    "Report": "report",
    "Request": "request",
    "certify": "certification",
    "load_config": "config",
    "restore": "persistence",
}

__all__ = [
    "Completion",
    "Config",
    "Engine",
    "Report",
    "Request",
    "certify",
    "load",
    "load_config",
    "restore",
]


def load(
    source: str | Path | dict[str, Any] | Config,
    *,
    backend: str | None = None,
    settings: Sequence[str] = (),
    dry_run: bool = False,
) -> Engine:
    """An engine from a configuration.

    Parameters
    ----------
    source : path, dict or Config
        A YAML or JSON file, or what one would hold.
    backend : str, optional
        A backend kind to run on instead of the configured one, with that kind's defaults.
    settings : sequence of str
        Changes such as "temperature.target=1.5".
    dry_run : bool
        Observe only; see `Engine`.

    Raises
    ------
    ConfigError, ModelError, CapabilityError
        With what is wrong and what to do.
    """
    from entropic_control.config import load_config
    from entropic_control.engine import Engine

    return Engine(load_config(source, backend=backend, settings=settings), dry_run=dry_run)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"entropic_control.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'entropic_control' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
