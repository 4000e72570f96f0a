"""Controller states as trees of arrays: named tuples whose leaves have one row per sequence.

States are values. Nothing here or in a controller writes into one, so whoever keeps an old state can
go back to it: a rejected draft, a preemption, a fork or a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

S = TypeVar("S", bound=tuple[Any, ...])


class NoState(NamedTuple):
    """The state of a controller that remembers nothing."""


def map_leaves(function: Callable[..., Any], *states: S) -> S:
    """Apply `function` to the corresponding arrays of states of one structure."""
    first = states[0]
    leaves = (
        map_leaves(function, *parts) if isinstance(parts[0], tuple) else function(*parts)
        for parts in zip(*states, strict=True)
    )
    return type(first)(*leaves)


def rows_of(state: tuple[Any, ...]) -> int:
    """The number of sequences in a state that holds an array, counted on the first one."""
    first: Any = state
    while isinstance(first, tuple):
        first = first[0]
    return len(first)


def stack(states: Sequence[S]) -> S:
    """Join states of single sequences into one state of many rows, in order."""
    first = states[0]
    if len(states) == 1:
        return first
    parts = zip(*states, strict=True)
    return type(first)(
        *(stack(part) if isinstance(part[0], tuple) else np.concatenate(part) for part in parts)
    )


def split(state: S, rows: int) -> list[S]:
    """Undo `stack`: one single-row state for each of the `rows` rows."""
    if rows == 1:
        return [state]
    columns = [
        split(leaf, rows)
        if isinstance(leaf, tuple)
        else [leaf[row : row + 1] for row in range(rows)]
        for leaf in state
    ]
    if not columns:
        return [state] * rows
    return [type(state)(*parts) for parts in zip(*columns, strict=True)]


class Together:
    """States of single sequences that are mostly wanted together, in one order.

    To stack the same states again, the very objects that `split` gave last, takes a comparison.
    """

    def __init__(self) -> None:
        self._whole: Any = None
        self._parts: list[Any] = []

    def stack(self, states: Sequence[S]) -> S:
        """What `stack` of them is."""
        known = len(states) == len(self._parts) and all(map(is_, states, self._parts))
        return cast("S", self._whole) if known else stack(states)

    def split(self, state: S, rows: int) -> list[S]:
        """What `split` of it is."""
        self._whole, self._parts = state, split(state, rows)
        return self._parts


def take(state: S, rows: slice | NDArray[np.intp]) -> S:
    """The state of the given rows."""
    return map_leaves(lambda leaf: leaf[rows], state)


def in_precision_of(old: S, new: S) -> S:
    """`new`, each array in the type of the one of `old`."""
    return map_leaves(_like, new, old)


def choose(mask: NDArray[np.bool_], new: S, old: S) -> S:
    """Row by row: `new` where `mask` holds, `old` elsewhere; in the precision of `old`."""
    if mask.all():
        return in_precision_of(old, new)
    return map_leaves(partial(_where, mask), new, old)


def _like(new: NDArray[Any], old: NDArray[Any]) -> NDArray[Any]:
    return new.astype(old.dtype, copy=False)


def _where(mask: NDArray[np.bool_], new: NDArray[Any], old: NDArray[Any]) -> NDArray[Any]:
    return np.where(mask, new, old).astype(old.dtype, copy=False)
