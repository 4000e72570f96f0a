"""From submission to release: what is wrong fails alone; late cancels, closed streams, long queues."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from engines import PLAIN, events_of, ids, reasons, simulated, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_control import Engine, Request
from entropic_control.controllers import EntropicPriority, FirstCome, RoundRobin
from entropic_control.controllers.priority import Plan
from entropic_control.errors import ConfigError, EntropicError, RequestError
from entropic_control.ordering import Ordering
from entropic_control.request import Event, Failed, Finished
from entropic_control.sequence import Sequence

OK = Request(id="ok", prompt=ids(8), max_tokens=6, seed=3)

WRONG: dict[str, Any] = {
    "setting out of range": Request(prompt="Hi", temperature={"target": -1.0}),
    "setting that no controller has": Request(prompt="Hi", temperature={"warmth": 1.0}),
    "taken id": Request(id="ok", prompt="Hi"),
    "empty": "",
    "token outside": [10**6],
    "forced token outside": Request(prompt="Hi", forced=(10**6,)),
    "too long": [1] * 9000,
    "a number": 7,
    "nothing": None,
    "bytes": b"\xff\xfe",
    "an object": object(),
    "chat without content": [{"role": "user"}],
    "unchecked tokens": Request.model_construct(prompt="Hi", max_tokens="many"),
    "unchecked seed": Request.model_construct(prompt="Hi", seed=object()),
    "unchecked id": Request.model_construct(prompt="Hi", id=["a"]),
    "unchecked stop": Request.model_construct(prompt="Hi", stop=5),
    "nothing at all": Request.model_construct(),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("bad", WRONG.values(), ids=WRONG)
def test_whatever_is_wrong_with_a_request_it_fails_alone(bad: Any, place: int) -> None:
    expected = tokens_of(simulated().run([OK]))["ok"]
    engine = simulated()
    report = engine.run([bad, OK] if place == 0 and bad is not WRONG["taken id"] else [OK, bad])
    assert sorted(reasons(report).values()) == ["failed", "length"]
    assert tokens_of(report)["ok"] == expected
    (failed,) = [work for work in engine.done if work.reason == "failed"]
    assert isinstance(failed.error, EntropicError)
    assert failed.id != "ok"
    assert engine.idle
    assert list(reasons(engine.run(["Hi"])).values()) == ["length"]
    # Submitted by itself it raises, and the engine is as it was.
    engine = simulated()
    engine.submit(OK)
    for _ in range(2):
        with pytest.raises((RequestError, ConfigError)):
            engine.submit(bad)
    assert [work.id for work in engine.unfinished] == ["ok"]
    assert engine.submit("Hi") == "1"
    assert engine.trace.names == ["ok", "1"]


@pytest.mark.parametrize(
    "raised", [ValueError("x"), KeyError("x"), RecursionError(), ZeroDivisionError(), TypeError()]
)
def test_a_template_that_raises_fails_the_request(raised: Exception) -> None:
    engine = simulated()
    plain: Any = engine.backend.encode

    def encode(prompt: Any) -> Any:
        if prompt == "bad":
            raise raised
        return plain(prompt)

    engine.backend.encode = encode  # type: ignore[method-assign]
    report = engine.run(["bad", OK, "good"])
    assert reasons(report) == {"0": "failed", "ok": "length", "2": "length"}
    assert "template or tokenizer" in (report.completions[0].error or "")
    with pytest.raises(RequestError, match="template or tokenizer"):
        engine.submit("bad")


@settings(max_examples=60)
@given(st.lists(st.one_of(st.none(), st.integers(0, 8).map(str)), max_size=10))
def test_ids_that_are_given_are_none_that_the_user_chose(names: list[str | None]) -> None:
    engine = simulated()
    report = engine.run([Request(id=n, prompt=[3, 4], max_tokens=1) for n in names])
    given_ids = [done.id for done in report.completions]
    assert len(set(given_ids)) == len(names)
    chosen = {name for name in names if name is not None}
    assert chosen <= set(given_ids)
    failed = [done for done in report.completions if done.finish_reason == "failed"]
    assert len(failed) == sum(name is not None for name in names) - len(chosen)
    assert not {done.id for done in failed} & chosen
    if not chosen:
        assert given_ids == [str(n) for n in range(len(names))]


# -- cancel -----------------------------------------------------------------------------------------


def test_a_late_cancel_does_nothing() -> None:
    engine = simulated()
    engine.run([[5, 6]])
    engine.cancel("0")  # finished
    engine.cancel("1")  # never there
    assert reasons(engine.run([[7, 8], [9]])) == {"0": "length", "1": "length"}
    engine.forget()
    engine.cancel("0")  # forgotten
    assert reasons(engine.run([[7, 8]])) == {"0": "length"}
    name = engine.submit([3])
    engine.submit(Request(id="x", prompt=[3], max_tokens=2))
    engine.cancel(name)
    engine.cancel(name)
    ends = reasons(engine.run())
    assert (ends[name], ends["x"]) == ("cancelled", "length")


def test_a_cancel_before_an_id_is_used_again_is_not_for_the_new_one() -> None:
    engine = simulated()
    engine.submit(Request(id="a", prompt=[3], max_tokens=1))
    engine.submit(Request(id="b", prompt=[3], max_tokens=50))
    engine.cancel("a")
    while any(work.id == "a" for work in engine.unfinished):
        engine.step()
    engine.forget()
    engine.submit(Request(id="a", prompt=[4], max_tokens=3))
    assert reasons(engine.run()) == {"b": "length", "a": "length"}


def test_a_cancel_from_another_thread_during_a_run() -> None:
    engine = simulated()
    plain: Any = engine.backend.forward

    def forward(chunks: Any) -> Any:
        if engine.trace.steps and len(engine.trace.steps) == 5:
            other = threading.Thread(target=engine.cancel, args=("0",))
            other.start()
            other.join(30)
        return plain(chunks)

    engine.backend.forward = forward  # type: ignore[method-assign]
    report = engine.run([[5, 6], [7, 8]])
    assert reasons(report) == {"0": "cancelled", "1": "length"}
    assert 4 <= len(report.completions[0].tokens) <= 7


# -- streams ----------------------------------------------------------------------------------------


def closed(stream: Iterator[Event]) -> None:
    stream.close()  # type: ignore[attr-defined]


def thrown_at(stream: Iterator[Event]) -> None:
    with pytest.raises(ZeroDivisionError):
        stream.throw(ZeroDivisionError())  # type: ignore[attr-defined]


def collected(stream: Iterator[Event]) -> None:
    holder: list[Any] = [stream]
    holder.append(holder)
    del stream, holder


CLOSINGS: dict[str, Callable[[Iterator[Event]], None]] = {
    "closed": closed,
    "thrown at": thrown_at,
    "collected": collected,
}


@pytest.mark.parametrize("events", [1, 2, 9])
@pytest.mark.parametrize("how", [*CLOSINGS, "left by break", "left by an error"])
def test_a_stream_closed_early_ends_its_requests_and_no_others(how: str, events: int) -> None:
    other = Request(id="other", prompt=ids(9), max_tokens=30, seed=1)
    expected = tokens_of(simulated().run([other]))["other"]
    engine = simulated({"slots": 3})
    engine.submit(other)
    mine = [Request(id=f"m{n}", prompt=ids(5, n), max_tokens=40) for n in range(4)]

    def read() -> None:
        for count, _ in enumerate(engine.stream(mine), 1):
            if count == events:
                if how == "left by an error":
                    raise ZeroDivisionError
                break

    if how == "left by break":
        read()
    elif how == "left by an error":
        with pytest.raises(ZeroDivisionError):
            read()
    else:
        stream = engine.stream(mine)
        for _ in range(events):
            next(stream)
        CLOSINGS[how](stream)
        del stream
    gc.collect()
    assert [work.id for work in engine.unfinished] == ["other"]
    held = sum(work.slot is not None for work in engine.unfinished)
    assert engine._seats.free == 3 - held
    report = engine.run()
    assert reasons(report) == {"other": "length"} | {f"m{n}": "cancelled" for n in range(4)}
    assert tokens_of(report)["other"] == expected


def test_a_stream_read_to_its_end_cancels_nothing() -> None:
    engine = simulated()
    events = list(engine.stream([OK, "Hi"]))
    assert {type(event) for event in events if not hasattr(event, "token")} == {Finished}
    assert set(reasons(engine.report()).values()) == {"length"}


# -- long queues --------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [EntropicPriority(), FirstCome(), RoundRobin()])
def test_a_step_weighs_a_few_of_those_that_wait(priority: Any) -> None:
    engine = simulated({"slots": 2}, priority=priority)
    seen: list[int] = []
    plain = engine._candidates

    def candidates(live: Any) -> Any:
        seen.append(len(live))
        return plain(live)

    engine._candidates = candidates  # type: ignore[method-assign]
    for n in range(3000):
        engine.submit(Request(prompt=[1 + n % 400, 2], max_tokens=3))
    for _ in range(30):
        engine.step()
    assert 2 < max(seen) <= 2 + 2 * 32
    assert 3000 * 5 - 100 < engine.progress[1] <= 3000 * 5
    assert engine.trace.steps["waiting"][-1] > 2900


def test_the_longest_waiting_is_always_weighed() -> None:
    """Patience bounds waits in a queue that is many times longer than what a step looks at."""
    engine = simulated({"slots": 1, "vocab": 32}, priority=EntropicPriority(patience=5))
    count = 150
    report = engine.run([Request(prompt=[1 + n % 30], max_tokens=2) for n in range(count)])
    assert set(reasons(report).values()) == {"length"}
    assert max(done.longest_wait for done in report.completions) <= 5 + count


def test_deadlines_far_back_in_the_queue_are_kept() -> None:
    engine = simulated({"slots": 1, "vocab": 32}, **PLAIN)
    waiting = [Request(prompt=[3], max_tokens=20) for _ in range(100)]
    engine.submit_all([*waiting, Request(id="due", prompt=[3], max_tokens=2, deadline=0.5)])
    while engine.backend.now() < 0.6:
        engine.step()
    assert reasons(engine.report())["due"] == "deadline"


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 2),  # arrival
            st.one_of(st.none(), st.floats(0.01, 3)),  # deadline
            st.integers(1, 6),  # tokens
            st.booleans(),  # cancelled
        ),
        min_size=1,
        max_size=60,
    ),
    st.integers(1, 3),
)
def test_every_request_ends_once_whatever_its_arrival(works: list[Any], slots: int) -> None:
    engine = simulated({"slots": slots, "vocab": 32, "cells": 64 * slots})
    for n, (arrive, deadline, tokens, _) in enumerate(works):
        engine.submit(
            Request(id=str(n), prompt=[3, 4], max_tokens=tokens, arrive=arrive, deadline=deadline)
        )
    for n, (_, _, _, cancelled) in enumerate(works):
        if cancelled:
            engine.cancel(str(n))
    while not engine.idle:
        engine.step()
    assert sorted(work.number for work in engine.done) == list(range(len(works)))
    ends = reasons(engine.report())
    assert {ends[str(n)] for n, work in enumerate(works) if work[3]} <= {"cancelled"}
    assert set(ends.values()) <= {"length", "deadline", "cancelled"}
    assert engine._seats.free == slots
    assert engine.progress[1] == engine.progress[0]
    assert len(engine._roster) == engine._roster.reach == engine._roster.waiting == 0


def test_a_busy_engine_forgets_what_is_finished() -> None:
    """Never idle: objects and rows are those of the unfinished, and these go on undisturbed."""
    long = Request(id="long", prompt=ids(9), max_tokens=400, seed=1)
    expected = tokens_of(simulated().run([long]))["long"]

    def alive() -> int:
        gc.collect()
        return sum(isinstance(thing, Sequence) for thing in gc.get_objects())

    before = alive()
    engine = simulated()
    engine.submit(long)
    sizes = []
    for turn in range(40):
        engine.submit_all(Request(prompt=[3, n + 1], max_tokens=2) for n in range(5))
        while len(engine.unfinished) > 1:
            engine.step()
        assert not engine.idle
        engine.forget()
        rows, names = len(engine.trace.tokens), len(engine.trace.names)
        assert (rows, names) == (len(engine.unfinished[0].tokens), 1)
        assert len(engine.trace.events) == len(engine.trace.steps) == len(engine.done) == 0
        if turn > 5:
            sizes.append(alive() - before)
    assert max(sizes) <= 1 + 5  # one unfinished, and those of readings that still wait
    report = engine.run()
    assert tokens_of(report) == {"long": expected}
    assert report.trace.of("long")["token"].tolist() == list(range(400))


# -- plans and arrivals -------------------------------------------------------------------------------


class Idle(FirstCome):
    """Serves nobody, or only now and then."""

    kind: str  # of no default, so that it stays out of the registry
    every: int = 0

    def plan(self, state: Any, candidates: Any, cost: Any, limits: Any) -> Plan:
        plan = super().plan(state, candidates, cost, limits)
        if self.every and candidates.decode_left.sum() % self.every == 0:
            return plan
        return Plan(plan.rows[:0], plan.tokens[:0], "no wish to")


@pytest.mark.parametrize("every", [0, 3])
def test_a_plan_that_serves_nobody_gives_way_to_the_order_of_arrival(every: int) -> None:
    engine = simulated({"slots": 2})
    expected = tokens_of(engine.run([Request(prompt=ids(9, n), max_tokens=9) for n in range(4)]))
    engine = simulated({"slots": 2})
    engine._order = Ordering(Idle(kind="idle", every=every), engine._by_arrival)
    works = [Request(prompt=ids(9, n), max_tokens=9) for n in range(4)]
    events = []
    for event in engine.stream(works):
        events.append(event)
        assert len(events) < 100
    assert tokens_of(engine.report()) == expected
    notes = events_of(engine, "fault")
    assert notes
    assert "planned the rows" in notes[0]["reason"] or "gave" in notes[0]["reason"]


def sleepy(engine: Engine) -> Engine:
    """On a clock that runs by itself."""
    backend: Any = engine.backend
    backend.capabilities = backend.capabilities._replace(virtual_clock=False)
    backend.now, backend.sleep = time.perf_counter, time.sleep
    return engine


@pytest.mark.parametrize("what", ["submit", "cancel"])
def test_an_engine_that_waits_for_an_arrival_hears_of_others(what: str) -> None:
    engine = sleepy(simulated())
    engine.submit(Request(id="late", prompt="Hi", max_tokens=2, arrive=600.0))
    seen: list[Event] = []

    def drive() -> None:
        seen.extend(engine.step())

    driver = threading.Thread(target=drive)
    driver.start()
    time.sleep(0.05)
    assert driver.is_alive()
    if what == "submit":
        engine.submit(Request(id="now", prompt="Hi", max_tokens=1))
    else:
        engine.cancel("late")
    driver.join(30)
    assert not driver.is_alive()
    assert [event.request for event in seen][-1:] == ["now" if what == "submit" else "late"]
    assert not any(isinstance(event, Failed) for event in seen)


def test_steps_retried_one_by_one_are_learnt_one_by_one() -> None:
    from entropic_control.errors import DecodeError

    engine = simulated({"slots": 4}, **PLAIN)
    plain: Any = engine.backend.forward
    learnt: list[tuple[int, float]] = []
    observe: Any = engine.backend.cost.observe

    def forward(chunks: Any) -> Any:
        if len(chunks) > 1:
            raise DecodeError(-1, "no")
        return plain(chunks)

    def watch(shape: Any, seconds: float) -> None:
        learnt.append((shape.rows, seconds))
        observe(shape, seconds)

    engine.backend.forward = forward  # type: ignore[method-assign]
    engine.backend.cost.observe = watch  # type: ignore[method-assign]
    prior = engine.backend.cost.weights.copy()
    report = engine.run([Request(prompt=ids(20, n), max_tokens=40) for n in range(4)])
    assert max(rows for rows, _ in learnt) == 1
    np.testing.assert_allclose(engine.backend.cost.weights, prior, rtol=0.02)
    assert report.summary["cost_error_median"] < 0.02
