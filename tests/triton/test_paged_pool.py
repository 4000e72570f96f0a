"""The block pool: reference counts, copy-on-write, and that nothing is lost or counted twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_control.backends.paged.pool import BLOCK, BlockPool, Table
from entropic_control.errors import CapabilityError, NoRoom


def consistent(pool: BlockPool, tables: list[Table]) -> None:
    """Every block is free or held, as often as it is counted; block 0 is neither."""
    held = [block for table in tables for block in table.blocks.tolist()]
    counts = np.bincount(held, minlength=pool.blocks)
    assert [pool.owners(block) for block in range(pool.blocks)] == counts.tolist()
    assert counts[0] == 0
    assert pool.free == pool.blocks - 1 - np.count_nonzero(counts)
    for table in tables:
        assert (np.diff(table.numbers) > 0).all()
        assert len(table.positions()) == table.cells
        assert not len(table.numbers) or table.numbers[-1] == (table.length - 1) // BLOCK


def test_a_shared_block_is_copied_before_it_is_written_to() -> None:
    pool = BlockPool(10)
    first = Table()
    pool.extend(first, 20)
    second = pool.share(first, 20)
    assert second.blocks.tolist() == first.blocks.tolist()
    assert pool.growth(second, 1).fresh == 1
    copy = pool.extend(second, 1)
    assert copy == (first.blocks[1], second.blocks[1])
    assert second.blocks[0] == first.blocks[0]
    assert pool.extend(first, 1) is None  # it is the only owner now
    consistent(pool, [first, second])


def test_a_full_shared_block_needs_no_copy() -> None:
    pool = BlockPool(10)
    first = Table()
    pool.extend(first, 32)
    second = pool.share(first, 32)
    assert pool.extend(second, 1) is None
    assert second.blocks[:2].tolist() == first.blocks.tolist()
    consistent(pool, [first, second])


def test_retract_undoes_extend_bit_for_bit() -> None:
    pool = BlockPool(10)
    first = Table()
    pool.extend(first, 20)
    second = pool.share(first, 20)
    before = (second.blocks.tolist(), second.length, pool.free)
    copy = pool.extend(second, 30)
    pool.retract(second, 20, copy)
    assert (second.blocks.tolist(), second.length, pool.free) == before
    consistent(pool, [first, second])


def test_without_room_nothing_changes() -> None:
    pool = BlockPool(4)
    first, second = Table(), Table()
    pool.extend(first, 20)
    with pytest.raises(NoRoom, match="needs 2 KV blocks of 16 tokens, 1 are free"):
        pool.check([first, second], [1, 17])
    with pytest.raises(NoRoom):
        pool.fill([0, 1], 32)
    assert not len(second.blocks)
    consistent(pool, [first])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 70)), max_size=60))
def test_nothing_is_lost_or_counted_twice(steps: list[tuple[int, int, int]]) -> None:
    pool = BlockPool(24)
    tables = [Table() for _ in range(4)]
    for what, at, amount in steps:
        table = tables[at]
        if what <= 1:
            try:
                pool.check([table], [amount])
            except NoRoom:
                continue
            length = table.length
            pool.extend(table, amount)
            assert table.length == length + amount
        elif what == 2:
            pool.truncate(table, min(amount, table.length))
        elif what == 3 and table.length > 2 * BLOCK:
            stop = min(BLOCK * (1 + amount % 4), (table.length - 1) // BLOCK * BLOCK)
            pool.evict(table, 0, stop)
            assert stop > table.positions()[-1] or (table.positions() >= stop).all()
        elif what == 4:
            pool.release(table)
            assert (table.length, table.cells) == (0, 0)
        elif table.length:
            other = tables[(at + 1) % 4]
            pool.release(other)
            length = 1 + amount % table.length
            if (length - 1) // BLOCK in table.numbers:
                tables[(at + 1) % 4] = pool.share(table, length)
        consistent(pool, tables)


def test_what_was_evicted_cannot_be_shared_from() -> None:
    pool, table = BlockPool(20), Table()
    pool.extend(table, 60)
    pool.evict(table, 16, 32)
    free = pool.free
    for length in (17, 24, 32):
        with pytest.raises(CapabilityError, match=f"position {length - 1} was evicted"):
            pool.share(table, length)
    assert pool.free == free
    for length in (0, 16, 33, 48, 60):
        other = pool.share(table, length)
        pool.extend(other, 5)
        shared = [p for p in range(length) if not 16 <= p < 32]
        expected = [*shared, *range(length, length + 5)]
        assert (other.length, other.positions().tolist()) == (length + 5, expected)
        pool.release(other)
    with pytest.raises(CapabilityError, match="has 60 tokens: 61 cannot be shared"):
        pool.share(table, 61)
    with pytest.raises(CapabilityError, match="goes on from its last block"):
        pool.evict(table, 0, 64)
    consistent(pool, [table])


@given(
    st.lists(
        st.tuples(
            st.sampled_from("xxxssetr"), st.integers(0, 3), st.integers(0, 6), st.integers(0, 90)
        ),
        max_size=40,
    )
)
def test_every_position_is_where_a_plain_set_of_positions_says(
    steps: list[tuple[str, int, int, int]],
) -> None:
    """Extend, share, evict, truncate and release, against sets of positions."""
    pool = BlockPool(40)
    tables = [Table() for _ in range(4)]
    held: list[set[int]] = [set() for _ in range(4)]
    lengths = [0] * 4
    for what, at, block, amount in steps:
        table, other = tables[at], (at + 1) % 4
        if what == "x":
            try:
                pool.check([table], [amount])
            except NoRoom:
                continue
            pool.extend(table, amount)
            held[at] |= set(range(lengths[at], lengths[at] + amount))
            lengths[at] += amount
        elif what == "e":
            start, stop = block * BLOCK, block * BLOCK + amount // BLOCK * BLOCK
            try:
                pool.evict(table, start, stop)
            except CapabilityError:
                assert start < lengths[at] <= stop or lengths[at] - 1 in range(start, stop)
                continue
            held[at] -= set(range(start, stop))
        elif what == "s":
            pool.release(tables[other])
            tables[other], held[other], lengths[other] = Table(), set(), 0
            try:
                tables[other] = pool.share(table, amount)
            except CapabilityError:
                assert amount > lengths[at] or amount - 1 not in held[at]
                continue
            held[other], lengths[other] = {p for p in held[at] if p < amount}, amount
        elif what == "t":
            pool.truncate(table, amount)
            held[at] = {p for p in held[at] if p < amount}
            lengths[at] = max(held[at], default=-1) + 1
        else:
            pool.release(table)
            held[at], lengths[at] = set(), 0
        assert [t.length for t in tables] == lengths
        assert [t.positions().tolist() for t in tables] == [sorted(h) for h in held]
        consistent(pool, tables)
