"""Plots of a run. Each returns its figure, draws in the axes it is given, and opens no window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from entropic_control.controllers.base import Array
from entropic_control.errors import CapabilityError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Columns = Mapping[str, Array]
"""Columns of a trace table, as `Table.columns` or `read_table` give them."""


def entropy_plot(tokens: Columns, *, window: int = 32, axes: Axes | None = None) -> Figure:
    """Entropy of each request, running mean over `window` tokens, against its target.

    Parameters
    ----------
    tokens : mapping of arrays
        The token columns of a trace.
    window : int
        Tokens of the running mean.
    axes : Axes, optional
        Where to draw; a new figure by default.
    """
    figure, axes = _axes(axes)
    lines = 0
    for name, mine in _by_request(tokens):
        if mine.sum() >= 2 * window:
            values = _running_mean(tokens["entropy"][mine], window)
            axes.plot(np.arange(len(values)) + window - 1, values, lw=1, label=str(name))
            lines += 1
    for target in np.unique(tokens["target"][~np.isnan(tokens["target"])]):
        axes.axhline(target, color="black", ls="--", lw=1, label=f"target {target:g}")
    axes.set(xlabel="generated tokens", ylabel=f"entropy [nats], mean of {window}", ylim=(0, None))
    if lines:
        axes.legend(fontsize="x-small", ncols=2, title="request", title_fontsize="x-small")
    return figure


def temperature_plot(tokens: Columns, *, axes: Axes | None = None) -> Figure:
    """Temperature of each request over its tokens."""
    figure, axes = _axes(axes)
    for name, mine in _by_request(tokens):
        axes.plot(tokens["token"][mine], tokens["temperature"][mine], lw=1, label=str(name))
    axes.set(xlabel="generated tokens", ylabel="temperature", ylim=(0, None))
    return figure


def cells_plot(steps: Columns, *, label: str | None = None, axes: Axes | None = None) -> Figure:
    """KV cells held by all sequences over time."""
    figure, axes = _axes(axes)
    time = steps["time"] - steps["time"][0] if len(steps["time"]) else steps["time"]
    axes.plot(time, steps["cells"], lw=1.2, label=label)
    axes.set(xlabel="time [s]", ylabel="KV cells held")
    _from_zero(axes)
    return figure


def tau_plot(steps: Columns, *, label: str | None = None, axes: Axes | None = None) -> Figure:
    """Entropic time against what it cost: the slope is d(tau)/dC."""
    figure, axes = _axes(axes)
    axes.plot(np.cumsum(steps["seconds"]), np.cumsum(steps["tau"]), lw=1.2, label=label)
    axes.set(xlabel="cost C [s of engine time]", ylabel="entropic time tau [nats]")
    _from_zero(axes)
    return figure


def run_plot(
    arms: Mapping[str, tuple[Columns, Columns]], *, controlled: str | None = None
) -> Figure:
    """Everything about a run, or about runs side by side.

    Parameters
    ----------
    arms : mapping of (tokens, steps)
        The trace tables by the name of the arm.
    controlled : str, optional
        The arm whose temperature is shown; the last by default.
    """
    controlled = controlled or list(arms)[-1]
    rows = -(-(len(arms) + 3) // 2)
    figure = new_figure((11, 3.4 * rows))
    axes = figure.subplots(rows, 2).ravel()
    for place, (arm, (tokens, _)) in zip(axes, arms.items(), strict=False):
        entropy_plot(tokens, axes=place)
        place.set_title(f"entropy, {arm}" if arm else "entropy")
    top = max(place.get_ylim()[1] for place in axes[: len(arms)])
    for place in axes[: len(arms)]:
        place.set_ylim(0, top)
    heat, cells, tau = axes[len(arms) : len(arms) + 3]
    temperature_plot(arms[controlled][0], axes=heat)
    heat.set_title(f"temperature, {controlled}" if controlled else "temperature")
    for arm, (_, steps) in arms.items():
        cells_plot(steps, label=arm, axes=cells)
        tau_plot(steps, label=arm, axes=tau)
    cells.set_title("KV memory")
    tau.set_title("uncertainty resolved per cost")
    if len(arms) > 1:
        cells.legend()
        tau.legend()
    for spare in axes[len(arms) + 3 :]:
        spare.remove()
    return figure


def _from_zero(axes: Axes) -> None:
    """Start the vertical axis at zero and let it grow with everything drawn so far."""
    axes.autoscale(axis="y")
    axes.set_ylim(bottom=0)


def _by_request(tokens: Columns) -> list[tuple[Any, Array]]:
    names = dict.fromkeys(tokens["request"].tolist())
    return [(name, tokens["request"] == name) for name in names]


def _running_mean(values: Array, window: int) -> Array:
    return np.convolve(values, np.full(window, 1 / window), mode="valid")


def new_figure(size: tuple[float, float]) -> Figure:
    """An empty figure of a size in inches, without a window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CapabilityError(
            "plots need matplotlib: pip install 'entropic-control[plots]'"
        ) from error
    return Figure(figsize=size, layout="constrained")


def _axes(axes: Axes | None) -> tuple[Figure, Axes]:
    if axes is not None:
        figure = axes.get_figure(root=True)
        assert figure is not None
        return figure, axes
    fresh = new_figure((7, 4))
    return fresh, fresh.subplots()
