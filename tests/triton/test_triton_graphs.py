"""The decode step in fixed tensors, as a CUDA graph needs it; without a GPU the recording is run anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from families import backend, engine, prompt, requests, tokens_of

from entropic_control.backends.base import Chunk
from entropic_control.backends.paged.runner import Runner
from entropic_control.controllers import EntropicSelection, FixedTemperature, SlidingWindow

PARTS: list[dict[str, Any]] = [
    {},
    {"pruning": SlidingWindow(budget=64, sinks=1, recent=2, min_tokens=0)},
    {"pruning": EntropicSelection(budget=0.3, low=7, high=8, min_tokens=0, by="product")},
]


def recorded(record: Any, family: str = "llama") -> Any:
    on = backend(family, attention="kernels")
    on._runner = Runner(on._model, on._runner._cache, record)
    return on


@pytest.mark.parametrize("parts", PARTS, ids=["dense", "pruned", "selected"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padded_steps_give_the_same_tokens(family: str, parts: dict[str, Any]) -> None:
    """Three rows in a recording of four, tables wider than they need to be, other rows each step."""
    parts = {"temperature": FixedTemperature(temperature=1.0), **parts}
    prompts = [prompt(20 + 60 * n, n) for n in range(3)]
    expected = tokens_of(
        engine(backend(family), **parts).run(requests(*prompts, tokens=16, seed=3))
    )
    runs: list[Any] = []

    def again(run: Any) -> Any:
        runs.append(run)
        return run

    on = recorded(again, family)
    assert tokens_of(engine(on, **parts).run(requests(*prompts, tokens=16, seed=3))) == expected
    assert 1 <= len(runs) <= 4  # by size, not by step
    assert on.room() == 4 * 512


def test_padding_writes_nothing() -> None:
    on = recorded(lambda run: run)
    on.forward([Chunk(0, 0, np.array(prompt(20), np.int32), True)])
    pools = on._storage[0]
    before = pools.keys.clone()
    on.fork(0, 1, 20)
    on.fork(0, 2, 20)
    chunks = [Chunk(slot, 20, np.array([7], np.int32), True) for slot in range(3)]
    on.forward(chunks)
    changed = (pools.keys != before).flatten(2).any(-1).nonzero()
    own = {on._tables[slot].blocks[1] for slot in range(3)}
    assert {int(block) for block, _ in changed} <= own
    assert not pools.keys[0].any()


def test_what_cannot_be_captured_runs_without() -> None:
    def refuse(run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    on = recorded(refuse)
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph and runs without"):
        found = tokens_of(engine(on).run(requests(prompt(20), tokens=5)))
    assert found == tokens_of(engine(backend()).run(requests(prompt(20), tokens=5)))
