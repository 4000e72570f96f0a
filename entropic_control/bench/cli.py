"""The `bench` commands."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from entropic_control.bench.frontier_commands import add_commands as add_frontier
from entropic_control.bench.options import add_shared, config_of
from entropic_control.bench.paper_commands import add_commands as add_paper


def add_commands(commands: Any) -> None:
    """Add `bench` and its parts to the command line."""
    bench = commands.add_parser("bench", help="measure, as ratios of arms in one process")
    parts = bench.add_subparsers(metavar="WHAT", required=True)

    demo = parts.add_parser(
        "demo", help="a mixed batch, baseline against control", description=_demo.__doc__
    )
    demo.add_argument("config", nargs="?", help="configuration; the defaults without one")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="run directory")
    demo.add_argument("--repeats", type=int, default=1, help="runs of each arm; medians are shown")
    demo.add_argument("--tokens", type=int, help="tokens each request generates")
    add_shared(demo)
    demo.set_defaults(run=_demo)

    overhead = parts.add_parser(
        "overhead", help="the engine against a bare decode loop", description=_overhead.__doc__
    )
    overhead.add_argument("config", nargs="?", help="configuration; the defaults without one")
    overhead.add_argument("--repeats", type=int, default=12, help="paired runs")
    add_shared(overhead)
    overhead.set_defaults(run=_overhead)

    generate = parts.add_parser(
        "generate",
        help="the triton backend against transformers' generate",
        description=_generate.__doc__,
    )
    generate.add_argument("config", nargs="?", help="configuration; the defaults without one")
    generate.add_argument("--repeats", type=int, default=5, help="paired runs")
    generate.add_argument("--tokens", type=int, default=64, help="tokens each row generates")
    add_shared(generate)
    generate.set_defaults(run=_generate, backend="triton")

    targets = parts.add_parser(
        "targets",
        help="how near the mean entropy comes to its target, by truncation",
        description=_targets.__doc__,
    )
    targets.add_argument("config", nargs="?", help="configuration; the defaults without one")
    targets.add_argument("--out", type=Path, default=Path("runs/targets"), help="run directory")
    targets.add_argument("--tokens", type=int, default=400, help="tokens each request generates")
    targets.add_argument("--targets", type=float, nargs="+", metavar="NATS", help="targets to hold")
    targets.add_argument(
        "--place", choices=("before", "after", "both"), default="before", help="of the truncations"
    )
    add_shared(targets)
    targets.set_defaults(run=_targets)

    memory = parts.add_parser(
        "memory", help="resident memory over many requests", description=_memory.__doc__
    )
    memory.add_argument("config", nargs="?", help="configuration; the defaults without one")
    memory.add_argument("--requests", type=int, default=1000)
    add_shared(memory)
    memory.set_defaults(run=_memory)

    add_frontier(parts)
    add_paper(parts)


def _demo(args: argparse.Namespace) -> int:
    """Decode one mixed batch twice, first come, first served and under entropic control."""
    from entropic_control.bench.demo import Workload, run_demo
    from entropic_control.cli import draw
    from entropic_control.progress import progress_bar
    from entropic_control.report import comparison

    workload = Workload(tokens=args.tokens) if args.tokens else Workload()
    with progress_bar(args.json) as bar:
        summary = run_demo(config_of(args), args.out, bar, workload=workload, repeats=args.repeats)
    if args.json:
        print(json.dumps(summary, indent=2))
        draw(args.out, Console(stderr=True))
        return 0
    console = Console()
    console.print(comparison(summary["arms"]))
    console.print(_entropy_table(summary["entropy"]))
    ratios = Table("control over baseline", "ratio")
    for name, value in summary["ratios"].items():
        ratios.add_row(name.replace("_", " "), f"{value:.2f}")
    console.print(ratios)
    draw(args.out, console)
    console.print(f"summary and traces are in {args.out}", highlight=False)
    return 0


def _entropy_table(entropy: dict[str, Any]) -> Table:
    target = entropy["target"]
    title = "mean entropy by quarter, nats" + (f", target {target:g}" if target else "")
    table = Table("request", "baseline", "entropic", title=title)
    for name, values in entropy["quarters"].items():
        before = entropy["baseline_quarters"].get(name, [])
        table.add_row(name, *(" ".join(f"{h:.2f}" for h in row) for row in (before, values)))
    return table


def _pairs_table(label: str, rival: str, results: dict[str, Any]) -> Table:
    table = Table(label, f"{rival} tokens/s", "engine tokens/s", "ratio")
    for size, figures in results.items():
        table.add_row(
            size,
            f"{figures[f'{rival}_tokens_per_second']:.1f}",
            f"{figures['engine_tokens_per_second']:.1f}",
            f"{figures['ratio']:.3f}",
        )
    return table


def _overhead(args: argparse.Namespace) -> int:
    """Tokens per second of the engine with all loops on over a bare decode and argmax loop."""
    from entropic_control.bench.overhead import run_overhead
    from entropic_control.progress import progress_bar

    with progress_bar(args.json) as bar:
        results = run_overhead(config_of(args), bar, repeats=args.repeats)
    if args.json:
        print(json.dumps(results, indent=2))
        return 0
    Console().print(_pairs_table("batch", "bare", results))
    return 0


def _generate(args: argparse.Namespace) -> int:
    """Tokens per second of the engine on the triton backend over those of transformers' generate."""
    from entropic_control.bench.generate import run_generate
    from entropic_control.progress import progress_bar

    with progress_bar(args.json) as bar:
        results = run_generate(config_of(args), bar, repeats=args.repeats, tokens=args.tokens)
    if args.json:
        print(json.dumps(results, indent=2))
        return 0
    Console().print(_pairs_table("rows", "generate", results))
    return 0


def _targets(args: argparse.Namespace) -> int:
    """Eight prompts under every target and truncation: the mean entropy of tokens 50 and on.

    Interrupted, it goes on where it stopped, with the cells that --out holds.
    """
    from entropic_control.bench.targets import TARGETS, markdown, run_targets, table
    from entropic_control.progress import progress_bar

    places = ("before", "after") if args.place == "both" else (args.place,)
    with progress_bar(args.json) as bar:
        cells = run_targets(
            config_of(args),
            args.out,
            bar,
            targets=args.targets or TARGETS,
            places=places,
            tokens=args.tokens,
        )
    (args.out / "targets.md").write_text(markdown(cells), encoding="utf-8")
    if args.json:
        print(json.dumps(cells, indent=2))
        return 0
    console = Console()
    console.print(table(cells))
    console.print(f"the cells are in {args.out}", highlight=False)
    return 0


def _memory(args: argparse.Namespace) -> int:
    """Resident memory after a tenth of many short requests and after all of them."""
    from entropic_control.bench.memory import run_memory
    from entropic_control.progress import progress_bar

    with progress_bar(args.json) as bar:
        figures = run_memory(config_of(args), bar, requests=args.requests)
    if args.json:
        print(json.dumps(figures, indent=2))
        return 0
    table = Table("requests", "resident, start", "resident, end", "growth")
    table.add_row(
        str(figures["requests"]),
        f"{figures['resident_bytes_start'] / 2**20:.0f} MiB",
        f"{figures['resident_bytes_end'] / 2**20:.0f} MiB",
        f"{figures['growth_percent']:+.2f} %",
    )
    Console().print(table)
    return 0
