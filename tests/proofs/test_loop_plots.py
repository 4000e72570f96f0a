"""Plots return figures, draw in the axes they are given, and open no window."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from entropic_control.controllers import PITemperature
from entropic_control.proofs import plots
from entropic_control.proofs.signals import signals

PI = PITemperature()
SINGLE: dict[str, Callable[..., Figure]] = {
    "nyquist": lambda axes=None: plots.nyquist(PI, [0.5, 2.0], axes=axes),
    "root locus": lambda axes=None: plots.root_locus(PI, 1.0, 2, axes=axes),
    "step response": lambda axes=None: plots.step_response(PI, 2.0, 0.3, tokens=50, axes=axes),
    "margin map": lambda axes=None: plots.margin_map(PI, (0.5, 20.0), (1, 3), axes=axes),
}


@pytest.mark.parametrize("name", SINGLE)
def test_case_22_two_subplots_each_in_its_own_axes(name: str) -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    returned = SINGLE[name](axes=right)
    assert returned is figure
    assert right.has_data()
    assert not left.has_data()


@pytest.mark.parametrize("name", SINGLE)
def test_a_figure_of_its_own_is_drawn_and_rendered(name: str, tmp_path: Path) -> None:
    figure = SINGLE[name]()
    assert figure.axes[0].get_xlabel()
    assert figure.axes[0].get_ylabel()
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5_000


def test_bode_draws_magnitude_and_phase_in_the_axes_given() -> None:
    figure = Figure()
    axes = figure.subplots(2, 1)
    assert plots.bode(PI, 2.0, axes=tuple(axes)) is figure
    magnitude = axes[0].lines[0].get_ydata()
    assert np.all(np.diff(magnitude) < 0)
    assert "gain margin" in axes[0].get_title()
    wild = plots.bode(PITemperature(kp=2.5, schedule="none"), 30.0)
    assert "unstable" in wild.axes[0].get_title()
    assert len(plots.bode(PI, [1.0, 2.0]).axes[0].get_legend().get_texts()) == 2


def test_step_response_shows_prediction_simulation_and_trace(run: Path) -> None:
    figure = plots.step_response(PI, 1.7, 0.0, tokens=100, trace=signals(run))
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert [label.split(",")[0] for label in labels] == ["predicted", "simulated", "real"]
    predicted, simulated = (line.get_ydata() for line in figure.axes[0].lines[:2])
    assert np.allclose(predicted, simulated)


def test_no_window_is_opened() -> None:
    code = (
        "import sys; from entropic_control.controllers import PITemperature; "
        "from entropic_control.proofs import plots; plots.nyquist(PITemperature()); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_everything_that_draws_is_covered() -> None:
    drawing: dict[str, Any] = {
        name: value
        for name, value in vars(plots).items()
        if getattr(value, "__module__", "") == plots.__name__
    }
    public = {name.replace("_", " ") for name in drawing if not name.startswith("_")}
    assert public == {*SINGLE, "bode"}
