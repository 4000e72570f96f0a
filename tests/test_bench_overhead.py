"""The arms of `bench overhead` do the same work, and the bare one leaves no trace of itself."""

from __future__ import annotations

import numpy as np
import pytest
from engines import ids, simulated, tokens_of

from entropic_control.bench.overhead import bare, controlled
from entropic_control.request import Request


@pytest.mark.parametrize("rows", [1, 3])
def test_a_bare_turn_changes_nothing_for_the_engine(rows: int) -> None:
    engines = plain, crossed = simulated(), simulated()
    for engine in engines:
        engine.submit_all(
            Request(prompt=ids(20, n), max_tokens=40, ignore_eos=True) for n in range(rows)
        )
        while any(work.prompt_left for work in engine.unfinished):
            engine.step()
    while not crossed.idle:
        held = [crossed.backend.held(work.slot or 0) for work in crossed.unfinished]
        done, seconds = bare(crossed.backend, crossed.unfinished)
        assert done == 16 * len(crossed.unfinished) > 0
        assert seconds > 0
        for work, positions in zip(crossed.unfinished, held, strict=True):
            np.testing.assert_array_equal(crossed.backend.held(work.slot or 0), positions)
        for engine in engines:
            engine.step()
    assert tokens_of(crossed.report()) == tokens_of(plain.report())


def test_a_turn_of_the_engine_counts_its_tokens() -> None:
    engine = simulated()
    engine.submit_all(Request(prompt=ids(20, n), max_tokens=40, ignore_eos=True) for n in range(2))
    while any(work.prompt_left for work in engine.unfinished):
        engine.step()
    before = sum(len(work.tokens) for work in engine.unfinished)
    done, seconds = controlled(engine)
    assert done == sum(len(work.tokens) for work in engine.unfinished) - before == 32
    assert seconds > 0
