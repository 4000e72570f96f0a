"""The decode loop on the simulated plant: what runs, what is measured, and what fails alone."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from engines import (
    GREEDY,
    PLAIN,
    configured,
    events_of,
    ids,
    ledgers_are_true,
    reasons,
    simulated,
    tokens_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_control import Engine, Request, load
from entropic_control.backends import Chunk, SimulatedConfig
from entropic_control.controllers import (
    EntropicPriority,
    EntropicPruning,
    FirstCome,
    FixedTemperature,
    NoPruning,
    PITemperature,
    RandomPruning,
    RoundRobin,
    ShortestRemaining,
    SlidingWindow,
    TopK,
)
from entropic_control.controllers.state import map_leaves
from entropic_control.errors import CapabilityError, DecodeError, EngineBusy, LogitsError, NoRoom
from entropic_control.request import Failed, Finished, Token

PRUNE = EntropicPruning(budget=96, sinks=1, recent=2, min_tokens=64, gate=None)


def requests(count: int = 4, tokens: int = 20, prompt: int = 30) -> list[Request]:
    return [
        Request(id=f"r{n}", prompt=ids(prompt + 7 * n, n), max_tokens=tokens, seed=n)
        for n in range(count)
    ]


def test_a_run_generates_what_was_asked_for() -> None:
    report = simulated().run(["Write a story.", Request(prompt="Another.", max_tokens=7)])
    assert [len(done.tokens) for done in report.completions] == [256, 7]
    assert [done.finish_reason for done in report.completions] == ["length", "length"]
    assert report.completions[1].text.count(" w") == 7
    assert report.summary["tokens"] == 263
    assert report.summary["failed"] == 0


def test_a_configuration_makes_an_engine() -> None:
    engine = load({"temperature": {"kind": "pi", "target": 2.0}}, backend="simulated")
    assert engine.config.temperature == PITemperature(target=2.0)
    assert engine.run([Request(prompt="Hi", max_tokens=3)]).completions[0].target == 2.0


def test_events_tell_the_whole_story() -> None:
    events = list(simulated().stream(requests(2, tokens=5)))
    for name in ("r0", "r1"):
        mine = [event for event in events if event.request == name]
        assert [type(event) for event in mine] == [Token] * 5 + [Finished]
        assert mine[-1].reason == "length"
    report = simulated().run(requests(2, tokens=5))
    shown = {
        name: "".join(e.text for e in events if e.request == name and not isinstance(e, Failed))
        for name in ("r0", "r1")
    }
    assert shown == {done.id: done.text for done in report.completions}


def test_the_end_token_ends_and_is_no_text() -> None:
    engine = simulated({"end": 5.0}, **PLAIN)
    report = engine.run(requests(4, tokens=400))
    assert set(reasons(report).values()) == {"end"}
    for done in report.completions:
        assert done.tokens[-1] == 0
        assert 0 not in done.tokens[:-1]
        assert len(done.text.split()) == len(done.tokens) - 1


@pytest.mark.parametrize("priority", [EntropicPriority(), RoundRobin(), ShortestRemaining()])
@pytest.mark.parametrize("step_tokens", [16, 512])
def test_tokens_do_not_depend_on_the_schedule(priority: Any, step_tokens: int) -> None:
    alone: dict[str, list[int]] = {}
    for request in requests():
        alone |= tokens_of(simulated({"slots": 1}, priority=FirstCome()).run([request]))
    together = simulated({"slots": 3, "step_tokens": step_tokens}, priority=priority)
    assert tokens_of(together.run(requests())) == alone


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_chunks_of_a_prompt_are_measured_like_the_whole(share: float) -> None:
    tables = []
    pruning = PRUNE.replace(window=0.0, measured=share)
    for step_tokens in (16, 24, 512):
        engine = simulated({"step_tokens": step_tokens}, pruning=pruning)
        engine.submit(Request(prompt=ids(200), max_tokens=9))
        while engine.unfinished[0].prompt_left:
            engine.step()
        tables.append(engine.unfinished[0].ledger.export()["surprisal"].max(axis=1))
    assert np.count_nonzero(tables[0]) == 13
    np.testing.assert_array_equal(tables[0], tables[2])
    np.testing.assert_array_equal(tables[1], tables[2])


@pytest.mark.parametrize("step_tokens", [7, 16, 512])
def test_surprisal_belongs_to_the_block_of_its_own_token(step_tokens: int) -> None:
    # What was to be expected, but for the first token of one block and the last of another.
    plant = SimulatedConfig().open()
    prompt = [5]
    while len(prompt) < 100:
        chunk = Chunk(0, 0, np.array(prompt[-1:], np.int32), True)
        row = plant.forward([chunk]).logits[0][1:]
        plant.release(0)
        surprising = len(prompt) in (32, 79)
        prompt.append(1 + int(row.argmin() if surprising else row.argmax()))
    pruning = PRUNE.replace(window=0.0, measured=1.0, numbers=0.0)
    engine = simulated({"step_tokens": step_tokens}, pruning=pruning)
    engine.submit(Request(prompt=prompt, max_tokens=9))
    while engine.unfinished[0].prompt_left:
        engine.step()
    nats = engine.unfinished[0].ledger.export()["surprisal"].max(axis=1)
    assert np.flatnonzero(nats > 6).tolist() == [2, 4]
    assert np.all(nats[:7] > 0)


def test_case_11_generated_blocks_carry_the_surprisal_of_their_tokens() -> None:
    engine = simulated(pruning=PRUNE)
    engine.submit(Request(id="a", prompt=ids(100), max_tokens=80))
    while engine.unfinished[0].decode_left > 1:
        engine.step()
    work = engine.unfinished[0]
    nats = work.ledger.export()["surprisal"].max(axis=1)
    trace = engine.trace.of("a")
    position = 100 + trace["token"]
    for block in range(7, 10):  # those that hold generated tokens alone
        mine = position // 16 == block
        assert nats[block] == pytest.approx(trace["raw_surprisal"][mine].max())


def test_prompts_are_measured_only_where_pruning_will_need_it() -> None:
    def measured(pruning: Any, prompt: int) -> bool:
        engine = simulated(pruning=pruning)
        engine.run([Request(prompt=ids(prompt), max_tokens=5)])
        return bool(engine.trace.steps["measured"].any())

    assert measured(PRUNE.replace(measured=1.0), 200)
    assert measured(PRUNE.replace(measured=0.1), 200)
    assert not measured(PRUNE.replace(measured=0.0), 200)
    assert not measured(PRUNE.replace(measured=1.0), 40)
    assert not measured(NoPruning(), 200)
    assert not measured(SlidingWindow(budget=96, recent=2, min_tokens=64), 200)


@pytest.mark.parametrize("step_tokens", [16, 48, 512])
def test_the_prompt_in_the_window_is_not_measured(step_tokens: int) -> None:
    pruning = PRUNE.replace(window=0.5, measured=1.0)
    engine = simulated({"step_tokens": step_tokens}, pruning=pruning)
    engine.submit(Request(prompt=ids(400), max_tokens=20))
    while engine.unfinished[0].prompt_left:
        engine.step()
    nats = engine.unfinished[0].ledger.export()["surprisal"].ravel()
    last = pruning.measures(420)
    assert last == 420 - 48 + PRUNE.lead
    assert np.all(nats[1:last] > 0)
    assert not np.any(nats[last:400])
    assert engine.trace.steps["measured"].sum() == last - 1


@pytest.mark.parametrize("step_tokens", [16, 48, 512])
def test_what_is_not_measured_is_estimated_before_the_prompt_is_read(step_tokens: int) -> None:
    def nats_of(share: float, numbers: float = 1.0) -> Any:
        pruning = PRUNE.replace(window=0.25, measured=share, numbers=numbers)
        engine = simulated({"step_tokens": step_tokens}, pruning=pruning)
        engine.submit(Request(prompt=ids(400), max_tokens=20))
        work = engine.unfinished[0]
        before = work.ledger.export()["surprisal"].ravel()[:400]
        while work.prompt_left:
            engine.step()
        after = work.ledger.export()["surprisal"].ravel()[:400]
        asked = int(engine.trace.steps["measured"].sum())
        return work.survey, before, after, asked

    _, _, true, _ = nats_of(1.0, numbers=0.0)
    for share in (0.0, 0.4):
        survey, before, after, asked = nats_of(share)
        estimate = survey.estimate.astype(np.float32)
        np.testing.assert_array_equal(before, estimate)
        measured = true + survey.extra.astype(np.float32)
        np.testing.assert_allclose(after, np.where(survey.measured, measured, estimate), rtol=1e-6)
        assert asked == survey.measured.sum()


def test_pruning_between_the_chunks_of_a_prompt_makes_later_chunks_cheaper() -> None:
    def run(pruning: Any) -> Any:
        engine = simulated({"step_tokens": 128}, pruning=pruning, priority=FirstCome())
        engine.submit(Request(prompt=ids(2000), max_tokens=20))
        while not engine.idle:
            engine.step()
            ledgers_are_true(engine)
            for work in engine.unfinished:
                assert not pruning.during_prefill or work.ledger.cells < 0.55 * 2000 + 128
        return engine

    pruning = EntropicPruning(budget=0.5, min_tokens=256)
    after, between = run(pruning), run(pruning.replace(during_prefill=True))
    assert len(events_of(after, "pruned")) == 1
    assert len(events_of(between, "pruned")) > 5
    reads = [engine.trace.steps["prompt_reads"].sum() for engine in (after, between)]
    assert reads[1] < 0.75 * reads[0]
    assert between.report().summary["kv_peak"] < 0.7 * after.report().summary["kv_peak"]


@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize(
    "pruning",
    [
        PRUNE,
        PRUNE.replace(during_prefill=True),
        SlidingWindow(budget=64, recent=2, min_tokens=0),
        RandomPruning(min_tokens=32),
    ],
    ids=lambda pruning: pruning.kind,
)
def test_the_ledger_is_the_cache_after_every_step(pruning: Any, block: int) -> None:
    engine = simulated({"slots": 3, "step_tokens": 64, "block": block}, pruning=pruning)
    engine.submit_all(requests(5, tokens=60, prompt=150))
    checked = 0
    while not engine.idle:
        engine.step()
        checked += ledgers_are_true(engine)
    assert checked > 100
    pruned = events_of(engine, "pruned")
    assert {event["request"] for event in pruned} == {f"r{n}" for n in range(5)}
    assert all(event["cells"] > 0 for event in pruned)
    assert engine.backend.room() == 3 * 8192


def test_pruning_frees_time_as_well_as_cells() -> None:
    dense = simulated(priority=FirstCome(), pruning=NoPruning())
    pruned = simulated(priority=FirstCome(), pruning=EntropicPruning(budget=0.25, min_tokens=64))
    work = [Request(prompt=ids(2000), max_tokens=200)]
    before, after = dense.run(work).summary, pruned.run(work).summary
    assert after["kv_peak"] <= before["kv_peak"]
    assert after["kv_mean"] < 0.9 * before["kv_mean"]
    assert after["decode_tokens_per_second"] > 1.2 * before["decode_tokens_per_second"]


def test_states_of_neighbours_and_of_reused_slots_are_apart() -> None:
    """Case 7: interleaved sequences with targets of their own, then a slot is used again."""
    wanted = [
        Request(
            id=f"t{n}", prompt=ids(10, n), max_tokens=80, seed=n, temperature={"target": target}
        )
        for n, target in enumerate((0.6, 2.4, 1.2, 3.0))
    ]

    def trace(engine: Engine, name: str) -> dict[str, Any]:
        return {
            column: engine.trace.of(name)[column]
            for column in ("temperature", "commanded", "entropy", "token_id", "target")
        }

    together = simulated({"slots": 2})
    together.run(wanted)
    for request in wanted:
        alone = simulated({"slots": 1})
        alone.run([request])
        for column, values in trace(alone, request.id or "").items():
            np.testing.assert_array_equal(trace(together, request.id or "")[column], values, column)
    ends = [trace(together, f"t{n}")["temperature"][-1] for n in (0, 1)]
    assert ends[0] < 0.7 < ends[1]  # each integral went its own way


def states_of(work: Any) -> list[Any]:
    return [work.temperature, work.priority, work.pruning]


def test_the_states_are_the_same_whenever_somebody_looks() -> None:
    """A lone sequence's priority and pruning states are brought up to date when they are looked at."""
    looked, left = simulated(), simulated()
    for engine in (looked, left):
        engine.submit(Request(prompt=ids(20), max_tokens=150))
    while not looked.idle:
        for engine in (looked, left):
            engine.step()
        states_of((looked.unfinished or looked.done)[0])
    for one, other in zip(states_of(looked.done[0]), states_of(left.done[0]), strict=True):
        for mine, yours in zip(leaves(one), leaves(other), strict=True):
            np.testing.assert_array_equal(mine, yours)
    assert leaves(looked.done[0].priority)[1] != looked.config.priority.init(1).flow


