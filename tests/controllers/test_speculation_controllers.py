"""Prompt lookup, what is learnt of it, and which drafts pay."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from entropic_control.controllers import NgramSpeculation
from entropic_control.controllers.base import Array
from entropic_control.controllers.signals import reading
from entropic_control.controllers.speculation.ngram import lookup
from entropic_control.controllers.speculation.worth import paying

pytestmark = pytest.mark.filterwarnings("error")


def ids(*tokens: int) -> Array:
    return np.array(tokens, np.int32)


# -- lookup -----------------------------------------------------------------------------------------


def naive(tokens: list[int], longest: int) -> tuple[int, int]:
    """Every earlier end, followed back token by token."""
    best = (0, 0)
    for end in range(len(tokens) - 1):
        length = 0
        while length <= end and length < longest and tokens[end - length] == tokens[-1 - length]:
            length += 1
        if length and length >= best[1]:
            best = (end + 1, length)
    return best


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6))
def test_lookup_finds_the_latest_of_the_longest_matches(tokens: list[int], longest: int) -> None:
    assert lookup(ids(*tokens), longest) == naive(tokens, longest)


def test_a_guess_copies_what_followed() -> None:
    ngram = NgramSpeculation(shortest=2, draft=3)
    guess = ngram.guess(ngram.init(), ids(1, 2, 3, 4, 5, 9, 1, 2))
    assert guess.tolist() == [3, 4, 5]
    assert guess.dtype == np.int32
    assert ngram.guess(ngram.init(), ids(1, 2, 3, 9, 2)).tolist() == []  # one token is too short


def test_a_match_that_overlaps_its_copy_goes_on_as_a_loop() -> None:
    ngram = NgramSpeculation(shortest=1, draft=7)
    assert ngram.guess(ngram.init(), ids(5, 1, 2, 3, 1, 2, 3)).tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert ngram.guess(ngram.init(), ids(8, 8)).tolist() == [8] * 7


@pytest.mark.parametrize("tokens", [[], [3], [1, 2, 3, 4]])
def test_nothing_is_guessed_of_a_text_without_repeats(tokens: list[int]) -> None:
    ngram = NgramSpeculation(shortest=1)
    assert ngram.guess(ngram.init(), ids(*tokens)).size == 0


def test_a_shortest_match_above_the_longest_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"shortest match, 5, is longer than the longest, 4"):
        NgramSpeculation(shortest=5, longest=4)


# -- entropy ----------------------------------------------------------------------------------------


def test_the_entropy_chooses_the_length() -> None:
    ngram = NgramSpeculation(draft=8, entropy=2.0, filter=1.0)
    lengths, _ = ngram.update(ngram.init(5), reading(np.array([0.0, 0.5, 1.0, 2.0, 9.0])))
    assert lengths.tolist() == [8, 6, 4, 0, 0]
    _, unsure = ngram.update(ngram.init(), reading(3.0))
    assert ngram.guess(unsure, ids(1, 2, 3, 1, 2)).size == 0
    _, sure = ngram.update(ngram.init(), reading(1.5))
    assert ngram.guess(sure, ids(1, 2, 3, 1, 2)).tolist() == [3, 1]


def test_the_entropy_is_filtered_from_the_first_reading_on() -> None:
    ngram = NgramSpeculation(filter=0.25)
    _, state = ngram.update(ngram.init(), reading(4.0))
    assert state.entropy.tolist() == [4.0]
    _, state = ngram.update(state, reading(0.0))
    assert state.entropy.tolist() == [3.0]


# -- learning ---------------------------------------------------------------------------------------


@given(st.integers(0, 9), st.booleans(), st.floats(0, 1), st.floats(0, 1))
def test_learning_is_the_filter_of_each_outcome(
    right: int, wrong: bool, prior: float, rate: float
) -> None:
    ngram = NgramSpeculation(prior=prior, rate=rate)
    expected = prior
    for outcome in [1.0] * right + [0.0] * wrong:
        expected += rate * (outcome - expected)
    state = ngram.learn(ngram.init(), right, wrong)
    assert state.right[0] == pytest.approx(expected, abs=1e-12)
    chances = ngram.chances(state, ids(*range(4)))
    np.testing.assert_allclose(chances, expected ** np.arange(1, 5), atol=1e-12)


# -- what pays --------------------------------------------------------------------------------------


class Linear:
    """step + row n + row_cell n L."""

    def __init__(self, step: float, row: float, row_cell: float = 0.0) -> None:
        self.weights = step, row, row_cell

    def decode(self, rows: Array, longest: Array) -> Array:
        step, row, row_cell = self.weights
        return np.asarray(step + row * rows + row_cell * rows * longest)

    def prefill(self, tokens: Array, cells: Array) -> Array:
        raise NotImplementedError


def rate_of(lengths: list[int], chances: list[Array], rows: int, cells: int, cost: Linear) -> float:
    """Tokens a second of a step with these drafts, all of one length."""
    drafted = sum(lengths)
    gained = sum(float(own[:k].sum()) for own, k in zip(chances, lengths, strict=True))
    everyone = drafted and sum(k > 0 for k in lengths) == rows
    seconds = float(cost.decode(np.array(rows + drafted * bool(everyone)), np.array(cells)))
    if drafted and not everyone:
        seconds += float(cost.decode(np.array(drafted), np.array(cells)))
    return (rows + gained) / seconds


@given(
    guesses=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 4)), min_size=1, max_size=4),
    others=st.integers(0, 3),
    cells=st.integers(0, 2000),
    room=st.integers(0, 12),
    step=st.floats(0, 10),
    row=st.floats(0.1, 10),
)
def test_no_drafts_of_one_length_give_more_tokens_a_second(
    guesses: list[tuple[float, int]], others: int, cells: int, room: int, step: float, row: float
) -> None:
    cost = Linear(step, row, 1e-3)
    chances = [p ** np.arange(1, k + 1) for p, k in guesses]
    rows = len(chances) + others
    lengths = paying(chances, rows, cells, cost, room).tolist()
    assert sum(lengths) <= room
    assert len({k for k in lengths if k}) <= 1
    assert all(k <= len(own) for k, own in zip(lengths, chances, strict=True))
    got = rate_of(lengths, chances, rows, cells, cost)
    best = 0.0
    for length in range(5):
        for chosen in itertools.product([0, length], repeat=len(chances)):
            fits = all(k <= len(own) for k, own in zip(chosen, chances, strict=True))
            if fits and sum(chosen) <= room:
                best = max(best, rate_of(list(chosen), chances, rows, cells, cost))
    assert got == pytest.approx(best, rel=1e-9)


def test_what_pays_depends_on_chance_and_cost() -> None:
    sure, unsure = np.full(8, 1.0), 0.2 ** np.arange(1, 9)
    llama = Linear(4.7e-3, 5.8e-3)
    assert paying([sure], 1, 300, llama, 99).tolist() == [8]
    assert paying([unsure], 1, 300, llama, 99).tolist() == [0]
    assert paying([sure], 1, 300, llama, 3).tolist() == [3]
    assert paying([sure, unsure], 2, 300, llama, 99).tolist() == [8, 0]
    assert paying([unsure], 1, 300, Linear(1.0, 1e-6), 99).tolist() == [8]  # nearly free
    assert paying([unsure], 1, 300, Linear(0.0, 0.0), 99).tolist() == [8]  # free
    assert paying([], 3, 300, llama, 99).size == 0


def test_always_takes_every_guess_that_fits() -> None:
    ngram = NgramSpeculation(when="always")
    chances = [np.zeros(5), np.zeros(4), np.zeros(3)]
    cost = Linear(1.0, 100.0)
    assert ngram.plan(chances, 3, 50, cost, 99).tolist() == [5, 4, 3]
    assert ngram.plan(chances, 3, 50, cost, 7).tolist() == [5, 2, 0]
    assert NgramSpeculation().plan(chances, 3, 50, cost, 99).tolist() == [0, 0, 0]
