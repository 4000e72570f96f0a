"""Which blocks of a paged cache belong to whom: reference counts, shared prefixes, copy-on-write.

No tensors here: block numbers only, so that all of it is decided before anything is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from entropic_control.controllers.base import Array
from entropic_control.errors import NoRoom

BLOCK = 16
"""Tokens in a block."""


class Table:
    """The blocks that one sequence holds, in order of position."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        """Block n covers positions [16 n, 16 n + 16) of the sequence; rising."""
        self.blocks: list[int] = []
        """Where each of them lies in the pool."""
        self.length = 0
        """Tokens the sequence has seen, evicted ones too."""

    @property
    def cells(self) -> int:
        """Tokens whose keys and values are held."""
        return len(self.blocks) * BLOCK - self.slack

    @property
    def slack(self) -> int:
        """Tokens that still fit into the last block."""
        return -self.length % BLOCK

    def positions(self) -> Array:
        """The positions held, rising."""
        each = np.array(self.numbers, np.int64)[:, None] * BLOCK + np.arange(BLOCK)
        flat = each.ravel()
        return flat[flat < self.length]


class Growth(NamedTuple):
    """What it takes to append tokens to a table."""

    copied: bool
    """Whether the last block is shared and must be copied before it is written to."""
    fresh: int
    """Blocks taken from the pool, the copy included."""


class BlockPool:
    """Blocks with reference counts.

    Parameters
    ----------
    blocks : int
        How many there are. Block 0 is never handed out: it stays zero, and pads tables.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks - 1, 0, -1))
        self._owners = np.zeros(blocks, np.int32)

    @property
    def free(self) -> int:
        """Blocks that belong to nobody."""
        return len(self._free)

    def owners(self, block: int) -> int:
        """How many tables hold a block."""
        return int(self._owners[block])

    def growth(self, table: Table, tokens: int) -> Growth:
        """What `extend` would take."""
        copied = bool(tokens and table.slack and self._owners[table.blocks[-1]] > 1)
        beyond = -(-max(tokens - table.slack, 0) // BLOCK)
        return Growth(copied, copied + beyond)

    def check(self, tables: Sequence[Table], tokens: Sequence[int]) -> None:
        """Refuse an extension of several tables that would not fit.

        Raises
        ------
        NoRoom
            Nothing was changed.
        """
        growths = (self.growth(table, n) for table, n in zip(tables, tokens, strict=True))
        wanted = sum(growth.fresh for growth in growths)
        if wanted > self.free:
            raise NoRoom(
                1, f"the step needs {wanted} KV blocks of {BLOCK} tokens, {self.free} are free"
            )

    def extend(self, table: Table, tokens: int) -> tuple[int, int] | None:
        """Append room for `tokens` tokens; `check` comes first.

        Returns
        -------
        (source, target) or None
            The copy to make before writing, where the last block was shared.
        """
        growth = self.growth(table, tokens)
        copy = None
        if growth.copied:
            source, (target,) = table.blocks[-1], self._take(1)
            self._owners[source] -= 1
            table.blocks[-1] = target
            copy = source, target
        new = growth.fresh - growth.copied
        first = -(-table.length // BLOCK)
        table.numbers += range(first, first + new)
        table.blocks += self._take(new)
        table.length += tokens
        return copy

    def retract(self, table: Table, length: int, copy: tuple[int, int] | None) -> None:
        """Undo `extend`: back to `length`, and to the shared block, whose copy may not have been made."""
        self.truncate(table, length)
        if copy is not None:
            source, target = copy
            table.blocks[-1] = source
            self._owners[source] += 1
            self._drop([target])

    def truncate(self, table: Table, length: int) -> None:
        """Forget the positions from `length` on."""
        keep = sum(number * BLOCK < length for number in table.numbers)
        self._drop(table.blocks[keep:])
        del table.blocks[keep:], table.numbers[keep:]
        # Without its last block the sequence ends where the blocks do.
        table.length = min(length, table.numbers[-1] * BLOCK + BLOCK) if keep else 0

    def evict(self, table: Table, start: int, stop: int) -> None:
        """Give up the blocks within [start, stop), both on block borders."""
        inside = [start <= number * BLOCK < stop for number in table.numbers]
        pairs = list(zip(table.numbers, table.blocks, inside, strict=True))
        self._drop([block for _, block, out in pairs if out])
        table.numbers = [number for number, _, out in pairs if not out]
        table.blocks = [block for _, block, out in pairs if not out]

    def share(self, table: Table, length: int) -> Table:
        """A second table over the first `length` positions, on the same blocks."""
        other = Table()
        keep = sum(number * BLOCK < length for number in table.numbers)
        other.numbers, other.blocks = table.numbers[:keep], table.blocks[:keep]
        other.length = length
        self._owners[other.blocks] += 1
        return other

    def fill(self, numbers: Sequence[int], length: int) -> Table:
        """A table of fresh blocks for the given block numbers.

        Raises
        ------
        NoRoom
            Nothing was changed.
        """
        if len(numbers) > self.free:
            raise NoRoom(1, f"{len(numbers)} KV blocks are needed, {self.free} are free")
        table = Table()
        table.numbers, table.blocks = list(numbers), self._take(len(numbers))
        table.length = length
        return table

    def release(self, table: Table) -> None:
        """Give up everything a table holds."""
        self.truncate(table, 0)

    def _take(self, count: int) -> list[int]:
        taken = [self._free.pop() for _ in range(count)]
        self._owners[taken] = 1
        return taken

    def _drop(self, blocks: Sequence[int]) -> None:
        self._owners[list(blocks)] -= 1
        self._free += [block for block in blocks if self._owners[block] == 0]
