"""Plots of a loop. Each returns its figure, draws in the axes it is given, and opens no window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from entropic_control.controllers import PITemperature, TemperatureController
from entropic_control.controllers.base import Array
from entropic_control.proofs.loop import Loop, closed_loop, open_loop
from entropic_control.proofs.margins import loop_margins, stable_gains
from entropic_control.proofs.noise import measure_path
from entropic_control.proofs.rollout import rollout
from entropic_control.proofs.signals import Signals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAD, GOOD = "tab:red", "tab:green"


def bode(
    controller: TemperatureController,
    gain: float | Sequence[float] = 1.0,
    delay: int = 1,
    axes: tuple[Axes, Axes] | None = None,
) -> Figure:
    """Magnitude and phase of the open loop at one or more plant gains, with the margins marked.

    Parameters
    ----------
    controller : TemperatureController
    gain : float or sequence of float
        dH/d(ln T), nats.
    delay : int
        Tokens from measurement to effect.
    axes : (Axes, Axes), optional
        Where to draw magnitude and phase.
    """
    if axes is None:
        figure = _figure((6.4, 5.4))
        upper, lower = figure.subplots(2, 1, sharex=True)
    else:
        upper, lower = axes
        figure = cast("Figure", upper.figure)
    omega = np.geomspace(1e-3, np.pi, 1500)
    many = np.atleast_1d(np.asarray(gain, float))
    lowest = 0.0
    for g in many:
        loop = open_loop(controller, float(g), delay)
        value = loop.at(omega)
        (line,) = upper.loglog(omega, np.abs(value), label=f"gain {g:.3g}")
        phase = np.degrees(np.unwrap(np.angle(value)))
        phase -= 360 * np.round((phase[0] + 90) / 360)
        lower.semilogx(omega, phase, color=line.get_color())
        lowest = min(lowest, float(phase.min()))
        if len(many) == 1:
            _mark_margins(loop, upper, lower, omega, np.abs(value), phase)
    upper.axhline(1, color="black", lw=0.8)
    lower.axhline(-180, color="black", lw=0.8)
    lowest = 90 * int(np.floor(max(min(lowest, -181.0), -900.0) / 90))
    lower.set(ylim=(lowest, 0), yticks=np.arange(lowest, 1, 90 if lowest > -500 else 180))
    upper.set(ylabel="|L|")
    lower.set(ylabel="phase of L [deg]", xlabel="frequency [rad/token]", xlim=(omega[0], np.pi))
    upper.legend(fontsize="small")
    for ax in (upper, lower):
        ax.grid(alpha=0.3)
    return figure


def nyquist(
    controller: TemperatureController,
    gain: float | Sequence[float] = 1.0,
    delay: int = 1,
    axes: Axes | None = None,
) -> Figure:
    """The open loop near -1, with the unit circle and the disk that the worst of the loops avoids."""
    figure, ax = _axes(axes, (5.2, 5.2))
    omega = np.concatenate([np.geomspace(1e-4, 0.05, 800), np.linspace(0.05, np.pi, 3000)])
    many = [open_loop(controller, float(g), delay) for g in np.atleast_1d(np.asarray(gain, float))]
    for g, loop in zip(np.atleast_1d(gain), many, strict=True):
        value = loop.at(omega)
        (line,) = ax.plot(value.real, value.imag, label=f"gain {g:.3g}")
        ax.plot(value.real, -value.imag, color=line.get_color(), lw=0.7, ls=":")
    turn = np.linspace(0, 2 * np.pi, 400)
    ax.plot(np.cos(turn), np.sin(turn), color="gray", lw=0.7)
    alpha = min(loop_margins(loop).disk_margin for loop in many)
    if alpha > 0:
        # 2 |1 + L| = alpha |1 - L| is a circle through these two real points.
        left, right = -(2 + alpha) / (2 - alpha), -(2 - alpha) / (2 + alpha)
        left = max(left, -1e3)
        radius, centre = (right - left) / 2, (right + left) / 2
        disk = centre + radius * np.exp(1j * turn)
        ax.fill(disk.real, disk.imag, color=GOOD, alpha=0.12, label=f"disk margin {alpha:.3g}")
    ax.plot(-1, 0, "+", color=BAD, ms=12, mew=2)
    ax.set(xlim=(-2.2, 1.2), ylim=(-1.7, 1.7), xlabel="Re L", ylabel="Im L", aspect="equal")
    ax.legend(fontsize="small", loc="upper right")
    ax.grid(alpha=0.3)
    return figure


def root_locus(
    controller: TemperatureController,
    gain: float = 1.0,
    delay: int = 1,
    axes: Axes | None = None,
) -> Figure:
    """Closed-loop poles as the loop gain grows from nothing to past the gain margin."""
    figure, ax = _axes(axes, (5.6, 5.0))
    loop = open_loop(controller, gain, delay)
    margin = loop_margins(loop).gain_margin
    top = 2 * margin if 0 < margin < np.inf else 100.0
    factors = np.concatenate([[0.0], np.geomspace(1e-3 * top, top, 600)])
    poles = np.array([_padded(loop.poles(factor), loop) for factor in factors])
    colour = np.repeat(np.log10(np.maximum(factors, 1e-3 * top)), poles.shape[1])
    dots = ax.scatter(poles.real.ravel(), poles.imag.ravel(), c=colour, s=4, cmap="viridis")
    turn = np.linspace(0, 2 * np.pi, 400)
    ax.plot(np.cos(turn), np.sin(turn), color="black", lw=0.8)
    now = loop.poles()
    ax.plot(now.real, now.imag, "x", color=BAD, ms=9, mew=2, label="as configured")
    if 0 < margin < np.inf:
        edge = loop.poles(margin)
        edge = edge[np.abs(np.abs(edge) - 1) < 1e-6]
        ax.plot(
            edge.real, edge.imag, "o", mfc="none", color="black", ms=9, label=f"gain x {margin:.3g}"
        )
    figure.colorbar(dots, ax=ax, fraction=0.045, pad=0.03, label="log10 of the factor on the gain")
    ax.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), xlabel="Re z", ylabel="Im z", aspect="equal")
    ax.legend(fontsize="small", loc="lower left")
    ax.grid(alpha=0.3)
    return figure


def step_response(
    controller: PITemperature,
    gain: float,
    offset: float,
    delay: int = 1,
    tokens: int = 300,
    trace: Sequence[Signals] | None = None,
    axes: Axes | None = None,
) -> Figure:
    """The filtered entropy after a start that is off by `offset` in ln T.

    Three answers on one axis: predicted by the linear loop, simulated with the real controller around
    a plant of that gain, and, where there is one, the mean over the requests of a real trace.

    Parameters
    ----------
    controller : PITemperature
    gain : float
        dH/d(ln T), nats.
    offset : float
        ln of the start temperature over the one that meets the target.
    delay, tokens : int
        Tokens from measurement to effect; tokens to draw.
    trace : sequence of Signals, optional
        Requests that began at that start.
    axes : Axes, optional
        Where to draw.
    """
    figure, ax = _axes(axes, (6.4, 3.8))
    predicted = controller.target + _predicted(controller, gain, offset, delay, tokens)
    ax.plot(predicted, color="black", lw=1.5, label="predicted, linear loop")
    simulated = _simulated(controller, gain, offset, delay, tokens)
    ax.plot(simulated, color="tab:orange", ls="--", lw=1.8, label="simulated, real controller")
    if trace:
        paths = [measure_path(controller, one)[:tokens] for one in trace]
        length = min(map(len, paths))
        real = np.array([path[:length] for path in paths])
        ax.plot(
            real.mean(axis=0),
            color="tab:blue",
            lw=1.2,
            label=f"real, mean of {len(paths)} requests",
        )
        if len(paths) > 1:
            error = 1.96 * real.std(axis=0, ddof=1) / np.sqrt(len(paths))
            around = real.mean(axis=0)
            ax.fill_between(
                np.arange(length),
                around - error,
                around + error,
                color="tab:blue",
                alpha=0.15,
                lw=0,
            )
    ax.axhline(controller.target, color="gray", lw=0.8, ls=":")
    ax.set(xlabel="token", ylabel="filtered entropy [nats]", xlim=(0, tokens))
    ax.legend(fontsize="small")
    ax.grid(alpha=0.3)
    return figure


def margin_map(
    controller: TemperatureController,
    gain: tuple[float, float] = (0.1, 30.0),
    delays: tuple[int, int] = (1, 32),
    axes: Axes | None = None,
) -> Figure:
    """The gain margin in dB over plant gain and delay; unstable where the map is left red."""
    figure, ax = _axes(axes, (6.4, 4.4))
    many = np.geomspace(*gain, 33)
    tokens = np.arange(delays[0], delays[1] + 1)
    factor = np.array(
        [[stable_gains(open_loop(controller, float(g), int(d)))[1] for g in many] for d in tokens]
    )
    decibels = 20 * np.log10(np.maximum(factor, 1e-3))
    ax.set_facecolor(BAD)
    shown = np.ma.masked_less_equal(np.minimum(decibels, 40.0), 0.0)
    mesh = ax.pcolormesh(many, tokens, shown, shading="nearest", cmap="viridis", vmin=0, vmax=40)
    figure.colorbar(mesh, ax=ax, label="gain margin [dB], 40 and above alike")
    if (decibels < 6).any() and (decibels > 6).any():
        lines = ax.contour(many, tokens, decibels, levels=[6], colors=["white"], linewidths=[1.2])
        ax.clabel(lines, fmt=lambda level: f"{level:g} dB", fontsize="small")
    if (decibels <= 0).any():
        rows, columns = np.nonzero(decibels <= 0)
        ax.text(
            many[int(np.median(columns))],
            np.median(tokens[rows]),
            "unstable",
            color="white",
            ha="center",
        )
    ax.set(xscale="log", xlabel="plant gain dH/d(ln T) [nats]", ylabel="delay [tokens]")
    return figure


def _predicted(
    controller: PITemperature, gain: float, offset: float, delay: int, tokens: int
) -> Array:
    A = closed_loop(controller.linearize(gain), gain, delay)
    x = np.zeros(A.shape[0])
    x[1:] = offset  # the command in force and those on their way
    out = []
    for _ in range(tokens):
        x = A @ x
        out.append(x[0])
    return np.array(out)


def _simulated(
    controller: PITemperature, gain: float, offset: float, delay: int, tokens: int
) -> Array:
    loops = rollout(controller, 1, delay)
    loops = loops._replace(state=loops.state._replace(varentropy=np.array([gain])))
    centre, out = loops.in_force - offset, []
    for _ in range(tokens):
        loops = loops.step(controller.target + gain * (loops.in_force - centre), gain)
        out.append(loops.state.entropy[0])
    return np.array(out)


def _mark_margins(
    loop: Loop, upper: Axes, lower: Axes, omega: Array, magnitude: Array, phase: Array
) -> None:
    found = loop_margins(loop)
    if not found.stable:
        upper.set_title(f"unstable: |pole| {found.pole_radius:.3g}", color=BAD, fontsize="medium")
        return
    title = f"gain margin {found.gain_margin_db:.1f} dB, phase margin {found.phase_margin:.0f} deg"
    upper.set_title(title, fontsize="medium")
    crossing = np.flatnonzero((magnitude[:-1] > 1) & (magnitude[1:] <= 1))
    if crossing.size:
        at = crossing[-1]
        lower.vlines(omega[at], -180, phase[at], color=GOOD, lw=1.5)
    turned = np.flatnonzero((phase[:-1] > -180) & (phase[1:] <= -180 + 1e-6))
    if turned.size:
        at = turned[0] + 1
        upper.vlines(omega[at], magnitude[at], 1, color=GOOD, lw=1.5)


def _padded(poles: Array, loop: Loop) -> Array:
    """Poles of a constant number: `roots` drops those at 0 and those that went to infinity."""
    count = len(loop.characteristic()) - 1
    return np.concatenate([poles, np.full(max(count - len(poles), 0), np.nan)])[:count]


def _figure(size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def _axes(axes: Axes | None, size: tuple[float, float]) -> tuple[Figure, Axes]:
    if axes is not None:
        return cast("Figure", axes.figure), axes
    figure = _figure(size)
    return figure, figure.subplots()
