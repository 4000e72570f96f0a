"""A progress bar that follows an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

if TYPE_CHECKING:
    from entropic_control.engine import Engine

_INTERVAL = 0.2


def progress_bar(quiet: bool) -> Progress:
    """A bar on standard error, silent where asked. It is redrawn by `follow`, not by a thread of its
    own, which would take time from the engine's."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        disable=quiet,
    )


def follow(
    engine: Engine,
    requests: Sequence[Any],
    bar: Progress,
    label: str = "decoding",
    go_on: Callable[[], bool] = lambda: True,
) -> None:
    """Run requests to their end, or until `go_on`, asked after each step, is false.

    The bar counts prompt and generated tokens.
    """
    engine.submit_all(requests)
    task = bar.add_task(label, total=engine.progress[1])
    shown = 0.0
    while not engine.idle:
        engine.step()
        if not go_on():
            break
        now = time.perf_counter()
        if now - shown > _INTERVAL:
            _show(bar, task, engine)
            shown = now
    _show(bar, task, engine)


def _show(bar: Progress, task: Any, engine: Engine) -> None:
    done, total = engine.progress
    bar.update(task, completed=done, total=total)
    bar.refresh()
