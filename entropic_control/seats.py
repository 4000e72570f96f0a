"""Who sits where: slots and KV cells of the backend, and who gives way when they run out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from entropic_control.backends.base import Backend
from entropic_control.controllers.pruning import BLOCK
from entropic_control.errors import CacheError
from entropic_control.neighbours import gather
from entropic_control.pruner import still_holds
from entropic_control.sequence import Sequence as Work

Share = tuple[Work, int]
"""A sequence and the tokens a step gives it."""


class Seating(NamedTuple):
    """What of a plan can run now."""

    shares: list[Share]
    reason: str
    """Why the plan was made."""
    starved: Work | None = None
    """The plan's first, if it can never run, or if nothing can."""


class Seats:
    """The slots of a backend.

    Parameters
    ----------
    backend : Backend
        Whose slots they are.
    preempted : function
        Called with each sequence that had to give way, and why.
    """

    def __init__(self, backend: Backend, preempted: Callable[[Work, str], None]) -> None:
        self._backend = backend
        self._preempted = preempted
        self._free = list(range(backend.capabilities.slots))

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self, plan: Sequence[Share], order: Callable[[], list[Work]], reason: str) -> Seating:
        """Seat a plan.

        The first of the plan goes ahead: where cells or slots are short, others are preempted for it
        from the end of the order, so that something finishes whatever the rest needs. The rest of the
        plan gets what is left. Where the backend cannot swap, the first waits for cells instead.

        Parameters
        ----------
        plan : sequence of (sequence, tokens)
            What should run, the most important first.
        order : function
            Gives all live sequences from first to last; asked only when something is short.
        reason : str
            Why the plan was made; goes into the explanation of a preemption.
        """
        shares, needs, seats = list(plan), 0, 0
        for work, tokens in plan:
            needs += self._missing(work, tokens)
            seats += work.slot is None
        if needs > self._backend.room() or seats > self.free:
            first, wanted = plan[0]
            gone, stuck = self._clear_for(first, min(wanted, BLOCK), order(), reason)
            fits = self._fits(first, 1)
            if not fits and self._backend.capabilities.can_swap and not stuck:
                return Seating([], reason, starved=first)
            shares = self._what_fits([share for share in plan if share[0] not in gone])
            if not shares and not fits:
                # Nobody can give way: whoever holds a slot goes on, until cells come free.
                shares = self._what_fits([(work, 1) for work in order() if work.slot is not None])
            if not shares:
                return Seating([], reason, starved=first)
        for work, _ in shares:
            if work.slot is None:
                self._seat(work)
        return Seating([share for share in shares if share[0].fault is None], reason)

    def gather(self, shares: Sequence[Share]) -> list[Work]:
        """Bring the decoding rows of a step into neighbouring slots if that pays; those that moved."""
        if len(shares) < 2 or not self._backend.capabilities.adjacent:
            return []
        rows = [work for work, _ in shares if not work.prompt_left]
        left = [work.slot for work in rows]
        moves = gather(rows, self._free, self._backend)
        if moves:
            taken = {work.slot for work in rows}
            given = {slot for slot in left if slot is not None}
            self._free = sorted({*self._free, *given} - taken)
        return [work for work, _ in moves]

    def leave(self, work: Work) -> None:
        """Free the slot of a sequence, if it has one."""
        if work.slot is not None:
            slot, work.slot = work.slot, None
            self._empty(slot)

    def _empty(self, slot: int) -> None:
        """Release a slot; one that the engine fails to release is not used again."""
        try:
            self._backend.release(slot)
        except Exception:  # noqa: BLE001 - of anybody's code
            return
        self._free = sorted([*self._free, slot])

    def _clear_for(
        self, first: Work, tokens: int, order: list[Work], reason: str
    ) -> tuple[list[Work], bool]:
        """Who gave way, and whether somebody could not because the engine failed at saving it."""
        gone: list[Work] = []
        stuck = False
        others = [work for work in order if work.slot is not None and work is not first]
        while others and self._backend.capabilities.can_swap and not self._fits(first, tokens):
            work = others.pop()
            assert work.slot is not None
            try:
                work.swapped = self._backend.save(work.slot) if work.ledger.length else None
            except Exception as error:  # noqa: BLE001 - of anybody's code
                stuck = True
                if not still_holds(work, self._backend):
                    work.fault = CacheError(work.id, f"the engine failed at saving it: {error!r}")
                continue  # it keeps its place, and what it holds
            self.leave(work)
            work.preemptions += 1
            self._preempted(work, f"made room for {first.id}: {reason}")
            gone.append(work)
        return gone, stuck

    def _what_fits(self, plan: Sequence[Share]) -> list[Share]:
        shares: list[Share] = []
        room, seats = self._backend.room(), self.free
        for work, tokens in plan:
            fits = min(tokens, room - self._missing(work, 0))
            if fits < 1 or (work.slot is None and not seats):
                continue
            shares.append((work, fits))
            room -= self._missing(work, fits)
            seats -= work.slot is None
        return shares

    def _seat(self, work: Work) -> None:
        slot = self._free.pop(0)
        if work.swapped is not None:
            try:
                self._backend.restore(slot, work.swapped)
            except Exception as error:  # noqa: BLE001 - of anybody's code
                self._empty(slot)  # what was put back of it is no use to anybody
                work.swapped = None
                work.fault = CacheError(
                    work.id, f"its keys and values cannot be put back: {error!r}"
                )
                work.fault.__cause__ = error
                return
            work.swapped = None
        work.slot = slot

    def _missing(self, work: Work, tokens: int) -> int:
        """KV cells it takes to run `tokens` tokens of a sequence."""
        return tokens + (work.ledger.cells if work.slot is None else 0)

    def _fits(self, work: Work, tokens: int) -> bool:
        seated = work.slot is not None or self.free > 0
        return seated and self._missing(work, tokens) <= self._backend.room()
