"""Draft and verify over paged blocks, with every family, on the host and on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from families import FAMILIES, backend, engine, prompt, requests, tokens_of

from entropic_control.backends.base import Chunk
from entropic_control.controllers import (
    EntropicSelection,
    FixedTemperature,
    NgramSpeculation,
    PITemperature,
)
from entropic_control.engine import Engine
from entropic_control.errors import CapabilityError

ALWAYS = NgramSpeculation(shortest=1, draft=5, when="always")


def run(on: Any, works: Any, **parts: Any) -> Engine:
    """Run to the end; after each step the ledgers are what the pool holds."""
    running = engine(on, **parts)
    running.submit_all(works)
    while not running.idle:
        running.step()
        for work in running.unfinished:
            if work.slot is not None:
                assert work.ledger.positions().tolist() == on.held(work.slot).tolist()
    return running


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_plain_decoding(family: str) -> None:
    """Texts that repeat: random models fall into loops, and the prompts are some already."""
    on = backend(family)
    works = requests(prompt(9) * 4, prompt(5, 2) * 5, [7, 8] * 11, tokens=40)
    plain = run(on, works)
    speculating = run(on, works, speculation=ALWAYS)
    assert tokens_of(speculating.report()) == tokens_of(plain.report())
    steps = speculating.trace.steps
    assert 0 < steps["accepted"].sum() <= steps["drafted"].sum()
    assert len(steps) < len(plain.trace.steps)
    assert on.room() == 4 * 512


@pytest.mark.parametrize("sampling", ["host", "device"])
@pytest.mark.parametrize("temperature", [PITemperature(target=2.0), FixedTemperature()])
def test_sampled_tokens_are_those_of_plain_decoding(sampling: Any, temperature: Any) -> None:
    on = backend(sampling=sampling)
    works = requests(prompt(9) * 4, prompt(5, 2) * 5, tokens=40)
    plain = run(on, works, temperature=temperature)
    speculating = run(on, works, temperature=temperature, speculation=ALWAYS)
    assert tokens_of(speculating.report()) == tokens_of(plain.report())
    assert speculating.trace.steps["drafted"].sum() > 0
    for name in "01":
        for column in ("temperature", "entropy", "raw_entropy", "tau"):
            np.testing.assert_allclose(
                speculating.trace.of(name)[column], plain.trace.of(name)[column], atol=1e-3
            )


def test_a_rollback_leaves_no_trace() -> None:
    tokens = np.array(prompt(40), np.int32)
    back, fresh = backend(), backend()
    for on in (back, fresh):
        on.forward([Chunk(0, 0, tokens[:30], True)])
    logits = back.forward([Chunk(0, 30, tokens[30:36], True, drafts=5)]).logits
    assert len(logits) == 6
    back.rollback(0, 32)
    for at in (30, 31):
        (row,) = fresh.forward([Chunk(0, at, tokens[at : at + 1], True)]).logits
        np.testing.assert_allclose(logits[at - 30], row, atol=1e-5)
    assert back.held(0).tolist() == fresh.held(0).tolist()
    assert back.room() == fresh.room()
    one, other = (on.forward([Chunk(0, 32, tokens[3:4], True)]).logits[0] for on in (back, fresh))
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_blocks_chosen_token_by_token_cannot_be_chosen_for_a_draft() -> None:
    with pytest.raises(CapabilityError, match=r"'selection'.*'ngram' cannot run with it"):
        engine(backend(), pruning=EntropicSelection(), speculation=ALWAYS)