def test_a_sequence_that_moves_to_another_engine_leaves_nothing_unread() -> None:
    first, second = simulated(), simulated()
    first.submit(Request(prompt=ids(20), max_tokens=50))
    for _ in range(10):
        first.step()
    work = first.unfinished[0]
    fresh = leaves(first.config.priority.init(1))
    second.adopt(work)
    assert [leaf.tolist() for leaf in leaves(work.__dict__["_priority"])] != [
        leaf.tolist() for leaf in fresh
    ]
    assert work.catch_up == second._loops._catch_up


def leaves(state: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, state)
    return found


# -- failures ---------------------------------------------------------------------------------------


def break_rows(
    engine: Engine, name: str, after: int, value: float, where: Any = slice(None)
) -> None:
    """Have the backend give one request no distribution once it has generated `after` tokens."""
    plain: Any = engine.backend.forward

    def forward(chunks: list[Chunk]) -> Any:
        result = plain(chunks)
        at = {w.slot: w for w in engine.unfinished}
        sampling = [chunk for chunk in chunks if chunk.sample]
        for chunk, row in zip(sampling, result.logits, strict=True):
            if at[chunk.slot].id == name and len(at[chunk.slot].tokens) >= after:
                row[where] = value
        return result

    engine.backend.forward = forward  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(
    ("value", "where"), [(-np.inf, slice(None)), (np.nan, slice(None)), (np.nan, 3), (np.inf, 3)]
)
@pytest.mark.parametrize("kind", ["pi", "exact", "edt", "mirostat"])
def test_case_2_a_row_without_a_distribution_fails_alone(
    value: float, where: Any, kind: str
) -> None:
    """Case 2: one of four rows is no distribution: a typed error, and no state moves."""
    config = configured().replace(temperature=kind, pruning=PRUNE)
    expected = tokens_of(Engine(config).run(requests()))
    engine = Engine(config)
    break_rows(engine, "r1", 6, value, where)
    engine.submit_all(requests())
    before: list[Any] = []
    while not engine.idle:
        for work in engine.unfinished:
            if work.id == "r1" and len(work.tokens) == 6:
                before = [map_leaves(np.copy, state) for state in states_of(work)]
        engine.step()
    report = engine.report()
    assert reasons(report) == {"r0": "length", "r1": "failed", "r2": "length", "r3": "length"}
    tokens = tokens_of(report)
    assert tokens["r1"] == expected.pop("r1")[:6]
    assert {name: tokens[name] for name in expected} == expected
    assert 0 <= min(min(t) for t in tokens.values()) <= max(max(t) for t in tokens.values()) < 512
    (failed,) = [work for work in engine.done if work.id == "r1"]
    assert isinstance(failed.error, LogitsError)
    assert failed.error.request == "r1"
    for old, new in zip(before, states_of(failed), strict=True):
        for a, b in zip(leaves(old), leaves(new), strict=True):
            np.testing.assert_array_equal(a, b)


