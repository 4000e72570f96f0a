"""A sequence under a pruning controller, step by step as the engine has it: what is held, what may be."""

from __future__ import annotations

import numpy as np

from entropic_control.controllers import Pruning
from entropic_control.controllers.base import Array
from entropic_control.controllers.pruning import Blocks
from entropic_control.controllers.signals import Reading, whole_row_reading


class Run:
    """A growing sequence and the real controller's `init`, `update`, `due` and `keep` around it.

    Parameters
    ----------
    pruning : Pruning
    capacity : int
        Tokens that it will reach.
    size : int
        Tokens in a block.
    rng : Generator
        Draws the surprisals.
    """

    def __init__(
        self, pruning: Pruning, capacity: int, size: int, rng: np.random.Generator
    ) -> None:
        self._pruning, self._size, self._rng = pruning, size, rng
        count = -(-capacity // size)
        self._held = np.zeros(count, np.bool_)
        self._surprisal = rng.exponential(3.0, (count, size)).astype(np.float32)
        self._state = pruning.init(1)
        self.open = True
        """Whether the controller lets it be pruned, as far as it knows what it needs to know."""
        self.pruned = False
        """Whether the last step pruned it."""
        self.length = self.steps = 0

    @staticmethod
    def reading(entropy: float) -> Reading:
        """A step of one row at T = 1 with this entropy, nats."""
        column, one = np.array([float(entropy)]), np.ones(1)
        return whole_row_reading(column, one, column, np.full(1, 1000), one, np.ones(1, np.bool_))

    @property
    def blocks(self) -> int:
        """Number of blocks held."""
        return int(self._held.sum())

    @property
    def cells(self) -> int:
        """Tokens held."""
        return self.blocks * self._size - (-self.length % self._size)

    def view(self) -> Blocks:
        """The blocks as the controller sees them, all with the same attention."""
        number = np.flatnonzero(self._held)
        attention = np.full(len(number), 1 / max(len(number), 1))
        nats = self._surprisal[number]
        return Blocks(number, nats, self.length, self.cells, self._size, attention)

    def step(self, tokens: int, reading: bool, entropy: float) -> None:
        """Grow by `tokens`, of the prompt if `reading`; one that draws shows its entropy, nats."""
        first = -(-self.length // self._size)
        self.length += tokens
        self.steps += 1
        self._held[first : -(-self.length // self._size)] = True
        pruning = self._pruning
        if not reading:
            prunable, self._state = pruning.update(self._state, self.reading(entropy))
            watched = (
                tokens == 1 or not pruning.needs_attention
            )  # attention is that of a single token
            self.open = bool(prunable[0]) and watched
        self.pruned = False
        if not pruning.prunes or not self.open or (reading and _waits(pruning)):
            return
        own = pruning.at(self._state)
        if own.due(self.blocks, self.length, self._size):
            number = np.flatnonzero(self._held)
            self._held[number[~own.keep(self.view())]] = False
            self.pruned = True

    def missing(self) -> Array:
        """Numbers of sink and recent blocks that are not held."""
        everything = np.arange(-(-self.length // self._size))
        nats = self._surprisal[: len(everything)]
        full = Blocks(everything, nats, self.length, self.length, self._size)
        fixed = Pruning.fixed(self._pruning, full)
        return everything[fixed & ~self._held[: len(everything)]]


def allowed(
    pruning: Pruning, length: int, size: int = 1, *, open: bool, reading: bool = False
) -> int:
    """Cells, in whole blocks, that may be held after a step at `length` tokens.

    Parameters
    ----------
    open : bool
        Whether the controller lets the sequence be pruned.
    reading : bool
        Whether its prompt is still being read.
    """
    everything = -(-length // size) * size
    waits = not pruning.prunes or not open or (reading and _waits(pruning))
    if waits or length < pruning.min_tokens:
        return everything
    # At any state the budget is the whole one at most; a block beyond the slack makes pruning due.
    blocks = int(pruning.budget_blocks(length, size) * (1 + pruning.slack))
    return min(blocks * size, everything)


def _waits(pruning: Pruning) -> bool:
    """Whether a prompt has to be read to its end before anything of it goes."""
    return not pruning.during_prefill or pruning.needs_attention
