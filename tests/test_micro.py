"""The temperature loop by itself: what it is made from, what it refuses, and the trace it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropic_control.backends.micro import COLUMNS, MicroLoop, micro_of
from entropic_control.config import Config, dump_config
from entropic_control.controllers import FixedTemperature, PITemperature, SlewLimit, TopK
from entropic_control.controllers.base import Array
from entropic_control.controllers.signals import reading
from entropic_control.errors import ConfigError
from entropic_control.plots import entropy_plot
from entropic_control.proofs import identify
from entropic_control.trace import TOKEN_COLUMNS

PI = PITemperature(target=1.3)


def test_every_source_gives_the_same_parts(tmp_path: Path) -> None:
    config = Config(temperature=PI, truncation=TopK(k=7))
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    parts = micro_of(config)
    assert (parts.temperature, parts.truncation) == (PI, TopK(k=7))
    mapping = {
        "temperature": {"kind": "pi", "target": 1.3},
        "truncation": {"kind": "top_k", "k": 7},
    }
    for source in (path, str(path), mapping, config.model_dump(mode="json")):
        assert micro_of(source) == parts


def test_what_a_source_leaves_out_is_as_in_a_configuration() -> None:
    for source in ({}, {"generation": {"max_tokens": 3}}):
        parts = micro_of(source)
        assert (parts.temperature, parts.truncation, parts.estimator) == (
            Config().temperature,
            Config().truncation,
            Config().estimator,
        )
    slew = SlewLimit(inner=PI)
    assert micro_of(slew).temperature is slew


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere.yaml", "nowhere.yaml"),
        ({"temprature": "pi"}, "did you mean 'temperature'"),
        ({"temperature": {"kind": "pie"}}, "unknown temperature kind 'pie'"),
        ({"temperature": {"kind": "pi", "target": -1}}, "greater than 0"),
        ({"temperature": {"kind": "pi", "kpp": 1}}, "unknown key 'kpp'"),
        ({"truncation": {"kind": "top_k", "k": 0}}, "greater than or equal to 1"),
        (None, "not NoneType"),
        (1.5, "not float"),
        (TopK(k=3), "not TopK"),
    ],
)
def test_what_cannot_be_used_is_refused_in_words(source: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        micro_of(source)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\x00"])
def test_files_that_are_no_configuration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        micro_of(path)


@pytest.mark.parametrize(
    ("source", "overrides", "words"),
    [
        (PI, {"target": [1.0, -1.0]}, "greater than 0"),
        (PI, {"target": [1.0, np.nan]}, "finite"),
        (PI, {"target": "high"}, "must be a number"),
        (PI, {"kp": 0.1}, "no per-request setting 'kp'"),
        (FixedTemperature(), {"target": 1.0}, "no per-request setting 'target'"),
    ],
)
def test_settings_of_rows_are_checked_at_once(source: Any, overrides: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MicroLoop(source, overrides)


def test_as_many_settings_as_rows() -> None:
    loop = MicroLoop(PI, {"target": [1.0, 2.0]})
    with pytest.raises(ConfigError, match="a number or 3 of them"):
        loop.start(3)
    loop.start(2)
    assert loop.state.target.tolist() == [1.0, 2.0]


def driven(loop: MicroLoop, steps: int, rows: int, silent: Array | None = None) -> None:
    """A plant with noise, whose entropy answers to ln T with a gain of 2."""
    rng = np.random.default_rng(1)
    loop.start(rows)
    for _ in range(steps):
        temperature = loop.command().temperature * np.exp(0.2 * rng.normal(size=rows))
        h = 2.0 + 2 * np.log(temperature) + 0.3 * rng.normal(size=rows)
        valid = np.ones(rows, bool) if silent is None else ~silent
        loop.observe(reading(h, 2.0, temperature=temperature, valid=valid))
        loop.settle(np.arange(rows), h)


def test_the_trace_is_read_by_identify_and_the_plots() -> None:
    loop = MicroLoop(PI, {"target": [1.0, 1.6]})
    driven(loop, 300, 2)
    trace = loop.trace
    assert set(COLUMNS) == set(trace) <= set(TOKEN_COLUMNS)
    assert {name: column.dtype.kind for name, column in trace.items()} == {
        name: np.dtype(TOKEN_COLUMNS[name]).kind.replace("?", "b") for name in COLUMNS
    }
    assert trace["token"].tolist() == np.repeat(np.arange(300), 2).tolist()
    plant = identify(trace)
    assert plant.tokens == 600
    assert plant.gain.low < 2.0 < plant.gain.high
    assert len(entropy_plot(trace).axes[0].lines) == 4


def test_a_row_without_a_reading_keeps_its_state_and_leaves_no_trace() -> None:
    loop = MicroLoop(PI, {})
    driven(loop, 5, 3, silent=np.array([False, True, False]))
    fresh = PI.init(1)
    for now, before in zip(loop.state, fresh, strict=True):
        assert now[1] == before[0]
    assert loop.state.integral[0] != fresh.integral[0]
    assert loop.counts.tolist() == [5, 0, 5]
    assert sorted(set(loop.trace["request"].tolist())) == [0, 2]


def test_starting_again_forgets() -> None:
    loop = MicroLoop(PI, {})
    driven(loop, 20, 1)
    first = loop.trace
    driven(loop, 20, 1)
    for name, column in loop.trace.items():
        np.testing.assert_array_equal(column, first[name], name)
    loop.start(1)
    assert all(len(column) == 0 for column in loop.trace.values())


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_transformers_the_import_says_what_to_install(missing: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
from entropic_control.errors import CapabilityError
try:
    import entropic_control.backends.transformers
except CapabilityError as error:
    print(error)
"""
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert "pip install 'entropic-control[gpu]'" in done.stdout