def test_case_9_a_single_live_token_is_infeasible_and_harmless() -> None:
    """Case 9: one token is left alive: the target is flagged, nothing is divided by zero."""
    engine = simulated(temperature=PITemperature(target=1.0))
    break_rows(engine, "r0", 3, -np.inf, slice(1, None))
    plain: Any = engine.backend.forward

    def forward(chunks: list[Chunk]) -> Any:
        result = plain(chunks)
        for row in result.logits:
            row[0] = -np.inf
            if not np.isfinite(row).any():
                row[17] = 1.0
        return result

    engine.backend.forward = forward  # type: ignore[assignment, method-assign]
    report = engine.run([Request(id="r0", prompt=ids(5), max_tokens=8)])
    assert report.completions[0].tokens[3:] == [17] * 5
    trace = engine.trace.of("r0")
    assert trace["feasible"].tolist() == [True] * 3 + [False] * 5
    assert np.all(trace["entropy"][3:] == 0)
    assert (np.diff(trace["commanded"][2:]) > 0).all()  # towards the bound, as nothing else helps


def failing(engine: Engine, fails: Any, error: DecodeError) -> list[int]:
    """Have the backend refuse the steps that `fails` picks; returns the sizes of the steps it saw."""
    plain: Any = engine.backend.forward
    sizes: list[int] = []

    def forward(chunks: list[Chunk]) -> Any:
        sizes.append(len(chunks))
        if fails(chunks):
            raise error
        return plain(chunks)

    engine.backend.forward = forward  # type: ignore[assignment, method-assign]
    return sizes


