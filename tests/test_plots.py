"""Plots: each in its own axes, the figure returned, no window and no pyplot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import ids, simulated

from entropic_control import Request
from entropic_control.controllers import FixedTemperature, PITemperature
from entropic_control.errors import CapabilityError
from entropic_control.plots import cells_plot, entropy_plot, run_plot, tau_plot, temperature_plot
from entropic_control.trace import Trace

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]


def tables(**parts: Any) -> tuple[Any, Any]:
    engine = simulated(**parts)
    engine.run([Request(id=f"r{n}", prompt=ids(20), max_tokens=90 - 70 * n) for n in range(2)])
    tokens = engine.trace.tokens.columns()
    tokens["request"] = np.array(engine.trace.names, object)[tokens["request"]]
    return tokens, engine.trace.steps.columns()


def test_case_22_two_subplots_each_draw_in_their_own_axes() -> None:
    """Case 22: two plots side by side; the axes given are the axes drawn in, and nothing else is."""
    tokens, steps = tables()
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert entropy_plot(tokens, axes=left) is figure
    assert left.lines
    assert not right.lines
    assert cells_plot(steps, axes=right) is figure
    assert len(right.lines) == 1
    assert right.get_ylabel() == "KV cells held"
    assert "entropy" in left.get_ylabel()
    lines = len(left.lines)
    for plot, table in ((temperature_plot, tokens), (tau_plot, steps)):
        own = plot(table)
        assert own is not figure
        assert len(own.axes) == 1
        assert own.axes[0].lines
    assert (len(left.lines), len(right.lines)) == (lines, 1)


def test_the_entropy_plot_shows_the_running_mean_against_the_target() -> None:
    tokens, _ = tables(temperature=PITemperature(target=1.25))
    (axes,) = entropy_plot(tokens, window=16).axes
    lines = {str(line.get_label()): line for line in axes.lines}
    assert set(lines) == {"r0", "target 1.25"}  # r1 is too short for two windows
    mean = np.asarray(lines["r0"].get_ydata(), float)
    entropy = tokens["entropy"][tokens["request"] == "r0"]
    assert len(mean) == 90 - 15
    np.testing.assert_allclose(mean[[0, -1]], [entropy[:16].mean(), entropy[-16:].mean()])
    assert set(np.asarray(lines["target 1.25"].get_ydata()).tolist()) == {1.25}


def test_tau_is_drawn_against_its_cost() -> None:
    tokens, steps = tables()
    (line,) = tau_plot(steps).axes[0].lines
    x, y = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
    assert np.all(np.diff(x) > 0)
    assert np.all(np.diff(y) >= 0)
    assert y[-1] == pytest.approx(
        sum(tokens["tau"][tokens["request"] == r][-1] for r in ("r0", "r1"))
    )


@pytest.mark.parametrize("arms", [1, 2, 3])
def test_a_run_is_one_figure_with_an_axes_for_everything(arms: int, tmp_path: Path) -> None:
    settings: list[Any] = [FixedTemperature(), PITemperature(), PITemperature(target=2.0)]
    runs = {f"arm{n}": tables(temperature=settings[n]) for n in range(arms)}
    figure = run_plot(runs)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:arms] == [f"entropy, arm{n}" for n in range(arms)]
    assert titles[arms:] == [
        f"temperature, arm{arms - 1}",
        "KV memory",
        "uncertainty resolved per cost",
    ]
    by_title = dict(zip(titles, figure.axes, strict=True))
    assert len(by_title["KV memory"].lines) == arms
    assert len(by_title[f"temperature, arm{arms - 1}"].lines) == 2
    path = tmp_path / "run.png"
    figure.savefig(path, dpi=50)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_an_arm_without_a_token_is_an_empty_axes() -> None:
    empty = Trace()
    figure = run_plot({"none": (empty.tokens.columns(), empty.steps.columns()), "some": tables()})
    assert not figure.axes[0].lines
    assert figure.axes[1].lines


def test_no_window_and_no_global_state(tmp_path: Path) -> None:
    """Headless: pyplot, which would look for a display and keep every figure, is never imported."""
    code = (
        "import sys\n"
        "from entropic_control import load\n"
        "from entropic_control.plots import run_plot\n"
        "report = load({}, backend='simulated').run(['Hi'])\n"
        "tables = report.trace.tokens.columns(), report.trace.steps.columns()\n"
        "run_plot({'a': tables}).savefig('a.png')\n"
        "print('matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(tmp_path), "PATH": ""},
    )
    assert done.stdout.split() == ["True", "False"]
    assert (tmp_path / "a.png").exists()


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(CapabilityError, match=r"pip install 'entropic-control\[plots\]'"):
        entropy_plot(tables()[0])
