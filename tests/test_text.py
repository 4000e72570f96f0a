"""Streamed text: whatever the bytes and however they are split."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from entropic_control.text import TextStream

# A small alphabet, so that stop strings overlap themselves, one another, and the text.
LETTERS = st.text(alphabet="ab\u00e9\u20ac\U0001f999", max_size=24)
STOPS = st.lists(st.text(alphabet="ab\u00e9\u20ac", min_size=1, max_size=4), max_size=3)
CUTS = st.lists(st.integers(0, 80), max_size=12)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:stop] for start, stop in pairwise(at)]


def streamed(pieces: list[bytes], stop: list[str]) -> tuple[list[str], TextStream]:
    stream = TextStream(stop)
    shown = []
    for piece in pieces:
        shown.append(stream.feed(piece))
        if stream.stopped:
            break
    shown.append(stream.finish())
    return shown, stream


def cut_off(text: str, stop: list[str]) -> tuple[str, bool]:
    """The oracle: letter by letter, until a stop string is there."""
    for size in range(1, len(text) + 1):
        found = [size - len(s) for s in stop if text[:size].endswith(s)]
        if found:
            return text[: min(found)], True
    return text, False


@given(LETTERS, STOPS, CUTS)
@example("aab", ["aabb", "ab"], [])
@example("abab", ["bab", "aba"], [1])
@example("aba", ["abab", "ba"], [0])
def test_text_ends_before_the_first_stop_string_however_it_is_split(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    shown, stream = streamed(split(text.encode(), cuts), stop)
    expected, stopped = cut_off(text, stop)
    assert "".join(shown) == stream.text == expected
    assert stream.stopped == stopped


@given(st.binary(max_size=40), CUTS)
def test_any_bytes_give_what_they_decode_to(data: bytes, cuts: list[int]) -> None:
    shown, stream = streamed(split(data, cuts), [])
    assert "".join(shown) == stream.text == data.decode("utf-8", "replace")


@given(LETTERS, STOPS, CUTS)
def test_nothing_is_shown_that_must_be_taken_back(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    stream = TextStream(stop)
    final = cut_off(text, stop)[0]
    seen = ""
    for piece in split(text.encode(), cuts):
        seen += stream.feed(piece)
        assert final.startswith(seen)
        assert "\ufffd" not in seen
        if stream.stopped:
            assert seen == final
            return


@given(LETTERS)
def test_text_without_stop_strings_does_not_wait(text: str) -> None:
    stream = TextStream()
    assert [stream.feed(letter.encode()) for letter in text] == list(text)


def test_only_what_could_become_a_stop_string_waits() -> None:
    stream = TextStream(["END"])
    assert [stream.feed(p) for p in (b"the E", b"N", b"d. E", b"X")] == ["the ", "", "ENd. ", "EX"]
    assert (stream.finish(), stream.stopped) == ("", False)


@pytest.mark.parametrize("data", [b"\xe2\x82", b"\xf0\x9f\xa6", b"ok\xc3"])
def test_an_unfinished_character_is_replaced_at_the_end_only(data: bytes) -> None:
    stream = TextStream()
    assert "\ufffd" not in stream.feed(data)
    assert stream.finish() == "\ufffd"


def test_after_a_stop_nothing_follows() -> None:
    stream = TextStream(["."])
    assert stream.feed(b"end. more") == "end"
    assert (stream.feed(b"x"), stream.finish(), stream.text) == ("", "", "end")
