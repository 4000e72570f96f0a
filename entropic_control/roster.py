"""The unfinished requests: who is to come, who waits, who holds a slot. No step looks at all that wait."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from typing import Any

from entropic_control.sequence import Sequence as Work

_WINDOW = 4
"""Waiting requests, in slots, that a step weighs."""


class Line:
    """Requests in the order of a key, which does not change while they stand in it.

    Parameters
    ----------
    key : function
        Of a request; equal for no two.
    """

    def __init__(self, key: Callable[[Work], Any]) -> None:
        self._key = key
        self._works: list[Work] = []

    def __len__(self) -> int:
        return len(self._works)

    def __iter__(self) -> Iterator[Work]:
        return iter(self._works)

    def first(self, count: int) -> list[Work]:
        """The first `count`."""
        return self._works[:count]

    def add(self, work: Work) -> None:
        """Put a request in its place; most come last."""
        if not self._works or self._key(self._works[-1]) < self._key(work):
            self._works.append(work)
        else:
            insort(self._works, work, key=self._key)

    def upto(self, bound: Any) -> list[Work]:
        """Take out those whose key is not above `bound`."""
        count = bisect_right(self._works, bound, key=self._key)
        gone, self._works = self._works[:count], self._works[count:] if count else self._works
        return gone

    def remove(self, work: Work) -> None:
        """Take a request out."""
        place = bisect_left(self._works, self._key(work), key=self._key)
        if place < len(self._works) and self._works[place] is work:
            del self._works[place]
        else:
            self._works.remove(work)


class Roster:
    """The unfinished requests.

    A step weighs those that hold slots and, of the others, the first few of each sort: of those
    that were preempted and of those that never ran, the ones that waited longest, and the ones with the
    nearest deadlines. The longest waiting is always among them, so that patience bounds every wait.

    Parameters
    ----------
    slots : int
        Of the backend.
    """

    def __init__(self, slots: int) -> None:
        self._window = max(_WINDOW * slots, 32)
        self._coming = Line(_arrival)
        self._fresh, self._preempted = Line(_waiting), Line(_waiting)
        self._seated = Line(_arrival)
        self._deadlines = Line(_deadline)
        self._line: dict[Work, Line] = {}
        self.reach = 0
        """Tokens that all of them come to at most, prompts included."""

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, work: Work) -> bool:
        return work in self._line

    def __iter__(self) -> Iterator[Work]:
        """In order of their numbers."""
        return iter(sorted(self._line, key=lambda work: work.number))

    @property
    def waiting(self) -> int:
        """How many have arrived and hold no slot."""
        return len(self._fresh) + len(self._preempted)

    @property
    def fed(self) -> int:
        """Tokens that were fed for those that have arrived."""
        return sum(work.ledger.length for line in (self._seated, self._preempted) for work in line)

    @property
    def next_arrival(self) -> float | None:
        """When the next one arrives, by the backend's clock; None if one is here already, or none comes."""
        coming = self._coming.first(1)
        return coming[0].arrived if coming and len(self._line) == len(self._coming) else None

    def add(self, work: Work) -> None:
        """One is to come, when its `arrived` says."""
        self._put(work, self._coming)
        if work.request.deadline is not None:
            self._deadlines.add(work)
        self.reach += len(work.prompt) + work.limit

    def remove(self, work: Work) -> None:
        """One is done."""
        line = self._line.pop(work, None)
        if line is None:
            return
        line.remove(work)
        if work.request.deadline is not None:
            self._deadlines.remove(work)
        self.reach -= len(work.prompt) + work.limit

    def arrive(self, now: float, step: int) -> None:
        """Let those in that have arrived by now; they wait from this step on."""
        for work in self._coming.upto((now, float("inf"))):
            work.served = step
            self._put(work, self._preempted if work.ledger.length else self._fresh)

    def overdue(self, now: float) -> list[Work]:
        """Those whose deadline has passed."""
        late = []
        for work in self._deadlines:
            if work.deadline > now:
                break
            late.append(work)
        return late

    def settle(self, works: list[Work]) -> None:
        """Take note of which of the requests that were weighed hold slots now."""
        for work in works:
            line = self._line.get(work)
            if line is not None and (work.slot is not None) != (line is self._seated):
                line.remove(work)
                self._put(work, self._seated if work.slot is not None else self._preempted)

    def weighed(self) -> list[Work]:
        """Those that the next step may serve, in order of arrival."""
        if not self.waiting:
            return list(self._seated)
        chosen = dict.fromkeys(self._seated)
        for line in (self._preempted, self._fresh):
            chosen.update(dict.fromkeys(line.first(self._window)))
        for work in self._deadlines.first(self._window):
            if self._line[work] is not self._coming:
                chosen[work] = None
        return sorted(chosen, key=_arrival)

    def _put(self, work: Work, line: Line) -> None:
        line.add(work)
        self._line[work] = line


def _arrival(work: Work) -> tuple[float, int]:
    return work.arrived, work.number


def _waiting(work: Work) -> tuple[int, int]:
    return work.served, work.number


def _deadline(work: Work) -> tuple[float, int]:
    return work.deadline, work.number
