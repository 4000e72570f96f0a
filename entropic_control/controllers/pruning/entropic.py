"""Entropic pruning: keep what carried information when it was read."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from entropic_control.controllers.base import Array, Linear
from entropic_control.controllers.estimators import floored
from entropic_control.controllers.pruning.base import Blocks, Pruning
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.state import choose


class GateState(NamedTuple):
    entropy: Array
    """Filtered raw entropy with the floor applied, nats, shape (rows,)."""


class EntropicPruning(Pruning):
    """Scores a block by the largest surprisal of its tokens, and spends part of the budget on recency.

    A token that the model could not predict is what later tokens cannot reconstruct without it; names
    and numbers survive, boilerplate goes. Recency alone predicts continuation better and loses every
    fact; half and half gets both at a budget of one half.

    Parameters
    ----------
    window : float
        Share of the budget given to the most recent blocks.
    gate : float or None
        Pruning pauses while the filtered entropy is above this, nats: an unsure model may be about to
        look back.
    entropy_floor : float
        Entropies are not believed below this, nats.
    filter : float
        EMA coefficient of the gate's entropy.
    """

    needs_surprisal: ClassVar[bool] = True
    kind: Literal["entropic"] = "entropic"
    window: float = Field(0.5, ge=0, le=1)
    gate: float | None = Field(6.0, gt=0)
    entropy_floor: float = Field(0.02, gt=0)
    filter: float = Field(0.05, gt=0, le=1)

    def init(self, rows: int = 1, *, dtype: Any = np.float64) -> GateState:
        return GateState(np.full(rows, self.entropy_floor, dtype))

    def update(self, state: GateState, reading: Reading) -> tuple[Array, GateState]:
        measured = floored(reading.raw_entropy, self.entropy_floor)
        new = state.entropy + self.filter * (measured - state.entropy)
        dtype = state.entropy.dtype
        state = choose(reading.valid, GateState(new.astype(dtype, copy=False)), state)
        return self.open(state), state

    def linearize(self, varentropy: float = 1.0) -> Linear:
        a = self.filter
        return Linear(
            A=np.array([[1 - a]]),
            B=np.array([[a]]),
            C=np.array([[1 - a]]),
            D=np.array([[a]]),
            inputs=("entropy [nats]",),
            outputs=("gate entropy [nats]",),
        )

    def open(self, state: GateState) -> Array:
        """Whether each row may be pruned in this state, shape (rows,)."""
        if self.gate is None:
            return np.ones(state.entropy.shape, np.bool_)
        return np.asarray(state.entropy <= self.gate)

    def score(self, blocks: Blocks) -> Array:
        share = int(self.window * self.budget_blocks(blocks.length))
        in_window = np.arange(len(blocks.number)) >= len(blocks.number) - share
        return np.where(in_window, np.inf, blocks.surprisal)
