"""Attending to some of the blocks without losing any, and how much attention each gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from families import backend, engine, model_of, plain, prompt, requests, tokens_of, torch

from entropic_control.backends.base import Chunk
from entropic_control.controllers import (
    AttentionPruning,
    EntropicSelection,
    FixedTemperature,
    NoPruning,
)
from entropic_control.controllers.pruning.base import Blocks
from entropic_control.controllers.pruning.filtered import GateState
from entropic_control.engine import Engine
from entropic_control.errors import CapabilityError

BOTH = pytest.mark.parametrize("attention", ["gathered", "kernels"])
WARM = FixedTemperature(temperature=1.0)


def one(on: Any, token: int, **options: Any) -> Any:
    return on.forward([Chunk(0, on.length(0), np.array([token], np.int32), True, **options)])


def filled(length: int = 100, **settings: Any) -> Any:
    on = backend(**settings)
    on.forward([Chunk(0, 0, np.array(prompt(length), np.int32), True)])
    return on


@BOTH
def test_a_selection_is_an_eviction_that_is_taken_back(attention: str) -> None:
    """Selecting blocks 0, 2, 6 gives the logits of having evicted the others; then all are there."""
    evicted = filled(attention=attention)
    evicted.evict(0, 16, 32)
    evicted.evict(0, 48, 96)
    expected = one(evicted, 7).logits[0].copy()
    on = filled(attention=attention)
    np.testing.assert_allclose(one(on, 7, attend=np.array([0, 2])).logits[0], expected, atol=1e-6)
    assert on.held(0).tolist() == list(range(101))
    assert on.evict(0, 100, 101)
    dense = filled(attention=attention)
    assert np.array_equal(one(on, 7).logits[0], one(dense, 7).logits[0])


@BOTH
def test_selecting_everything_is_dense_bit_for_bit(attention: str) -> None:
    dense, on = filled(attention=attention), filled(attention=attention)
    chosen = one(on, 7, attend=np.arange(7)).logits[0]
    assert np.array_equal(chosen, one(dense, 7).logits[0])


def test_masses_are_the_models_attention() -> None:
    tokens = [*prompt(100), 7]
    with plain(model_of("llama"), "eager") as model:
        weights = model(torch.tensor([tokens]), output_attentions=True).attentions
    newest = torch.stack([layer[0, :, -1] for layer in weights]).mean((0, 1))
    expected = [float(newest[start : start + 16].sum()) for start in range(0, 101, 16)]
    found = one(filled(), 7, score=True).attention[0]
    assert found.number.tolist() == list(range(7))
    np.testing.assert_allclose(found.mass, expected, atol=1e-6)
    assert found.mass.sum() == pytest.approx(1.0, abs=1e-5)


def test_windowed_layers_do_not_count_in_the_masses() -> None:
    """Gemma's sliding layers never look at old blocks, so they cannot say what those are worth."""
    found = one(filled(model="gemma3"), 7, score=True).attention[0]
    assert found.mass.sum() == pytest.approx(1.0, abs=1e-5)
    assert found.mass[0] > 0.01


def test_certain_steps_attend_to_few_blocks_and_unsure_ones_to_all() -> None:
    policy = EntropicSelection(budget=0.25, low=1.0, high=3.0, min_tokens=0, recent=2)
    number = np.arange(40)
    blocks = Blocks(number, np.linspace(0, 5, 640).reshape(40, 16), 640, 640)

    def count(entropy: float) -> int:
        mask = policy.select(GateState(np.array([entropy])), blocks)
        return 40 if mask is None else int(mask.sum())

    assert [count(h) for h in (0.1, 1.0, 2.0, 3.0, 9.0)] == [10, 10, 25, 40, 40]
    mask = policy.select(GateState(np.zeros(1)), blocks)
    assert mask is not None
    assert mask[0]
    assert mask[-9:].all()  # the recent ones and the most surprising


def test_the_engine_selects_without_losing_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    every: list[Any] = []
    on = backend()
    forward = on.forward

    def watched(chunks: Any) -> Any:
        every.extend(chunk.attend for chunk in chunks if len(chunk.tokens) == 1)
        return forward(chunks)

    monkeypatch.setattr(on, "forward", watched)
    policy = EntropicSelection(budget=0.3, low=7.0, high=8.0, min_tokens=0, sinks=1, recent=2)
    run = engine(on, pruning=policy, temperature=WARM)
    for request in requests(prompt(150), tokens=30):
        run.submit(request)
    while not run.idle:
        run.step()
        for work in run.unfinished:
            if work.slot is not None:
                assert work.ledger.cells == work.ledger.length == on.length(work.slot)
    some = [attend for attend in every if attend is not None]
    assert some
    assert all(len(attend) < 10 for attend in some)


def test_attention_scores_reach_the_controller_and_prune() -> None:
    policy = AttentionPruning(budget=0.5, min_tokens=64, sinks=1, recent=1, slack=0.0)
    seen: list[Blocks] = []

    class Watched(AttentionPruning):
        def score(self, blocks: Blocks) -> Any:
            seen.append(blocks)
            return super().score(blocks)

    run = engine(backend(), pruning=Watched(**dict(policy)), temperature=WARM)
    report = run.run(requests(prompt(150), tokens=20))
    assert tokens_of(report)
    first = seen[0]
    assert first.attention is not None
    assert np.isfinite(first.attention).all()
    assert 0 < first.attention.sum() <= 1 + 1e-5
    pruned = [event for event in run.trace.events if event["event"] == "pruned"]
    assert pruned
    worst = np.argmin(first.attention[1:-1]) + 1
    assert not policy.keep(first)[worst]


@pytest.mark.parametrize(
    ("pruning", "fault"),
    [
        (EntropicSelection(), "cannot attend to some of the KV blocks only"),
        (AttentionPruning(), "cannot measure the attention of KV blocks"),
    ],
)
def test_backends_that_cannot_are_refused_when_the_engine_is_made(pruning: Any, fault: str) -> None:
    from entropic_control.backends import SimulatedConfig
    from entropic_control.config import Config

    with pytest.raises(CapabilityError, match=fault):
        Engine(Config(backend=SimulatedConfig(), pruning=pruning))
    Engine(Config(backend=SimulatedConfig(), pruning=NoPruning()))
