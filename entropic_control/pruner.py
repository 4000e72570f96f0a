"""Carrying out what a pruning controller decides: evict, keep the ledger true, compact when it pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from entropic_control.backends.base import Backend
from entropic_control.controllers.pruning import Pruning
from entropic_control.sequence import Sequence as Work

Note = Callable[..., Any]
"""Takes what happened, the sequence, and details."""


def is_due(work: Work, pruning: Pruning) -> bool:
    """Whether the controller finds a sequence worth pruning, and lets it be pruned now."""
    return _due(work, pruning) and work.prunable


def prune(work: Work, pruning: Pruning, backend: Backend, note: Note) -> None:
    """Prune a sequence if its controller finds it due. An eviction that is refused changes nothing."""
    if work.slot is None or not is_due(work, pruning):
        return
    pruning = pruning.at(work.pruning)
    before = work.ledger.cells
    for start, stop in work.ledger.runs(pruning.keep(work.ledger.view())):
        if not backend.evict(work.slot, start, stop):
            note("refused", work, start=start, stop=stop)
            break
        work.ledger.drop(start, stop)
    kept = work.ledger.cells
    if kept == before:
        return
    compacted = _compact_if_it_pays(work, backend)
    note("pruned", work, cells=before - kept, kept=kept, compacted=compacted)


def would_prune(work: Work, pruning: Pruning, note: Note) -> None:
    """Note, once, what `prune` would do."""
    if work.observed or not _due(work, pruning):
        return
    pruning = pruning.at(work.pruning)
    work.observed = True
    runs = work.ledger.runs(pruning.keep(work.ledger.view()))
    note("would_prune", work, cells=sum(stop - start for start, stop in runs))


def _due(work: Work, pruning: Pruning) -> bool:
    if not pruning.prunes or (work.prompt_left and not pruning.during_prefill):
        return False
    if pruning.needs_attention and not work.ledger.watched:
        return False  # nothing is known of its blocks yet
    return pruning.at(work.pruning).due(work.ledger.blocks, work.ledger.length, work.ledger.size)


def _compact_if_it_pays(work: Work, backend: Backend) -> bool:
    """Holes cost attention time until they are closed; closing them costs a swap.

    While a prompt is being read its next chunk fills the holes, so that closing them gains nothing.
    Where its cells lie changes how a sequence's attention is rounded, and so, now and then, a token.
    That must not hang on how fast the machine was: the costs are the assumed ones, not the measured.
    """
    assert work.slot is not None
    if work.prompt_left:
        return False
    cost, cells = backend.cost.assumed, work.ledger.cells
    one, extent = np.ones(1), np.array([backend.extent(work.slot)])
    saved = float((cost.decode(one, extent) - cost.decode(one, np.array([cells])))[0])
    if saved * work.decode_left <= 2 * cost.swap(cells):
        return False
    began = backend.now()
    backend.compact(work.slot)
    backend.cost.observe_swap(cells, backend.now() - began)
    return True
