"""The commands that fill the paper's table: `bench paper` and `bench peers`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from entropic_control.bench.options import add_shared, config_of, save_plot


def add_commands(parts: Any) -> None:
    """Add both to the parts of `bench`."""
    paper = parts.add_parser(
        "paper", help="the paper's table: every loop on every workload", description=_paper.__doc__
    )
    paper.add_argument(
        "config", nargs="?", help="configuration; without one the quickstart's, on 8-bit weights"
    )
    paper.add_argument("--quick", action="store_true", help="small sizes: minutes, rough figures")
    paper.add_argument(
        "--out", type=Path, default=Path("runs/paper"), help="run directory; a run in it goes on"
    )
    paper.add_argument("--workloads", nargs="+", default=[], metavar="NAME", help="some of them")
    paper.add_argument("--arms", nargs="+", default=[], metavar="NAME", help="some of them")
    paper.add_argument("--repeats", type=int, default=1, help="runs of each arm; medians are shown")
    add_shared(paper)
    paper.set_defaults(run=_paper)

    peers = parts.add_parser(
        "peers",
        help="the same work on llama.cpp's own server and samplers",
        description=_peers.__doc__,
    )
    peers.add_argument(
        "config", nargs="?", help="configuration; without one the quickstart's, on 8-bit weights"
    )
    peers.add_argument("--quick", action="store_true", help="small sizes: minutes, rough figures")
    peers.add_argument("--out", type=Path, default=Path("runs/peers"), help="run directory")
    add_shared(peers)
    peers.set_defaults(run=_peers)


def _paper(args: argparse.Namespace) -> int:
    """Run the arms baseline, fair, sampling, scheduling, pruning and full on the workloads of the paper,
    and print each figure beside the paper's claim. An interrupted run goes on where it stopped."""
    from entropic_control.bench.arms import default_config
    from entropic_control.bench.paper import Paper
    from entropic_control.bench.paper_plot import paper_plot
    from entropic_control.bench.paper_report import markdown, summary_of, tables
    from entropic_control.bench.quality import missing_overlap
    from entropic_control.progress import progress_bar
    from entropic_control.report import write_json

    console, remarks = Console(), Console(stderr=True)
    with remarks.status("measuring what a step costs on this machine"):
        paper = Paper(
            config_of(args, default_config()),
            args.out,
            quick=args.quick,
            workloads=args.workloads,
            arms=args.arms,
            repeats=args.repeats,
        )
    if not args.json:
        total, missing = len(list(paper.cells())), len(paper.missing)
        remarks.print(
            f"{missing} of {total} runs to do, about {max(paper.expected_seconds / 60, 1):.0f} minutes",
            highlight=False,
        )
    for measure, package in missing_overlap().items():
        remarks.print(f"{measure} will not be measured: pip install {package}", highlight=False)
    with progress_bar(args.json) as bar:
        paper.run(bar)
    cells = paper.done()
    summary = summary_of(cells, paper.manifest)
    write_json(args.out / "paper.json", summary)
    page = markdown(cells, paper.manifest, f"entropic {shlex.join(sys.argv[1:])}")
    (args.out / "evidence.md").write_text(page, encoding="utf-8")
    if args.json:
        print(json.dumps(summary, indent=2))
    else:
        for table in tables(cells):
            console.print(table)
    save_plot(lambda: paper_plot(cells), args.out / "evidence.png", remarks)
    remarks.print(f"paper.json and evidence.md are in {args.out}", highlight=False)
    return 0


def _peers(args: argparse.Namespace) -> int:
    """Run the chat and mixed workloads on llama.cpp's C++ server and on this engine in turn, and the
    temperature workload with llama.cpp's own dynatemp and mirostat samplers."""
    from entropic_control.bench.arms import default_config
    from entropic_control.bench.peers import run_peers, tables
    from entropic_control.progress import progress_bar
    from entropic_control.report import write_json

    remarks = Console(stderr=True)
    with progress_bar(args.json) as bar:
        summary = run_peers(config_of(args, default_config()), bar, quick=args.quick)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "peers.json", summary)
    for peer, reason in summary["missing"].items():
        remarks.print(f"{peer} was left out: {escape(reason)}", highlight=False)
    if args.json:
        print(json.dumps(summary, indent=2))
        return 0
    for table in tables(summary):
        Console().print(table)
    remarks.print(f"peers.json is in {args.out}", highlight=False)
    return 0
