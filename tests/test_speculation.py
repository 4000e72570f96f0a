"""Draft and verify: the tokens, states and readings of plain decoding, in fewer steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import GREEDY, configured, events_of, ledgers_are_true, reasons, simulated, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_control import restore
from entropic_control.backends import Chunk, SimulatedConfig
from entropic_control.backends.base import step_shape
from entropic_control.cli import main
from entropic_control.config import load_config
from entropic_control.controllers import (
    EntropicPriority,
    EntropicPruning,
    ExactTemperature,
    FirstCome,
    FixedTemperature,
    Mirostat,
    NgramSpeculation,
    NoPruning,
    NoTruncation,
    PITemperature,
    RoundRobin,
    SlidingWindow,
    TopK,
    TopP,
)
from entropic_control.engine import Engine
from entropic_control.errors import CapabilityError, DecodeError, LogitsError, NoRoom
from entropic_control.request import Request
from entropic_control.trace import TOKEN_COLUMNS

ALWAYS = NgramSpeculation(shortest=1, draft=6, when="always")
"""Guesses at every turn, right or wrong."""
PRUNE = EntropicPruning(budget=64, sinks=1, recent=2, min_tokens=64, gate=None, slack=0.0)
COLD = FixedTemperature(temperature=0.3)
SMALL = {"vocab": 24, "sharpness": 5.0}
"""A plant that repeats itself now and then."""


def requests(count: int = 4, tokens: int = 40, prompt: int = 30, **fields: Any) -> list[Request]:
    return [
        Request(
            id=f"r{n}",
            prompt=[1 + (n * 5 + t * t) % 7 for t in range(prompt + 3 * n)],
            max_tokens=tokens,
            **fields,
        )
        for n in range(count)
    ]


def driven(engine: Engine, works: list[Request]) -> Engine:
    """Run to the end; every ledger is compared with its cache after every step."""
    engine.submit_all(works)
    for _ in range(20_000):
        if engine.idle:
            return engine
        engine.step()
        ledgers_are_true(engine)
        assert not any(work.draft for work in engine.unfinished)
    raise AssertionError("the engine does not come to an end")


def leaves(state: Any) -> list[Any]:
    if not isinstance(state, tuple):
        return [state.tolist()]
    return [leaf for part in state for leaf in leaves(part)]


def listed(values: Any) -> list[Any]:
    """As a list that equals itself: NaN does not."""
    return list(np.atleast_1d(np.nan_to_num(values, nan=-1.0)).tolist())


def told(engine: Engine) -> dict[str, Any]:
    """Everything about the requests that does not depend on time or schedule."""
    columns = [name for name in TOKEN_COLUMNS if name not in ("step", "time")]
    out: dict[str, Any] = {}
    for work in engine.done:
        trace = engine.trace.of(work.id)
        out[work.id] = {
            "tokens": work.tokens,
            "reason": work.reason,
            "text": work.text.text,
            "tau": work.tau,
            "raw_entropy": work.raw_entropy,
            "states": [leaves(s) for s in (work.temperature, work.priority, work.pruning)],
            "ledger": {name: listed(value) for name, value in work.ledger.export().items()},
            **{name: listed(trace[name]) for name in columns},
            "pruned": [
                (event["cells"], event["kept"])
                for event in events_of(engine, "pruned")
                if event["request"] == work.id
            ],
        }
    return out


def same(speculating: Engine, plain: Engine) -> None:
    one, other = told(speculating), told(plain)
    assert one.keys() == other.keys()
    for name, fields in one.items():
        for field, value in fields.items():
            assert value == other[name][field], (name, field)


# -- equality ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pruning", [NoPruning(), PRUNE], ids=["dense", "pruned"])
@pytest.mark.parametrize(
    "temperature",
    [GREEDY, COLD, PITemperature(target=0.6), Mirostat(target=0.6), ExactTemperature(target=0.5)],
    ids=lambda t: t.kind + str(getattr(t, "temperature", "")),
)
def test_everything_is_as_without_drafts(temperature: Any, pruning: Any) -> None:
    parts = {"temperature": temperature, "pruning": pruning}
    works = requests(tokens=90, prompt=50)
    plain = driven(simulated(SMALL, **parts), works)
    speculating = driven(simulated(SMALL, speculation=ALWAYS, **parts), works)
    same(speculating, plain)
    steps = speculating.trace.steps
    assert 0 < steps["accepted"].sum() < steps["drafted"].sum()  # some held, and some did not
    assert len(steps) < len(plain.trace.steps)
    if pruning is PRUNE:
        assert events_of(speculating, "pruned")


@settings(max_examples=100)
@given(
    seed=st.integers(0, 1 << 40),
    sharpness=st.sampled_from([2.0, 5.0, 12.0]),
    drift=st.sampled_from([0.0, 0.02, 0.2]),
    end=st.sampled_from([None, 2.0]),
    sizes=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 50)), min_size=1, max_size=5),
    stop=st.sampled_from([(), (" w3 w3",), (" w5",)]),
    min_tokens=st.integers(0, 20),
    temperature=st.sampled_from(
        [GREEDY, COLD, FixedTemperature(), PITemperature(target=0.7), Mirostat(target=0.5)]
    ),
    truncation=st.sampled_from([NoTruncation(), TopK(k=3), TopP(p=0.8, place="after")]),
    pruning=st.sampled_from([NoPruning(), PRUNE, SlidingWindow(budget=64, recent=2, min_tokens=0)]),
    priority=st.sampled_from([FirstCome(), RoundRobin(), EntropicPriority(patience=5)]),
    speculation=st.builds(
        NgramSpeculation,
        shortest=st.integers(1, 3),
        longest=st.integers(3, 5),
        draft=st.integers(1, 9),
        entropy=st.sampled_from([None, 1.0]),
        when=st.sampled_from(["always", "pays"]),
    ),
    slots=st.integers(1, 4),
    step_tokens=st.integers(1, 60),
    cells=st.integers(160, 500),
)
def test_any_workload_is_decoded_as_without_drafts(
    seed: int,
    sharpness: float,
    drift: float,
    end: float | None,
    sizes: list[tuple[int, int]],
    stop: tuple[str, ...],
    min_tokens: int,
    slots: int,
    step_tokens: int,
    cells: int,
    speculation: Any,
    **parts: Any,
) -> None:
    plant = {
        "seed": seed % 100,
        "vocab": 16,
        "sharpness": sharpness,
        "drift": drift,
        "end": end,
        "slots": slots,
        "step_tokens": step_tokens,
        "cells": cells,
        "context": 160,
    }
    works = [
        Request(
            id=str(n),
            prompt=[1 + (n + t) % 5 for t in range(prompt)],
            max_tokens=tokens,
            min_tokens=min_tokens,
            seed=seed + n,
            stop=stop,
        )
        for n, (prompt, tokens) in enumerate(sizes)
    ]
    plain = driven(simulated(plant, **parts), works)
    speculating = driven(simulated(plant, speculation=speculation, **parts), works)
    same(speculating, plain)
    assert speculating.backend.room() == cells
    steps = speculating.trace.steps
    assert np.all(steps["rows"] + steps["drafted"] + steps["prompt_tokens"] <= step_tokens)
    assert np.all(steps["accepted"] <= steps["drafted"])
    assert steps["prompt_tokens"].sum() + steps["rows"].sum() + steps["accepted"].sum() == sum(
        len(work.prompt) + len(work.tokens) - 1 for work in speculating.done
    )


def test_the_events_are_those_of_plain_decoding() -> None:
    def heard(**parts: Any) -> list[Any]:
        engine = simulated({**SMALL, "end": 1.0}, temperature=COLD, **parts)
        stream = engine.stream([Request(id="a", prompt=[1, 2, 3] * 8, max_tokens=80)])
        return [(type(event), getattr(event, "text", "")) for event in stream]

    assert heard(speculation=ALWAYS) == heard()


def test_a_request_ends_inside_an_accepted_run() -> None:
    """A stop text, the end token and the token limit, each where plain decoding meets it."""
    loop = [1, 2, 3, 4, 5, 6] * 6

    def run(request: Request, **parts: Any) -> Engine:
        engine = simulated({"vocab": 8, "end": -30.0}, temperature=GREEDY, **parts)
        plain: Any = engine.backend.forward

        def forward(chunks: list[Chunk]) -> Any:
            """The plant counts: after token n comes n + 1, after 6 comes 1; it ends after 30."""
            result = plain(chunks)
            rows = iter(result.logits)
            for chunk in chunks:
                for at in range(len(chunk.tokens) - chunk.outputs, len(chunk.tokens)):
                    row = next(rows)
                    row[:] = -9.0
                    row[1 + int(chunk.tokens[at]) % 6] = 9.0
                    row[0] = 20.0 if chunk.start + at >= len(loop) + 30 else -9.0
            return result

        engine.backend.forward = forward  # type: ignore[assignment, method-assign]
        return driven(engine, [request])

    for request in (
        Request(id="limit", prompt=loop, max_tokens=11),
        Request(id="stop", prompt=loop, max_tokens=60, stop=(" w4 w5",)),
        Request(id="end", prompt=loop, max_tokens=60),
        Request(id="least", prompt=loop, max_tokens=60, min_tokens=40),
    ):
        plain = run(request)
        speculating = run(request, speculation=ALWAYS)
        same(speculating, plain)
        assert speculating.trace.steps["accepted"].sum() > 0
        assert len(speculating.trace.steps) < len(plain.trace.steps)
    assert reasons(plain.report()) == {"least": "end"}
    assert len(plain.done[0].tokens) > 40


def test_a_repetitive_text_takes_a_fraction_of_the_steps() -> None:
    """Greedy on this plant ends in a loop: nearly every draft holds, and each step gives seven tokens."""
    parts = {"temperature": GREEDY, "pruning": NoPruning()}
    works = [Request(id="r", prompt=[1, 2, 3], max_tokens=210)]
    plain = driven(simulated(SMALL, **parts), works)
    speculating = driven(simulated(SMALL, speculation=ALWAYS, **parts), works)
    same(speculating, plain)
    assert len(plain.trace.steps) == 210
    assert len(speculating.trace.steps) < 210 / 4


# -- cost -------------------------------------------------------------------------------------------


def timed(temperature: Any, **parts: Any) -> tuple[float, Engine]:
    engine = simulated(SMALL, temperature=temperature, pruning=NoPruning(), **parts)
    works = [Request(id="r", prompt=[1, 2, 3], max_tokens=300)]
    return driven(engine, works).report().summary["total_time"], engine


def test_drafts_that_do_not_pay_are_not_tried() -> None:
    """On the plant's own clock: what pays saves time on a loop and costs next to nothing on noise."""
    loop = {name: timed(GREEDY, **parts)[0] for name, parts in ARMS.items()}
    assert loop["pays"] < 0.7 * loop["plain"]
    noise = {
        name: timed(FixedTemperature(temperature=2.0), **parts)[0] for name, parts in ARMS.items()
    }
    assert noise["always"] > 1.2 * noise["plain"]
    assert noise["pays"] < 1.02 * noise["plain"]


ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pays": {"speculation": NgramSpeculation(shortest=1)},
    "always": {"speculation": NgramSpeculation(shortest=1, when="always")},
}


