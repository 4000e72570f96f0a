"""What one forward needs to know about its rows, as tensors on the device.

The tokens of all rows lie one after the other in a batch of one sequence, decoding rows first: every
layer but attention takes them as they come, so a step pays for its tokens and for no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from entropic_control.backends.paged.pool import BLOCK, Table
from entropic_control.controllers.base import Array
from entropic_control.kernels._torch import torch


class Row(NamedTuple):
    """One sequence in a step; its table holds the new tokens already."""

    table: Table
    tokens: Array
    """Token ids, shape (n,)."""
    attend: Array | None = None
    """Which of the table's blocks to attend to, a mask; None for all."""

    @property
    def numbers(self) -> Array:
        return _chosen(self.table.numbers, self.attend)

    @property
    def blocks(self) -> Array:
        return _chosen(self.table.blocks, self.attend)

    @property
    def start(self) -> int:
        """Position of the first new token."""
        return self.table.length - len(self.tokens)


def _chosen(items: Sequence[int], mask: Array | None) -> Array:
    array = np.asarray(items, np.int32)
    return array if mask is None else array[mask]


class Lists(NamedTuple):
    """The blocks that some rows attend to, as the kernels take them."""

    table: Any
    """Shape (rows, width), int32; block 0 pads."""
    starts: Any
    """Position of each block's first token, shape (rows, width), int32."""
    counts: Any
    """Blocks of each row, shape (rows,), int32."""
    lengths: Any
    """Tokens of each sequence, evicted ones too, shape (rows,), int32."""

    @classmethod
    def of(cls, rows: Sequence[Row], height: int | None = None, width: int | None = None) -> Lists:
        """On the host; padded to `height` rows, which see nothing, and `width` blocks."""
        height = len(rows) if height is None else height
        lists = [row.blocks for row in rows]
        counts = np.zeros(height, np.int32)
        counts[: len(rows)] = [len(blocks) for blocks in lists]
        width = max(int(counts.max(initial=1)), 1) if width is None else width
        table, starts = np.zeros((2, height, width), np.int32)
        lengths = np.zeros(height, np.int32)
        for at, (row, blocks) in enumerate(zip(rows, lists, strict=True)):
            table[at, : len(blocks)] = blocks
            starts[at, : len(blocks)] = row.numbers * BLOCK
            lengths[at] = row.table.length
        return cls(table, starts, counts, lengths)


class Part:
    """The decoding rows of a step, or its prompt chunks.

    Parameters
    ----------
    lists : Lists
        On the device.
    rows : sequence of Row
        The same on the host.
    padded : bool
        Whether the rows may be exchanged later for others, pruned ones too.
    """

    def __init__(self, lists: Lists, rows: Sequence[Row], *, padded: bool = False) -> None:
        self.lists = lists
        self.rows = rows
        self.ordered = not padded and all(
            len(row.blocks) * BLOCK >= row.table.length for row in rows
        )
        """Whether every row attends to all it has seen, so that blocks lie where their place says."""
        self.longest = max((len(row.tokens) for row in rows), default=0)
        self._device = lists.table.device
        self._masks: dict[tuple[int, int | None], Any] = {}

    @property
    def starts(self) -> Any:
        """Of the blocks, where they are not what their place says."""
        return None if self.ordered else self.lists.starts

    @cached_property
    def offsets(self) -> Any:
        """Where each row's tokens begin within the part, shape (rows + 1,), int32."""
        sizes = np.cumsum([0, *(len(row.tokens) for row in self.rows)])
        return torch.from_numpy(sizes.astype(np.int32)).to(self._device)

    @cached_property
    def _cells(self) -> tuple[list[Array], list[Array]]:
        """For each row, where its cells lie in the pool, and their positions."""
        within = np.arange(BLOCK)
        places, positions = [], []
        for row in self.rows:
            position = (row.numbers[:, None].astype(np.int64) * BLOCK + within).ravel()
            place = (row.blocks[:, None].astype(np.int64) * BLOCK + within).ravel()
            held = len(position) - row.table.slack
            places.append(place[:held])
            positions.append(position[:held])
        return places, positions

    @cached_property
    def gather(self) -> Any:
        """The cells of all rows padded to the longest with cell 0, shape (rows, cells), int64."""
        places, _ = self._cells
        index = np.zeros((len(places), max(map(len, places))), np.int64)
        for at, place in enumerate(places):
            index[at, : len(place)] = place
        return torch.from_numpy(index).to(self._device)

    def cells(self, row: int) -> Any:
        """The cells of one row, shape (cells,), int64."""
        return torch.from_numpy(self._cells[0][row]).to(self._device)

    def decode_mask(self, window: int | None) -> Any:
        """What each row's newest token sees, shape (rows, 1, 1, cells); None if that is everything."""
        return self._mask(-1, window, self._decode_mask)

    def chunk_mask(self, row: int, window: int | None) -> Any:
        """What the tokens of a chunk see, shape (tokens, cells)."""
        return self._mask(row, window, self._chunk_mask)

    def _mask(self, row: int, window: int | None, make: Any) -> Any:
        # The same for every layer of one window.
        key = row, window
        if key not in self._masks:
            mask = make(row, window)
            self._masks[key] = None if mask.all() else torch.from_numpy(mask).to(self._device)
        return self._masks[key]

    def _decode_mask(self, _row: int, window: int | None) -> Array:
        positions = self._cells[1]
        mask = np.zeros((len(positions), 1, 1, max(map(len, positions))), np.bool_)
        for line, (row, position) in enumerate(zip(self.rows, positions, strict=True)):
            since = 0 if window is None else row.table.length - window
            mask[line, 0, 0, : len(position)] = position >= since
        return mask

    def _chunk_mask(self, at: int, window: int | None) -> Array:
        row, position = self.rows[at], self._cells[1][at]
        here = np.arange(row.start, row.table.length)[:, None]
        seen = position <= here
        if window is not None:
            seen &= position > here - window
        return np.asarray(seen)


