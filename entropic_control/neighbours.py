"""Rows of a step in neighbouring slots: where they go through the model in one pass, moving pays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

import numpy as np

from entropic_control.backends.base import Backend, runs
from entropic_control.sequence import Sequence as Work

Move = tuple[Work, int]
"""A sequence and the slot it goes to."""


def gather(works: Sequence[Work], free: Collection[int], backend: Backend) -> list[Move]:
    """Move decoding sequences into neighbouring slots if that pays; returns the moves made.

    Every run of slots is a pass through the model, which costs what a step costs by itself. Closing the
    gaps costs a swap of each sequence that is moved, and holds until the set changes: it must pay
    twice by the time that the first of the set is done, as a compaction must.
    """
    passes = runs(work.slot for work in works if work.slot is not None)
    if passes < 2 or not backend.capabilities.can_swap:
        return []
    planned = _plan(works, free, backend.capabilities.slots)
    cost, one = backend.cost, np.ones(1)
    step = float((2 * cost.decode(one, 0 * one) - cost.decode(2 * one, 0 * one))[0])
    saved = (passes - 1) * step * min(work.decode_left for work in works)
    if not planned or saved <= 2 * sum(cost.swap(work.ledger.cells) for work, _ in planned):
        return []
    return [move for move in planned if _moved(*move, backend)]


def _plan(works: Sequence[Work], free: Collection[int], slots: int) -> list[Move]:
    """The moves that take the fewest cells to neighbouring slots; none if no row of slots is free."""
    own = {work.slot for work in works}
    best: list[Move] = []
    least = float("inf")
    for start in range(slots - len(works) + 1):
        window = range(start, start + len(works))
        if any(slot not in own and slot not in free for slot in window):
            continue
        outside = [work for work in works if work.slot not in window]
        cells = sum(work.ledger.cells for work in outside)
        if cells < least:
            least = cells
            best = list(zip(outside, (s for s in window if s not in own), strict=True))
    return best


def _moved(work: Work, slot: int, backend: Backend) -> bool:
    assert work.slot is not None
    began, cells = backend.now(), work.ledger.cells
    try:
        backend.restore(slot, backend.save(work.slot))
    except Exception:  # noqa: BLE001 - of anybody's code
        with suppress(Exception):
            backend.release(slot)  # of what was put there in part
        return False  # it stays where it is, whole
    backend.release(work.slot)
    work.slot = slot
    backend.cost.observe_swap(cells, backend.now() - began)
    return True