@pytest.mark.parametrize("code", [1, 2, -1])
def test_case_13_a_step_that_fails_once_is_retried(code: int) -> None:
    """Case 13: whatever the code, the rows are tried one by one and go on."""
    expected = tokens_of(simulated().run(requests()))
    engine = simulated(priority=FirstCome())
    once = [True]
    error = (NoRoom if code == 1 else DecodeError)(code, "no")
    sizes = failing(engine, lambda chunks: len(chunks) == 4 and once and once.pop(), error)
    report = engine.run(requests())
    assert tokens_of(report) == expected
    assert 1 in sizes
    assert [event["rows"] for event in events_of(engine, "retried")] == [4]


def test_case_13_the_request_at_fault_fails_by_itself() -> None:
    """Case 13: the request that breaks every step it is in ends; its ledger follows the engine."""
    expected = tokens_of(simulated(pruning=PRUNE).run(requests(prompt=150)))
    engine = simulated(pruning=PRUNE)
    engine.submit_all(requests(prompt=150))
    (victim,) = [work for work in engine.unfinished if work.id == "r2"]
    refusing = DecodeError(-1, "no")

    def broken(chunks: list[Chunk]) -> bool:
        return len(victim.tokens) > 4 and any(c.slot == victim.slot for c in chunks)

    failing(engine, broken, refusing)
    while not engine.idle:
        engine.step()
        ledgers_are_true(engine)
    report = engine.report()
    assert reasons(report) == {"r0": "length", "r1": "length", "r2": "failed", "r3": "length"}
    tokens = tokens_of(report)
    assert tokens.pop("r2") == expected.pop("r2")[:5]
    assert tokens == expected
    assert victim.error is refusing
    assert engine.backend.room() == 8 * 8192
    with pytest.raises(DecodeError):
        raise victim.error


