"""The ledger of a sequence's KV blocks: what it holds, and how surprising each block was."""

from __future__ import annotations

import numpy as np

from entropic_control.controllers.base import Array
from entropic_control.controllers.pruning import BLOCK, Blocks

_FADE = 0.1
"""Weight of the newest token's attention in a block's mean."""


class Ledger:
    """Which blocks of one sequence are in the KV cache.

    Parameters
    ----------
    capacity : int
        Tokens the sequence may reach.
    """

    def __init__(self, capacity: int) -> None:
        blocks = -(-capacity // BLOCK)
        self.length = 0
        self._held = np.zeros(blocks, np.bool_)
        self._surprisal = np.zeros(blocks)
        self._attention = np.full(blocks, np.nan)

    @property
    def blocks(self) -> int:
        """Number of blocks held."""
        return int(np.count_nonzero(self._held))

    @property
    def cells(self) -> int:
        """Number of tokens whose keys and values are held."""
        missing = -self.length % BLOCK  # of the last block, which is held while it grows
        return self.blocks * BLOCK - missing

    def extend(self, tokens: int) -> None:
        """The sequence grew; a token goes to the block of its position."""
        first = self.length // BLOCK
        self.length += tokens
        self._held[first : -(-self.length // BLOCK)] = True

    def record(self, start: int, surprisal: Array) -> None:
        """Note the surprisals, nats, of the tokens from position `start` on; NaN counts as nothing."""
        block = np.arange(start, start + len(surprisal)) // BLOCK
        np.fmax.at(self._surprisal, block, surprisal)

    @property
    def watched(self) -> bool:
        """Whether any block's attention was measured."""
        return not np.isnan(self._attention).all()

    def attended(self, number: Array, mass: Array) -> None:
        """Note the share of a token's attention that each of some blocks got."""
        before = self._attention[number]
        faded = np.where(np.isnan(before), mass, before + _FADE * (mass - before))
        self._attention[number] = faded

    def view(self) -> Blocks:
        """The blocks as pruning sees them."""
        number = np.flatnonzero(self._held)
        return Blocks(
            number, self._surprisal[number], self.length, self.cells, self._attention[number]
        )

    def runs(self, keep: Array) -> list[tuple[int, int]]:
        """Position ranges [start, stop) of the held blocks that the mask `keep` leaves out."""
        out = np.flatnonzero(self._held)[~keep]
        if not out.size:
            return []
        parts = np.split(out, np.flatnonzero(np.diff(out) > 1) + 1)
        return [(int(p[0]) * BLOCK, min((int(p[-1]) + 1) * BLOCK, self.length)) for p in parts]

    def drop(self, start: int, stop: int) -> None:
        """The engine gave up the positions [start, stop), whole blocks."""
        self._held[start // BLOCK : -(-stop // BLOCK)] = False

    def positions(self) -> Array:
        """The positions held, rising."""
        each = np.flatnonzero(self._held)[:, None] * BLOCK + np.arange(BLOCK)
        flat = each.ravel()
        return flat[flat < self.length]

    def resync(self, positions: Array) -> None:
        """Take over what the engine says it holds, whole blocks, after a failure."""
        self._held[:] = False
        self._held[positions // BLOCK] = True
        self.length = int(positions[-1]) + 1 if positions.size else 0

    def export(self) -> dict[str, Array]:
        """Everything, as arrays."""
        return {
            "length": np.array(self.length),
            "held": self._held.copy(),
            "surprisal": self._surprisal.copy(),
            "attention": self._attention.copy(),
        }

    def adopt(self, arrays: dict[str, Array]) -> None:
        """Take over what `export` gave."""
        self.length = int(arrays["length"])
        self._held = arrays["held"].astype(np.bool_)
        self._surprisal = arrays["surprisal"].astype(np.float64)
        self._attention = arrays["attention"].astype(np.float64)
