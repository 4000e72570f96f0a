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
    surprisal = np.random.default_rng(seed).gamma(2, 2, count)
    number = np.arange(count) if held is None else np.asarray(held)
    return Blocks(number, surprisal[number], length, len(number) * BLOCK)


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
    policy = EntropicPruning(budget=0.25, window=0.0, recent=2)
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
    policy = EntropicPruning(budget=0.5, window=0.0)
    blocks = blocks_of(3200)
    kept = policy.keep(blocks)
    free = np.arange(1, 192)
    chosen, dropped = free[kept[free]], free[~kept[free]]
    assert blocks.surprisal[chosen].min() >= blocks.surprisal[dropped].max()
    assert len(chosen) == 100 - 9


def test_entropic_pruning_gives_its_window_the_last_blocks_held() -> None:
    policy = EntropicPruning(budget=0.5, window=0.5)
    kept = policy.keep(blocks_of(3200))
    assert kept[-50:].all()
    assert not kept[-60:-50].all()
    assert kept.sum() == 100
    everything = EntropicPruning(budget=0.5, window=1.0).keep(blocks_of(3200))
    assert np.flatnonzero(everything).tolist() == [0, *range(101, 200)]


def test_equal_scores_go_to_the_later_block() -> None:
    policy = EntropicPruning(budget=0.5, window=0.0)
    blocks = blocks_of(1600)._replace(surprisal=np.ones(100))
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
