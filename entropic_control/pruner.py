"""Carrying out what a pruning controller decides: evict, keep the ledger true, compact when it pays.

A controller that raises, or would give up what always stays, is a fault of that sequence, whose keys and
values stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from entropic_control.backends.base import Backend
from entropic_control.controllers import hooks
from entropic_control.controllers.base import Array
from entropic_control.controllers.pruning import Pruning
from entropic_control.errors import CacheError
from entropic_control.sequence import Sequence as Work

Note = Callable[..., Any]
"""Takes what happened, the sequence, and details."""


def is_due(work: Work, pruning: Pruning) -> bool:
    """Whether the controller finds a sequence worth pruning, and lets it be pruned now.

    Raises
    ------
    ControllerFault
        If the controller raises, or does not say yes or no.
    """
    return _due(work, pruning) and work.prunable


def prune(work: Work, pruning: Pruning, backend: Backend, note: Note) -> None:
    """Prune a sequence if its controller finds it due. An eviction that is refused changes nothing.

    Raises
    ------
    ControllerFault
        If the controller raises, or returns what it may not. Nothing was evicted.
    CacheError
        If the engine raised, and holds something else now than it should.
    """
    if work.slot is None or not is_due(work, pruning):
        return
    before = work.ledger.cells
    for start, stop in _evicted(work, pruning):
        if not _evict(work, start, stop, backend):
            note("refused", work, start=start, stop=stop)
            break
        work.ledger.drop(start, stop)
    kept = work.ledger.cells
    if kept == before:
        return
    compacted = _compact_if_it_pays(work, backend, note)
    note("pruned", work, cells=before - kept, kept=kept, compacted=compacted)


def would_prune(work: Work, pruning: Pruning, note: Note) -> None:
    """Note, once, what `prune` would do."""
    if work.observed or not _due(work, pruning):
        return
    work.observed = True
    runs = _evicted(work, pruning)
    note("would_prune", work, cells=sum(stop - start for start, stop in runs))


def still_holds(work: Work, backend: Backend) -> bool:
    """Whether the engine holds what the ledger says, asked after it raised."""
    if work.slot is None:
        return False
    try:
        return bool(np.array_equal(backend.held(work.slot), work.ledger.positions()))
    except Exception:  # noqa: BLE001 - of anybody's code
        return False


def _evicted(work: Work, pruning: Pruning) -> list[tuple[int, int]]:
    """The positions that the controller gives up."""
    blocks = work.ledger.view()
    pruning = _at(work, pruning)
    keep = hooks.mask(pruning.keep, hooks.ask(pruning.keep, blocks), len(blocks.number))
    stay: Array = hooks.mask(pruning.fixed, hooks.ask(pruning.fixed, blocks), len(keep))
    if not keep[stay].all() or not keep[-1:].all():
        raise hooks.fault(pruning.keep, "gave up sinks or the newest blocks, which always stay")
    return work.ledger.runs(keep)


def _at(work: Work, pruning: Pruning) -> Pruning:
    found = hooks.ask(pruning.at, work.pruning)
    if not isinstance(found, Pruning):
        raise hooks.fault(pruning.at, f"returned {hooks.described(found)}, not a Pruning")
    return found


def _due(work: Work, pruning: Pruning) -> bool:
    if not pruning.prunes or (work.prompt_left and not pruning.during_prefill):
        return False
    if pruning.needs_attention and not work.ledger.watched:
        return False  # nothing is known of its blocks yet
    hook = _at(work, pruning).due
    due = hooks.ask(hook, work.ledger.blocks, work.ledger.length, work.ledger.size)
    if not isinstance(due, (bool, np.bool_)):
        raise hooks.fault(hook, f"returned {hooks.described(due)}, not whether it is due")
    return bool(due)


def _evict(work: Work, start: int, stop: int, backend: Backend) -> bool:
    assert work.slot is not None
    try:
        return backend.evict(work.slot, start, stop)
    except Exception as error:
        if still_holds(work, backend):
            return False
        raise CacheError(work.id, f"the engine failed at evicting: {error!r}") from error


def _compact_if_it_pays(work: Work, backend: Backend, note: Note) -> bool:
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
    try:
        backend.compact(work.slot)
    except Exception as error:
        if not still_holds(work, backend):
            reason = f"the engine lost keys and values when it compacted them: {error!r}"
            raise CacheError(work.id, reason) from error
        note("refused", work, reason=f"compacting: {error!r}")
        return False
    backend.cost.observe_swap(cells, backend.now() - began)
    return True