def test_an_unsure_model_is_not_guessed_after() -> None:
    """The entropy keeps drafts from noise by itself, with nothing learnt and no cost asked."""
    gated = NgramSpeculation(shortest=1, when="always", entropy=0.5)
    _, sure = timed(GREEDY, speculation=gated.replace(entropy=3.0))
    _, unsure = timed(FixedTemperature(temperature=2.0), speculation=gated)
    assert sure.trace.steps["drafted"].sum() > 200
    assert unsure.trace.steps["drafted"].sum() < 20


def test_a_verified_chunk_is_no_prompt() -> None:
    backend = SimulatedConfig().open()
    backend.forward([Chunk(0, 0, np.arange(1, 20, dtype=np.int32), True)])
    backend.forward([Chunk(1, 0, np.arange(1, 9, dtype=np.int32), True)])
    chunks = [
        Chunk(0, 19, np.array([5, 6, 7], np.int32), True, drafts=2),
        Chunk(1, 8, np.array([5], np.int32), True),
    ]
    seconds = backend.forward(chunks).seconds
    shape = step_shape(backend, chunks)
    assert shape._replace(prompt_reads=0) == shape
    assert (shape.rows, shape.longest, shape.drafted, shape.passes) == (2, 22, 2, 2)
    assert shape.prompt_tokens == 0
    plant = SimulatedConfig()
    rows = plant.seconds_per_row + plant.seconds_per_row_cell * 22
    assert seconds == pytest.approx(2 * plant.seconds_per_step + 4 * rows)


