"""Slots and KV cells when they are short: who runs, who gives way, and that everything ends."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
from engines import events_of, ids, ledgers_are_true, reasons, simulated, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_control import Request
from entropic_control.backends import Chunk, SimulatedConfig
from entropic_control.controllers import (
    EntropicPriority,
    FirstCome,
    NoPruning,
    RoundRobin,
    ShortestRemaining,
)
from entropic_control.seats import Seats
from entropic_control.sequence import Sequence

PRIORITIES = [
    FirstCome(),
    RoundRobin(),
    ShortestRemaining(),
    EntropicPriority(),
    EntropicPriority(patience=3),
]
over_priorities = pytest.mark.parametrize(
    "priority",
    PRIORITIES,
    ids=lambda p: p.kind + (" hasty" if getattr(p, "patience", 0) == 3 else ""),
)


def request(name: str, prompt: int, tokens: int, **more: Any) -> Request:
    return Request(
        id=name, prompt=ids(prompt, len(name)), max_tokens=tokens, min_tokens=tokens, **more
    )


def run_checked(engine: Any, requests: list[Request], most: int = 20_000) -> None:
    """Run to the end; after every step the slots are distinct and the cells within the pool."""
    engine.submit_all(requests)
    slots, cells = engine.backend.capabilities.slots, engine.backend.config.cells
    steps, fed = 0, -1
    while not engine.idle:
        before = engine.progress[0]
        engine.step()
        taken = [work.slot for work in engine.unfinished if work.slot is not None]
        assert len(set(taken)) == len(taken) <= slots
        assert set(taken) <= set(range(slots))
        assert engine._seats.free == slots - len(taken)
        assert cells is None or 0 <= engine.backend.room() <= cells
        ledgers_are_true(engine)
        steps += 1
        assert steps < most, "no end in sight"
        fed = engine.progress[0]
        assert fed > before or events_of(engine, "failed"), "a step that fed no token"
    assert fed > 0


@over_priorities
def test_case_20_one_block_short_of_what_two_need(priority: Any) -> None:
    """Case 20: two requests, and one block less than both take: both finish, one after the other."""
    need = 2 * (48 + 64)
    expected = tokens_of(
        simulated(pruning=NoPruning()).run([request("a", 48, 64), request("bb", 48, 64)])
    )
    engine = simulated({"cells": need - 16, "slots": 2}, priority=priority, pruning=NoPruning())
    run_checked(engine, [request("a", 48, 64), request("bb", 48, 64)])
    report = engine.report()
    assert set(reasons(report).values()) == {"length"}
    assert tokens_of(report) == expected  # what was preempted went on where it was
    preempted = events_of(engine, "preempted")
    assert 1 <= len(preempted) == report.summary["preemptions"]
    for event in preempted:
        assert event["cells_kept"] > 0
        assert event["reason"].startswith("made room for ")
    # Progress is kept: no token is fed twice.
    steps = engine.trace.steps
    assert steps["prompt_tokens"].sum() + steps["rows"].sum() == need - 2


@over_priorities
def test_case_20_many_requests_in_a_pool_for_one(priority: Any) -> None:
    """Case 20: six requests, each of which needs nearly the whole pool."""
    engine = simulated(
        {"cells": 100, "slots": 4, "step_tokens": 32}, priority=priority, pruning=NoPruning()
    )
    run_checked(engine, [request("x" * (n + 1), 40 + n, 50) for n in range(6)])
    assert Counter(reasons(engine.report()).values()) == {"length": 6}


def test_case_20_what_can_never_fit_fails_alone() -> None:
    """Case 20: a prompt larger than the pool ends with an error, and the rest finish."""
    engine = simulated({"cells": 64, "slots": 2}, priority=FirstCome(), pruning=NoPruning())
    requests = [request("huge", 90, 10), request("ok", 20, 30)]
    report = engine.run(requests)
    assert reasons(report) == {"huge": "failed", "ok": "length"}
    (failed,) = [done for done in report.completions if done.id == "huge"]
    assert "no KV cells are left for request 'huge'" in (failed.error or "")
    assert engine.backend.room() == 64


@over_priorities
@pytest.mark.parametrize("cells", [None, 150])
def test_a_backend_that_cannot_swap_lets_the_seated_go_on(priority: Any, cells: int | None) -> None:
    engine = simulated(
        {"cells": cells, "slots": 1 if cells is None else 3, "can_swap": False},
        priority=priority,
        pruning=NoPruning(),
    )
    run_checked(engine, [request("a", 40, 30), request("bb", 30, 30), request("ccc", 40, 30)])
    report = engine.report()
    assert not events_of(engine, "preempted")
    if cells is None:  # one slot: they run one after the other
        assert set(reasons(report).values()) == {"length"}
    # 205 cells are needed and 150 are there: at most one cannot be finished.
    assert Counter(reasons(report).values())["length"] >= 2


@over_priorities
def test_case_18_what_is_scheduled_is_seated_and_the_budget_comes_back(priority: Any) -> None:
    """Case 18: small steps, and requests that arrive in between: nothing is lost or taken twice."""
    engine = simulated(
        {"slots": 2, "step_tokens": 8, "cells": 200}, priority=priority, pruning=NoPruning()
    )
    later = [request("b" * (n + 2), 20 + 9 * n, 12, arrive=0.05 * n) for n in range(5)]
    run_checked(engine, [request("a", 100, 40), *later])
    assert set(reasons(engine.report()).values()) == {"length"}
    steps = engine.trace.steps
    assert (steps["rows"] + steps["prompt_tokens"]).max() <= 8
    assert steps["rows"].max() <= 2
    assert engine.backend.room() == 200
    assert engine._seats.free == 2


@over_priorities
def test_case_19_a_hundred_identical_requests_run_in_a_fixed_order(priority: Any) -> None:
    """Case 19: same prompt, same arrival: the order is the order of arrival, every time."""

    def order() -> list[str]:
        engine = simulated({"slots": 8, "step_tokens": 64}, priority=priority, pruning=NoPruning())
        same = [Request(id=f"{n:03}", prompt=[5, 6, 7], max_tokens=4, seed=1) for n in range(100)]
        report = engine.run(same)
        assert len({tuple(done.tokens) for done in report.completions}) == 1
        return [work.id for work in engine.done]

    first = order()
    assert first == order()
    assert sorted(first) == [f"{n:03}" for n in range(100)]
    if priority.kind in ("first_come", "shortest_remaining"):
        assert first == sorted(first)


def test_patience_bounds_every_wait() -> None:
    """The long prompt is the worst bargain by far, and still no wait exceeds patience + requests."""
    engine = simulated(
        {"slots": 2, "step_tokens": 32},
        priority=EntropicPriority(patience=10),
        pruning=NoPruning(),
    )
    quick = [request("q" * (n + 1), 4, 30, arrive=0.2 * n) for n in range(12)]
    report = engine.run([request("long", 600, 20), *quick])
    assert set(reasons(report).values()) == {"length"}
    waits = [done.longest_wait for done in report.completions]
    assert 10 <= max(waits) <= 10 + 13


# -- the seats themselves -----------------------------------------------------------------------------


def work_of(number: int, prompt: int, backend: Any) -> Sequence:
    tokens = np.array(ids(prompt), np.int32)
    return Sequence(request(f"w{number}", prompt, 10), number, tokens, 10, 256)


@settings(max_examples=60)
@given(
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    slots=st.integers(1, 3),
    cells=st.integers(16, 120),
    swap=st.booleans(),
    forced=st.booleans(),
    plans=st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=6),
        min_size=1,
        max_size=8,
    ),
)
def test_whatever_is_planned_what_is_seated_fits(
    prompts: list[int],
    slots: int,
    cells: int,
    swap: bool,
    forced: bool,
    plans: list[list[tuple[int, int]]],
) -> None:
    backend: Any = SimulatedConfig(slots=slots, cells=cells, context=256, can_swap=swap).open()
    preempted: list[str] = []
    seats = Seats(backend, lambda work, _: preempted.append(work.id))
    works = [work_of(n, prompt, backend) for n, prompt in enumerate(prompts)]
    for wanted in plans:
        unique = {n: tokens for n, tokens in wanted if n < len(works)}
        plan = [
            (works[n], min(tokens, works[n].prompt_left))
            for n, tokens in unique.items()
            if works[n].prompt_left
        ]
        if not plan:
            continue
        held = {work.id: work.ledger.cells for work in works}
        live = [work for work in works if work.prompt_left]
        before = {work.id for work in works if work.slot is not None}
        seating = seats.take(plan, partial(list, live), "test", forced="patience" if forced else "")
        assert {work.id: work.ledger.cells for work in works} == held
        assert seats.free == slots - sum(work.slot is not None for work in works)
        taken = [work.slot for work in works if work.slot is not None]
        assert len(set(taken)) == len(taken) <= slots
        after = {work.id for work in works if work.slot is not None}
        if seating.starved is not None:
            assert not seating.shares
            assert seating.starved in [work for work, _ in plan]
        elif seating.refused:  # nobody waits for a free room
            assert not seating.shares
            assert before
            assert after == before
            assert plan[0][0].id not in before
            assert not (swap and forced)
        else:
            assert seating.shares
            if swap and forced:
                assert seating.shares[0][0] is plan[0][0]
        assert sum(tokens for _, tokens in seating.shares) <= backend.room()
        planned = {work.id: tokens for work, tokens in plan}
        for work, tokens in seating.shares:
            assert work.slot is not None
            assert 1 <= tokens <= planned.get(work.id, 1)
            start = work.ledger.length
            backend.forward([_chunk(work, start, tokens)])
            work.ledger.extend(tokens)
            assert backend.held(work.slot).tolist() == list(range(start + tokens))
            if not work.prompt_left:
                seats.leave(work)
    assert swap or not preempted


def _chunk(work: Sequence, start: int, tokens: int) -> Chunk:
    assert work.slot is not None
    return Chunk(work.slot, start, work.prompt[start : start + tokens], False)
