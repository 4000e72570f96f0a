"""A run is read the same whichever format its trace was written in, and refused in the same words."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import RUN

from entropic_control.cli import main
from entropic_control.errors import CapabilityError, TraceError
from entropic_control.proofs import identify
from entropic_control.proofs.signals import signals
from entropic_control.trace import read_table

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

FORMATS = ("jsonl", "parquet")
Columns = dict[str, Any]


def write(directory: Path, columns: Columns, format: str) -> Path:
    """Write a trace; JSON has no NaN, so there it is null."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"trace.{format}"
    if format == "parquet":
        parquet.write_table(pyarrow.table(columns), path)
        return directory
    rows = zip(*(np.asarray(column).tolist() for column in columns.values()), strict=True)
    lines = ({k: None if v != v else v for k, v in zip(columns, row, strict=True)} for row in rows)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


@pytest.fixture(scope="module")
def recorded() -> Columns:
    return read_table(RUN, "trace")


def test_a_recorded_run_gives_the_same_plant(tmp_path: Path, recorded: Columns) -> None:
    directory = write(tmp_path, recorded, "parquet")
    expected = identify(RUN)
    assert expected.tokens == 1600
    for source in (directory, str(directory), directory / "trace.parquet"):
        assert identify(source).to_dict() == expected.to_dict()
    for ours, theirs in zip(signals(directory), signals(RUN), strict=True):
        assert ours.target == theirs.target
        for mine, its in zip(ours[:3], theirs[:3], strict=True):
            np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("command", [("identify",), ("tune", "--target", "0.9")])
def test_the_commands_read_both(
    tmp_path: Path, recorded: Columns, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for directory in (RUN, write(tmp_path, recorded, "parquet")):
        assert main([command[0], str(directory), *command[1:], "--json"]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1]


CHANGES: dict[str, tuple[Callable[[Columns], Any], str]] = {
    "constant entropy": (lambda c: c["entropy"].fill(1.0), "constant"),
    "constant temperature": (lambda c: c["temperature"].fill(0.7), "excitation"),
    "greedy": (lambda c: c["temperature"].fill(0.0), "greedy"),
    "one NaN": (lambda c: c["entropy"].__setitem__(42, np.nan), "token 10 of request 2"),
    "all NaN": (lambda c: c["varentropy"].fill(np.nan), "varentropy is nan at token 0"),
    "no temperature": (lambda c: c.pop("temperature"), "no column 'temperature'"),
    "too short": (lambda c: c.update({k: v[:40] for k, v in c.items()}), "too few"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_cannot_be_learned_from_is_refused_in_the_same_words(
    tmp_path: Path, synthetic: Callable[..., Columns], name: str
) -> None:
    change, words = CHANGES[name]
    columns = synthetic(tokens=100)
    change(columns)
    said = []
    for format in FORMATS:
        with pytest.raises(TraceError, match=words) as caught:
            identify(write(tmp_path / format, columns, format))
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("format", FORMATS)
def test_empty_missing_and_damaged_traces(tmp_path: Path, format: str) -> None:
    with pytest.raises(TraceError, match=r"no trace\.jsonl or trace\.parquet in"):
        identify(tmp_path)
    path = tmp_path / f"trace.{format}"
    with pytest.raises(TraceError, match=f"no trace at '.*{format}'"):
        identify(path)
    write(tmp_path, {"entropy": np.zeros(0), "temperature": np.zeros(0)}, format)
    with pytest.raises(TraceError, match="is empty"):
        identify(tmp_path)
    for damage in (b"\x93\xff\x00", b"PAR1", b"3\n"):
        path.write_bytes(damage)
        with pytest.raises(TraceError, match=f"trace.{format}' is no "):
            identify(tmp_path)


def test_of_two_formats_the_newer_is_read(
    tmp_path: Path, synthetic: Callable[..., Columns]
) -> None:
    write(tmp_path, synthetic(tokens=100), "jsonl")
    write(tmp_path, synthetic(tokens=200), "parquet")
    for newer, tokens in (("parquet", 800), ("jsonl", 400)):
        for format in ("parquet", "jsonl"):
            when = 2_000_000_000 if format == newer else 1_900_000_000
            os.utime(tmp_path / f"trace.{format}", (when, when))
        assert identify(tmp_path).tokens == tokens
    assert identify(tmp_path / "trace.parquet").tokens == 800


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synthetic: Callable[..., Columns]
) -> None:
    directory = write(tmp_path, synthetic(tokens=100), "parquet")
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CapabilityError, match=r"pip install 'entropic-control\[parquet\]'"):
        identify(directory)