def test_case_12_a_refused_eviction_changes_nothing() -> None:
    """Case 12: evict says no: the ledger stays, the refusal is traced, the tokens are the same."""
    expected = tokens_of(simulated(pruning=NoPruning()).run(requests(prompt=150)))
    engine = simulated(pruning=PRUNE)
    engine.backend.evict = lambda *_: False  # type: ignore[assignment, method-assign]
    engine.submit_all(requests(prompt=150))
    while not engine.idle:
        engine.step()
        ledgers_are_true(engine)
        assert all(work.ledger.cells == work.ledger.length for work in engine.unfinished)
    assert tokens_of(engine.report()) == expected
    assert events_of(engine, "refused")
    assert not events_of(engine, "pruned")


def test_case_12_what_a_backend_cannot_do_is_refused_at_construction() -> None:
    """Case 12: pruning on an engine that cannot evict."""
    with pytest.raises(CapabilityError, match="set pruning to 'none'"):
        simulated({"can_evict": False}, pruning=PRUNE)
    simulated({"can_evict": False}, pruning=NoPruning()).run(requests(1, tokens=2))


def test_a_refused_engine_leaves_a_backend_it_was_given_alone() -> None:
    closed: list[bool] = []
    backend = SimulatedConfig(can_evict=False).open()
    backend.close = lambda: closed.append(True)  # type: ignore[assignment, method-assign]
    with pytest.raises(CapabilityError):
        Engine(configured(pruning=PRUNE), backend)
    assert not closed