class Step:
    """One forward.

    Parameters
    ----------
    rows : sequence of Row
        Decoding rows (one token each) first, then prompt chunks.
    device : torch.device
        Where the model is.
    score : bool
        Whether the decoding rows' attention masses are wanted.
    height, width : int, optional
        Pad to this many decoding rows of this many blocks: padding writes nothing and sees nothing. Such
        a step holds decoding rows only, and can be refilled.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        device: Any,
        *,
        score: bool = False,
        height: int | None = None,
        width: int | None = None,
    ) -> None:
        self._padding = height, width
        decoding = [row for row in rows if len(row.tokens) == 1]
        chunks = [row for row in rows if len(row.tokens) > 1]
        if [*decoding, *chunks] != list(rows) or (chunks and height is not None):
            raise ValueError(
                "decoding rows come before prompt chunks, and alone if they are padded"
            )
        wide, narrow = self._arrays(decoding, chunks)
        self._wide, (self.tokens, self.positions, self.cells) = upload(wide, device)
        self._narrow, lists = upload(narrow, device)
        self.decode = Part(Lists(*lists[:4]), decoding, padded=height is not None)
        self.prefill = Part(Lists(*lists[4:]), chunks)
        self.mass: Any = None
        if score:
            self.mass = torch.zeros_like(self.decode.lists.table, dtype=torch.float32)
        self.scored = 0
        """Layers whose masses were added up."""

    def _arrays(
        self, decoding: Sequence[Row], chunks: Sequence[Row]
    ) -> tuple[list[Array], list[Array]]:
        """What goes to the device: int64 arrays by token, int32 arrays by row."""
        height, width = self._padding
        rows = [*decoding, *chunks]
        padding = 0 if height is None else height - len(rows)
        tokens = np.concatenate([*(row.tokens for row in rows), np.zeros(padding, np.int64)])
        places = [np.arange(row.start, row.table.length) for row in rows]
        positions = np.concatenate([*places, np.zeros(padding, np.int64)])
        cells = np.concatenate([*map(new_cells, rows), np.full(padding, -1)])
        lists = [*Lists.of(decoding, height, width), *Lists.of(chunks)]
        return [array.astype(np.int64) for array in (tokens, positions, cells)], lists

    def refill(self, rows: Sequence[Row]) -> None:
        """Take other decoding rows into the same tensors, as a captured graph reads them."""
        arrays = self._arrays(rows, [])
        for flat, parts in zip((self._wide, self._narrow), arrays, strict=True):
            flat.copy_(_packed(parts, flat.device), non_blocking=True)
        self.decode.rows = rows

    def begin(self) -> None:
        """Forget the masses of an earlier forward."""
        self.scored = 0
        if self.mass is not None:
            self.mass.zero_()

    @property
    def decoding(self) -> int:
        """Rows that decode, padding included."""
        return int(self.decode.lists.counts.shape[0])

    def masses(self) -> list[Array]:
        """For each decoding row, the share of its attention on each block it attended to."""
        mean = (self.mass / max(self.scored, 1)).cpu().numpy()
        return [row[: len(of.blocks)] for row, of in zip(mean, self.decode.rows, strict=False)]

    def add_mass(self, masses: Any) -> None:
        """Add one layer's masses, shape (rows, heads, width)."""
        self.mass += masses.mean(1)
        self.scored += 1


def new_cells(row: Row) -> Array:
    """Where the keys and values of a row's new tokens go, shape (tokens,), int64."""
    position = np.arange(row.start, row.table.length)
    # The new tokens lie in the table's last blocks.
    back = position // BLOCK - (row.table.length - 1) // BLOCK - 1
    block = np.asarray(row.table.blocks, np.int64)[back]
    return np.asarray(block * BLOCK + position % BLOCK)


def upload(arrays: Sequence[Array], device: Any) -> tuple[Any, list[Any]]:
    """Arrays of one type as one flat tensor on the device and its parts, sent without waiting for it."""
    flat = _packed(arrays, device).to(device, non_blocking=True)
    parts = flat.split([array.size for array in arrays])
    return flat, [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _packed(arrays: Sequence[Array], device: Any) -> Any:
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    return flat.pin_memory() if device.type == "cuda" else flat
