"""The ledger of KV blocks, against a plain set of positions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_control.controllers.pruning import BLOCK
from entropic_control.ledger import Ledger

CAPACITY = 20 * BLOCK - 5
GROW = st.tuples(st.just("grow"), st.integers(1, 3 * BLOCK))
PRUNE = st.tuples(st.just("prune"), st.lists(st.booleans(), min_size=20, max_size=20))
RECORD = st.tuples(
    st.just("record"), st.lists(st.floats(0, 30) | st.just(float("nan")), max_size=40)
)


SIZES = pytest.mark.parametrize("size", [1, 4, BLOCK])


def check(ledger: Ledger, held: set[int], length: int) -> None:
    size = ledger.size
    assert ledger.positions().tolist() == sorted(held)
    assert ledger.cells == len(held)
    assert ledger.length == length
    assert ledger.blocks == len({position // size for position in held})
    view = ledger.view()
    assert view.number.tolist() == sorted({position // size for position in held})
    assert (view.length, view.cells, view.size) == (length, len(held), size)


@SIZES
@given(st.lists(GROW | PRUNE | RECORD, max_size=25))
def test_ledger_is_a_set_of_positions(size: int, operations: list[tuple[str, object]]) -> None:
    ledger = Ledger(CAPACITY, size)
    held: set[int] = set()
    surprisal = np.zeros(20 * BLOCK, np.float32)
    length = 0
    for what, value in operations:
        if what == "grow":
            tokens = min(int(value), CAPACITY - length)  # type: ignore[call-overload]
            ledger.extend(tokens)
            held |= set(range(length, length + tokens))
            length += tokens
        elif what == "record":
            start = length // 2
            values = np.array(value, float)[: max(length - start, 0)]
            ledger.record(start, values)
            for position, nats in enumerate(values, start):
                if nats == nats:
                    surprisal[position] = nats
        elif held:
            blocks = ledger.view().number
            keep = np.resize(np.array(value), len(blocks))
            keep[-1] = True  # the block that grows always stays
            before = ledger.positions().tolist()
            runs = ledger.runs(keep)
            gone = {p for start, stop in runs for p in range(start, stop)}
            assert gone == {p for b in blocks[~keep] for p in range(b * size, (b + 1) * size)}
            assert runs == sorted(runs)
            joined = [a for (_, a), (b, _) in pairwise(runs) if a == b]
            assert not joined, "neighbouring blocks go in one call"
            assert ledger.positions().tolist() == before  # asking changes nothing
            for start, stop in runs:
                ledger.drop(start, stop)
            held -= gone
        check(ledger, held, length)
        view = ledger.view()
        np.testing.assert_array_equal(view.surprisal, surprisal.reshape(-1, size)[view.number])


@SIZES
@given(st.lists(st.booleans(), min_size=20, max_size=20), st.integers(1, CAPACITY))
def test_a_ledger_follows_the_engine_after_a_failure(
    size: int, blocks: list[bool], length: int
) -> None:
    ledger = Ledger(CAPACITY, size)
    ledger.extend(CAPACITY)
    positions = np.array([p for p in range(length) if blocks[p // BLOCK]], np.int64)
    ledger.resync(positions)
    check(ledger, set(positions.tolist()), int(positions[-1]) + 1 if len(positions) else 0)


@given(st.integers(0, CAPACITY), st.integers(0, 19))
def test_export_and_adopt_are_inverse_and_apart(length: int, dropped: int) -> None:
    ledger = Ledger(CAPACITY)
    ledger.extend(length)
    ledger.record(0, np.arange(length, dtype=float))
    if dropped < length // BLOCK:
        ledger.drop(dropped * BLOCK, (dropped + 1) * BLOCK)
    exported, positions = ledger.export(), ledger.positions().tolist()
    other = Ledger(CAPACITY)
    other.adopt(exported)
    assert other.positions().tolist() == positions
    np.testing.assert_array_equal(other.view().surprisal, ledger.view().surprisal)
    if length < CAPACITY:
        other.extend(CAPACITY - length)
        other.record(0, np.full(length, 99.0 + CAPACITY))
    assert ledger.positions().tolist() == positions
    assert not np.any(ledger.view().surprisal == np.float32(99.0 + CAPACITY))


def test_an_empty_ledger() -> None:
    ledger = Ledger(CAPACITY)
    check(ledger, set(), 0)
    assert ledger.runs(np.zeros(0, bool)) == []


@pytest.mark.parametrize("keep_last", [True, False])
def test_the_last_block_ends_at_the_length(keep_last: bool) -> None:
    ledger = Ledger(CAPACITY)
    ledger.extend(40)
    assert ledger.runs(np.array([True, False, keep_last])) == [(16, 32 if keep_last else 40)]
