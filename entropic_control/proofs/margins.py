"""Stability margins of the temperature loop, found from closed-loop poles.

Margins read off a Bode plot alone mislead here: a loop that goes unstable through z = -1 has no phase
crossover below the Nyquist frequency, and integrators give spurious ones near zero. So every gain at
which a closed-loop pole can cross the unit circle is computed, z = -1 included, and the poles decide
which of them is the margin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from entropic_control.controllers import Linear, TemperatureController
from entropic_control.controllers.base import Array
from entropic_control.errors import ConfigError
from entropic_control.proofs.crossover import crossovers
from entropic_control.proofs.loop import Loop, open_loop

GAINS = 25
"""Points, evenly spaced in the logarithm, at which a range of gains is examined."""

SHARP = 0.05
"""Distance from the unit circle below which a root gets frequencies of its own."""


@dataclass(frozen=True)
class Margins:
    """Margins of one loop, or the worst of each over a range of gains.

    Attributes
    ----------
    stable : bool
        Whether every closed-loop pole lies inside the unit circle.
    gain_margin : float
        The factor on the loop gain at which stability is lost; below 1, the factor at which an
        unstable loop becomes stable, 0 if none does.
    low_gain_margin : float
        The factor below 1 at which a stable loop becomes unstable; 0 for most.
    phase_margin : float
        Degrees; 0 for an unstable loop, inf without a gain crossover.
    delay_margin : float
        Tokens of extra delay the loop survives; 0 for an unstable loop.
    disk_margin : float
        The diameter alpha of the largest disk of simultaneous gain and phase changes (Seiler, Packard
        and Gahinet, IEEE Control Systems 40, 2020, with zero skew); 2 is the most there is.
    sensitivity_peak : float
        max |1 / (1 + L)|.
    pole_radius : float
        Largest modulus of a closed-loop pole.
    """

    stable: bool
    gain_margin: float
    low_gain_margin: float
    phase_margin: float
    delay_margin: float
    disk_margin: float
    sensitivity_peak: float
    pole_radius: float

    @property
    def gain_margin_db(self) -> float:
        return 20 * float(np.log10(self.gain_margin)) if self.gain_margin > 0 else -np.inf

    @property
    def settling(self) -> float:
        """Tokens in which the slowest mode falls to 2 %."""
        return np.log(0.02) / np.log(self.pole_radius) if 0 < self.pole_radius < 1 else np.inf

    def __str__(self) -> str:
        if not self.stable:
            word = f"unstable: a closed-loop pole at |z| = {self.pole_radius:.4g}"
            if self.gain_margin > 0:
                return f"{word}; stable once the gain is multiplied by less than {self.gain_margin:.4g}"
            return word
        return (
            f"stable: gain margin {self.gain_margin:.4g} ({self.gain_margin_db:.1f} dB), phase margin "
            f"{self.phase_margin:.1f} deg, delay margin {self.delay_margin:.1f} tokens, disk margin "
            f"{self.disk_margin:.3g}, sensitivity peak {self.sensitivity_peak:.3g}, slowest pole "
            f"{self.pole_radius:.4f}"
        )


def margins(
    controller: TemperatureController,
    gain: float | tuple[float, float] = 1.0,
    delay: int = 1,
    plant: Linear | None = None,
    varentropy: float | None = None,
) -> Margins:
    """The worst of each margin over a range of plant gains.

    Parameters
    ----------
    controller : TemperatureController
        Any that commands ln T.
    gain : float or (float, float)
        dH/d(ln T), the varentropy, nats; with `plant`, a factor on it.
    delay : int
        Tokens from measurement to effect.
    plant, varentropy
        As in `open_loop`.

    Raises
    ------
    ConfigError
        If a gain is negative, the range is empty, or the controller does not command ln T.
    """
    return worst(
        [loop_margins(open_loop(controller, g, delay, plant, varentropy)) for g in gains(gain)]
    )


def gains(gain: float | tuple[float, float]) -> Array:
    """The gains that stand for a range."""
    low, high = gain if isinstance(gain, tuple) else (gain, gain)
    if not 0 <= low <= high < np.inf:
        raise ConfigError(f"gains must be 0 <= low <= high, not {low:g}, {high:g}")
    if low == high:
        return np.array([low])
    return np.unique([low, *np.geomspace(max(low, 1e-3 * high), high, GAINS), high])


def worst(many: list[Margins]) -> Margins:
    """The worst of each margin."""
    largest = {"low_gain_margin", "sensitivity_peak", "pole_radius"}
    pick = {
        field.name: (max if field.name in largest else min)(getattr(m, field.name) for m in many)
        for field in fields(Margins)
    }
    return Margins(**pick)


def loop_margins(loop: Loop) -> Margins:
    """All margins of one loop."""
    return _loop_margins(tuple(loop.num), tuple(loop.den), loop.delay)


@lru_cache(maxsize=4096)
def _loop_margins(num: tuple[float, ...], den: tuple[float, ...], delay: int) -> Margins:
    loop = Loop(np.array(num), np.array(den), delay)
    radius = loop.radius()
    low, high = stable_gains(loop)
    stable = radius < 1
    phase, tokens = _phase_and_delay(loop) if stable else (0.0, 0.0)
    disk, peak = _disk_and_peak(loop) if stable else (0.0, np.inf)
    return Margins(stable, high, low, phase, tokens, disk, peak, radius)


def critical_gains(loop: Loop) -> Array:
    """Every gain k > 0 at which 1 + k L has a zero on the unit circle, in rising order.

    These are the frequencies where L is real and negative: sign changes of Im(L), refined by
    bisection, and the ends z = 1 and z = -1, where Im(L) is zero without changing sign.
    """
    omega = frequencies(loop)
    value = _imaginary(loop, omega)
    at = np.flatnonzero(np.sign(value[:-1]) * np.sign(value[1:]) < 0)
    low, high, sign = omega[at], omega[at + 1], np.sign(value[at])
    for _ in range(60):
        middle = 0.5 * (low + high)
        same = np.sign(_imaginary(loop, middle)) == sign
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    crossings = _finite(loop, np.concatenate([0.5 * (low + high), [np.pi]]))
    real = loop.at(crossings).real
    if abs(np.polyval(loop.den, 1.0)) > 1e-9 * np.abs(loop.den).sum():
        real = np.append(real, np.polyval(loop.num, 1.0) / np.polyval(loop.den, 1.0))
    return np.sort(-1.0 / real[real < -1e-12])


def stable_gains(loop: Loop) -> tuple[float, float]:
    """The gains (low, high) of the stable interval around 1, or of the nearest one below it.

    Between neighbouring critical gains the number of unstable poles is constant, so one look at the
    poles inside each interval settles it. (0, 0) where nothing up to 1 is stable.
    """
    edges = np.concatenate([[0.0], critical_gains(loop), [np.inf]])
    at = int(np.searchsorted(edges, 1.0, side="right")) - 1
    while at >= 0 and not _stable_between(loop, edges[at], edges[at + 1]):
        at -= 1
    if at < 0:
        return 0.0, 0.0
    low = high = at
    while low > 0 and _stable_between(loop, edges[low - 1], edges[low]):
        low -= 1
    while high + 1 < len(edges) - 1 and _stable_between(loop, edges[high + 1], edges[high + 2]):
        high += 1
    return float(edges[low]), float(edges[high + 1])


def _stable_between(loop: Loop, low: float, high: float) -> bool:
    if low <= 1.0 < high:
        return loop.radius() < 1
    inside = 0.5 * (low + high) if np.isfinite(high) else 2.0 * low
    return loop.radius(inside) < 1


def frequencies(loop: Loop) -> Array:
    """Frequencies close enough that the phase turns little between two of them.

    Near a root of the loop that lies by the unit circle the phase turns within the root's distance from
    it, so there the points follow that distance.
    """
    turns = loop.delay + len(loop.den)
    grid = [np.geomspace(1e-7, 0.02, 300, endpoint=False), np.linspace(0.02, np.pi, 48 * turns)]
    roots = [np.roots(p) for p in (loop.num, loop.den, loop.characteristic())]
    for root in np.concatenate(roots):
        away, angle = abs(abs(root) - 1), float(np.angle(root))
        if away < SHARP and angle > 1e-6:
            steps = np.geomspace(max(away, 1e-12) / 100, SHARP, 80)
            grid += [angle - steps, np.array([angle]), angle + steps]
    every = np.unique(np.concatenate(grid))
    return _finite(loop, every[(every > 0) & (every <= np.pi)])


def _finite(loop: Loop, omega: Array) -> Array:
    """Those of the frequencies that are no pole of the loop."""
    return np.asarray(omega[np.polyval(loop.den, np.exp(1j * omega)) != 0])


def _imaginary(loop: Loop, omega: Array) -> Array:
    """Im(L) |den|^2, which has no poles."""
    z = np.exp(1j * omega)
    value = np.polyval(loop.num, z) * np.conj(np.polyval(loop.den, z))
    return np.asarray((value * np.exp(-1j * omega * loop.delay)).imag)


def _phase_and_delay(loop: Loop) -> tuple[float, float]:
    """Phase margin in degrees and delay margin in tokens, the least over all gain crossovers."""
    crossover = crossovers(loop.num, loop.den)
    if crossover is None:  # |L| = 1 everywhere
        crossover = frequencies(loop)
    # The lag that would turn L onto -1; a lead that would do so is a phase margin too.
    lag = np.angle(-loop.at(crossover)) % (2 * np.pi)
    phase = np.minimum(lag, 2 * np.pi - lag)
    moving = crossover > 0  # no delay turns L(1)
    tokens = (lag[moving] / crossover[moving]).min(initial=np.inf)
    return float(np.degrees(phase.min(initial=np.inf))), min(float(tokens), _whole_tokens(loop))


def _whole_tokens(loop: Loop) -> float:
    """Less than one where |L(-1)| > 1: a token more turns L(-1) from one side of -1 to the other.

    The characteristic polynomial's sign at z = -1, which stability fixes, changes with it.
    """
    num, den = (abs(float(np.polyval(p, -1.0))) for p in (loop.num, loop.den))
    return float(np.nextafter(1.0, 0.0)) if num > den else np.inf


def _disk_and_peak(loop: Loop) -> tuple[float, float]:
    """Disk margin min 2 |1 + L| / |1 - L|, and the sensitivity peak max 1 / |1 + L|."""

    def disk(omega: Array) -> Array:
        value = loop.at(omega)
        return np.asarray(2 * np.abs(1 + value) / np.maximum(np.abs(1 - value), 1e-300))

    def distance(omega: Array) -> Array:
        return np.asarray(np.abs(1 + loop.at(omega)))

    grid = frequencies(loop)
    return _minimum(disk, grid), 1.0 / _minimum(distance, grid)


def _minimum(function: Callable[[Array], Array], omega: Array) -> float:
    """The least value of a function of frequency: the best grid point, then three closer looks."""
    values = function(omega)
    for _ in range(3):
        best = int(np.argmin(values))
        left, right = omega[max(best - 1, 0)], omega[min(best + 1, len(omega) - 1)]
        omega = np.linspace(left, right, 41)
        values = function(omega)
    return float(values.min())
