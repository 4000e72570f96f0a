"""Who sits where: slots and KV cells of the backend, and who gives way when they run out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from entropic_control.backends.base import Backend
from entropic_control.controllers.priority import Forced
from entropic_control.controllers.pruning import BLOCK
from entropic_control.errors import CacheError
from entropic_control.neighbours import gather
from entropic_control.pruner import still_holds
from entropic_control.sequence import Sequence as Work

Share = tuple[Work, int]
"""A sequence and the tokens a step gives it."""


Order = Callable[[], list[Work]]
"""Gives all live sequences from first to last."""

Pays = Callable[[Work, Work], bool]
"""Whether it pays to serve the first sequence in the place of the second, the swap counted."""

AHEAD, AGAIN = BLOCK, 4 * BLOCK
"""Tokens that everybody seated can still grow by when one takes a seat, and when one comes back to one:
what swaps cost is spread over that many tokens at least."""


class Seating(NamedTuple):
    """What of a plan can run now."""

    shares: list[Share]
    reason: str
    """Why the plan was made."""
    starved: Work | None = None
    """The plan's first, if it can never run, or if nothing can."""
    refused: bool = False
    """Nothing of the plan has a seat, and nobody gives way for it: plan without those that wait."""


def _never(coming: Work, going: Work) -> bool:  # noqa: ARG001
    return False


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
        self._seated: list[Work] = []

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(
        self,
        plan: Sequence[Share],
        order: Order,
        reason: str,
        *,
        forced: Forced = "",
        pays: Pays = _never,
        overtaking: bool = True,
    ) -> Seating:
        """Seat a plan.

        Who holds a seat keeps it. One that waits takes a seat where there is one, with cells for what
        it holds, for its prompt and for everybody's next tokens. Otherwise it waits until somebody
        leaves, unless it is the plan's first and may claim a seat: because it waited too long; or, once
        in its life, because of its deadline, or because a swap for it pays and it never gave way itself.
        So two requests cannot take turns in pushing each other out.

        Where the seated outgrow the cells, the last of the order gives way, so that something finishes
        whatever the rest needs. Where the backend cannot swap, the first waits for cells instead.

        Parameters
        ----------
        plan : sequence of (sequence, tokens)
            What should run, the most important first.
        order : function
            Gives all live sequences from first to last; asked only when something is short.
        reason : str
            Why the plan was made; goes into the explanation of a preemption.
        forced : {"", "deadline", "patience"}
            What the first of the plan goes ahead for, if for anything.
        pays : function
            Whether a swap of two sequences pays.
        overtaking : bool
            Whether one that there is room for may take a seat before one that waits for more room.
        """
        shares = list(plan)
        if any(work.slot is None for work, _ in plan):
            shares = self._admitted(plan, order, reason, forced, pays, overtaking)
            if not shares:
                return Seating([], reason, refused=True)
        first, wanted = shares[0]
        needs = sum(self._missing(work, tokens) for work, tokens in shares)
        if needs > self._backend.room():
            gone, stuck = self._clear_for(first, min(wanted, BLOCK), order(), reason)
            fits = self._fits(first, 1)
            if not fits and self._backend.capabilities.can_swap and not stuck:
                return Seating([], reason, starved=first)
            shares = self._what_fits([share for share in shares if share[0] not in gone])
            if not shares and not fits:
                # Nobody can give way: whoever holds a slot goes on, until cells come free.
                shares = self._what_fits([(work, 1) for work in order() if work.slot is not None])
            if not shares:
                return Seating([], reason, starved=first)
        for work, _ in shares:
            if work.slot is None:
                self._seat(work)
        return Seating([share for share in shares if share[0].fault is None], reason)

    def can_run(self, work: Work) -> bool:
        """Whether a sequence holds a slot, or can have one without another giving way."""
        return work.slot is not None or self._enters(work, self._seated, self._backend.room())

    def _admitted(
        self,
        plan: Sequence[Share],
        order: Order,
        reason: str,
        forced: Forced,
        pays: Pays,
        overtaking: bool,
    ) -> list[Share]:
        """The shares of the seated, and of those that take a seat now; may make others give way."""
        first, wanted = plan[0]
        gone: list[Work] = []
        claims = False
        if not self.can_run(first) and self._backend.capabilities.can_swap:
            if forced == "patience":
                claims = True
                gone, _ = self._clear_for(first, min(wanted, BLOCK), order(), reason)
            elif self._claims(first, order(), forced, pays):
                first.claimed = claims = True
                gone, _ = self._clear_for(first, _growth(first, AHEAD), order(), reason)
        shares: list[Share] = []
        seated, room, passing = list(self._seated), self._backend.room(), True
        for work, tokens in plan:
            if work.slot is None:
                ahead = claims and work is first
                if work in gone or not (ahead or (passing and self._enters(work, seated, room))):
                    passing = passing and (overtaking or work in gone)
                    continue
                seated.append(work)
                room -= work.ledger.cells
            shares.append((work, tokens))
        return shares

    def _claims(self, first: Work, order: list[Work], forced: Forced, pays: Pays) -> bool:
        """Whether the first of a plan may make others give way, by its deadline or its worth."""
        if first.claimed:
            return False
        if forced == "deadline":
            return True
        if first.preemptions:
            return False
        seated, room = list(self._seated), self._backend.room()
        for work in reversed(order):
            if self._enters(first, seated, room):
                return True
            if work.slot is not None:
                if not pays(first, work):
                    return False
                seated.remove(work)
                room += work.ledger.cells
        return self._enters(first, seated, room)

    def _enters(self, work: Work, seated: list[Work], room: int) -> bool:
        """Whether a slot and cells are free for a sequence, and for everybody to grow a while."""
        if not seated:
            return True
        if len(seated) >= self._backend.capabilities.slots:
            return False
        ahead = AHEAD if work.swapped is None else AGAIN
        growth = sum(_growth(other, ahead) for other in (work, *seated))
        return work.ledger.cells + growth <= room

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
            self._empty(work.slot)  # first: cut short by an interrupt, it is done again
            self._seated.remove(work)
            work.slot = None

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
            began = self._backend.now()
            try:
                work.swapped = self._backend.save(work.slot) if work.ledger.length else None
            except Exception as error:  # noqa: BLE001 - of anybody's code
                stuck = True
                if not still_holds(work, self._backend):
                    work.fault = CacheError(work.id, f"the engine failed at saving it: {error!r}")
                continue  # it keeps its place, and what it holds
            work.swap_seconds = self._backend.now() - began
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
            began = self._backend.now()
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
            seconds = work.swap_seconds + self._backend.now() - began
            self._backend.cost.observe_swap(work.ledger.cells, seconds)
        work.slot = slot
        self._seated.append(work)

    def _missing(self, work: Work, tokens: int) -> int:
        """KV cells it takes to run `tokens` tokens of a sequence."""
        return tokens + (work.ledger.cells if work.slot is None else 0)

    def _fits(self, work: Work, tokens: int) -> bool:
        seated = work.slot is not None or self.free > 0
        return seated and self._missing(work, tokens) <= self._backend.room()


def _growth(work: Work, ahead: int) -> int:
    """Cells that a sequence takes in its prompt and its next `ahead` tokens."""
    return work.prompt_left + min(work.decode_left, ahead)
