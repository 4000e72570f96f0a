"""The rivals of entropic pruning, and the trivial member of the family."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from entropic_control.controllers.base import Array, Linear, static
from entropic_control.controllers.pruning.base import Blocks, Pruning
from entropic_control.controllers.sampling import uniform
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.state import NoState


class Stateless(Pruning):
    """Base of the policies that remember nothing and may prune at any time."""

    def init(self, rows: int = 1, *, dtype: Any = np.float64) -> NoState:
        return NoState()

    def update(self, state: NoState, reading: Reading) -> tuple[Array, NoState]:
        return np.ones(reading.entropy.shape, np.bool_), state

    def linearize(self, varentropy: float = 1.0) -> Linear:
        return static("entropy [nats]", "gate entropy [nats]")


class NoPruning(Stateless):
    """Keeps everything."""

    prunes: ClassVar[bool] = False
    kind: Literal["none"] = "none"

    def due(self, blocks: int, length: int) -> bool:
        return False

    def score(self, blocks: Blocks) -> Array:
        return np.full(len(blocks.number), np.inf)

    def keep(self, blocks: Blocks) -> Array:
        return np.ones(len(blocks.number), np.bool_)


class SlidingWindow(Stateless):
    """Attention sinks and the most recent blocks: StreamingLLM (Xiao et al., ICLR 2024)."""

    kind: Literal["sliding_window"] = "sliding_window"

    def score(self, blocks: Blocks) -> Array:
        return blocks.number.astype(np.float64)


class RandomPruning(Stateless):
    """Blocks at random, each block's lot drawn once from (seed, block number)."""

    kind: Literal["random"] = "random"
    seed: int = 0

    def score(self, blocks: Blocks) -> Array:
        return np.array([uniform(self.seed, int(number)) for number in blocks.number])
