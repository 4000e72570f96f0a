"""The PI temperature loop: holds the mean entropy at a target by moving ln T."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, model_validator

from entropic_control.controllers.base import Array, Linear, Rows
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.state import choose, in_precision_of
from entropic_control.controllers.temperature.base import Command, TemperatureController


class PIState(NamedTuple):
    """Arrays of shape (rows,)."""

    log_temperature: Array
    """u = ln T in force."""
    entropy: Array
    """Filtered entropy, nats."""
    varentropy: Array
    """Filtered varentropy, nats^2: the measured plant gain dH/du."""
    integral: Array
    """The integral part of ln T."""
    target: Array
    """H*, nats."""


class PITemperature(TemperatureController):
    """Proportional-integral control of the entropy of what is sampled, by ln T.

    With F the filter h <- h + filter (H - h), and all sums clipped to ln bounds:
    I[t+1] = I[t] + ki (H* - H[t]) and u[t+1] = I[t+1] + kp (H* - F[H]) / max(F[V], v_min).

    The integral adds up the entropy itself, in nats, with a gain that never changes. So its sum
    telescopes, and off the bounds the mean of H over n tokens differs from H* by at most
    ln(high / low) / (ki n), whatever the model and the text. An integral of an error that is divided
    by the measured varentropy, or held where the tokens at hand allow no such entropy, regulates a
    weighted mean instead: under min_p it left half of the entropy asked for.

    The proportional part acts on the filtered entropy, so that the structure within words is left
    alone, and is divided by the *filtered* varentropy, the gain from u to F[H]: the plant's gain
    differs a hundredfold between texts. The filter starts at the target: without evidence there is
    no action. The clip of the integral is the anti-windup.

    Parameters
    ----------
    target : float
        H*, nats; a per-request setting. It is the mean over tokens that is held, not each token's: where
        only few tokens are live, the others make up for it.
    kp : float
        Proportional gain on ln T; in nats with the schedule, in 1/nats without.
    ki : float
        Integral gain per token on ln T, in 1/nats.
    filter : float
        EMA coefficient, 1 is no filter.
    bounds : (float, float)
        Temperature limits.
    start : float
        Temperature of the first token.
    schedule : {"varentropy", "none"}
        Whether the proportional part is divided by the measured gain (design: Rugh and Shamma,
        Automatica 36, 2000, on gain scheduling).
    v_min : float
        Floor of the divisor, nats^2.
    v_start : float
        Varentropy assumed before any was measured, nats^2.
    """

    overridable: ClassVar[frozenset[str]] = frozenset({"target"})
    kind: Literal["pi"] = "pi"
    target: float = Field(1.0, gt=0)
    kp: float = Field(0.05, ge=0)
    ki: float = Field(0.03, gt=0)
    filter: float = Field(0.1, gt=0, le=1)
    bounds: tuple[float, float] = (0.1, 2.0)
    start: float = Field(0.7, gt=0)
    schedule: Literal["varentropy", "none"] = "varentropy"
    v_min: float = Field(1.0, gt=0)
    v_start: float = Field(2.0, gt=0)

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        low, high = self.bounds
        if not 0 < low < high:
            raise ValueError(f"bounds must be 0 < low < high, not {low:g}, {high:g}")
        if not low <= self.start <= high:
            raise ValueError(f"start {self.start:g} lies outside the bounds {low:g}, {high:g}")
        return self

    @property
    def log_bounds(self) -> tuple[float, float]:
        """The temperature limits as u = ln T."""
        return math.log(self.bounds[0]), math.log(self.bounds[1])

    def init(self, rows: int = 1, *, dtype: Any = np.float64, **overrides: ArrayLike) -> PIState:
        self.check_overrides(overrides)
        target = self.overridden(rows, dtype, overrides, "target")
        return PIState(
            log_temperature=np.full(rows, np.log(self.start), dtype),
            entropy=target,
            varentropy=np.full(rows, self.v_start, dtype),
            integral=np.full(rows, np.log(self.start), dtype),
            target=target,
        )

    def command(self, state: PIState, logits: Rows | None = None) -> Command:
        return Command(np.exp(state.log_temperature))

    def update(self, state: PIState, reading: Reading) -> tuple[Array, PIState]:
        moved = PIState(
            *law(*state[1:], reading.entropy, reading.varentropy, *self._gains), state.target
        )
        new = choose(reading.valid, moved, state)
        return np.exp(new.log_temperature), new

    @property
    def compiled_gains(self) -> tuple[float, ...] | None:
        # A subclass may do other than `law`.
        return self._gains if type(self) is PITemperature else None

    @property
    def _gains(self) -> tuple[float, ...]:
        return self.filter, self.kp, self.ki, *self.log_bounds, *self.divisor_bounds

    @property
    def divisor_bounds(self) -> tuple[float, float]:
        """Between which the filtered varentropy divides the proportional part, nats^2."""
        return (1.0, 1.0) if self.schedule == "none" else (self.v_min, math.inf)

    def divisor(self, varentropy: Array) -> Array:
        """What the proportional part is divided by, given F[V], nats^2 (1 unscheduled)."""
        return np.asarray(clipped(varentropy, *self.divisor_bounds))

    def linearize(self, varentropy: float = 1.0) -> Linear:
        """State: deviations of (F[H], I)."""
        a = self.filter
        proportional = self.kp / float(self.divisor(np.array(varentropy)))
        return Linear(
            A=np.array([[1 - a, 0.0], [0.0, 1.0]]),
            B=np.array([[a], [-self.ki]]),
            C=np.array([[-proportional * (1 - a), 1.0]]),
            D=np.array([[-proportional * a - self.ki]]),
            inputs=("entropy [nats]",),
            outputs=("ln temperature",),
        )

    def track(self, state: PIState, temperature: Array) -> PIState:
        own = state.log_temperature
        kept = temperature == np.exp(own)
        u = np.where(kept, own, clipped(np.log(temperature), *self.log_bounds))
        integral = clipped(state.integral + (u - own), *self.log_bounds)
        return in_precision_of(state, state._replace(log_temperature=u, integral=integral))

    def targets(self, state: PIState) -> Array:
        return state.target

    def saturated(self, state: PIState) -> Array:
        low, high = self.log_bounds
        u = state.log_temperature
        return np.where(u >= high, 1, np.where(u <= low, -1, 0))


def law(
    entropy: Any,
    varentropy: Any,
    integral: Any,
    target: Any,
    measured_entropy: Any,
    measured_varentropy: Any,
    filter: float,
    kp: float,
    ki: float,
    low: float,
    high: float,
    least: float,
    most: float,
) -> tuple[Any, Any, Any, Any]:
    """One step of `PITemperature`: `PIState` without its target. Of rows, or compiled of one.

    Parameters
    ----------
    entropy, varentropy, integral, target
        `PIState`, without the command: nothing follows from it but the reading.
    measured_entropy, measured_varentropy
        Of the `Reading`.
    filter, kp, ki : float
        Gains.
    low, high : float
        Bounds of ln T.
    least, most : float
        Bounds of the divisor, nats^2.
    """
    h = entropy + filter * (measured_entropy - entropy)
    v = varentropy + filter * (measured_varentropy - varentropy)
    i = clipped(integral + ki * (target - measured_entropy), low, high)
    u = clipped(i + kp * (target - h) / clipped(v, least, most), low, high)
    return u, h, v, i


def clipped(x: Any, low: float, high: float) -> Any:
    """`x` within the bounds; np.clip takes four times as long on a few rows."""
    return np.minimum(np.maximum(x, low), high)
