"""Streamed text: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns the bytes of tokens into text that may be shown.

    Bytes of an unfinished UTF-8 character wait for the rest of it, and text that could be the start of
    a stop string waits until it is none.

    Parameters
    ----------
    stop : sequence of str
        Texts that end the output.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._undecoded = b""
        self._stop = tuple(text for text in stop if text)
        self._waiting = ""
        self.stopped = False
        self.text = ""

    def feed(self, piece: bytes) -> str:
        """Take the bytes of a token; returns the text that can be shown now."""
        return self._take(piece, last=False)

    def finish(self) -> str:
        """Returns the rest of the text."""
        return self._take(b"", last=True)

    def _take(self, piece: bytes, last: bool) -> str:
        data = self._undecoded + piece
        text, used = codecs.utf_8_decode(data, "replace", last)
        self._undecoded = data[used:]
        if self._stop:
            text = self._before_stops(text, last)
        self.text += text
        return text

    def _before_stops(self, text: str, last: bool) -> str:
        """What can be shown of the waiting text and `text`; the rest waits."""
        if self.stopped:
            return ""
        waiting = self._waiting + text
        starts = ((waiting.find(text), text) for text in self._stop)
        found = [(at + len(text), at) for at, text in starts if at >= 0]
        self.stopped = bool(found)
        # The stop that is complete first, so that it does not matter how the bytes were split.
        size = min(found)[1] if found else len(waiting) - (0 if last else self._undecided(waiting))
        self._waiting = waiting[size:]
        return waiting[:size]

    def _undecided(self, waiting: str) -> int:
        """Length of the longest end of the waiting text that begins a stop string."""
        return max(
            (
                size
                for text in self._stop
                for size in range(1, min(len(text), len(waiting) + 1))
                if waiting.endswith(text[:size])
            ),
            default=0,
        )
