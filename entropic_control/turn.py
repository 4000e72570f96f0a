"""The turn in the engine: one thread at a time, and no Ctrl-C in the middle."""

from __future__ import annotations

import _signal  # what `signal` wraps: its enumerations cost a hundredth of a millisecond a step
import threading
from types import FrameType

from entropic_control.errors import EngineBusy, EngineClosed


class Turn:
    """Held by the one thread that is in the engine.

    Where an interrupt (SIGINT) would raise KeyboardInterrupt, it does so at the end of the turn; a second
    one does at once. A handler that the program installed itself is left alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holding = self._interrupted = False
        self.closed = False

    def require_open(self) -> None:
        """Refuse to go on with an engine that was closed."""
        if self.closed:
            raise EngineClosed("the engine was closed: load another one")

    def __enter__(self) -> None:
        self.require_open()
        if not self._lock.acquire(blocking=False):
            raise EngineBusy(
                "the engine is in use by another thread: give each thread its own engine, or one "
                "thread the steps; submit and cancel are for any thread"
            )
        try:
            self._holding = (
                threading.current_thread() is threading.main_thread()
                and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
            )
            if self._holding:
                self._interrupted = False
                _signal.signal(_signal.SIGINT, self._hold)
        except BaseException:  # an interrupt just before
            self._lock.release()
            raise

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            _signal.default_int_handler(number, frame)
        self._interrupted = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        holding = self._holding
        self._lock.release()
        if holding:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
            if self._interrupted and kind is None:
                raise KeyboardInterrupt
