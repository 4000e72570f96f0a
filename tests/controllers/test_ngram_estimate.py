"""The surprisal of a prompt, estimated from its own n-grams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from entropic_control.controllers import EntropicPruning, EntropicSelection, Pruning, SlidingWindow
from entropic_control.controllers.base import Array
from entropic_control.controllers.pruning.ngram import (
    BASE,
    NEW,
    ORDER,
    RARE,
    SLOPE,
    TRUST,
    UNSEEN,
    estimated_surprisal,
    rarity,
)

pytestmark = pytest.mark.filterwarnings("error")
TEXTS = st.one_of(
    st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 2**31 - 1), max_size=60)
)


def counted(tokens: list[int]) -> list[float]:
    """The estimate as it is defined, by looking back from every token."""
    nats = []
    for place, token in enumerate(tokens):
        probability = UNSEEN
        for order in range(1, min(ORDER, place + 1) + 1):
            context = tokens[place - order + 1 : place]
            followers = [
                tokens[at]
                for at in range(order - 1, place)
                if tokens[at - order + 1 : at] == context
            ]
            weight = NEW if order == 1 else TRUST
            hits = followers.count(token) + weight * probability
            probability = hits / (len(followers) + weight)
        nats.append(BASE - SLOPE * np.log(probability))
    return nats


@given(tokens=TEXTS)
def test_it_is_what_counting_gives(tokens: list[int]) -> None:
    assert_allclose(estimated_surprisal(np.array(tokens, np.int64)), counted(tokens), rtol=1e-12)


@given(tokens=TEXTS, cut=st.integers(0, 60))
def test_a_tokens_value_does_not_depend_on_what_follows(tokens: list[int], cut: int) -> None:
    whole = estimated_surprisal(np.array(tokens, np.int64))
    assert_array_equal(estimated_surprisal(np.array(tokens[:cut], np.int64)), whole[:cut])
    assert np.all(np.isfinite(whole) & (whole >= 0))


@given(tokens=TEXTS, names=st.permutations(range(4)))
def test_which_id_a_token_has_does_not_matter(tokens: list[int], names: list[int]) -> None:
    few = np.array(tokens, np.int64) % 4
    assert_array_equal(estimated_surprisal(few), estimated_surprisal(np.array(names)[few]))


def test_what_was_read_before_surprises_less_and_less() -> None:
    passage = np.random.default_rng(0).permutation(1000)[:50]
    nats = estimated_surprisal(np.tile(passage, 4)).reshape(4, 50)[:, ORDER:]
    assert np.all(np.diff(nats, axis=0) < 0)
    assert nats[0].min() > 3.0
    assert nats[3].max() < 1.2


@pytest.mark.parametrize(
    ("tokens", "wrong"),
    [([1.5, 2.0], "whole"), ([[1, 2]], "whole"), ([-1], "between"), ([2**31], "between")],
)
def test_what_is_no_row_of_ids_is_refused(tokens: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        estimated_surprisal(np.array(tokens))


@given(members=st.lists(st.booleans(), max_size=80), cut=st.integers(0, 80))
def test_a_class_is_the_more_surprising_the_rarer_it_was(members: list[bool], cut: int) -> None:
    mask = np.array(members, np.bool_)
    nats = rarity(mask)
    expected = [-np.log((sum(members[:at]) + 1) / (at + RARE)) for at in range(len(members))]
    assert_allclose(nats, np.where(mask, expected, 0.0))
    assert_array_equal(rarity(mask[:cut]), nats[:cut])
    assert np.all(np.isfinite(nats) & (nats >= 0))


def test_a_number_in_prose_is_news_and_one_in_a_table_is_not() -> None:
    prose, table = np.zeros(2000, np.bool_), np.ones(2000, np.bool_)
    prose[1500] = True
    assert rarity(prose)[1500] > 7
    assert rarity(table)[1500] < 0.05


SIZE = 3000
PROMPT = np.random.default_rng(1).integers(0, 400, SIZE).astype(np.int32)
NUMBERS = PROMPT < 8


def needed_by(policy: Pruning) -> Array:
    """The tokens that are pruned by, but for the first, which has no surprisal."""
    places = np.arange(SIZE)
    return (places > 0) & (places < policy.measures(SIZE + 200))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_the_model_measures_the_share_that_is_foreseen_least(share: float, weight: float) -> None:
    policy = EntropicPruning(budget=0.5, measured=share, numbers=weight)
    needed = needed_by(policy)
    survey = policy.survey(PROMPT, SIZE + 200, NUMBERS)
    assert_array_equal(survey.extra, weight * rarity(NUMBERS))
    assert_array_equal(survey.estimate, estimated_surprisal(PROMPT) + survey.extra)
    assert survey.measured.sum() == round(share * needed.sum())
    assert not survey.measured[~needed].any()
    if share > 0:
        left = survey.estimate[needed & ~survey.measured]
        assert survey.estimate[survey.measured].min() >= left.max()


def test_a_policy_that_measures_all_assumes_nothing() -> None:
    for policy in (EntropicPruning(measured=1.0), EntropicSelection()):
        survey = policy.survey(PROMPT, SIZE + 200, NUMBERS)
        assert np.isnan(survey.estimate).all()
        assert_array_equal(survey.measured, needed_by(policy))
        assert survey.measured.any()
    assert not survey.extra.any()


@pytest.mark.parametrize(
    ("policy", "length"), [(SlidingWindow(), SIZE + 200), (EntropicPruning(measured=0.5), 900)]
)
def test_where_nothing_is_pruned_nothing_is_assumed_or_measured(policy: Any, length: int) -> None:
    survey = policy.survey(PROMPT[: length - 100], length, NUMBERS[: length - 100])
    assert np.isnan(survey.estimate).all()
    assert not survey.measured.any()
    assert not survey.extra.any()