def test_case_17_a_second_thread_is_refused() -> None:
    """Case 17: whoever comes while another thread is inside gets a typed error, whatever it calls."""
    engine = simulated()
    engine.submit_all(requests(2))
    inside, go_on = threading.Event(), threading.Event()
    plain: Any = engine.backend.forward

    def forward(chunks: list[Chunk]) -> Any:
        inside.set()
        assert go_on.wait(30)
        return plain(chunks)

    engine.backend.forward = forward  # type: ignore[assignment, method-assign]
    other = threading.Thread(target=engine.step)
    other.start()
    try:
        assert inside.wait(30)
        for call in (engine.step, lambda: engine.submit("Hi"), lambda: engine.save("nowhere")):
            with pytest.raises(EngineBusy):
                call()
        engine.cancel("r0")  # this one may come at any time
    finally:
        go_on.set()
        other.join(30)
    report = engine.run()
    assert reasons(report) == {"r0": "cancelled", "r1": "length"}


def test_case_6_a_batch_of_one_has_defined_statistics() -> None:
    """Case 6: one request, one row: nothing is a variance over nothing."""
    report = simulated().run([Request(prompt="Hi", max_tokens=1)])
    trace = report.trace.tokens.columns()
    assert np.isfinite(trace["varentropy"]).all()
    assert report.completions[0].entropy_quarters == []
    assert np.isfinite(report.summary["latency_p95"])


def test_case_8_the_entropy_after_truncation_is_reported_too() -> None:
    """Case 8: what is measured is what is sampled, after a later cut too."""
    engine = simulated(
        temperature=FixedTemperature(temperature=1.0), truncation=TopK(k=3, place="after")
    )
    engine.run([Request(id="a", prompt="Hi", max_tokens=40)])
    trace = engine.trace.of("a")
    assert np.all(trace["realized_entropy"] <= np.log(3) + 1e-9)
    assert np.all(trace["realized_entropy"] == trace["entropy"])
    before = simulated(temperature=FixedTemperature(temperature=1.0), truncation=TopK(k=3))
    before.run([Request(id="a", prompt="Hi", max_tokens=40)])
    trace = before.trace.of("a")
    np.testing.assert_allclose(trace["realized_entropy"], trace["entropy"])


# -- figures ----------------------------------------------------------------------------------------


