"""The command `bench frontier`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from entropic_control.bench.options import add_shared, config_of, save_plot


def add_commands(parts: Any) -> None:
    """Add the command to the parts of `bench`."""
    frontier = parts.add_parser(
        "frontier",
        help="pruning rules by continuation and by facts kept",
        description=_frontier.__doc__,
    )
    frontier.add_argument("config", nargs="?", help="configuration; the defaults without one")
    frontier.add_argument("--out", type=Path, default=Path("runs/frontier"), help="run directory")
    frontier.add_argument(
        "--budgets", type=float, nargs="+", default=[0.5, 0.25], help="shares of the text to keep"
    )
    frontier.add_argument("--tokens", type=int, default=2048, help="length of the texts")
    frontier.add_argument(
        "--documents", type=int, default=8, help="texts to be continued, at most 8"
    )
    frontier.add_argument("--depths", type=int, default=12, help="codes to be found")
    add_shared(frontier)
    frontier.set_defaults(run=_frontier)


def _frontier(args: argparse.Namespace) -> int:
    """Compare pruning rules: NLL of the true continuation, and recall of a hidden code. Resumable."""
    from entropic_control.bench.frontier import run_frontier
    from entropic_control.bench.frontier_plot import frontier_plot
    from entropic_control.errors import ConfigError
    from entropic_control.progress import progress_bar

    if any(not 0 < budget <= 1 for budget in args.budgets):
        raise ConfigError("budgets are shares of the text: above 0 and at most 1")
    if args.tokens < 256 or args.documents < 1 or args.depths < 1:
        raise ConfigError("give at least 256 tokens, one document and one depth")
    with progress_bar(args.json) as bar:
        task = bar.add_task("texts", total=1)

        def advance(name: str, before: int, total: int, done: int) -> None:
            bar.update(task, description=name, completed=before + done, total=total)
            bar.refresh()

        figures = run_frontier(
            config_of(args),
            args.out,
            budgets=args.budgets,
            tokens=args.tokens,
            documents=args.documents,
            depths=args.depths,
            advance=advance,
        )
    console = Console(stderr=args.json)
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        console.print(_table(figures))
    save_plot(lambda: frontier_plot(figures), args.out / "frontier.png", console)
    return 0


def _table(figures: dict[str, Any]) -> Table:
    title = (
        f"{figures['continuations']} texts of {figures['tokens']} tokens, "
        f"{figures['needles']} hidden codes, blocks of {figures['block']}"
    )
    table = Table("rule at budget", "added NLL", "± s.e.", "needle NLL", "recall", title=title)
    for name, arm in figures["arms"].items():
        table.add_row(
            name,
            f"{arm['continuation_nll_delta']:+.3f}",
            f"{arm['continuation_error']:.3f}",
            f"{arm['needle_nll']:.2f}",
            f"{arm['needle_recall']:.2f}",
        )
    return table