def test_the_cost_of_a_step_with_drafts_is_predicted() -> None:
    _, engine = timed(COLD, speculation=ALWAYS)
    steps = engine.trace.steps
    drafted = steps["drafted"] > 0
    np.testing.assert_allclose(steps["predicted"][drafted], steps["forward"][drafted], rtol=1e-6)


# -- room -------------------------------------------------------------------------------------------


def test_nobody_gives_way_for_a_guess() -> None:
    """The cells are just those that the requests need: drafts take what is left and no more."""
    works = requests(count=3, tokens=50, prompt=20)
    need = sum(len(w.prompt) + 50 - 1 for w in works)
    parts = {"temperature": GREEDY, "pruning": NoPruning(), "priority": FirstCome()}
    engine = driven(simulated({**SMALL, "cells": need}, speculation=ALWAYS, **parts), works)
    assert reasons(engine.report()) == dict.fromkeys(("r0", "r1", "r2"), "length")
    assert not events_of(engine, "preempted")
    assert not events_of(engine, "retried")
    assert engine.trace.steps["accepted"].sum() > 0
    assert engine.trace.steps["cells"].max() <= need


def test_no_room_for_a_guess_is_plain_decoding() -> None:
    works = requests(count=2, tokens=30)
    plain = driven(simulated(SMALL, temperature=GREEDY), works)
    engine = simulated({**SMALL, "step_tokens": 2}, temperature=GREEDY, speculation=ALWAYS)
    driven(engine, works)
    assert tokens_of(engine.report()) == tokens_of(plain.report())
    full = engine.trace.steps["rows"] == 2
    assert full.any()
    assert not engine.trace.steps["drafted"][full].any()


