"""Mirostat v2: holds the surprisal of the sampled tokens by cutting off the improbable ones."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from entropic_control.controllers.base import Array, Linear, Rows
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.state import choose
from entropic_control.controllers.temperature.base import Command, TemperatureController


class MirostatState(NamedTuple):
    """Arrays of shape (rows,)."""

    limit: Array
    """mu, nats: tokens more surprising than this are cut off."""
    target: Array
    """tau, nats."""


class Mirostat(TemperatureController):
    """An integrator on the surprisal limit: mu <- mu - rate (S - tau), from mu = 2 tau.

    S is the surprisal of the sampled token under what was sampled from. Mirostat v2 of Basu et al.
    (ICLR 2021, arXiv:2007.14966), in nats where the paper counts bits; `rate` is the same in both.

    Parameters
    ----------
    target : float
        tau, nats; a per-request setting.
    rate : float
        eta, the paper's learning rate.
    temperature : float
        The temperature, applied before the cut.
    """

    overridable: ClassVar[frozenset[str]] = frozenset({"target"})
    kind: Literal["mirostat"] = "mirostat"
    target: float = Field(3.0, gt=0)
    rate: float = Field(0.1, gt=0)
    temperature: float = Field(1.0, ge=0)

    def init(
        self, rows: int = 1, *, dtype: Any = np.float64, **overrides: ArrayLike
    ) -> MirostatState:
        self.check_overrides(overrides)
        target = self.overridden(rows, dtype, overrides, "target")
        return MirostatState(2 * target, target)

    def command(self, state: MirostatState, logits: Rows | None = None) -> Command:
        # Below 0 the integrator still counts, but no token is less surprising than one that is certain.
        return Command(self._temperatures(state), np.maximum(state.limit, 0.0))

    def update(self, state: MirostatState, reading: Reading) -> tuple[Array, MirostatState]:
        # Greedy sampling of a token that is not the first has infinite surprisal: no information.
        informative = reading.valid & np.isfinite(reading.surprisal)
        limit = state.limit - self.rate * (reading.surprisal - state.target)
        new = MirostatState(limit.astype(state.limit.dtype, copy=False), state.target)
        return self._temperatures(state), choose(informative, new, state)

    def linearize(self, varentropy: float = 1.0) -> Linear:
        return Linear(
            A=np.array([[1.0]]),
            B=np.array([[-self.rate]]),
            C=np.array([[1.0]]),
            D=np.array([[-self.rate]]),
            inputs=("surprisal [nats]",),
            outputs=("surprisal limit [nats]",),
        )

    def targets(self, state: MirostatState) -> Array:
        return state.target

    def _temperatures(self, state: MirostatState) -> Array:
        return np.full_like(state.limit, self.temperature)
