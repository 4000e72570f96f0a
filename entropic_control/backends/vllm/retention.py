"""Which KV blocks stay, by a rule that two processes can follow without talking to each other.

vLLM's scheduler frees blocks and its worker skips them. Both know a sequence's length and nothing else in
common, so the kept blocks are a function of the length: one time line, grown as sequences get longer, on
which every pruning is what the pruning controller says at that length of what was kept before.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from entropic_control.backends.vllm.config import Settings
from entropic_control.controllers.base import Array
from entropic_control.controllers.pruning.base import BLOCK, Blocks, Pruning
from entropic_control.errors import CapabilityError


class Retention:
    """The dropped blocks of a sequence, by its length.

    Parameters
    ----------
    pruning : Pruning
        A controller whose scores depend on the number of the block alone.
    block_size : int
        Tokens in a block of vLLM's, a multiple of 16.
    """

    def __init__(self, pruning: Pruning, block_size: int) -> None:
        self._pruning = pruning
        self._per_block = block_size // BLOCK
        self._held = np.zeros(0, np.bool_)
        self._lengths = [0]
        self._dropped: list[Array] = [np.zeros(0, np.intp)]
        self._reached = 0

    def dropped(self, length: int) -> Array:
        """Numbers of vLLM's blocks that are gone when a sequence has `length` tokens, rising."""
        while self._reached < length:
            self._grow()
        return self._dropped[bisect_right(self._lengths, length) - 1]

    def _grow(self) -> None:
        """One block further."""
        self._held = np.append(self._held, True)
        length = self._reached + 1  # the first token of the new block
        self._reached += BLOCK
        number = np.flatnonzero(self._held)
        if not self._pruning.due(len(number), length):
            return
        unmeasured = np.zeros((len(number), BLOCK))
        blocks = Blocks(number, unmeasured, length, len(number) * BLOCK)
        self._held[number[~self._pruning.keep(blocks)]] = False
        whole = len(self._held) // self._per_block * self._per_block
        gone = ~self._held[:whole].reshape(-1, self._per_block).any(axis=1)
        self._lengths.append(length)
        self._dropped.append(np.flatnonzero(gone))


def retention(settings: Settings, block_size: int) -> Retention | None:
    """The rule of a configuration, or None if nothing is to be pruned.

    Raises
    ------
    CapabilityError
        If the pruning controller needs what the scheduler and the worker do not share.
    """
    pruning = settings.pruning
    if not settings.backend.prune or not pruning.prunes:
        return None
    if pruning.needs_surprisal:
        raise CapabilityError(
            f"pruning '{pruning.kind}' scores blocks by the surprisal of their tokens, which vLLM's "
            f"scheduler and worker do not share: set pruning to 'sliding_window' or 'random'"
        )
    if block_size % BLOCK:
        raise CapabilityError(
            f"vLLM's block_size is {block_size}, not a multiple of {BLOCK}: set another"
        )
    return Retention(pruning, block_size)
