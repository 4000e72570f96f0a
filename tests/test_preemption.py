"""Swaps are for what pays: equals do not take turns, whoever gave way waits, and all of it ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import events_of, ids, ledgers_are_true, reasons, simulated, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_control import Request
from entropic_control.backends.cost import CostModel
from entropic_control.controllers import (
    EntropicPriority,
    FirstCome,
    NoPruning,
    RoundRobin,
    ShortestRemaining,
)
from entropic_control.controllers.priority import Candidates, FlowState

PRIORITIES = [FirstCome(), RoundRobin(), ShortestRemaining(), EntropicPriority()]
over_priorities = pytest.mark.parametrize("priority", PRIORITIES, ids=lambda p: p.kind)


def equals(count: int, prompt: int, tokens: int) -> list[Request]:
    return [
        Request(id=f"{n:02}", prompt=ids(prompt, n), max_tokens=tokens, min_tokens=tokens)
        for n in range(count)
    ]


def ran(requests: list[Request], priority: Any, most: int = 20_000, **backend: Any) -> Any:
    """The engine after all of them are done; after every step its ledgers are true."""
    engine = simulated(backend, priority=priority, pruning=NoPruning())
    engine.submit_all(requests)
    steps = 0
    while not engine.idle:
        engine.step()
        ledgers_are_true(engine)
        steps += 1
        assert steps < most, "no end in sight"
    return engine


def preemptions(engine: Any) -> int:
    return sum(work.preemptions for work in engine.done)


@over_priorities
@pytest.mark.parametrize(
    ("count", "prompt", "tokens", "slots", "cells"),
    [
        (2, 20, 150, 2, 200),
        (2, 90, 100, 2, 256),
        (3, 20, 150, 3, 300),
        (8, 20, 150, 4, 400),
        (8, 20, 150, 8, 600),
        (6, 100, 60, 3, 330),
    ],
)
def test_equals_never_take_turns(
    priority: Any, count: int, prompt: int, tokens: int, slots: int, cells: int
) -> None:
    """Each gives way to another at most once, whatever the policy."""
    engine = ran(equals(count, prompt, tokens), priority, slots=slots, cells=cells)
    assert set(reasons(engine.report()).values()) == {"length"}
    assert preemptions(engine) <= count
    assert max(work.preemptions for work in engine.done) <= 1
    expected = tokens_of(
        simulated(priority=priority, pruning=NoPruning()).run(equals(count, prompt, tokens))
    )
    assert tokens_of(engine.report()) == expected


def test_the_entropic_index_swaps_equals_little_more_than_first_come() -> None:
    for count, slots, cells in [(2, 2, 200), (5, 2, 200), (8, 4, 400), (8, 8, 600), (12, 4, 500)]:
        first = preemptions(ran(equals(count, 20, 150), FirstCome(), slots=slots, cells=cells))
        own = preemptions(ran(equals(count, 20, 150), EntropicPriority(), slots=slots, cells=cells))
        assert own <= 2 * first + 1


class _Tight:
    """A load that does not fit."""

    requests = st.lists(
        st.tuples(
            st.integers(1, 120),  # prompt
            st.integers(1, 120),  # tokens
            st.sampled_from([None, None, 0.5, 2.0, 6.0]),  # deadline
            st.sampled_from([0.0, 0.0, 0.3, 1.5]),  # arrival
        ),
        min_size=2,
        max_size=10,
    )


@settings(max_examples=60, deadline=None)
@given(
    load=_Tight.requests,
    priority=st.sampled_from(PRIORITIES),
    slots=st.integers(1, 5),
    cells=st.integers(100, 500),
    step_tokens=st.sampled_from([8, 64, 512]),
)
def test_preemptions_are_bounded_by_the_requests(
    load: list[tuple[int, int, float | None, float]],
    priority: Any,
    slots: int,
    cells: int,
    step_tokens: int,
) -> None:
    """No request gives way more than three times unless another had waited too long."""
    requests = [
        Request(
            id=f"{n:02}",
            prompt=ids(prompt, n),
            max_tokens=tokens,
            deadline=deadline,
            arrive=arrive,
        )
        for n, (prompt, tokens, deadline, arrive) in enumerate(load)
    ]
    engine = ran(requests, priority, slots=slots, cells=cells, step_tokens=step_tokens)
    assert len(engine.done) == len(requests)
    for work in engine.done:
        # What fails can never fit; what is cut off had a deadline.
        allowed = {"length", "end"} | ({"deadline"} if work.request.deadline else set())
        if len(work.prompt) + work.limit > cells:
            allowed |= {"failed"}
        assert work.reason in allowed
    own = [e for e in events_of(engine, "preempted") if "waited" not in e["reason"]]
    assert len(own) <= 2 * len(requests)
    assert engine.backend.room() == cells


# -- what a swap is worth -----------------------------------------------------------------------------


def candidates(**columns: list[float]) -> Candidates:
    count = len(next(iter(columns.values())))
    plain: dict[str, Any] = {
        "arrival": np.arange(count),
        "waited": np.zeros(count, int),
        "prompt_left": np.zeros(count, int),
        "decode_left": np.full(count, 100),
        "cells": np.full(count, 100),
        "slack": np.full(count, np.inf),
        "seated": np.ones(count, bool),
    }
    return Candidates(**plain | {name: np.array(column) for name, column in columns.items()})


def costs() -> CostModel:
    return simulated().backend.cost


def pays(
    c: Candidates, flow: list[float], cost: CostModel, coming: int = 0, going: int = 1
) -> bool:
    state = FlowState(np.ones(len(flow)), np.array(flow))
    return EntropicPriority().pays(state, c, cost, coming, going)


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.integers(1, 500),
    tokens=st.integers(2, 300),
    done=st.integers(0, 299),
    flow=st.floats(0.03, 3.0),
)
def test_a_swap_between_equals_never_pays(prompt: int, tokens: int, done: int, flow: float) -> None:
    """Neither for a fresh one, nor for one that is ahead; the one under way has less left."""
    done = min(done, tokens - 1)
    fresh = candidates(
        prompt_left=[prompt, 0], decode_left=[tokens, tokens - done], cells=[0, prompt + done]
    )
    assert not pays(fresh, [flow, flow], costs())
    alike = candidates(decode_left=[tokens, tokens], cells=[prompt, prompt])
    assert not pays(alike, [flow, flow], costs())


def test_a_swap_pays_for_more_gain_a_second_unless_it_is_dear() -> None:
    c = candidates(decode_left=[20, 400], cells=[50, 2000])
    cost = costs()
    assert pays(c, [2.0, 0.2], cost)
    assert not pays(c, [0.25, 0.2], cost)  # gains are too noisy for that little
    assert not pays(c, [2.0, 0.2], cost, coming=1, going=0)
    for _ in range(40):
        cost.observe_swap(2000, 60.0)
    assert cost.swap(2000) > 50
    assert not pays(c, [2.0, 0.2], cost)


class Eager(EntropicPriority):
    """Finds that every swap pays."""

    kind: str

    def pays(self, state: Any, candidates: Any, cost: Any, coming: int, going: int) -> bool:
        return True


def test_even_where_every_swap_seems_to_pay_none_is_undone_by_another() -> None:
    """A claim is made once, and never by one that gave way."""
    load = equals(8, 60, 80)
    engine = ran(load, Eager(kind="eager"), slots=3, cells=300)
    assert set(reasons(engine.report()).values()) == {"length"}
    assert preemptions(engine) <= 2 * len(load)


def test_a_deadline_makes_another_give_way_once() -> None:
    requests = [
        Request(id="long", prompt=ids(100, 1), max_tokens=150, min_tokens=150),
        Request(
            id="due", prompt=ids(60, 2), max_tokens=60, min_tokens=60, arrive=0.8, deadline=2.0
        ),
    ]
    engine = ran(requests, EntropicPriority(), slots=2, cells=256)
    assert reasons(engine.report())["due"] == "length"
    assert preemptions(engine) <= 1
