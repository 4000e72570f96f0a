"""Which KV blocks stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from entropic_control.controllers import (
    EntropicPruning,
    NoPruning,
    Pruning,
    RandomPruning,
    SlidingWindow,
)
from entropic_control.controllers.base import Array
from entropic_control.controllers.pruning import BLOCK, Blocks
from entropic_control.controllers.signals import reading

pytestmark = pytest.mark.filterwarnings("error")
POLICIES = [EntropicPruning, SlidingWindow, RandomPruning]
EVERY = pytest.mark.parametrize("cls", POLICIES)


def blocks_of(length: int, seed: int = 0, held: Array | None = None) -> Blocks:
    count = -(-length // BLOCK)
    surprisal = np.random.default_rng(seed).gamma(2, 2, (count, BLOCK))
    number = np.arange(count) if held is None else np.asarray(held)
    return Blocks(number, surprisal[number], length, len(number) * BLOCK)


def tokens_of(length: int, seed: int = 0, held: Array | None = None) -> Blocks:
    """Blocks of one token."""
    surprisal = np.random.default_rng(seed).gamma(2, 2, (length, 1))
    number = np.arange(length) if held is None else np.asarray(held)
    return Blocks(number, surprisal[number], length, len(number), 1)


@EVERY
@given(
    length=st.integers(1, 6000),
    budget=st.one_of(st.floats(0.01, 1.0), st.integers(160, 4000)),
    sinks=st.integers(0, 3),
    recent=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_sinks_and_recent_blocks_stay_and_the_budget_is_used(
    cls: Any, length: int, budget: Any, sinks: int, recent: int, seed: int
) -> None:
    policy = cls(budget=budget, sinks=sinks, recent=recent)
    blocks = blocks_of(length, seed)
    kept = policy.keep(blocks)
    count = len(blocks.number)
    assert kept[: min(sinks, count)].all()
    assert kept[-recent:].all()
    tokens = budget * length if isinstance(budget, float) else budget
    assert kept.sum() == min(count, max(int(tokens) // BLOCK, sinks + recent))


@EVERY
def test_case_10_a_tiny_budget_keeps_sinks_and_window(cls: Any) -> None:
    length = 4096
    half = cls(budget=0.5).keep(blocks_of(length))
    assert half.sum() == 128
    held = np.flatnonzero(half)
    tiny = cls(budget=9 * BLOCK)
    kept = held[tiny.keep(blocks_of(length, held=held))]
    assert kept.tolist() == [0, *range(248, 256)]
    smallest = held[cls(budget=0.001).keep(blocks_of(length, held=held))]
    assert smallest.tolist() == kept.tolist()


@pytest.mark.parametrize("cls", [*POLICIES, NoPruning])
def test_case_10_a_budget_too_small_for_what_must_stay_is_refused(cls: Any) -> None:
    with pytest.raises(ValidationError, match=r"143 tokens cannot hold 1 sink and 8 recent.*144"):
        cls(budget=143)
    with pytest.raises(ValidationError, match="give at least 80"):
        cls(budget=64, sinks=2, recent=3)
    with pytest.raises(ValidationError, match="fraction above 1"):
        cls(budget=1.5)
    for bad in ({"budget": 0.0}, {"budget": -5}, {"recent": 0}, {"sinks": -1}):
        with pytest.raises(ValidationError):
            cls(**bad)
    assert cls(budget=144).budget == 144
    assert isinstance(cls(budget=1.0).budget, float)


def test_case_11_after_an_eviction_later_blocks_still_win_a_place() -> None:
    policy = EntropicPruning(budget=0.25, window=0.0, recent=2, fading=0.0)
    first = policy.keep(blocks_of(1600))
    held = np.flatnonzero(first)
    # The sequence goes on; position 2000 is block 125, whatever was evicted before.
    grown = np.concatenate([held, np.arange(100, 150)])
    blocks = blocks_of(2400, held=grown)
    surprisal = blocks.surprisal.copy()
    late = grown == 125
    surprisal[late] = 99.0
    kept = grown[policy.keep(blocks._replace(surprisal=surprisal))]
    assert 125 in kept
    assert {0, 148, 149} <= set(kept)
    assert len(kept) == policy.budget_blocks(2400)
    assert set(kept) & set(range(1, 100)) <= set(held)


def test_entropic_pruning_keeps_the_surprising_blocks() -> None:
    policy = EntropicPruning(budget=0.5, window=0.0, span=1, lead=0, tail=0, fading=0.0)
    blocks = blocks_of(3200)
    kept = policy.keep(blocks)
    free = np.arange(1, 192)
    chosen, dropped = free[kept[free]], free[~kept[free]]
    largest = blocks.surprisal.max(axis=1)
    assert largest[chosen].min() >= largest[dropped].max()
    assert len(chosen) == 100 - 9


def test_the_worth_of_a_token_is_the_largest_span_around_it() -> None:
    policy = EntropicPruning(span=3, lead=2, tail=1, fading=2.0)
    blocks = tokens_of(60)
    nats = blocks.surprisal.ravel()
    spans = [nats[max(i - 2, 0) : i + 1].sum() - 2 * np.log(60 - i) for i in range(60)]
    expected = [max(spans[max(i - 1, 0) : i + 3]) for i in range(60)]
    np.testing.assert_allclose(policy.worth(blocks), expected)


@pytest.mark.parametrize("size", [1, BLOCK])
def test_a_surprising_passage_stays_with_its_lead_in(size: int) -> None:
    nats = np.full(3200, 1.0)
    nats[800:805] = 6.0  # as a five-digit code in a text that is easy to foresee
    blocks = Blocks(np.arange(3200 // size), nats.reshape(-1, size), 3200, 3200, size)
    kept = np.repeat(EntropicPruning(budget=0.2, window=0.8).keep(blocks), size)
    assert kept[800 - 4 : 805 + 4].all()
    alone = np.repeat(SlidingWindow(budget=0.2).keep(blocks), size)
    assert not alone[800:805].any()


def test_what_was_pruned_before_does_not_change_the_worth_of_a_whole_passage() -> None:
    nats = np.full((3200, 1), 1.0)
    nats[800:808] = 6.0
    blocks = Blocks(np.arange(3200), nats, 3200, 3200, 1)
    policy = EntropicPruning(budget=0.25, fading=0.0)
    held = np.flatnonzero(policy.keep(blocks))
    again = blocks._replace(number=held, surprisal=nats[held], cells=len(held))
    assert policy.worth(again).max() == policy.worth(blocks).max() == 48.0
    assert set(range(800, 812)) <= set(held[policy.keep(again)].tolist())


@EVERY
@given(
    length=st.integers(1, 3000),
    budgets=st.tuples(st.integers(160, 3000), st.integers(160, 3000)),
    size=st.sampled_from([1, BLOCK]),
    seed=st.integers(0, 99),
)
def test_a_larger_budget_keeps_all_that_a_smaller_one_keeps(
    cls: Any, length: int, budgets: tuple[int, int], size: int, seed: int
) -> None:
    blocks = tokens_of(length, seed) if size == 1 else blocks_of(length, seed)
    less, more = (cls(budget=b).keep(blocks) for b in sorted(budgets))
    assert not np.any(less & ~more)
    assert (less == cls(budget=min(budgets)).keep(blocks)).all()


@EVERY
@given(
    length=st.integers(1, 6000),
    budget=st.floats(0.01, 1.0),
    sinks=st.integers(0, 3),
    recent=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_single_tokens_keep_sinks_and_window_too(
    cls: Any, length: int, budget: float, sinks: int, recent: int, seed: int
) -> None:
    policy = cls(budget=budget, sinks=sinks, recent=recent)
    kept = policy.keep(tokens_of(length, seed))
    window = (-(-length // BLOCK) - recent) * BLOCK
    assert kept[: sinks * BLOCK].all()
    assert kept[max(window, 0) :].all()
    fixed = np.count_nonzero((np.arange(length) < sinks * BLOCK) | (np.arange(length) >= window))
    assert kept.sum() == max(min(length, policy.budget_blocks(length, 1)), fixed)
    assert policy.budget_blocks(length, 1) == max(int(budget * length), (sinks + recent) * BLOCK)


def test_of_equally_surprising_passages_the_later_stays() -> None:
    nats = np.full((3200, 1), 1.0)
    nats[[*range(800, 808), *range(1600, 1608)]] = 6.0
    blocks = Blocks(np.arange(3200), nats, 3200, 3200, 1)
    worth = EntropicPruning(fading=10.0).worth(blocks)
    assert worth[1607] - worth[807] == pytest.approx(10 * np.log((3200 - 807) / (3200 - 1607)))
    faded = EntropicPruning(fading=1e6, budget=0.25, window=0.1).keep(blocks)
    recency = SlidingWindow(budget=0.25).keep(blocks)
    assert np.count_nonzero(faded & recency) > 0.97 * np.count_nonzero(recency)


def test_only_what_may_be_in_front_of_the_window_is_measured() -> None:
    policy = EntropicPruning(budget=0.5, window=0.5)
    assert policy.measures(4000) == 3000 + policy.lead
    assert EntropicPruning(budget=1000, window=0.5).measures(4000) == 3500 + policy.lead
    assert policy.measures(900) == 0  # never pruned
    assert SlidingWindow().measures(4000) == 0
    assert policy.replace(follow=0.5).measures(4000) == 3500 + policy.lead


@given(length=st.integers(1100, 4000), budget=st.floats(0.1, 0.9), window=st.floats(0, 1))
def test_what_is_not_measured_is_never_scored(length: int, budget: float, window: float) -> None:
    policy = EntropicPruning(budget=budget, window=window, slack=0.0)
    measured = policy.measures(length)
    for now in range(1024, length + 1, 97):
        blocks = tokens_of(now)
        hidden = blocks.surprisal * (blocks.number < measured)[:, None]
        kept = policy.keep(blocks)
        assert (kept == policy.keep(blocks._replace(surprisal=hidden))).all()


def test_a_budget_can_follow_the_entropy() -> None:
    policy = EntropicPruning(budget=0.5, gate=4.0, follow=0.5, filter=0.5)
    state = policy.init(1)
    assert policy.at(state).budget == 0.5  # whole until something is known
    for _ in range(40):
        _, state = policy.update(state, reading(0.0, raw_entropy=0.0))
    assert policy.at(state).budget == pytest.approx(0.25, abs=2e-3)
    for _ in range(40):
        _, state = policy.update(state, reading(0.0, raw_entropy=2.0))
    assert policy.at(state).budget == pytest.approx(0.375, abs=1e-3)
    fixed = EntropicPruning(budget=0.5)
    assert fixed.at(fixed.init(1)) is fixed
    counted = EntropicPruning(budget=1000, gate=4.0, follow=0.5)
    assert counted.at(policy.init(1)).budget == 1000
    with pytest.raises(ValidationError, match="set a gate"):
        EntropicPruning(follow=0.5, gate=None)


def test_entropic_pruning_gives_its_window_the_last_blocks_held() -> None:
    policy = EntropicPruning(budget=0.5, window=0.5)
    kept = policy.keep(blocks_of(3200))
    assert kept[-50:].all()
    assert not kept[-60:-50].all()
    assert kept.sum() == 100
    everything = EntropicPruning(budget=0.5, window=1.0).keep(blocks_of(3200))
    assert np.flatnonzero(everything).tolist() == [0, *range(101, 200)]


def test_equal_scores_go_to_the_later_block() -> None:
    policy = EntropicPruning(budget=0.5, window=0.0, span=1, fading=0.0)
    blocks = blocks_of(1600)._replace(surprisal=np.ones((100, BLOCK)))
    assert np.flatnonzero(policy.keep(blocks)).tolist() == [0, *range(51, 100)]


def test_the_sliding_window_is_sinks_and_the_last_blocks() -> None:
    kept = SlidingWindow(budget=320, sinks=2).keep(blocks_of(1600))
    assert np.flatnonzero(kept).tolist() == [0, 1, *range(82, 100)]


def test_random_pruning_draws_each_lot_once() -> None:
    kept = RandomPruning(seed=1).keep(blocks_of(3200))
    assert (kept == RandomPruning(seed=1).keep(blocks_of(3200))).all()
    assert (kept != RandomPruning(seed=2).keep(blocks_of(3200))).any()
    # The lots are the blocks' own: who is dropped stays dropped as others go.
    held = np.flatnonzero(kept)
    fewer = held[RandomPruning(seed=1, budget=0.25).keep(blocks_of(3200, held=held))]
    at_once = np.flatnonzero(RandomPruning(seed=1, budget=0.25).keep(blocks_of(3200)))
    assert fewer.tolist() == at_once.tolist()


def test_pruning_is_due_when_the_slack_is_spent() -> None:
    policy: Pruning = EntropicPruning(budget=0.5, slack=0.1, min_tokens=1024)
    assert not policy.due(60, 1008)
    assert policy.due(128, 2048)
    assert not policy.due(70, 2048)
    assert policy.due(71, 2048)
    assert not NoPruning().due(10_000, 160_000)
    assert NoPruning().keep(blocks_of(3200)).all()


def test_the_gate_closes_on_an_unsure_model_and_opens_again() -> None:
    policy = EntropicPruning(gate=2.0, filter=0.5)
    state = policy.init(1)
    opened, state = policy.update(state, reading(0.0, raw_entropy=1.0))
    assert opened.tolist() == [True]
    for _ in range(10):
        opened, state = policy.update(state, reading(0.0, raw_entropy=4.0))
    assert opened.tolist() == [False]
    for _ in range(10):
        opened, state = policy.update(state, reading(9.0, raw_entropy=0.0))
    assert opened.tolist() == [True]
    assert state.entropy[0] >= policy.entropy_floor
    always = EntropicPruning(gate=None)
    assert always.update(always.init(1), reading(99.0))[0].tolist() == [True]
