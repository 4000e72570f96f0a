"""What the `bench` commands share: their options, the configuration named, a plot that may fail."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from entropic_control.errors import CapabilityError


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="PART.KEY=VALUE", help="change a setting"
    )
    parser.add_argument("--backend", help="backend kind to run on instead of the configured one")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def config_of(args: argparse.Namespace, default: Any = None) -> Any:
    """The configuration that a command line names, or `default` with its settings."""
    from entropic_control.config import load_config

    return load_config(args.config or default or {}, backend=args.backend, settings=args.set)


def save_plot(make: Callable[[], Any], path: Path, console: Console) -> None:
    """Save the figure that `make` draws; without matplotlib, say so and go on."""
    try:
        make().savefig(path, dpi=110)
    except CapabilityError as error:
        console.print(f"no plot was drawn: {escape(str(error))}", highlight=False)
    else:
        console.print(f"wrote {path}", highlight=False)
