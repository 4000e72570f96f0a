"""A step that is cut short anywhere, and what comes after it: the tokens of an undisturbed run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from engines import PLAIN, configured, ids, ledgers_are_true, reasons, simulated, tokens_of

from entropic_control import Engine, Request
from entropic_control.controllers import EntropicPruning, NgramSpeculation

PRUNE = EntropicPruning(budget=96, sinks=1, recent=2, min_tokens=64, gate=None)

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "pruned": {"pruning": PRUNE},
    "drafted": {"speculation": NgramSpeculation()},
    "pruned and drafted": {"pruning": PRUNE, "speculation": NgramSpeculation()},
}


def works() -> list[Request]:
    words = [7, 8, 9, 10, 11, 12] * 20
    return [
        Request(id=f"r{n}", prompt=words[: 80 + 9 * n], max_tokens=12 + 3 * n, seed=n)
        for n in range(3)
    ]


def interrupting(plain: Callable[..., Any], at: int, after: bool) -> Callable[..., Any]:
    """`plain`, but its call number `at` is cut short, before it does anything or after it has."""
    calls = [0]

    def called(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] != at:
            return plain(*arguments, **named)
        if after:
            plain(*arguments, **named)
        raise KeyboardInterrupt

    return called


PLACES: dict[str, Callable[[Engine], tuple[Any, str]]] = {
    "forward": lambda e: (e.backend, "forward"),
    "piece": lambda e: (e.backend, "piece"),
    "is_end": lambda e: (e.backend, "is_end"),
    "evict": lambda e: (e.backend, "evict"),
    "rollback": lambda e: (e.backend, "rollback"),
    "release": lambda e: (e.backend, "release"),
    "measure and update": lambda e: (e._loops, "step"),
    "take in readings": lambda e: (e._loops, "_take_in"),
    "plan": lambda e: (e, "_plan"),
    "chunk": lambda e: (e, "_chunk"),
    "take": lambda e: (e, "_take"),
    "finish": lambda e: (e, "_finish"),
    "prune": lambda e: (e, "_prune"),
    "record": lambda e: (e, "_record_step"),
    "note": lambda e: (e.trace, "event"),
    "trace of tokens": lambda e: (e.trace.tokens, "append"),
    "trace of steps": lambda e: (e.trace.steps, "append"),
    "learn costs": lambda e: (e.backend.cost, "observe"),
    "text": lambda e: (e.unfinished[0].text, "feed"),
    "ledger": lambda e: (e.unfinished[0].ledger, "extend"),
}


def cut_short(engine: Engine, place: str, at: int, after: bool) -> bool:
    """Run requests with one interrupt; returns whether it came."""
    engine.submit_all(works())
    owner, name = PLACES[place](engine)
    setattr(owner, name, interrupting(getattr(owner, name), at, after))
    came = False
    while not engine.idle:
        try:
            engine.step()
        except KeyboardInterrupt:
            came = True
        ledgers_are_true(engine)
    return came


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", CONFIGURATIONS)
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_step_is_as_if_it_never_was(place: str, kind: str, after: bool) -> None:
    expected = simulated({"vocab": 64, "slots": 2}, **CONFIGURATIONS[kind]).run(works())
    came = False
    for at in (1, 5):
        engine = simulated({"vocab": 64, "slots": 2}, **CONFIGURATIONS[kind])
        came = cut_short(engine, place, at, after) or came
        report = engine.report()
        assert tokens_of(report) == tokens_of(expected)
        assert set(reasons(report).values()) == {"length"}
        for name in reasons(report):
            token = engine.trace.of(name)["token"]
            assert token.tolist() == list(range(len(token)))
        assert engine.backend.room() == 2 * 8192
        assert engine._seats.free == 2
    assert came or (place == "evict" and "pruned" not in kind) or place in ("rollback",)


def test_a_run_goes_on_after_ctrl_c() -> None:
    """A signal comes between steps: the run stops with it, the next one finishes the same tokens."""
    expected = tokens_of(simulated().run(works()))
    engine = simulated()
    plain: Any = engine.backend.forward

    def forward(chunks: Any) -> Any:
        if len(engine.trace.steps) == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(chunks)

    engine.backend.forward = forward  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.run(works())
    assert len(engine.trace.steps) == 8
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(engine.unfinished) == 3
    assert tokens_of(engine.run()) == expected


def test_a_handler_of_the_programs_own_is_left_alone() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        engine = simulated()
        engine.submit("Hi")
        plain: Any = engine.backend.forward

        def forward(chunks: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            assert heard
            return plain(chunks)

        engine.backend.forward = forward  # type: ignore[method-assign]
        engine.step()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_what_the_engine_cannot_take_back_fails_alone() -> None:
    engine = simulated({"can_rollback": False, "slots": 2}, **PLAIN)
    engine.submit_all([Request(id=n, prompt=ids(9), max_tokens=9) for n in "ab"])
    engine.step()
    engine.step()
    plain: Any = engine.backend.forward
    engine.backend.forward = interrupting(plain, 1, after=True)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    report = engine.report()
    assert reasons(report) == {"a": "failed", "b": "failed"}
    assert reasons(engine.run(["Hi"])) == {"0": "length"}
    assert "a step was cut short" in (report.completions[0].error or "")


def test_llama_goes_on_after_an_interrupt() -> None:
    pytest.importorskip("llama_cpp")

    from entropic_control.backends import LlamaCppConfig

    config = configured(**PLAIN).replace(
        backend=LlamaCppConfig(slots=2, context=256, step_tokens=64, threads=1)
    )
    short = [
        Request(id=str(n), prompt=[28 + n, 50, 60], max_tokens=6, seed=n, ignore_eos=True)
        for n in range(2)
    ]
    with Engine(config) as engine:
        expected = tokens_of(engine.run(short))
        for place in ("forward", "measure and update", "take", "trace of tokens"):
            for after in (False, True):
                engine.forget()
                engine.submit_all(short)
                owner, name = PLACES[place](engine)
                plain = getattr(owner, name)
                for at in (1, 4):
                    setattr(owner, name, interrupting(plain, at, after))
                    with pytest.raises(KeyboardInterrupt):
                        engine.run()
                    ledgers_are_true(engine)
                setattr(owner, name, plain)
                assert tokens_of(engine.run()) == expected
