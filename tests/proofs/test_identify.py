"""Identification: it finds a known plant, says how sure it is, and refuses what it cannot learn from."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropic_control.errors import TraceError
from entropic_control.proofs import identify
from entropic_control.proofs.identify import Estimate, ljung_box
from entropic_control.proofs.loop import transfer

Columns = dict[str, Any]


def test_a_known_plant_is_found_within_its_interval(synthetic: Callable[..., Columns]) -> None:
    plant = identify(synthetic(tokens=2000, gain=2.0, memory=0.3))
    assert plant.gain.low < 2.0 < plant.gain.high
    assert plant.gain.high - plant.gain.low < 0.3
    assert plant.dc_gain.low < 2.0 / 0.7 < plant.dc_gain.high
    assert plant.coefficients[0] == pytest.approx(0.3, abs=0.05)
    assert plant.residual_std == pytest.approx(0.3, rel=0.05)
    assert plant.whiteness > 0.01
    assert plant.varentropy.value == 2.0


def test_intervals_cover_as_often_as_they_say(synthetic: Callable[..., Columns]) -> None:
    covered = 0
    for seed in range(60):
        gain = identify(synthetic(tokens=250, seed=seed)).gain
        covered += gain.low < 2.0 < gain.high
    assert covered >= 51  # 95 % of 60 is 57; fewer than 51 has probability 0.3 %


def test_the_linear_plant_is_the_regression(synthetic: Callable[..., Columns]) -> None:
    plant = identify(synthetic(tokens=800))
    num, den = transfer(plant.linear())
    dc = np.polyval(num, 1.0) / np.polyval(den, 1.0)
    assert dc == pytest.approx(plant.dc_gain.value)
    first = plant.linear().respond(np.eye(5, 1))[:, 0]
    assert first[0] == pytest.approx(plant.gain.value)
    assert first[1] == pytest.approx(plant.gain.value * plant.coefficients[0])


def test_coloured_residuals_fail_the_whiteness_test() -> None:
    rng = np.random.default_rng(0)
    white = rng.normal(size=3000)
    coloured = white + 0.4 * np.roll(white, 15)
    assert ljung_box(white, 2) > 0.01
    assert ljung_box(coloured, 2) < 1e-6


def test_a_real_run_is_identified(run: Path) -> None:
    plant = identify(run)
    assert plant.tokens == 1600
    assert 0.5 < plant.varentropy.low < plant.varentropy.high < 5
    assert plant.range[1] >= plant.varentropy.high
    assert plant.whiteness > 0.05


def test_what_to_be_careful_about_is_said(run: Path) -> None:
    plant = identify(run)
    low, high = Estimate(0.3, 0.1, 0.5), Estimate(9.0, 8.0, 10.0)
    assert "biases it low" in str(replace(plant, dc_gain=low))
    assert "the text amplifies" in str(replace(plant, dc_gain=high))
    assert "not white" in str(replace(plant, whiteness=0.01))
    assert replace(plant, dc_gain=high).range[1] == 10.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"entropy": 1.0}, "constant"),
        ({"temperature": 0.7}, "excitation"),
        ({"temperature": 0.0}, "greedy"),
        ({"entropy": np.nan}, "nan"),
        ({"varentropy": np.inf}, "inf"),
    ],
)
def test_traces_without_information_are_refused_in_words(
    synthetic: Callable[..., Columns], change: dict[str, float], words: str
) -> None:
    columns = synthetic(tokens=100)
    for name, value in change.items():
        columns[name] = np.full_like(columns[name], value)
    with pytest.raises(TraceError, match=words):
        identify(columns)


def test_one_nan_is_refused_and_located(synthetic: Callable[..., Columns]) -> None:
    columns = synthetic(tokens=100)
    columns["entropy"][42] = np.nan
    with pytest.raises(TraceError, match="token 10 of request 2"):
        identify(columns)


def test_empty_short_and_missing_traces_are_refused(
    tmp_path: Path, synthetic: Callable[..., Columns]
) -> None:
    with pytest.raises(TraceError, match="empty"):
        identify({"entropy": [], "temperature": []})
    with pytest.raises(TraceError, match="too few"):
        identify(synthetic(tokens=30))
    with pytest.raises(TraceError, match="no column 'temperature'"):
        identify({"entropy": [1.0]})
    with pytest.raises(TraceError, match="has 2 values"):
        identify({"entropy": [1.0], "temperature": [1.0, 2.0]})
    with pytest.raises(TraceError, match="no trace"):
        identify(tmp_path)
    (tmp_path / "trace.jsonl").write_text("")
    with pytest.raises(TraceError, match="is empty"):
        identify(tmp_path)
    (tmp_path / "trace.jsonl").write_text("{not json\n")
    with pytest.raises(TraceError, match="JSON lines"):
        identify(tmp_path)
