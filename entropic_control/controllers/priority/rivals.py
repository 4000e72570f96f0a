"""The published rivals of the entropic index, and the trivial member of the family."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from entropic_control.controllers.base import Array, Linear, static
from entropic_control.controllers.priority.base import Candidates, Cost, Priority
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.state import NoState


class _Stateless(Priority):
    def init(self, rows: int = 1, *, dtype: Any = np.float64) -> NoState:
        return NoState()

    def update(self, state: NoState, reading: Reading) -> tuple[Array, NoState]:
        return np.zeros(reading.entropy.shape, reading.entropy.dtype), state

    def linearize(self, varentropy: float = 1.0) -> Linear:
        return static("entropy fall [nats]", "flow [nats/token]")


class FirstCome(_Stateless):
    """First come, first served: what serving engines do by default."""

    kind: Literal["first_come"] = "first_come"

    def index(self, state: NoState, candidates: Candidates, cost: Cost) -> Array:
        return -candidates.arrival.astype(np.float64)


class RoundRobin(_Stateless):
    """The request that waited longest comes first, so that prompts take turns by chunks."""

    kind: Literal["round_robin"] = "round_robin"

    def index(self, state: NoState, candidates: Candidates, cost: Cost) -> Array:
        return candidates.waited.astype(np.float64)


class ShortestRemaining(_Stateless):
    """Shortest remaining processing time (Schrage, Operations Research 16, 1968), by predicted seconds."""

    kind: Literal["shortest_remaining"] = "shortest_remaining"

    def index(self, state: NoState, candidates: Candidates, cost: Cost) -> Array:
        c = candidates
        prefill = np.where(c.prompt_left > 0, cost.prefill(c.prompt_left, c.cells), 0.0)
        decode = c.decode_left * cost.decode(np.ones_like(c.cells), c.cells + c.prompt_left)
        return np.asarray(-(prefill + decode))
