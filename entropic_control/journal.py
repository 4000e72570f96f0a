"""What a step is about to change, so that one that is cut short can be taken back as if it never was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from entropic_control.backends.base import Backend, Reversible
from entropic_control.errors import DecodeError
from entropic_control.loops import Loops
from entropic_control.sequence import Sequence as Work
from entropic_control.trace import Trace


class Journal:
    """The sequences of a step, the readings and the trace as they are before it.

    Controller states are values, so that to keep the old ones is all it takes; of what grows the length is
    kept.

    Parameters
    ----------
    works : iterable of Sequence
        The sequences of the step; all hold slots.
    loops, trace
        Which the step adds to.
    """

    def __init__(self, works: Iterable[Work], loops: Loops, trace: Trace) -> None:
        self.apart = False
        """Whether its sequences went through the model one by one."""
        self._works = [
            (work, vars(work).copy(), len(work.tokens), vars(work.text).copy(), work.ledger.mark())
            for work in works
        ]
        self._loops, self._read = loops, loops.unread
        self._trace, self._written = trace, trace.mark()

    def undo(self, backend: Backend, ended: set[str]) -> list[tuple[Work, DecodeError]]:
        """Put everything back, but for the sequences that `ended`; may be called again if it is cut short.

        Returns
        -------
        list of (sequence, error)
            Those that the engine cannot put back.
        """
        self._trace.rewind(self._written, ended)
        self._loops.unread = self._read
        lost = []
        for work, fields, tokens, text, ledger in self._works:
            if work.id in ended:
                continue
            vars(work).update(fields)
            del work.tokens[tokens:]
            vars(work.text).update(text)
            work.ledger.rewind(ledger)
            try:
                _take_back(work, backend)
            except DecodeError as error:
                lost.append((work, error))
        return lost


def _take_back(work: Work, backend: Backend) -> None:
    """Have the engine forget what it was fed beyond the ledger."""
    slot: Any = work.slot
    length = work.ledger.length
    if not length:
        backend.release(slot)
    elif backend.length(slot) > length and backend.capabilities.can_rollback:
        cast("Reversible", backend).rollback(slot, length)
    if backend.length(slot) != length:
        raise DecodeError(
            -1,
            f"a step was cut short, and the engine holds {backend.length(slot)} tokens of request "
            f"{work.id!r} instead of {length}: submit it again",
        )
