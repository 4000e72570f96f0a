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
        self._decode(piece, last=False)
        return self._release(last=False)

    def finish(self) -> str:
        """Returns the rest of the text."""
        self._decode(b"", last=True)
        return self._release(last=True)

    def _decode(self, piece: bytes, last: bool) -> None:
        data = self._undecoded + piece
        text, used = codecs.utf_8_decode(data, "replace", last)
        self._waiting += text
        self._undecoded = data[used:]

    def _release(self, last: bool) -> str:
        if self.stopped:
            return ""
        if not self._stop:
            return self._show(len(self._waiting))
        starts = ((self._waiting.find(text), text) for text in self._stop)
        found = [(at + len(text), at) for at, text in starts if at >= 0]
        if found:
            # The one that is complete first, so that it does not matter how the bytes were split.
            self.stopped = True
            return self._show(min(found)[1])
        return self._show(len(self._waiting) - (0 if last else self._undecided()))

    def _show(self, size: int) -> str:
        shown, self._waiting = self._waiting[:size], self._waiting[size:]
        self.text += shown
        return shown

    def _undecided(self) -> int:
        """Length of the longest end of the waiting text that begins a stop string."""
        return max(
            (
                size
                for text in self._stop
                for size in range(1, min(len(text), len(self._waiting) + 1))
                if self._waiting.endswith(text[:size])
            ),
            default=0,
        )
