"""Scheduling: the set that is chosen, the order of equals, and how long anyone waits."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from pydantic import ValidationError
from table import PRIORITIES

from entropic_control.controllers import (
    EntropicPriority,
    FirstCome,
    RoundRobin,
    ShortestRemaining,
)
from entropic_control.controllers.base import Array
from entropic_control.controllers.priority import Candidates, FlowState, Limits, Plan, fall, fallen
from entropic_control.controllers.signals import reading

pytestmark = pytest.mark.filterwarnings("error")
EVERY = pytest.mark.parametrize("policy", PRIORITIES.values(), ids=PRIORITIES.keys())


class Padded:
    """A backend whose rows all pay for the longest one."""

    def __init__(self, step: float = 10e-3, row: float = 2e-3, cell: float = 5e-6) -> None:
        self.step, self.row, self.cell = step, row, cell

    def decode(self, rows: Array, longest: Array) -> Array:
        return np.asarray(self.step + rows * (self.row + self.cell * longest))

    def prefill(self, tokens: Array, cells: Array) -> Array:
        return np.asarray(tokens * (4e-3 + 1e-6 * (cells + tokens / 2)))


COST = Padded()


def candidates(n: int, **columns: Any) -> Candidates:
    defaults = {
        "arrival": np.arange(n),
        "waited": np.zeros(n, int),
        "prompt_left": np.zeros(n, int),
        "decode_left": np.full(n, 100),
        "cells": np.full(n, 200),
        "slack": np.full(n, np.inf),
        "seated": np.ones(n, bool),
    }
    return Candidates(**{name: np.asarray(columns.get(name, v)) for name, v in defaults.items()})


def state_of(policy: Any, flow: Array) -> Any:
    if policy.kind == "entropic":
        return FlowState(np.full(len(flow), 1.0), np.asarray(flow, float))
    return policy.init(len(flow))


def random_candidates(rng: np.random.Generator, n: int) -> tuple[Candidates, Array]:
    prompt = rng.random(n) < 0.5
    found = candidates(
        n,
        arrival=rng.permutation(n),
        waited=rng.integers(0, 30, n),
        prompt_left=np.where(prompt, rng.integers(1, 3000, n), 0),
        decode_left=rng.integers(1, 500, n),
        cells=np.where(prompt, rng.integers(0, 500, n), rng.integers(1, 8000, n)),
        slack=np.where(rng.random(n) < 0.5, np.inf, rng.uniform(-1, 60, n)),
        seated=rng.random(n) < 0.6,
    )
    return found, rng.gamma(1.0, 0.5, n)


def partitions(items: list[int]) -> Any:
    """Every way to part a list into sets."""
    if not items:
        yield []
        return
    head, rest = items[0], items[1:]
    for others in range(len(rest) + 1):
        for chosen in combinations(rest, others):
            left = [item for item in rest if item not in chosen]
            for parts in partitions(left):
                yield [[head, *chosen], *parts]


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 7))
def test_rows_are_parted_into_the_cheapest_sets_and_the_best_is_served(
    seed: int, n: int, room: int
) -> None:
    rng = np.random.default_rng(seed)
    policy = EntropicPriority(beta=0.0, gamma=0.0)
    cells, flow = rng.integers(1, 9000, n), rng.gamma(0.5, 1.0, n)
    gain = np.maximum(flow, policy.entropy_floor)
    found = policy.plan(state_of(policy, flow), candidates(n, cells=cells), COST, Limits(0, room))

    def seconds(rows: Any) -> float:
        return float(COST.decode(len(rows), cells[list(rows)].max()))

    allowed = [p for p in partitions(list(range(n))) if max(map(len, p)) <= room]
    least = min(sum(map(seconds, parts)) for parts in allowed)
    cheapest = [p for p in allowed if sum(map(seconds, p)) <= least * (1 + 1e-12)]

    def rate(rows: Any) -> float:
        return float(gain[list(rows)].sum()) / seconds(rows)

    served = [p for p in cheapest if sorted(found.rows.tolist()) in map(sorted, p)]
    assert served, "the set belongs to no cheapest partition"
    assert any(rate(found.rows) >= max(map(rate, p)) * (1 - 1e-12) for p in served)
    assert found.tokens.tolist() == [1] * len(found.rows)


def test_a_long_sequence_does_not_make_short_ones_wait_for_it() -> None:
    policy = EntropicPriority()
    cells = [200, 200, 200, 6000]
    found = policy.plan(policy.init(4), candidates(4, cells=cells), COST, Limits(0, 8))
    assert sorted(found.rows.tolist()) == [0, 1, 2]
    # With enough to gain from it, it goes along.
    state = state_of(policy, np.array([0.1, 0.1, 0.1, 5.0]))
    found = policy.plan(state, candidates(4, cells=cells), COST, Limits(0, 8))
    assert 3 in found.rows


def test_gain_breaks_the_tie_between_rows_of_one_cost() -> None:
    policy = EntropicPriority()
    state = state_of(policy, np.array([0.1, 0.9, 0.5]))
    found = policy.plan(state, candidates(3), COST, Limits(0, 1))
    assert found.rows.tolist() == [1]
    assert policy.order(state, candidates(3), COST).tolist() == [1, 2, 0]


def test_a_dearer_request_has_the_lower_index() -> None:
    policy = EntropicPriority()
    found = policy.index(
        policy.init(4),
        candidates(4, cells=[100, 4000, 0, 0], prompt_left=[0, 0, 100, 4000]),
        COST,
    )
    assert found[0] > found[1]
    assert found[2] > found[3]


def test_a_deadline_that_nears_raises_the_index() -> None:
    policy = EntropicPriority(gamma=1.0)
    found = policy.index(policy.init(3), candidates(3, slack=[np.inf, 0.1, 0.01]), COST)
    assert found[0] < found[1] < found[2]


def test_short_prompts_run_before_a_long_one_and_before_low_gain_decoding() -> None:
    policy = EntropicPriority()
    columns = {"prompt_left": [5000, 50, 0], "cells": [0, 0, 5000], "decode_left": [100, 100, 100]}
    found = policy.plan(policy.init(3), candidates(3, **columns), COST, Limits(0, 64))
    assert found.rows[0] == 1
    assert found.tokens[0] == 50
    assert found.reason == "prompts: best gain per cost"


def test_decoding_goes_on_while_a_prompt_is_worth_less() -> None:
    policy = EntropicPriority()
    state = state_of(policy, np.array([0.02, 2.0, 2.0]))
    columns = {"prompt_left": [8000, 0, 0], "cells": [0, 100, 100], "decode_left": [2, 100, 100]}
    found = policy.plan(state, candidates(3, **columns), COST, Limits(0, 64))
    assert sorted(found.rows.tolist()) == [1, 2]
    assert found.reason == "decoding set: best gain per cost"


@EVERY
def test_case_19_a_hundred_identical_requests_have_one_order(policy: Any) -> None:
    n = 100
    for prompt in (0, 40):
        same = candidates(n, prompt_left=np.full(n, prompt), cells=np.full(n, 0 if prompt else 50))
        state = policy.init(n)
        expected = policy.plan(state, same, COST, Limits(0, 64))
        assert policy.order(state, same, COST).tolist() == list(range(n))
        assert expected.rows.tolist() == list(range(len(expected.rows)))
        for seed in range(100):
            shuffle = np.random.default_rng(seed).permutation(n)
            mixed = Candidates(*(column[shuffle] for column in same))
            found = policy.plan(state, mixed, COST, Limits(0, 64))
            assert_array_equal(mixed.arrival[found.rows], expected.rows)
            assert_array_equal(found.tokens, expected.tokens)


def planned_tokens_fit(plan: Plan, given_to: Candidates, limits: Limits) -> None:
    left = given_to.prompt_left[plan.rows]
    assert len(set(plan.rows.tolist())) == len(plan.rows)
    assert (plan.tokens >= 1).all()
    assert (plan.tokens <= np.maximum(left, 1)).all()
    assert plan.tokens.sum() <= limits.step_tokens


@EVERY
@given(seed=st.integers(0, 10**6), n=st.integers(1, 12))
def test_plans_keep_to_slots_and_tokens(policy: Any, seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    found, flow = random_candidates(rng, n)
    # A request that is alone finds a slot: there is nobody to hold it.
    limits = Limits(int(rng.integers(n == 1, 4)), int(rng.integers(1, 600)))
    plan = policy.plan(state_of(policy, flow), found, COST, limits)
    planned_tokens_fit(plan, found, limits)
    new = plan.rows[~found.seated[plan.rows]]
    # One overdue row may ask for a slot beyond the free ones; it comes first.
    extra = policy.kind == "entropic" and len(new) and found.waited[new].max() >= policy.patience
    assert len(new) <= limits.free_slots + bool(extra)
    if len(new) > limits.free_slots:
        assert plan.rows[0] in new
        assert found.waited[plan.rows[0]] == found.waited.max()
    if found.seated.any() or limits.free_slots:
        assert len(plan.rows)


class Stream:
    """Requests that come and go, served by a policy one plan a step."""

    def __init__(self, seed: int, size: int, slots: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.size, self.slots, self.arrivals = size, slots, 0
        self.live: list[dict[str, Any]] = []

    def arrive(self, flow: float, prompt: int, decode: int) -> None:
        self.live.append(
            {
                "arrival": self.arrivals,
                "waited": 0,
                "prompt_left": prompt,
                "decode_left": decode,
                "cells": 0,
                "slack": np.inf,
                "seated": False,
                "flow": flow,
            }
        )
        self.arrivals += 1

    def step(self, policy: Any, step_tokens: int) -> Plan:
        names = Candidates._fields
        columns = {name: np.array([r[name] for r in self.live]) for name in names}
        flow = np.array([r["flow"] for r in self.live])
        free = self.slots - int(columns["seated"].sum())
        plan = policy.plan(
            state_of(policy, flow), Candidates(**columns), COST, Limits(free, step_tokens)
        )
        for request in self.live:
            request["waited"] += 1
        for row, tokens in zip(plan.rows.tolist(), plan.tokens.tolist(), strict=True):
            request = self.live[row]
            request["seated"], request["waited"] = True, 0
            request["cells"] += tokens
            if request["prompt_left"]:
                request["prompt_left"] -= tokens
            else:
                request["decode_left"] -= 1
        self.live = [r for r in self.live if r["decode_left"] > 0]
        return plan


@pytest.mark.parametrize("seed", range(6))
def test_no_request_waits_longer_than_patience_and_the_number_of_requests(seed: int) -> None:
    policy = EntropicPriority(patience=12)
    size = 8
    stream = Stream(seed, size, slots=size)
    # One that nobody would choose, and then a stream that is always worth more.
    stream.arrive(flow=0.0, prompt=3000, decode=2000)
    longest = served = 0
    for _ in range(1500):
        while len(stream.live) < size:
            decode = int(stream.rng.integers(1, 40))
            stream.arrive(stream.rng.uniform(1, 50), int(stream.rng.integers(1, 30)), decode)
        plan = stream.step(policy, 16)
        served += 0 in plan.rows
        longest = max(longest, *(r["waited"] for r in stream.live))
    assert policy.patience <= longest <= policy.patience + size
    assert served >= 1500 // (policy.patience + size) - 1


@pytest.mark.parametrize("seed", range(4))
def test_a_waiting_request_gets_its_slot_although_newcomers_are_worth_more(seed: int) -> None:
    policy = EntropicPriority(patience=10)
    stream = Stream(seed, 6, slots=3)
    stream.arrive(flow=0.0, prompt=4000, decode=4)
    poor = stream.live[0]
    for _ in range(2000):
        while len(stream.live) < 6:
            stream.arrive(50.0, int(stream.rng.integers(1, 5)), int(stream.rng.integers(1, 3)))
        stream.step(policy, 64)
        if poor["decode_left"] == 0:
            break
    assert poor["decode_left"] == 0, "starved"


def test_patience_names_the_reason() -> None:
    policy = EntropicPriority(patience=5)
    waited = [0, 7, 9]
    found = policy.plan(
        state_of(policy, np.array([9.0, 0.1, 0.1])),
        candidates(3, waited=waited, prompt_left=[0, 0, 500]),
        COST,
        Limits(0, 32),
    )
    assert found.rows.tolist() == [2]
    assert found.tokens.tolist() == [32]
    assert found.reason == "prompts: waited 9 steps"
    found = policy.plan(
        state_of(policy, np.array([9.0, 0.1])), candidates(2, waited=[0, 7]), COST, Limits(0, 1)
    )
    assert (found.rows.tolist(), found.reason) == ([1], "decoding set: waited 7 steps")


def test_first_come_orders_by_arrival_and_fills_with_prompts() -> None:
    policy = FirstCome()
    found = candidates(4, arrival=[3, 1, 2, 0], prompt_left=[0, 100, 0, 50])
    plan = policy.plan(policy.init(4), found, COST, Limits(0, 100))
    assert plan.rows.tolist() == [2, 0, 3, 1]
    assert plan.tokens.tolist() == [1, 1, 50, 48]


def test_round_robin_gives_turns() -> None:
    policy = RoundRobin()
    found = candidates(3, waited=[2, 9, 5])
    assert policy.order(policy.init(3), found, COST).tolist() == [1, 2, 0]


def test_shortest_remaining_orders_by_predicted_seconds() -> None:
    policy = ShortestRemaining()
    found = candidates(3, prompt_left=[2000, 0, 10], decode_left=[5, 300, 5], cells=[0, 50, 0])
    seconds = [
        COST.prefill(np.array(p), np.array(c)) * (p > 0) + d * COST.decode(np.array(1), c + p)
        for p, d, c in zip(found.prompt_left, found.decode_left, found.cells, strict=True)
    ]
    order = policy.order(policy.init(3), found, COST)
    assert_array_equal(order, np.argsort(seconds))
    assert_allclose(-policy.index(policy.init(3), found, COST), seconds)


def test_flow_is_the_filtered_fall_of_the_raw_entropy() -> None:
    policy = EntropicPriority(filter=0.5, prior=0.4, entropy_floor=0.1)
    gain, state = policy.update(policy.init(1), reading(1.0, raw_entropy=3.0))
    assert_allclose(gain, 0.4)
    gain, state = policy.update(state, reading(9.0, raw_entropy=2.0))
    assert_allclose(gain, 0.4 + 0.5 * (1.0 - 0.4))
    gain, state = policy.update(state, reading(0.0, raw_entropy=5.0))
    assert_allclose(gain, 0.35)
    gain, state = policy.update(state, reading(0.0, raw_entropy=0.0))
    assert_allclose(gain, 0.35 + 0.5 * (4.9 - 0.35))  # the floor: 5.0 to 0.1
    for _ in range(40):
        gain, state = policy.update(state, reading(0.0, raw_entropy=0.0))
    assert_allclose(gain, 0.1)


def test_entropic_time_counts_falls_only() -> None:
    entropies = np.array([np.nan, 3.0, 1.0, 2.5, 0.5])
    falls = fall(entropies[:-1], entropies[1:])
    assert falls.tolist() == [0.0, 2.0, 0.0, 2.0]
    assert [fallen(before, now) for before, now in pairwise(entropies.tolist())] == falls.tolist()
    assert fallen(1.0, np.nan) == fall(np.array(1.0), np.array(np.nan)) == 0


def test_impossible_parameters_are_refused() -> None:
    for bad in ({"alpha": 0.0}, {"beta": -1.0}, {"patience": 0}, {"filter": 1.5}):
        with pytest.raises(ValidationError):
            EntropicPriority(**bad)


class Weighing(EntropicPriority):
    """Weighs every step, also those with one set to choose from."""

    def _only_set(self, *_: Any) -> None:
        return None


@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(0, 2), st.integers(1, 12))
def test_what_need_not_be_weighed_comes_out_as_if_it_were(
    seed: int, n: int, free: int, room: int
) -> None:
    rng = np.random.default_rng(seed)
    waiting = rng.random(n) < rng.choice([0.0, 0.4])
    prompts = rng.random(n) < rng.choice([0.0, 0.3])
    columns = candidates(
        n,
        arrival=rng.permutation(n),
        waited=rng.choice(
            [0, 511, 512, 600], n, p=rng.choice([[1, 0, 0, 0], [0.7, 0.1, 0.1, 0.1]])
        ),
        prompt_left=np.where(prompts | waiting, rng.integers(1, 900, n), 0),
        decode_left=rng.integers(1, 300, n),
        cells=np.where(waiting, 0, rng.choice([256, 512, 6144], n)),
        slack=np.where(rng.random(n) < rng.choice([0.0, 0.2]), rng.random(n) * 9, np.inf),
        seated=~waiting,
    )
    flow = rng.gamma(0.5, 1.0, n)
    plans = [
        policy.plan(state_of(policy, flow), columns, COST, Limits(free, room))
        for policy in (EntropicPriority(), Weighing())
    ]
    for one, other in zip(*plans, strict=True):
        assert_array_equal(one, other)


def test_most_steps_of_a_full_batch_need_no_weighing() -> None:
    policy = EntropicPriority()
    seated = np.arange(16) < 8
    columns = candidates(16, seated=seated, prompt_left=np.where(seated, 0, 300))
    only = policy._only_set(policy.init(16), columns, COST, Limits(0, 512))
    assert only is not None
    assert only.tolist() == list(range(8))
    assert policy._only_set(policy.init(16), columns, COST, Limits(1, 512)) is None
