"""The backend protocol on paged blocks: eviction, forks, saved states, failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from families import VOCAB, backend, engine, model_of, plain, prompt, requests, tokens_of, torch

import entropic_control
from entropic_control.backends import TritonConfig
from entropic_control.backends.base import Chunk
from entropic_control.controllers import EntropicPriority, EntropicPruning, FixedTemperature
from entropic_control.errors import CapabilityError, DecodeError, NoRoom


def feed(on: Any, slot: int, tokens: list[int], **options: Any) -> Any:
    chunk = Chunk(slot, on.length(slot), np.array(tokens, np.int32), True, **options)
    return on.forward([chunk])


def reference(tokens: list[int]) -> Any:
    """Logits after every token, by the model itself."""
    with plain(model_of("llama")) as model:
        return model(torch.tensor([tokens])).logits[0].numpy()


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_logits_and_surprisals_are_the_models_own() -> None:
    tokens = prompt(50)
    expected = reference(tokens)
    on = backend()
    forward = feed(on, 1, tokens, following=np.array(tokens[1:]))
    close(forward.logits[0], expected[-1])
    nats = torch.tensor(expected[:-1]).log_softmax(-1)[range(49), tokens[1:]]
    close(forward.surprisal[0], -nats)
    assert forward.seconds > 0
    forward.logits[0][3] = -np.inf  # the engine masks in place


def test_single_surprisals_are_those_of_the_whole() -> None:
    tokens, on = prompt(50), backend()
    whole = feed(on, 0, tokens, following=np.array(tokens[1:])).surprisal[0]
    asked = np.where(np.arange(49) % 3 == 1, tokens[1:], -1)
    forward = feed(on, 1, tokens, following=asked)
    close(forward.logits[0], reference(tokens)[-1])
    close(forward.surprisal[0], np.where(asked < 0, np.nan, whole))


def test_eviction_frees_blocks_at_once_and_keeps_positions_true() -> None:
    tokens = prompt(100)
    on = backend()
    feed(on, 0, tokens)
    room = on.room()
    assert on.evict(0, 32, 64)
    assert on.room() == room + 32
    assert on.extent(0) == 68
    assert on.held(0).tolist() == [*range(32), *range(64, 100)]
    assert on.length(0) == 100
    # The next token sees what is left, at the positions that were true when it was written.
    mask = torch.ones(1, 1, 101, 101, dtype=torch.bool).tril()
    mask[:, :, 100, 32:64] = False
    with plain(model_of("llama")) as model:
        expected = model(torch.tensor([[*tokens, 7]]), attention_mask=mask).logits[0, -1].numpy()
    close(feed(on, 0, [7]).logits[0], expected)
    assert np.abs(expected - reference([*tokens, 7])[-1]).max() > 1e-3


def test_a_part_of_a_block_cannot_be_evicted_but_the_end_can_be_taken_back() -> None:
    tokens = prompt(60)
    on = backend()
    feed(on, 0, tokens)
    assert not on.evict(0, 8, 32)
    assert not on.evict(0, 16, 40)
    assert on.held(0).tolist() == list(range(60))
    assert on.evict(0, 41, 10_000)  # a rejected draft
    assert on.length(0) == 41
    close(feed(on, 0, [9, 8]).logits[0], reference([*tokens[:41], 9, 8])[-1])


def test_forks_share_blocks_and_part_when_they_write() -> None:
    tokens = prompt(40)
    on = backend()
    feed(on, 0, tokens)
    room = on.room()
    on.fork(0, 1, 40)
    on.fork(0, 2, 25)
    assert room - on.room() <= 0  # nothing was copied; the shared slack is counted for each
    a = on.forward(
        [Chunk(slot, on.length(slot), np.array([7 + slot], np.int32), True) for slot in range(3)]
    )
    close(a.logits[0], reference([*tokens, 7])[-1])
    close(a.logits[1], reference([*tokens, 8])[-1])
    close(a.logits[2], reference([*tokens[:25], 9])[-1])
    on.release(0)
    close(feed(on, 1, [5]).logits[0], reference([*tokens, 8, 5])[-1])
    with pytest.raises(CapabilityError, match="cannot fork the first 90"):
        on.fork(1, 3, 90)


def test_evicting_a_shared_prefix_leaves_the_other_owner_alone() -> None:
    tokens = prompt(64)
    on = backend()
    feed(on, 0, tokens)
    on.fork(0, 1, 64)
    assert on.evict(0, 0, 48)
    close(feed(on, 1, [7]).logits[0], reference([*tokens, 7])[-1])


def test_a_saved_slot_goes_on_in_another() -> None:
    tokens = prompt(70)
    on = backend()
    feed(on, 0, tokens)
    on.evict(0, 16, 32)
    data = on.save(0)
    expected = feed(on, 0, [7]).logits[0].copy()
    on.release(0)
    on.restore(3, data)
    assert on.held(3).tolist() == [*range(16), *range(32, 70)]
    assert np.array_equal(feed(on, 3, [7]).logits[0], expected)
    with pytest.raises(DecodeError, match="the saved state of slot 2 is unfit"):
        on.restore(2, data[:-40])
    with pytest.raises(DecodeError, match="unfit"):
        backend("gemma3").restore(0, data)
    assert on.length(2) == 0


def test_without_blocks_a_step_is_refused_whole() -> None:
    on = backend(slots=2, cells=64)
    feed(on, 0, prompt(60))
    room, held = on.room(), on.held(0).tolist()
    with pytest.raises(NoRoom, match="KV blocks"):
        on.forward(
            [
                Chunk(0, 60, np.array([5], np.int32), True),
                Chunk(1, 0, np.array(prompt(300), np.int32), True),
            ]
        )
    assert (on.room(), on.held(0).tolist(), on.length(1)) == (room, held, 0)
    close(feed(on, 0, [7]).logits[0], reference([*prompt(60), 7])[-1])


def test_a_failure_inside_the_model_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(40)
    on = backend()
    feed(on, 0, tokens)
    on.fork(0, 1, 40)
    room = on.room()
    head = on._model.lm_head

    def broken(_: Any) -> Any:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(head, "forward", broken)
        with pytest.raises(DecodeError, match="the model failed: RuntimeError: broken"):
            feed(on, 1, [7])
    assert (on.room(), on.length(1)) == (room, 40)
    close(feed(on, 1, [7]).logits[0], reference([*tokens, 7])[-1])
    close(feed(on, 0, [9]).logits[0], reference([*tokens, 9])[-1])


@pytest.mark.parametrize(
    ("chunk", "fault"),
    [
        (Chunk(0, 3, np.array([5], np.int32), True), "slot 0 is at 0, not 3"),
        (Chunk(0, 0, np.array([VOCAB], np.int32), True), "outside the vocabulary"),
        (Chunk(0, 0, np.zeros(600, np.int32), True), "pass its context of 512"),
    ],
)
def test_wrong_chunks_are_refused_before_anything_runs(chunk: Chunk, fault: str) -> None:
    on = backend()
    with pytest.raises(DecodeError, match=fault):
        on.forward([chunk])
    good = Chunk(1, 0, np.array([5], np.int32), True)
    with pytest.raises(DecodeError, match="twice"):
        on.forward([good, good])
    assert on.room() == 4 * 512


def test_case_20_short_of_blocks_everything_still_finishes() -> None:
    """Case 20: requests that cannot all be held at once queue, and none fails or is corrupted."""
    prompts = [prompt(100, n) for n in range(5)]
    roomy = tokens_of(engine(backend()).run(requests(*prompts, tokens=40)))
    tight = engine(backend(cells=192), priority=EntropicPriority(patience=3))
    assert tokens_of(tight.run(requests(*prompts, tokens=40))) == roomy
    assert any(done.preemptions for done in tight.done)
    assert tight.backend.room() == 192


def test_a_request_that_can_never_fit_fails_alone() -> None:
    run = engine(backend(cells=64))
    report = run.run(requests(prompt(200), prompt(20, 2), tokens=4))
    by_id = {done.id: done for done in report.completions}
    assert by_id["0"].finish_reason == "failed"
    assert "no KV cells" in (by_id["0"].error or "")
    assert by_id["1"].finish_reason == "length"


def test_a_row_of_nan_fails_alone_and_leaves_nothing_behind() -> None:
    """Case 2, and the blocks it wrote NaN into are given to others afterwards."""
    model = model_of("llama")
    bad = VOCAB - 1
    weight = model.get_input_embeddings().weight
    kept = weight[bad].clone()
    on = backend()
    expected = tokens_of(engine(on).run(requests(prompt(20), prompt(30, 2))))
    with torch.no_grad():
        weight[bad] = float("nan")
    try:
        report = engine(on).run(requests([bad, *prompt(10)], prompt(20), prompt(30, 2)))
        by_id = {done.id: done for done in report.completions}
        assert by_id["0"].finish_reason == "failed"
        assert [by_id["1"].tokens, by_id["2"].tokens] == expected
        again = tokens_of(engine(on).run(requests(prompt(20), prompt(30, 2))))
        assert again == expected
    finally:
        with torch.no_grad():
            weight[bad] = kept


def test_pruning_keeps_the_ledger_true_and_frees_memory() -> None:
    pruning = EntropicPruning(budget=0.5, min_tokens=64, sinks=1, recent=1)
    run = engine(backend(), pruning=pruning, temperature=FixedTemperature(temperature=1.0))
    for request in requests(prompt(150), prompt(90, 2), tokens=60):
        run.submit(request)
    pruned = False
    while not run.idle:
        run.step()
        for work in run.unfinished:
            if work.slot is not None:
                assert work.ledger.positions().tolist() == run.backend.held(work.slot).tolist()
                assert run.backend.extent(work.slot) == work.ledger.cells
                pruned |= work.ledger.cells < work.ledger.length
    assert pruned
    assert run.backend.room() == 4 * 512


def test_an_engine_is_saved_and_taken_up_again(tmp_path: Any) -> None:
    def started() -> Any:
        run = engine(backend(), temperature=FixedTemperature(temperature=1.0))
        for request in requests(prompt(40), prompt(60, 2), tokens=20):
            run.submit(request)
        for _ in range(8):
            run.step()
        return run

    whole = started()
    while not whole.idle:
        whole.step()
    part = started()
    part.save(tmp_path / "state.npz")
    again = entropic_control.restore(tmp_path / "state.npz", backend())
    while not again.idle:
        again.step()
    assert tokens_of(again.report()) == tokens_of(whole.report())


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    warm = FixedTemperature(temperature=1.0)
    prompts = [prompt(30 + 9 * n, n) for n in range(4)]
    together = tokens_of(engine(backend(), temperature=warm).run(requests(*prompts, seed=5)))
    for tokens, expected in zip(prompts, together, strict=True):
        alone = engine(backend(), temperature=warm).run(requests(tokens, seed=5))
        assert tokens_of(alone) == [expected]


def test_cuda_is_never_replaced_by_the_cpu_in_silence() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(CapabilityError, match=r"sees no CUDA device: set backend\.device to 'cpu'"):
        TritonConfig(device="cuda").open()
