"""The synthetic plant: seeded, and alive in the ways that matter to control."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import PLAIN, ids, simulated, tokens_of

from entropic_control import Request
from entropic_control.backends import Chunk, SimulatedConfig
from entropic_control.controllers import FixedTemperature, NoPruning, PITemperature
from entropic_control.controllers.softmax import moments
from entropic_control.errors import CapabilityError, DecodeError, NoRoom


def opened(**settings: Any) -> Any:
    return SimulatedConfig(**settings).open()


def feed(backend: Any, slot: int, tokens: list[int]) -> np.ndarray[Any, Any]:
    start = backend.length(slot)
    chunk = Chunk(slot, start, np.array(tokens, np.int32), True)
    return np.asarray(backend.forward([chunk]).logits[0].copy())


def entropies(temperature: Any, **backend: Any) -> np.ndarray[Any, Any]:
    """Mean entropy of eight requests over their first 25 tokens, and then by hundreds."""
    engine = simulated(backend, temperature=temperature, pruning=NoPruning())
    engine.run([Request(id=str(n), prompt=ids(10, n), max_tokens=425, seed=n) for n in range(8)])
    rows = np.array([engine.trace.of(str(n))["entropy"] for n in range(8)])
    return np.array([rows[:, :25].mean(), *(part.mean() for part in np.split(rows[:, 25:], 4, 1))])


def test_the_seed_is_all_there_is_to_it() -> None:
    np.testing.assert_array_equal(feed(opened(), 0, ids(9)), feed(opened(), 3, ids(9)))
    assert np.any(feed(opened(), 0, ids(9)) != feed(opened(seed=1), 0, ids(9)))
    requests = [Request(prompt=ids(9, n), max_tokens=20) for n in range(3)]
    assert tokens_of(simulated().run(requests)) == tokens_of(simulated().run(requests))


def test_words_are_tokens_and_chat_turns_are_words() -> None:
    backend = opened()
    text = backend.encode("The cat, the cat.")
    assert len(text) == 6
    assert text[1] == text[4] != text[0]
    assert np.array_equal(backend.encode([{"role": "user", "content": "The cat, the cat."}]), text)
    assert np.array_equal(backend.encode([3, 4]), [3, 4])
    assert backend.piece(0) == b""
    assert backend.is_end(0)
    assert not backend.is_end(1)


def test_entropy_rises_with_temperature() -> None:
    backend = opened()
    for prompt in range(10):
        row = feed(backend, 0, ids(5, prompt))
        entropy = [moments(row, t).entropy for t in np.geomspace(0.05, 20, 40)]
        assert np.all(np.diff(entropy) > 0)
        assert entropy[0] < 0.7
        assert entropy[-1] > 0.9 * np.log(511)
        backend.release(0)


def test_without_control_text_collapses_or_dissolves_and_control_holds_it() -> None:
    cold = entropies(FixedTemperature(temperature=0.5))
    assert cold[-1] < 0.6 * cold[0], "at a low temperature text does not collapse"
    hot = entropies(FixedTemperature(temperature=1.2))
    assert hot[-1] > 1.3 * hot[0], "at a high temperature text does not dissolve"
    for target in (0.8, 1.5, 2.5):
        held = entropies(PITemperature(target=target))
        np.testing.assert_allclose(held[2:], target, rtol=0.1)
    steady = entropies(FixedTemperature(temperature=0.5), drift=0)
    np.testing.assert_allclose(steady[1:], steady[0], rtol=0.2)


def test_contexts_differ_as_tokens_in_words_do() -> None:
    # Without drift: noise would lift every context to the ceiling of ln(vocab).
    engine = simulated({"drift": 0}, **PLAIN)
    engine.run([Request(id="a", prompt=ids(9), max_tokens=300)])
    entropy = engine.trace.of("a")["raw_entropy"]
    assert entropy.min() < 0.3 * np.median(entropy)
    assert entropy.max() > 1.3 * np.median(entropy)


def test_time_is_virtual_and_costs_what_was_said() -> None:
    backend = opened(
        seconds_per_step=1.0,
        seconds_per_row=0.1,
        seconds_per_row_cell=0.01,
        seconds_per_prompt_token=2.0,
        seconds_per_prompt_read=0.0,
        seconds_per_measured=4.0,
    )
    assert backend.now() == 0.0
    feed(backend, 0, ids(10))
    assert backend.now() == pytest.approx(20.0)
    chunk = Chunk(1, 0, np.array(ids(5), np.int32), True, np.array(ids(4), np.int32))
    assert backend.forward([chunk]).seconds == pytest.approx(5 * 2.0 + 4 * 4.0)
    before = backend.now()
    one = np.array([5], np.int32)
    backend.forward([Chunk(0, 10, one, True), Chunk(1, 5, one, True)])
    assert backend.now() - before == pytest.approx(1.0 + 2 * 0.1 + 2 * 11 * 0.01)
    backend.sleep(7.5)
    assert backend.now() - before == pytest.approx(7.5 + 1.42)


def test_holes_cost_time_until_they_are_closed() -> None:
    backend = opened()
    feed(backend, 0, ids(200))
    assert backend.evict(0, 16, 160)
    assert backend.held(0).tolist() == [*range(16), *range(160, 200)]
    assert (backend.extent(0), backend.length(0)) == (200, 200)
    backend.compact(0)
    assert (backend.extent(0), backend.length(0)) == (56, 200)
    feed(backend, 0, [7])
    assert backend.held(0)[-1] == 200
    assert backend.room() == 8 * 8192 - 57


def test_saved_slots_go_on_anywhere() -> None:
    backend = opened()
    feed(backend, 0, ids(20))
    feed(backend, 0, [5])
    data = backend.save(0)
    expected = [feed(backend, 0, [token]) for token in (9, 11)]
    backend.restore(4, data)
    for token, row in zip((9, 11), expected, strict=True):
        np.testing.assert_array_equal(feed(backend, 4, [token]), row)
    backend.release(4)
    assert backend.length(4) == 0


def test_a_fork_is_the_whole_sequence_or_an_error() -> None:
    """Case 15, as far as this backend can: never a wrong prefix."""
    backend = opened()
    feed(backend, 0, ids(20))
    backend.fork(0, 1, 20)
    np.testing.assert_array_equal(feed(backend, 0, [9]), feed(backend, 1, [9]))
    with pytest.raises(CapabilityError, match="whole sequences"):
        backend.fork(0, 2, 10)
    assert backend.length(2) == 0
    with pytest.raises(CapabilityError):
        opened(can_fork=False).fork(0, 1, 0)


@pytest.mark.parametrize(
    ("chunk", "error", "message"),
    [
        (Chunk(0, 5, np.array([1], np.int32), True), DecodeError, "slot 0 is at 4, not 5"),
        (Chunk(0, 4, np.array([99], np.int32), True), DecodeError, "outside the vocabulary"),
        (Chunk(0, 4, np.full(29, 1, np.int32), True), NoRoom, "would pass its context of 32"),
        (
            Chunk(1, 0, np.full(30, 1, np.int32), True),
            NoRoom,
            "30 cells are needed and 28 are free",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    chunk: Chunk, error: type[DecodeError], message: str
) -> None:
    backend = opened(vocab=64, context=32, slots=2, cells=40 if "context" in message else 32)
    feed(backend, 0, [1, 2, 3, 4])
    before = backend.save(0), backend.save(1), backend.now()
    with pytest.raises(error, match=message):
        backend.forward([chunk])
    assert (backend.save(0), backend.save(1), backend.now()) == before


def test_an_eviction_is_refused_by_an_engine_that_cannot() -> None:
    backend = opened(can_evict=False)
    feed(backend, 0, ids(64))
    assert not backend.evict(0, 16, 32)
    assert len(backend.held(0)) == 64