def test_drafts_end_where_the_context_does() -> None:
    """The last token of a request is drawn and never fed: no draft reaches beyond it."""
    (work,) = requests(count=1, tokens=500, prompt=30)
    parts = {"temperature": GREEDY, "pruning": NoPruning()}
    plain = driven(simulated({**SMALL, "context": 97}, **parts), [work])
    engine = driven(simulated({**SMALL, "context": 97}, speculation=ALWAYS, **parts), [work])
    same(engine, plain)
    assert reasons(engine.report()) == {"r0": "context"}
    assert engine.trace.steps["accepted"].sum() > 30
    assert not events_of(engine, "retried")


# -- failures ---------------------------------------------------------------------------------------


def refusing(engine: Engine, fails: Callable[[list[Chunk]], bool], error: DecodeError) -> None:
    plain: Any = engine.backend.forward

    def forward(chunks: list[Chunk]) -> Any:
        if fails(chunks):
            raise error
        return plain(chunks)

    engine.backend.forward = forward  # type: ignore[assignment, method-assign]


PARTS: dict[str, Any] = {"temperature": PITemperature(target=0.6), "pruning": PRUNE}


@pytest.mark.parametrize("error", [DecodeError(-1, "no"), NoRoom(1, "full")])
def test_a_step_never_fails_for_its_drafts(error: DecodeError) -> None:
    """Whatever drafts break is done again without them, and nobody notices."""
    works = requests(tokens=60, prompt=50)
    plain = driven(simulated(SMALL, **PARTS), works)
    engine = simulated(SMALL, speculation=ALWAYS, **PARTS)
    refusing(engine, lambda chunks: any(chunk.drafts for chunk in chunks), error)
    same(driven(engine, works), plain)
    assert all("without drafts" in event["reason"] for event in events_of(engine, "retried"))
    assert events_of(engine, "retried")


def test_the_request_that_breaks_a_step_with_drafts_fails_alone() -> None:
    works = requests(tokens=60, prompt=50)
    plain = driven(simulated(SMALL, **PARTS), works)
    engine = simulated(SMALL, speculation=ALWAYS, **PARTS)
    engine.submit_all(works)
    (victim,) = [work for work in engine.unfinished if work.id == "r2"]
    error = DecodeError(-1, "no")
    refusing(
        engine,
        lambda chunks: len(victim.tokens) > 20 and any(c.slot == victim.slot for c in chunks),
        error,
    )
    driven(engine, [])
    assert victim.error is error
    assert 20 < len(victim.tokens) < 60
    expected, got = told(plain), told(engine)
    assert got.pop("r2")["tokens"] == expected.pop("r2")["tokens"][: len(victim.tokens)]
    assert got == expected
    assert engine.backend.room() == 8 * 8192


