"""States as trees of arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.testing import assert_array_equal

from entropic_control.controllers.state import (
    NoState,
    Together,
    choose,
    map_leaves,
    rows_of,
    split,
    stack,
    take,
)


class Leaf(NamedTuple):
    a: Any


class Tree(NamedTuple):
    inner: Leaf
    b: Any


def tree(*numbers: float, dtype: Any = np.float32) -> Tree:
    values = np.array(numbers, dtype)
    return Tree(Leaf(values), values * 10)


def same(one: Tree, other: Tree) -> None:
    assert_array_equal(one.inner.a, other.inner.a)
    assert_array_equal(one.b, other.b)


def test_choose_goes_row_by_row_and_keeps_the_old_precision() -> None:
    mask = np.array([True, False, True])
    found = choose(mask, tree(1, 2, 3, dtype=np.float64), tree(7, 8, 9))
    same(found, tree(1, 8, 3))
    assert (found.inner.a.dtype, found.b.dtype) == (np.float32, np.float32)
    same(choose(np.array([True, True]), tree(1, 2), tree(7, 8)), tree(1, 2))


def test_split_stack_and_take_are_consistent() -> None:
    whole = tree(1, 2, 3)
    parts = split(whole, 3)
    same(parts[1], tree(2))
    same(stack(parts), whole)
    same(stack([parts[2], parts[0]]), take(whole, np.array([2, 0])))
    assert rows_of(whole) == 3


def test_states_without_arrays_pass_through() -> None:
    assert stack([NoState(), NoState()]) == NoState()
    assert split(NoState(), 3) == [NoState()] * 3
    assert map_leaves(np.copy, NoState()) == NoState()


def test_states_that_were_split_together_need_no_stacking_again() -> None:
    together = Together()
    whole = tree(1, 2, 3)
    parts = together.split(whole, 3)
    assert together.stack(parts) is whole
    for others in ([parts[2], parts[0]], [*parts[:2], tree(3)], parts[:2], [tree(5)]):
        found = together.stack(others)
        same(found, stack(others))
        assert found is not whole
