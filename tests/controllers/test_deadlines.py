"""Deadlines: what can still be had in time, who goes first for it, and what is not begun any more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from entropic_control.backends import SimulatedConfig
from entropic_control.config import Config
from entropic_control.controllers import EntropicPriority, NoPruning
from entropic_control.controllers.base import Array
from entropic_control.controllers.priority import Candidates, Limits
from entropic_control.controllers.priority.deadlines import pressing, tokens_in_time
from entropic_control.engine import Engine
from entropic_control.request import Request

pytestmark = pytest.mark.filterwarnings("error")


class Seconds:
    """10 ms a decode step and 1 ms a row; 4 ms a prompt token."""

    def decode(self, rows: Array, longest: Array) -> Array:
        return np.asarray(0.010 + 0.001 * rows + 0.0 * longest)

    def prefill(self, tokens: Array, cells: Array) -> Array:
        return np.asarray(0.004 * tokens + 0.0 * cells)


COST, LIMITS = Seconds(), Limits(0, 64)


def candidates(slack: list[float], prompt: list[int], **columns: Any) -> Candidates:
    n = len(slack)
    defaults = {
        "arrival": np.arange(n),
        "waited": np.zeros(n, int),
        "decode_left": np.full(n, 100),
        "cells": np.where(prompt, 0, 200),
        "seated": np.ones(n, bool),
    }
    given = {name: np.asarray(columns.get(name, value)) for name, value in defaults.items()}
    return Candidates(prompt_left=np.array(prompt), slack=np.array(slack), **given)


def test_tokens_in_time_are_those_after_the_prompt() -> None:
    c = candidates([np.inf, 1.0, 1.0, 0.3, -2.0], [500, 100, 0, 100, 0])
    prefill, alone = 0.004 * c.prompt_left, np.full(5, 0.02)
    assert tokens_in_time(c, prefill, alone).tolist() == [100, 30, 50, 0, 0]


def test_one_presses_if_waiting_would_cost_it_tokens_that_it_could_have() -> None:
    c = candidates([np.inf, 60.0, 2.8, 2.0, 0.3], [100] * 5)
    found = pressing(c, np.full(5, 0.4), np.full(5, 0.02), np.full(5, 0.02), wait=0.2)
    # 0.4 + 100 x 0.02 seconds, with a margin of a quarter and 0.2 to wait: 3.2.
    assert_array_equal(found, [False, False, True, True, False])


def test_a_long_prompt_whose_deadline_nears_goes_before_better_ones() -> None:
    policy = EntropicPriority()
    shorts = {"prompt": [1000, 30, 0], "decode_left": [100, 20, 20]}
    for slack, first, reason in (
        (60.0, 1, "prompts: best gain per cost"),
        (6.5, 0, "prompts: a deadline nears"),
        (3.9, 1, "prompts: best gain per cost"),  # 4 s for the prompt: nothing is left to save
    ):
        c = candidates([slack, np.inf, np.inf], **shorts)
        plan = policy.plan(policy.init(3), c, COST, LIMITS)
        assert (plan.rows[0], plan.reason) == (first, reason)


def test_a_decoding_row_whose_deadline_nears_takes_its_set_along() -> None:
    policy = EntropicPriority()
    c = candidates([np.inf, 1.5, np.inf], [20, 0, 0])
    plan = policy.plan(policy.init(3), c, COST, LIMITS)
    assert plan.reason == "decoding set: a deadline nears"
    assert (plan.rows[0], sorted(plan.rows)) == (1, [1, 2])


def test_of_several_pressing_requests_the_best_goes_first() -> None:
    policy = EntropicPriority()
    c = candidates([6.0, 3.0, 6.0], [1000, 400, 1000], decode_left=[100, 100, 40])
    plan = policy.plan(policy.init(3), c, COST, LIMITS)
    index = policy.index(policy.init(3), c, COST)
    assert plan.reason == "prompts: a deadline nears"
    assert plan.rows[0] == np.argmax(index)


def test_what_has_waited_too_long_goes_before_a_deadline() -> None:
    policy = EntropicPriority(patience=10)
    c = candidates([6.5, np.inf], [1000, 1000], waited=[0, 11])
    plan = policy.plan(policy.init(2), c, COST, LIMITS)
    assert (plan.rows[0], plan.reason) == (1, "prompts: waited 11 steps")


def test_what_cannot_be_had_in_time_is_begun_only_if_there_is_nothing_else() -> None:
    policy = EntropicPriority()
    late, other = candidates([0.5] * 2, [1000] * 2), candidates([0.5, np.inf], [1000, 4000])
    assert policy.plan(policy.init(2), other, COST, LIMITS).rows.tolist() == [1]
    assert len(policy.plan(policy.init(2), late, COST, LIMITS).rows)


def arrivals(deadline: float) -> list[Request]:
    """A long prompt with a deadline, and a stream of short ones, more than the engine can serve."""
    long = Request(
        id="long", prompt=[1] * 1600, max_tokens=60, min_tokens=60, deadline=deadline, seed=1
    )
    return [long] + [
        Request(prompt=[2 + n] * 60, max_tokens=60, min_tokens=60, arrive=0.6 * n, seed=n)
        for n in range(40)
    ]


def long_of(deadline: float) -> tuple[str, int, int]:
    """How the long request ended, its tokens, and the prompt tokens that were read for it."""
    config = Config(backend=SimulatedConfig(vocab=64, drift=0.0), pruning=NoPruning())
    with Engine(config) as engine:
        report = engine.run(arrivals(deadline))
        read = int(engine.trace.steps["prompt_tokens"].sum()) - 40 * 60
    assert all(c.finish_reason == "length" for c in report.completions[1:])
    one = report.completions[0]
    return one.finish_reason, len(one.tokens), read


def test_the_engine_meets_a_deadline_that_can_be_met_and_reads_no_prompt_for_nothing() -> None:
    assert long_of(20.0) == ("length", 60, 1600)
    assert long_of(7.0) == ("deadline", 0, 0)