def test_drafts_that_cannot_be_taken_back_end_their_request_alone() -> None:
    works = requests(tokens=60, prompt=50)
    plain = driven(simulated(SMALL, **PARTS), works)
    engine = simulated(SMALL, speculation=ALWAYS, **PARTS)
    backend: Any = engine.backend
    engine.submit_all(works)
    (victim,) = [work for work in engine.unfinished if work.id == "r1"]
    rollback = backend.rollback

    def refuse(slot: int, length: int) -> None:
        if slot == victim.slot and len(victim.tokens) > 10:
            raise DecodeError(-1, "it stays")
        rollback(slot, length)

    backend.rollback = refuse
    driven(engine, [])
    assert isinstance(victim.error, DecodeError)
    expected, got = told(plain), told(engine)
    tokens = got.pop("r1")["tokens"]
    assert 10 < len(tokens) < 60
    assert tokens == expected.pop("r1")["tokens"][: len(tokens)]
    assert got == expected
    assert backend.room() == 8 * 8192


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_position_without_a_distribution_fails_there(value: float) -> None:
    """The same request ends at the same token, with the states it had, drafted along or not."""
    works = requests(tokens=60, prompt=50)

    def run(**parts: Any) -> Engine:
        engine = simulated(SMALL, temperature=GREEDY, pruning=PRUNE, **parts)
        plain: Any = engine.backend.forward

        def forward(chunks: list[Chunk]) -> Any:
            result = plain(chunks)
            at = {work.slot: work for work in engine.unfinished}
            rows = iter(result.logits)
            for chunk in chunks:
                for position in range(chunk.outputs):
                    row = next(rows)
                    work = at[chunk.slot]
                    if work.id == "r1" and len(work.tokens) + position == 33:
                        row[:] = value
            return result

        engine.backend.forward = forward  # type: ignore[assignment, method-assign]
        return driven(engine, works)

    plain, speculating = run(), run(speculation=ALWAYS)
    same(speculating, plain)
    (failed,) = [work for work in speculating.done if work.reason == "failed"]
    assert failed.id == "r1"
    assert len(failed.tokens) == 33
    assert isinstance(failed.error, LogitsError)
    assert speculating.trace.steps["accepted"].sum() > 0


def test_what_a_backend_cannot_take_back_is_refused_at_construction() -> None:
    with pytest.raises(CapabilityError, match=r"'simulated' cannot take back.*'ngram'.*'none'"):
        simulated({"can_rollback": False}, speculation=ALWAYS)
    assert simulated({"can_rollback": False}).backend.capabilities.can_rollback is False


# -- with the rest of the engine --------------------------------------------------------------------


def test_save_and_restore_in_the_middle(tmp_path: Path) -> None:
    works = requests(tokens=80, prompt=50)
    parts = {**PARTS, "speculation": ALWAYS}
    expected = driven(simulated(SMALL, **parts), works)
    engine = simulated(SMALL, **parts)
    engine.submit_all(works)
    while sum(len(work.tokens) for work in engine.unfinished) < 120:
        engine.step()
    engine.save(tmp_path / "state.npz")
    learnt = {work.id: leaves(work.speculation) for work in engine.unfinished}
    again = restore(tmp_path / "state.npz")
    assert {work.id: leaves(work.speculation) for work in again.unfinished} == learnt
    assert len({str(state) for state in learnt.values()}) > 1
    driven(again, [])
    assert tokens_of(again.report()) == tokens_of(expected.report())
    assert again.trace.steps["accepted"].sum() > 0


def test_a_cancelled_request_keeps_its_tokens_and_frees_its_slot() -> None:
    works = requests(tokens=80)
    plain = tokens_of(driven(simulated(SMALL, temperature=GREEDY), works).report())
    engine = simulated(SMALL, temperature=GREEDY, speculation=ALWAYS)
    engine.submit_all(works)
    while not any(len(work.tokens) > 30 for work in engine.unfinished):
        engine.step()
    engine.cancel("r1")
    driven(engine, [])
    tokens = tokens_of(engine.report())
    assert reasons(engine.report())["r1"] == "cancelled"
    assert 0 < len(tokens["r1"]) < 80
    assert tokens.pop("r1") == plain["r1"][: len(engine.done[0].tokens)]
    assert tokens == {name: plain[name] for name in tokens}
    assert engine.backend.room() == 8 * 8192


