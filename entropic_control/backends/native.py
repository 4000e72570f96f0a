"""Whether llama.cpp, as it was built, runs on this CPU: tried in a process of its own, and remembered.

A library that was built for another kind of CPU ends its process by a signal. pip's cache hands such a
build on when a disk image or a home directory moves, so nothing that opens the library takes it on trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from entropic_control.backends import models
from entropic_control.backends.conversion import cache_directory
from entropic_control.backends.cpu import this_cpu
from entropic_control.errors import CapabilityError

SWITCH = "ENTROPIC_PROBE"
"""Environment variable: "off" takes the library on trust."""
PLACE = "LLAMA_CPP_LIB_PATH"
"""Environment variable of llama-cpp-python: where its shared libraries are instead."""
SECONDS = 120.0
"""How long a probe with the default model may take; it needs about two of them."""
SECONDS_OF_OTHERS = 900.0
"""The same with any other model, which may be large and far away."""
_CHILD = Path(__file__).with_name("llama_probe.py")

_SIGNALS = {
    "SIGILL": "it used an instruction that this CPU lacks, or that the system does not let it use",
    "SIGSEGV": "it touched memory that is not its own, as builds for another kind of CPU do",
    "SIGBUS": "it touched memory that is not there",
    "SIGABRT": "it gave up by itself: one of its own checks failed",
    "SIGFPE": "it made an arithmetic fault",
    "SIGTRAP": "it ran into a trap of its own",
    "SIGSYS": "it made a call that the system forbids here",
    "SIGKILL": "it was killed from outside, as happens where memory runs out",
}
_STAGES = {
    "start": "before it began",
    "import": "while the library was loaded",
    "load": "while the model was loaded",
    "prompt": "in llama_decode, on a prompt",
    "decode": "in llama_decode, on a single token",
    "done": "after it had decoded",
}
_EXITS = {3: "gave logits that are no numbers", 4: "could not load the model"}

Kind = Literal["well", "signal", "timeout", "wrong", "model", "missing", "failed"]


class Outcome(NamedTuple):
    """How a probe ended."""

    kind: Kind
    """"wrong" is a build that decodes to no numbers, "model" a model that the library did not load,
    "missing" that there is no library or no model, "failed" any other end."""
    words: str
    version: str | None = None
    """Of llama-cpp-python, where the probe got that far."""
    built: str | None = None
    """The instruction sets the library was built for, in its own words."""
    seconds: float = 0.0

    @property
    def works(self) -> bool:
        return self.kind == "well"

    @property
    def is_the_build(self) -> bool:
        """Whether another build of the library may help."""
        return self.kind in ("signal", "timeout", "wrong", "failed")


def library() -> Path | None:
    """The directory that holds llama.cpp's shared libraries, or None; nothing is loaded."""
    own = os.environ.get(PLACE)
    if own:
        return Path(own)
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "lib"


def probe(model: Path, *, seconds: float = SECONDS, command: Sequence[str] = ()) -> Outcome:
    """Decode a prompt and three tokens with llama.cpp in a process of its own.

    Parameters
    ----------
    model : path
        The GGUF file to decode with.
    seconds : float
        How long it may take.
    command : sequence of str
        What to run instead of the probe's own script; it gets the model as its last argument.
    """
    command = command or (sys.executable, "-P", str(_CHILD))
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, str(model)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        code, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, output, errors = None, late.stdout or b"", late.stderr or b""
    except OSError as error:
        return Outcome("failed", f"could not be started: {error}")
    told = _told(output)
    kind, words = _verdict(code, str(told["stage"]), seconds, errors)
    return Outcome(kind, words, told.get("version"), told.get("built"), time.perf_counter() - began)


def _told(output: bytes) -> dict[str, Any]:
    """All that the child said about itself, the last word on each matter."""
    told: dict[str, Any] = {"stage": "start"}
    for line in output.decode(errors="replace").splitlines():
        if line.startswith("{"):
            try:
                told |= json.loads(line)
            except ValueError:  # cut off by its end
                break
    return told


