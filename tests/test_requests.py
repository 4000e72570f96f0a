"""What a single request may ask for: ends, limits, seeds, targets, arrivals, and how it is cut short."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import GREEDY, PLAIN, events_of, ids, reasons, simulated, tokens_of
from pydantic import ValidationError

from entropic_control import Engine, Request
from entropic_control.controllers import FixedTemperature, NoPruning, PITemperature
from entropic_control.errors import ConfigError, PromptError
from entropic_control.request import Failed, Finished, Token


def spelling(engine: Engine, *pieces: bytes) -> Engine:
    """Have an engine say `pieces`, one a token, whatever its model thinks."""
    plain: Any = engine.backend.forward

    def forward(chunks: Any) -> Any:
        result = plain(chunks)
        at = {work.slot: len(work.tokens) for work in engine.unfinished}
        sampling = [chunk for chunk in chunks if chunk.sample]
        for chunk, row in zip(sampling, result.logits, strict=True):
            row[:] = -np.inf
            row[1 + at[chunk.slot] % len(pieces)] = 0.0
        return result

    engine.backend.forward = forward  # type: ignore[method-assign]
    engine.backend.piece = lambda token: pieces[token - 1]  # type: ignore[method-assign]
    return engine


# -- limits -----------------------------------------------------------------------------------------


def test_max_tokens_and_the_context_end_a_request() -> None:
    engine = simulated({"context": 64}, pruning=NoPruning())
    report = engine.run(
        [
            Request(id="short", prompt=ids(10), max_tokens=5),
            Request(id="exact", prompt=ids(60), max_tokens=4),
            Request(id="full", prompt=ids(60), max_tokens=5),
            Request(id="last", prompt=ids(63)),
        ]
    )
    assert [len(done.tokens) for done in report.completions] == [5, 4, 4, 1]
    assert reasons(report) == {
        "short": "length",
        "exact": "length",
        "full": "context",
        "last": "context",
    }


def test_min_tokens_hold_back_the_end() -> None:
    report = simulated({"end": 30.0}, **PLAIN).run(
        [
            Request(id="free", prompt=ids(5), max_tokens=40),
            Request(id="held", prompt=ids(5), max_tokens=40, min_tokens=12),
        ]
    )
    free, held = tokens_of(report).values()
    assert free == [0]
    assert len(held) >= 13
    assert held[-1] == 0
    assert 0 not in held[:-1]


def test_the_end_can_be_ignored() -> None:
    requests = [Request(prompt=ids(5), max_tokens=12, ignore_eos=True)]
    report = simulated({"end": 30.0}, **PLAIN).run(requests)
    assert tokens_of(report)["0"] == [0] * 12
    assert reasons(report) == {"0": "length"}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ("  \n ", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1] * 64, "has 64 tokens and the context holds 64: shorten it, or set backend.context"),
        ([512], "token ids must lie between 0 and 511"),
        ([-1], "token ids must lie between 0 and 511"),
        ([2**40], "token ids must lie between 0 and 511"),
        (5, "cannot be used"),
        ("\ud800", "the prompt is not text"),
        ([{"role": "user", "content": "\ud800"}], "the prompt is not text"),
        ([{"role": "user"}], "needs a 'role' and a 'content'"),
        ([{"role": "user", "content": 5}], "valid string"),
        ([1.5], "cannot be used"),
    ],
)
def test_a_bad_prompt_fails_alone_and_names_itself(prompt: Any, message: str) -> None:
    engine = simulated({"context": 64}, pruning=NoPruning())
    with pytest.raises(PromptError) as caught:
        engine.submit(prompt)
    assert caught.value.request == "0"
    assert message in str(caught.value)
    events = list(engine.stream([prompt, Request(id="good", prompt=ids(4), max_tokens=3)]))
    assert isinstance(events[0], Failed)
    assert message in str(events[0].error)
    assert reasons(engine.report())["good"] == "length"
    assert engine.report().summary["failed"] == 1
    assert [event["event"] for event in engine.trace.events].count("failed") == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"deadline": 0},
        {"arrive": -1},
        {"temperature": {"target": float("nan")}},
        {"temprature": {}},
        {"prompt": 5},
        {"prompt": [{"role": "user"}]},
    ],
)
def test_a_request_out_of_range_is_refused_where_it_is_written(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        Request(**{"prompt": "Hi", **fields})


def test_names_are_unique_and_given_where_none_was_chosen() -> None:
    engine = simulated()
    assert engine.submit("Hi") == "0"
    with pytest.raises(ConfigError, match="request id '0' is taken"):
        engine.submit(Request(id="0", prompt="Hi"))
    assert engine.submit(Request(id="2", prompt="Hi")) == "2"
    assert engine.submit("Hi") == "3"
    assert len(engine.run().completions) == 3


# -- seeds and settings -----------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_whoever_the_neighbours_are() -> None:
    request = Request(id="mine", prompt=ids(12), max_tokens=30, seed=5)
    alone = tokens_of(simulated().run([request]))["mine"]
    others = [Request(prompt=ids(20, n), max_tokens=25 + n) for n in range(6)]
    assert tokens_of(simulated().run([*others, request]))["mine"] == alone
    assert tokens_of(simulated().run([request, *others]))["mine"] == alone
    other_seed = simulated().run([request.replace(seed=6)])
    assert tokens_of(other_seed)["mine"] != alone


def test_requests_without_a_seed_differ_and_are_repeatable() -> None:
    def run(seed: int) -> list[list[int]]:
        config = {"generation": {"seed": seed, "max_tokens": 20}}
        from entropic_control import load

        engine = load(config, backend="simulated")
        return [done.tokens for done in engine.run([ids(5), ids(5)]).completions]

    first = run(0)
    assert first == run(0)
    assert first[0] != first[1]
    assert run(1)[0] == first[1]  # the seed of the run plus the number of the request
    assert run(9) != first


def test_targets_of_their_own_are_held_by_each_request() -> None:
    targets = {"low": 0.8, "mid": 1.5, "high": 2.5}
    requests = [
        Request(id=name, prompt=ids(8), max_tokens=600, temperature={"target": target}, seed=3)
        for name, target in targets.items()
    ]
    engine = simulated(temperature=PITemperature(target=1.1))
    report = engine.run([*requests, Request(id="default", prompt=ids(8), max_tokens=600, seed=3)])
    for done in report.completions:
        target = targets.get(done.id, 1.1)
        assert done.target == target
        assert np.mean(done.entropy_quarters[1:]) == pytest.approx(target, rel=0.12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kp": 0.3}, "no per-request setting 'kp' (it has: target)"),
        ({"target": -1.0}, "target"),
    ],
)
def test_an_unknown_setting_is_refused_with_those_that_exist(
    settings: dict[str, float], message: str
) -> None:
    engine = simulated()
    with pytest.raises(ConfigError) as caught:
        engine.submit(Request(prompt="Hi", temperature=settings))
    assert message in str(caught.value)
    assert engine.idle
    assert engine.submit("Hi") == "0"


def test_temperatures_of_their_own() -> None:
    engine = simulated(temperature=FixedTemperature(temperature=1.0))
    engine.run(
        [
            Request(id="greedy", prompt=ids(5), max_tokens=20, temperature={"temperature": 0.0}),
            Request(id="plain", prompt=ids(5), max_tokens=20),
        ]
    )
    alone = simulated(temperature=GREEDY).run([Request(id="greedy", prompt=ids(5), max_tokens=20)])
    assert tokens_of(engine.report())["greedy"] == tokens_of(alone)["greedy"]
    assert np.all(engine.trace.of("plain")["entropy"] > 0)


# -- ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "tokens"),
    [
        ((b"one ", b"STOP", b" two"), ("STOP",), "one ", 2),
        ((b"one ST", b"OP two", b" three"), ("STOP",), "one ", 2),
        ((b"a", b"b", b"c", b"d"), ("bcd",), "a", 4),
        ((b"a", b"b", b"c", b"d"), ("cx", "bc"), "a", 3),
        ((b"one", b" two"), ("",), "one two", 2),
        ((b"x\xe2\x82", b"\xac!", b" more"), ("\u20ac",), "x", 2),
    ],
)
def test_a_stop_string_ends_the_text_before_it(
    pieces: tuple[bytes, ...], stop: tuple[str, ...], text: str, tokens: int
) -> None:
    engine = spelling(simulated(), *pieces)
    events = list(engine.stream([Request(prompt="Hi", max_tokens=len(pieces), stop=stop)]))
    (done,) = engine.report().completions
    assert (done.text, len(done.tokens)) == (text, tokens)
    assert done.finish_reason == ("stop" if stop != ("",) else "length")
    shown = "".join(event.text for event in events if isinstance(event, Token | Finished))
    assert shown == text


def test_the_configured_stop_strings_are_the_default() -> None:
    from entropic_control.config import Generation

    config = Generation(stop=("b",), max_tokens=3)
    report = spelling(simulated(generation=config), b"a", b"b", b"c").run(
        [Request(id="d", prompt="Hi"), Request(id="own", prompt="Hi", stop=())]
    )
    assert [done.text for done in report.completions] == ["a", "abc"]


def test_text_waits_for_the_rest_of_a_character_and_of_a_stop_string() -> None:
    pieces = (b"\xf0\x9f", b"\xa6\x99", b" ST", b"AR", b"\xe2\x82")
    engine = spelling(simulated(), *pieces)
    events = list(engine.stream([Request(prompt="Hi", max_tokens=5, stop=("STOP",))]))
    shown = [event.text for event in events if isinstance(event, Token | Finished)]
    assert shown == ["", "\U0001f999", " ", "STAR", "", "\ufffd"]


# -- cut short --------------------------------------------------------------------------------------


def test_cancel_keeps_what_was_generated() -> None:
    engine = simulated({"slots": 1})
    engine.submit_all(
        [
            Request(id="running", prompt=ids(5), max_tokens=50),
            Request(id="waiting", prompt=ids(5), max_tokens=4),
            Request(id="later", prompt=ids(5), max_tokens=4, arrive=1e6),
            Request(id="kept", prompt=ids(5), max_tokens=4),
        ]
    )
    full = tokens_of(simulated().run([Request(id="running", prompt=ids(5), max_tokens=50)]))
    while not any(len(work.tokens) == 7 for work in engine.unfinished):
        engine.step()
    for name in ("running", "waiting", "later", "nobody"):
        engine.cancel(name)
    events = engine.step()
    assert {e.request for e in events if isinstance(e, Finished) and e.reason == "cancelled"} == {
        "running",
        "waiting",
        "later",
    }
    report = engine.run()
    assert reasons(report)["kept"] == "length"
    tokens = tokens_of(report)
    assert tokens["running"] == full["running"][:7]
    assert (tokens["waiting"], tokens["later"]) == ([], [])
    assert engine.backend.room() == 8192
    # Cancelled requests say nothing about latency.
    assert report.summary["latency_mean"] == report.completions[-1].latency


def test_cancel_while_the_engine_reads_the_list_is_not_lost() -> None:
    """Another thread may cancel at any moment, so also between the reading and the clearing."""
    engine = simulated()
    engine.submit_all([Request(id=name, prompt=ids(5), max_tokens=30) for name in "ab"])
    engine.step()
    plain = engine._finish

    def finish(work: Any, reason: Any, events: Any) -> None:
        engine.cancel("b")  # while "a" is being cancelled
        plain(work, reason, events)

    engine._finish = finish  # type: ignore[method-assign]
    engine.cancel("a")
    engine.step()
    engine._finish = plain  # type: ignore[method-assign]
    assert set(reasons(engine.run()).values()) == {"cancelled"}


def test_deadlines_cut_off_running_and_waiting_requests() -> None:
    engine = simulated({"slots": 1}, **PLAIN)
    report = engine.run(
        [
            Request(id="runs", prompt=ids(5), max_tokens=200, deadline=0.5),
            Request(id="waits", prompt=ids(5), max_tokens=5, deadline=0.2),
            Request(id="in time", prompt=ids(5), max_tokens=5, deadline=60),
        ]
    )
    assert reasons(report) == {"runs": "deadline", "waits": "deadline", "in time": "length"}
    runs, waits, _ = report.completions
    assert 10 < len(runs.tokens) < 200
    assert waits.tokens == []
    assert runs.latency == pytest.approx(0.5, abs=0.02)
    assert [event["request"] for event in events_of(engine, "deadline")] == ["waits", "runs"]


def test_requests_arrive_when_they_said() -> None:
    engine = simulated(**PLAIN)
    report = engine.run(
        [
            Request(id="late", prompt=ids(5), max_tokens=3, arrive=2.0),
            Request(id="now", prompt=ids(5), max_tokens=3),
            Request(id="last", prompt=ids(5), max_tokens=3, arrive=100.0, deadline=50.0),
        ]
    )
    now, late, last = (engine.trace.of(name)["time"] for name in ("now", "late", "last"))
    assert now[-1] < 1.0
    assert 2.0 <= late[0] < 2.2
    assert 100.0 <= last[0] < 100.2
    assert set(reasons(report).values()) == {"length"}
    assert max(done.latency for done in report.completions) < 1.0
    assert report.summary["total_time"] == pytest.approx(last[-1])
