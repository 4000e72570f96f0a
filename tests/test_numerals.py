"""Which tokens hold a digit."""

from __future__ import annotations

import numpy as np

from entropic_control.backends import SimulatedConfig
from entropic_control.numerals import Numerals

PIECES = [b"", b"a", b" 7", b"x2y", "\u0663".encode(), b"\xff1", b"\n"]


def test_tokens_with_a_digit_are_found_and_looked_at_once() -> None:
    asked: list[int] = []

    def piece(token: int) -> bytes:
        asked.append(token)
        return PIECES[token]

    numerals = Numerals(piece)
    tokens = np.array([2, 1, 2, 0, 5, 3, 4, 6, 2], np.int32)
    expected = [True, False, True, False, True, True, False, False, True]
    assert numerals.among(tokens).tolist() == expected
    assert numerals.among(tokens[::-1]).tolist() == expected[::-1]
    assert sorted(asked) == list(range(7))
    assert numerals.among(tokens[:0]).tolist() == []


def test_any_backend_can_be_asked() -> None:
    found = Numerals(SimulatedConfig().open().piece).among(np.array([0, 3], np.int32))
    assert found.tolist() == [False, True]
