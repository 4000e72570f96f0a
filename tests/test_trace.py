"""The trace: columns that grow, and files that give back what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import ids, simulated
from hypothesis import given
from hypothesis import strategies as st

from entropic_control import Request
from entropic_control.controllers import FixedTemperature, PITemperature
from entropic_control.errors import CapabilityError
from entropic_control.trace import STEP_COLUMNS, TOKEN_COLUMNS, Table, Trace, read_table

FORMATS = ["jsonl", "parquet"]


def traced(**parts: Any) -> Trace:
    engine = simulated(**parts)
    engine.run([Request(id=name, prompt=ids(40), max_tokens=15) for name in ("first", 'se"co\nnd')])
    return engine.trace


def written(records: list[list[int]]) -> dict[str, Any]:
    return {"x": [x for record in records for x in record], "y": 0.5}


@given(st.lists(st.integers(0, 3000), max_size=6) | st.lists(st.integers(0, 9), max_size=200))
def test_a_table_holds_what_was_appended(sizes: list[int]) -> None:
    table = Table({"x": "i8", "y": "f8"})
    expected: list[int] = []
    for size in sizes:
        rows = list(range(len(expected), len(expected) + size))
        table.append(size, written, rows)
        expected += rows
    assert len(table) == len(expected)
    assert table["x"].tolist() == expected
    assert table["y"].tolist() == [0.5] * len(expected)
    assert {name: column.dtype.str[1:] for name, column in table.columns().items()} == {
        "x": "i8",
        "y": "f8",
    }


def test_a_row_without_one_of_the_columns_is_a_mistake() -> None:
    table = Table({"x": "i8", "y": "f8"})
    table.append(1, lambda records: {"x": records}, 1)
    with pytest.raises(KeyError):
        table.columns()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("temperature", [PITemperature(), FixedTemperature()], ids=lambda t: t.kind)
def test_files_give_back_every_column(tmp_path: Path, format: Any, temperature: Any) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    trace = traced(temperature=temperature)
    files = trace.write(tmp_path / "deep" / "run", format)
    suffix = "jsonl" if format == "jsonl" else "parquet"
    assert [path.name for path in files] == [f"trace.{suffix}", f"steps.{suffix}", "events.jsonl"]
    tokens = read_table(tmp_path / "deep" / "run", "trace")
    assert list(tokens) == list(TOKEN_COLUMNS)
    for name, written in trace.tokens.columns().items():
        if name == "request":
            written = np.array(trace.names, object)[written]
            assert tokens[name].tolist() == written.tolist()
        else:
            np.testing.assert_array_equal(tokens[name], written, name)  # NaN equals NaN here
    assert tokens["feasible"].dtype == bool
    assert np.isnan(tokens["target"]).all() == (temperature.kind == "fixed")
    steps = read_table(tmp_path / "deep" / "run", "steps")
    assert list(steps) == list(STEP_COLUMNS)
    for name, written in trace.steps.columns().items():
        np.testing.assert_array_equal(steps[name], written, name)
    events = [json.loads(line) for line in files[2].read_text().splitlines()]
    assert events == trace.events
    assert {"step", "time", "event", "request"} <= set(events[0])


def test_lines_are_json_by_the_standard(tmp_path: Path) -> None:
    """NaN is no JSON: other languages' readers refuse it."""
    trace = traced(temperature=FixedTemperature())
    assert np.isnan(trace.tokens["target"]).all()
    trace.write(tmp_path)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for path in tmp_path.iterdir():
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize("format", FORMATS)
def test_a_trace_of_nothing(tmp_path: Path, format: Any) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    Trace().write(tmp_path, format)
    assert all(len(column) == 0 for column in read_table(tmp_path, "trace").values())


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no trace\.jsonl or trace\.parquet in"):
        read_table(tmp_path, "trace")


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import builtins

    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CapabilityError, match=r"pip install 'entropic-control\[parquet\]'"):
        traced().write(tmp_path, "parquet")


def test_the_columns_of_one_request() -> None:
    trace = traced()
    for name in trace.names:
        assert trace.of(name)["token"].tolist() == list(range(15))
    with pytest.raises(ValueError, match="not in list"):
        trace.of("nobody")