def _verdict(code: int | None, stage: str, seconds: float, errors: bytes) -> tuple[Kind, str]:
    where = _STAGES.get(stage, f"in stage {stage}")
    if code is None:
        return "timeout", f"did not end within {seconds:.0f} s; it was last seen {where}"
    if code == 0:
        if stage == "done":
            return "well", "decoded a prompt and three tokens"
        return "failed", f"ended {where} without a word"
    number = -code if code < 0 else code - 128  # a shell in between tells signals so
    if number > 0 and (name := _signal_name(number)) is not None:
        why = _SIGNALS.get(name, "")
        return "signal", f"died by {name} {where}" + (f": {why}" if why else "")
    if code in _EXITS:
        return ("wrong" if code == 3 else "model"), _EXITS[code]
    last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["it gave no reason"]
    return "failed", f"failed {where} with exit code {code}: {last[0]}"


def _signal_name(number: int) -> str | None:
    try:
        return signal.Signals(number).name
    except ValueError:
        return None


# -- what is remembered -----------------------------------------------------------------------------


def fingerprint(directory: Path) -> str:
    """Tells pairs of CPU and library apart: what the CPU can do, and which files the library is."""
    cpu = this_cpu()
    files = sorted(directory.glob("*")) if directory.is_dir() else []
    known = [
        *(cpu.machine, cpu.name, *sorted(cpu.flags), platform.release(), str(directory.resolve())),
        *(f"{file.name} {(s := file.stat()).st_size} {s.st_mtime_ns}" for file in files),
    ]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]


_good: set[str] = set()
"""What worked in this process, where the cache cannot be written."""


def _note(key: str) -> Path:
    return cache_directory() / "probes" / key


def remembered(directory: Path) -> bool:
    """Whether this library is known to run on this CPU."""
    key = fingerprint(directory)
    return key in _good or _note(key).is_file()


def remember(directory: Path, outcome: Outcome) -> None:
    """Keep a good outcome, in the user's cache if that can be written, and forget it after a bad one."""
    key = fingerprint(directory)
    note = _note(key)
    try:
        if outcome.works:
            _good.add(key)
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(f"{outcome.words}\n", encoding="utf-8")
        else:
            _good.discard(key)
            note.unlink(missing_ok=True)
    except OSError:
        pass  # it is then tried again in the next process


def try_out(model: str = models.DEFAULT) -> Outcome:
    """Probe the library with the default model, or with `model` where that is not installed.

    Raises
    ------
    ModelError
        If neither is there.
    """
    directory = library()
    if directory is None:
        return Outcome(
            "missing", "llama-cpp-python is missing: pip install 'entropic-control[llama]'"
        )
    known = models.locate(models.DEFAULT)
    seconds = SECONDS if known else SECONDS_OF_OTHERS
    outcome = probe(known or models.resolve(model), seconds=seconds)
    remember(directory, outcome)
    return outcome


def assure(model: str) -> None:
    """Make sure, before llama.cpp is loaded into this process, that it can be.

    Costs a few stats where it is known, and about two seconds once for each CPU and build.

    Parameters
    ----------
    model : str
        What is about to be opened; tried where the default model is not installed.

    Raises
    ------
    CapabilityError
        If the library dies on this CPU: with the signal, and what to do.
    """
    directory = library()
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false"):
        return
    if directory is None or not sys.executable or remembered(directory):
        return  # without a library, opening it says what to install
    outcome = try_out(model)
    if outcome.is_the_build:
        raise CapabilityError(
            f"llama.cpp, as it was built, does not run on this CPU ({this_cpu().name}): tried in a process "
            f"of its own, it {outcome.words}; `entropic doctor` says more, and `entropic doctor --fix` "
            f"builds it anew ({SWITCH}=off takes it on trust)"
        )
