"""A limit on how fast the temperature moves, around any other temperature controller."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from entropic_control.controllers.base import Array, Linear, Rows
from entropic_control.controllers.kinds import KindOf
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.softmax import GREEDY
from entropic_control.controllers.state import choose
from entropic_control.controllers.temperature.base import Command, TemperatureController


class SlewState(NamedTuple):
    inner: Any
    """The state of the limited controller."""
    log_temperature: Array
    """ln T last in force, shape (rows,); NaN before the first step, which is not limited."""


class SlewLimit(TemperatureController):
    """Moves ln T by at most `rate` a token towards what the inner controller commands.

    The inner controller is told the temperature in force, by `reading.temperature` and, where the
    limit held it back, by `track`: an integrator that ran on behind the limit would have to come all
    the way back (tracking anti-windup; Astrom and Hagglund, Advanced PID Control, 2006).

    Parameters
    ----------
    inner : TemperatureController
        What is limited; its per-request settings are this controller's.
    rate : float
        Largest change of ln T per token.
    """

    kind: Literal["slew"] = "slew"
    inner: Annotated[TemperatureController, KindOf("temperature")]
    rate: float = Field(0.1, gt=0)

    @property
    def overridable(self) -> frozenset[str]:  # type: ignore[override]
        return self.inner.overridable

    @property
    def reads_logits(self) -> bool:  # type: ignore[override]
        return self.inner.reads_logits

    def init(self, rows: int = 1, *, dtype: Any = np.float64, **overrides: ArrayLike) -> SlewState:
        inner = self.inner.init(rows, dtype=dtype, **overrides)
        return SlewState(inner, np.full(rows, np.nan, dtype))

    def command(self, state: SlewState, logits: Rows | None = None) -> Command:
        wanted = self.inner.command(state.inner, logits)
        return wanted._replace(temperature=self._limited(state, wanted.temperature))

    def update(self, state: SlewState, reading: Reading) -> tuple[Array, SlewState]:
        wanted, inner = self.inner.update(state.inner, reading)
        now = self._logarithm(reading.temperature).astype(state.log_temperature.dtype, copy=False)
        new = SlewState(inner, now)
        new = self.track(new, self._limited(new, wanted))
        state = choose(reading.valid, new, state)
        return self._limited(state, wanted), state

    def linearize(self, varentropy: float = 1.0) -> Linear:
        """The inner controller's: small signals stay within the limit."""
        return self.inner.linearize(varentropy)

    def targets(self, state: SlewState) -> Array | None:
        return self.inner.targets(state.inner)

    def feasible(self, state: SlewState, live: Array) -> Array:
        return self.inner.feasible(state.inner, live)

    def saturated(self, state: SlewState) -> Array:
        return self.inner.saturated(state.inner)

    def track(self, state: SlewState, temperature: Array) -> SlewState:
        return state._replace(inner=self.inner.track(state.inner, temperature))

    def _limited(self, state: SlewState, wanted: Array) -> Array:
        last, u = state.log_temperature, self._logarithm(wanted)
        held = np.clip(u, last - self.rate, last + self.rate)
        # Where nothing is held back the command goes through bit for bit, 0 included.
        free = np.isnan(last) | (held == u)
        return np.where(free, wanted, np.exp(held)).astype(wanted.dtype, copy=False)

    @staticmethod
    def _logarithm(temperature: Array) -> Array:
        return np.asarray(np.log(np.maximum(temperature, GREEDY)))
