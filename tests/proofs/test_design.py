"""Design: the gains keep what was asked, on the plant they were designed for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import RUN

from entropic_control.errors import ConfigError
from entropic_control.proofs import certify, design, expected, identify
from entropic_control.proofs.identify import Plant
from entropic_control.proofs.noise import measure
from entropic_control.proofs.signals import signals


@pytest.fixture(scope="module")
def plant() -> Plant:
    return identify(RUN)


@pytest.mark.parametrize(("gm", "pm"), [(6.0, 60.0), (12.0, 75.0)])
def test_the_margins_asked_for_are_kept(plant: Plant, gm: float, pm: float) -> None:
    tuned = design(plant, target=1.0, gm=gm, pm=pm)
    found, spread = expected(tuned, plant)
    assert found.stable
    assert found.gain_margin_db >= gm
    assert found.phase_margin >= pm
    assert spread.log_temperature <= 0.2
    assert certify(tuned).holds


def test_a_quieter_loop_can_be_asked_for(plant: Plant) -> None:
    loud, quiet = (expected(design(plant, wander=w), plant)[1] for w in (0.2, 0.1))
    assert quiet.log_temperature <= 0.1 < loud.log_temperature
    assert quiet.entropy > loud.entropy


def test_an_unscheduled_loop_can_be_asked_for(plant: Plant) -> None:
    tuned = design(plant, schedule="none")
    found, _ = expected(tuned, plant)
    assert tuned.schedule == "none"
    assert found.gain_margin_db >= 6


def test_a_longer_delay_is_designed_for(plant: Plant) -> None:
    tuned = design(plant, delay=2)
    assert expected(tuned, plant, delay=2)[0].stable
    assert certify(tuned, delay=2).holds


def test_the_design_holds_the_target_on_a_synthetic_plant(
    synthetic: Callable[..., dict[str, Any]],
) -> None:
    plant = identify(synthetic(memory=0.0, tokens=1500))
    tuned = design(plant, target=1.5)
    again = signals(synthetic(tuned, memory=0.0, dither=0.0, tokens=1500))
    assert np.mean([one.entropy[200:].mean() for one in again]) == pytest.approx(1.5, abs=0.02)
    promised, measured = expected(tuned, plant)[1], measure(tuned, again)
    assert measured.entropy == pytest.approx(promised.entropy, rel=0.15)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"target": 12.0}, "out of reach"),
        ({"target": -1.0}, "out of reach"),
        ({"target": 5.0}, "outside the bounds"),
        ({"gm": -3.0}, "margins must be"),
        ({"pm": 200.0}, "margins must be"),
        ({"gm": 90.0}, "no gains give"),
        ({"wander": 1e-4}, "no gains give"),
        ({"filter": 2.0}, "less than or equal to 1"),
    ],
)
def test_what_cannot_be_met_is_refused_in_words(
    plant: Plant, asked: dict[str, float], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        design(plant, **asked)


def test_works_from_a_run_directory(run: Path) -> None:
    assert design(identify(run)).v_start == pytest.approx(identify(run).varentropy.value)
