"""Signals that ask a run to stop: it does so between two steps, with everything written."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class Stop:
    """While it is entered, SIGINT and SIGTERM are noted instead of obeyed; a second one is an interrupt."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal that came; None if none did."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