def test_a_deadline_cuts_a_prefix_of_the_same_tokens() -> None:
    plain = tokens_of(driven(simulated(SMALL, temperature=GREEDY), requests(tokens=200)).report())
    engine = simulated(SMALL, temperature=GREEDY, speculation=ALWAYS)
    driven(engine, requests(tokens=200, deadline=1.0))
    for name, tokens in tokens_of(engine.report()).items():
        assert 0 < len(tokens) < 200
        assert tokens == plain[name][: len(tokens)]


def test_a_dry_run_drafts_nothing() -> None:
    config = configured(SMALL, **PARTS)
    works = requests(tokens=60, prompt=50)
    plain = driven(Engine(config, dry_run=True), works)
    dry = driven(Engine(config.replace(speculation=ALWAYS), dry_run=True), works)
    same(dry, plain)
    assert not dry.trace.steps["drafted"].any()
    assert len(events_of(dry, "would_prune")) == len(events_of(plain, "would_prune")) > 0


def test_per_request_targets_hold() -> None:
    works = [
        Request(id=str(n), prompt=[1, 2, 3] * 9, max_tokens=60, temperature={"target": target})
        for n, target in enumerate((0.3, 1.0, 1.8))
    ]
    plain = driven(simulated(SMALL, **PARTS), works)
    same(driven(simulated(SMALL, speculation=ALWAYS, **PARTS), works), plain)


def test_what_held_is_reported() -> None:
    engine = simulated(SMALL, temperature=GREEDY, speculation=ALWAYS)
    report = driven(engine, requests(tokens=60)).report()
    drafted, accepted = report.summary["drafted"], report.summary["accepted"]
    assert 0 < accepted < drafted
    assert f"drafts accepted: {accepted} of {drafted} ({100 * accepted / drafted:.0f} %)" in str(
        report
    )
    steps = report.trace.steps
    alone = (steps["rows"] > 0) & (steps["prompt_tokens"] == 0)
    expected = (steps["rows"] + steps["accepted"])[alone].sum() / steps["seconds"][alone].sum()
    assert report.summary["decode_tokens_per_second"] == pytest.approx(expected)
    assert "drafts accepted: -" in str(driven(simulated(), requests(tokens=5)).report())


def test_the_command_line_turns_it_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": [1, 2, 3] * 10, "max_tokens": 60}) + "\n")
    settings = ["speculation.kind=ngram", "temperature.kind=fixed", "temperature.temperature=0.0"]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    source = tmp_path / "run.yaml"
    source.write_text("backend: {kind: simulated, vocab: 24}\n")
    arguments = ["run", str(source), "--prompts", str(prompts), "--json", *flags]
    assert main(arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["accepted"] > 0
    assert load_config(source, settings=settings).speculation == NgramSpeculation()


# -- the simulated backend --------------------------------------------------------------------------


def test_logits_do_not_depend_on_what_is_drafted_along() -> None:
    text = [1 + (7 * n) % 20 for n in range(40)]
    alone, drafted = (SimulatedConfig(drift=0.2, vocab=24).open() for _ in range(2))
    for backend in (alone, drafted):
        backend.forward([Chunk(0, 0, np.array(text[:10], np.int32), True)])
    expected = [
        alone.forward([Chunk(0, at, np.array(text[at : at + 1], np.int32), True)]).logits[0].copy()
        for at in range(10, 15)
    ]
    chunk = Chunk(0, 10, np.array(text[10:15], np.int32), True, drafts=4)
    for one, other in zip(drafted.forward([chunk]).logits, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_rollback_leaves_no_trace() -> None:
    fresh, back = (SimulatedConfig(drift=0.2, vocab=24).open() for _ in range(2))
    prompt = np.array([3, 4, 5], np.int32)
    for backend in (fresh, back):
        backend.forward([Chunk(0, 0, prompt, True)])
    back.forward([Chunk(0, 3, np.array([6, 7, 8, 9], np.int32), True, drafts=3)])
    back.rollback(0, 5)  # type: ignore[attr-defined]
    fresh.forward([Chunk(0, 3, np.array([6], np.int32), True)])
    fresh.forward([Chunk(0, 4, np.array([7], np.int32), True)])
    assert back.save(0) == fresh.save(0)
    assert (back.length(0), back.extent(0), back.room()) == (5, 5, fresh.room())
    with pytest.raises(DecodeError, match="slot 0 cannot go back to 4 tokens"):
        back.rollback(0, 4)  # type: ignore[attr-defined]
