"""The ledger of a sequence's KV cache: which blocks it holds, and how surprising each token was."""

from __future__ import annotations

from typing import Any

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
    size : int
        Tokens in a block: the least that the engine frees by itself.
    """

    def __init__(self, capacity: int, size: int = BLOCK) -> None:
        blocks = -(-capacity // size)
        self.length = 0
        self.blocks = 0
        """Number of blocks held."""
        self._held = np.zeros(blocks, np.bool_)
        self._surprisal = np.zeros((blocks, size), np.float32)
        self._attention = np.full(blocks, np.nan)
        self._looked = False
        """Whether any block's attention was ever measured."""

    @property
    def size(self) -> int:
        """Tokens in a block."""
        return self._surprisal.shape[1]

    @property
    def cells(self) -> int:
        """Number of tokens whose keys and values are held."""
        missing = -self.length % self.size  # of the last block, which is held while it grows
        return self.blocks * self.size - missing

    def extend(self, tokens: int) -> None:
        """The sequence grew; a token goes to the block of its position."""
        begun, first = self.length // self.size, -(-self.length // self.size)
        self.length += tokens
        stop = -(-self.length // self.size)
        if stop > first:
            self._held[first:stop] = True
            self.blocks += stop - first
        if begun < first and not self._held[begun]:
            self._held[begun] = True
            self.blocks += 1

    def mark(self) -> tuple[Any, ...]:
        """What `rewind` goes back to."""
        attention = self._attention.copy() if self._looked else None
        return self.length, self.blocks, self._held.copy(), attention

    def rewind(self, mark: tuple[Any, ...]) -> None:
        """Go back to what was held at a mark; surprisals are noted again when their tokens are."""
        self.length, self.blocks, held, attention = mark
        self._held = held.copy()
        if attention is not None:
            self._attention = attention.copy()
        else:
            self._attention[:] = np.nan
        self._looked = attention is not None

    def record(self, start: int, surprisal: Array) -> None:
        """Note the surprisals, nats, of the tokens from position `start` on; NaN counts as nothing."""
        nats = surprisal[: self._surprisal.size - start]
        places = self._surprisal.reshape(-1)[start : start + len(nats)]
        np.copyto(places, nats, where=~np.isnan(nats), casting="same_kind")

    @property
    def watched(self) -> bool:
        """Whether any block's attention was measured."""
        return not np.isnan(self._attention).all()

    def attended(self, number: Array, mass: Array) -> None:
        """Note the share of a token's attention that each of some blocks got."""
        self._looked = True
        before = self._attention[number]
        faded = np.where(np.isnan(before), mass, before + _FADE * (mass - before))
        self._attention[number] = faded

    def view(self) -> Blocks:
        """The blocks as pruning sees them."""
        number = np.flatnonzero(self._held)
        return Blocks(
            number,
            self._surprisal[number],
            self.length,
            self.cells,
            self.size,
            self._attention[number],
        )

    def runs(self, keep: Array) -> list[tuple[int, int]]:
        """Position ranges [start, stop) of the held blocks that the mask `keep` leaves out."""
        out = np.flatnonzero(self._held)[~keep]
        if not out.size:
            return []
        breaks = np.flatnonzero(np.diff(out) > 1)
        starts = out[np.r_[0, breaks + 1]] * self.size
        stops = np.minimum((out[np.r_[breaks, -1]] + 1) * self.size, self.length)
        return list(zip(starts.tolist(), stops.tolist(), strict=True))

    def drop(self, start: int, stop: int) -> None:
        """The engine gave up the positions [start, stop), whole blocks."""
        blocks = slice(start // self.size, -(-stop // self.size))
        self.blocks -= int(np.count_nonzero(self._held[blocks]))
        self._held[blocks] = False

    def positions(self) -> Array:
        """The positions held, rising."""
        each = np.flatnonzero(self._held)[:, None] * self.size + np.arange(self.size)
        flat = each.ravel()
        return flat[flat < self.length]

    def resync(self, positions: Array) -> None:
        """Take over what the engine says it holds, whole blocks, after a failure."""
        self._held[:] = False
        self._held[positions // self.size] = True
        self.blocks = int(np.count_nonzero(self._held))
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
        self.blocks = int(np.count_nonzero(self._held))
        self._surprisal = arrays["surprisal"].astype(np.float32)
        self._attention = arrays["attention"].astype(np.float64)
        self._looked = self.watched