def test_tau_in_the_trace_is_the_falls_of_the_entropy() -> None:
    engine = simulated()
    report = engine.run(requests())
    for done in report.completions:
        entropy = engine.trace.of(done.id)["raw_entropy"]
        falls = np.maximum(entropy[:-1] - entropy[1:], 0).sum()
        assert done.tau == pytest.approx(falls)
        assert engine.trace.of(done.id)["tau"][-1] == pytest.approx(falls)
    assert report.summary["tau"] == pytest.approx(engine.trace.steps["tau"].sum())


def test_latency_and_time_to_first_token_are_by_the_backends_clock() -> None:
    engine = simulated({"slots": 1}, **PLAIN)
    report = engine.run([Request(prompt=ids(10), max_tokens=5)])
    (done,) = report.completions
    times = engine.trace.of("0")["time"]
    assert done.latency == pytest.approx(times[-1])
    assert done.time_to_first_token == pytest.approx(times[0])
    assert 0 < done.time_to_first_token < done.latency
    assert report.summary["overhead_percent"] == pytest.approx(0, abs=1e-9)


def test_progress_ends_at_its_total() -> None:
    engine = simulated({"end": 4.0})
    engine.submit_all(requests())
    seen = [engine.progress]
    while not engine.idle:
        engine.step()
        seen.append(engine.progress)
    done = [now for now, _ in seen]
    assert done == sorted(done)
    assert all(now <= total for now, total in seen)
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] > 0


def test_greedy_is_a_temperature_of_zero() -> None:
    engine = simulated(temperature=GREEDY)
    engine.run([Request(id="a", prompt=ids(3), max_tokens=30)])
    trace = engine.trace.of("a")
    assert np.all(trace["entropy"] == 0)
    assert np.all(trace["surprisal"] == 0)
    assert np.all(trace["raw_entropy"] > 0)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 30)), min_size=1, max_size=7),
    slots=st.integers(1, 4),
    step_tokens=st.integers(1, 80),
    cells=st.integers(160, 500),
    priority=st.sampled_from([FirstCome(), RoundRobin(), EntropicPriority(patience=5)]),
    pruning=st.sampled_from([NoPruning(), PRUNE]),
)
def test_any_workload_ends_with_everything_accounted(
    sizes: list[tuple[int, int]],
    slots: int,
    step_tokens: int,
    cells: int,
    priority: Any,
    pruning: Any,
) -> None:
    engine = simulated(
        {"slots": slots, "step_tokens": step_tokens, "cells": cells, "vocab": 32, "context": 160},
        priority=priority,
        pruning=pruning,
    )
    work = [
        Request(id=str(n), prompt=[1 + n] * prompt, max_tokens=tokens)
        for n, (prompt, tokens) in enumerate(sizes)
    ]
    engine.submit_all(work)
    steps = 0
    while not engine.idle:
        engine.step()
        ledgers_are_true(engine)
        steps += 1
        assert steps < 10_000
    assert set(reasons(engine.report()).values()) == {"length"}
    assert [len(done.tokens) for done in engine.report().completions] == [t for _, t in sizes]
    assert engine.backend.room() == cells
    fed = engine.trace.steps["prompt_tokens"].sum() + engine.trace.steps["rows"].sum()
    assert fed == sum(prompt + tokens - 1 for prompt, tokens in sizes)
    longest = engine.trace.steps["rows"] + engine.trace.steps["prompt_tokens"]
    assert longest.max() <= step_tokens


def test_waiting_for_an_arrival_is_no_part_of_a_step() -> None:
    engine = simulated(**PLAIN)
    report = engine.run(
        [Request(prompt=ids(9), max_tokens=5), Request(prompt=ids(9), max_tokens=5, arrive=9.0)]
    )
    assert report.summary["total_time"] > 9
    assert report.trace.steps["seconds"].sum() < 1
    assert report.summary["overhead_percent"] == pytest.approx(0)
