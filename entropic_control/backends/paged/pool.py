"""Which blocks of a paged cache belong to whom: reference counts, shared prefixes, copy-on-write.

No tensors here: block numbers only, so that all of it is decided before anything is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from entropic_control.controllers.base import Array
from entropic_control.errors import CapabilityError, NoRoom

BLOCK = 16
"""Tokens in a block."""


class Table:
    """The blocks that one sequence holds, in order of position."""

    def __init__(self) -> None:
        # Arrays, because a step reads thousands of entries and changes one or none.
        self._store = np.zeros((2, 16), np.int32)
        self._count = 0
        self.length = 0
        """Tokens the sequence has seen, evicted ones too."""

    @property
    def numbers(self) -> Array:
        """Block n covers positions [16 n, 16 n + 16) of the sequence; rising, shape (blocks,), int32."""
        return self._store[0, : self._count]

    @property
    def blocks(self) -> Array:
        """Where each of them lies in the pool, shape (blocks,), int32."""
        return self._store[1, : self._count]

    def append(self, numbers: Sequence[int] | Array, blocks: Sequence[int] | Array) -> None:
        """Add blocks behind the others."""
        count = self._count + len(blocks)
        if count > self._store.shape[1]:
            grown = np.zeros((2, 2 * count), np.int32)
            grown[:, : self._count] = self._store[:, : self._count]
            self._store = grown
        self._store[:, self._count : count] = [numbers, blocks]
        self._count = count

    def keep(self, mask: Array) -> None:
        """Drop the blocks that the mask leaves out."""
        left = self._store[:, : self._count][:, mask]
        self._count = left.shape[1]
        self._store[:, : self._count] = left

    @property
    def cells(self) -> int:
        """Tokens whose keys and values are held."""
        return self._count * BLOCK - self.slack

    @property
    def slack(self) -> int:
        """Tokens that still fit into the last block."""
        return -self.length % BLOCK

    def positions(self) -> Array:
        """The positions held, rising."""
        each = self.numbers[:, None].astype(np.int64) * BLOCK + np.arange(BLOCK)
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
            source, (target,) = int(table.blocks[-1]), self._take(1)
            self._owners[source] -= 1
            table.blocks[-1] = target
            copy = source, target
        new = growth.fresh - growth.copied
        first = -(-table.length // BLOCK)
        table.append(range(first, first + new), self._take(new))
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
        keep = table.numbers * BLOCK < length
        self._drop(table.blocks[~keep].tolist())
        table.keep(keep)
        # Without its last block the sequence ends where the blocks do.
        ends = int(table.numbers[-1] + 1) * BLOCK if keep.any() else 0
        table.length = min(length, table.length, ends)

    def evict(self, table: Table, start: int, stop: int) -> None:
        """Give up the blocks within [start, stop), both on block borders.

        Raises
        ------
        CapabilityError
            If the last block is one of them, from which the sequence goes on; nothing was changed.
        """
        first = table.numbers * BLOCK
        inside = (start <= first) & (first < stop)
        if inside[-1:].any():
            raise CapabilityError(
                f"the sequence goes on from its last block, {first[-1]} to {table.length}: truncate it"
            )
        self._drop(table.blocks[inside].tolist())
        table.keep(~inside)

    def share(self, table: Table, length: int) -> Table:
        """A second table over the first `length` positions, on the same blocks.

        Raises
        ------
        CapabilityError
            If the last of them is not held; nothing was changed.
        """
        if not 0 <= length <= table.length:
            raise CapabilityError(f"the table has {table.length} tokens: {length} cannot be shared")
        if length and (length - 1) // BLOCK not in table.numbers:
            raise CapabilityError(
                f"position {length - 1} was evicted, so that what shares {length} tokens could not go on "
                "from there: share up to a position that is held"
            )
        other = Table()
        keep = table.numbers * BLOCK < length
        other.append(table.numbers[keep], table.blocks[keep])
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
        table.append(numbers, self._take(len(numbers)))
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
        self._owners[list(blocks)] -= 1  # each once: a table holds no block twice
        self._free += [block for block in blocks if self._owners[block] == 0]
