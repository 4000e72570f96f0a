"""Teacher forcing: a known text through the engine's own path."""

from __future__ import annotations

import numpy as np
import pytest
from engines import PLAIN, ids, ledgers_are_true, simulated
from pydantic import ValidationError

from entropic_control import Request
from entropic_control.controllers import EntropicPruning, PITemperature
from entropic_control.controllers.softmax import surprisals
from entropic_control.errors import PromptError

TEXT = tuple(ids(40, start=5))


def test_forced_tokens_take_the_place_of_the_draws_as_far_as_they_go() -> None:
    free = simulated(**PLAIN).run([Request(prompt=ids(20), max_tokens=60)])
    forced = simulated(**PLAIN).run([Request(prompt=ids(20), max_tokens=60, forced=TEXT)])
    tokens = forced.completions[0].tokens
    assert tokens[:40] == list(TEXT)
    assert len(tokens) == 60
    assert tokens[40:] != list(TEXT[:20])
    assert free.completions[0].tokens[:40] != list(TEXT)


def test_a_place_of_minus_one_is_left_to_the_draw() -> None:
    """A text that forces what would have been drawn, and leaves the rest free, is the free text."""
    free = simulated(**PLAIN).run([Request(prompt=ids(20), max_tokens=30, seed=3)])
    drawn = free.completions[0].tokens
    forced = [token if n % 3 else -1 for n, token in enumerate(drawn)]
    again = simulated(**PLAIN).run(
        [Request(prompt=ids(20), max_tokens=30, seed=3, forced=tuple(forced))]
    )
    assert again.completions[0].tokens == drawn


def test_the_trace_holds_how_likely_the_model_found_the_text() -> None:
    engine = simulated({"drift": 0.0}, **PLAIN)
    trace = engine.run([Request(prompt=ids(20), max_tokens=40, forced=TEXT)]).trace
    plant = engine.backend
    given = np.array([ids(20)[-1], *TEXT[:-1]])
    rows = np.stack([plant._after(int(token)) for token in given])  # type: ignore[attr-defined]
    assert trace.tokens["raw_surprisal"] == pytest.approx(surprisals(rows, np.array(TEXT)))


def test_the_loops_run_on_a_forced_text_and_the_tokens_of_all_arms_are_equal() -> None:
    work = Request(prompt=ids(1500), max_tokens=40, forced=TEXT)
    dense = simulated(**PLAIN)
    full = simulated(temperature=PITemperature(target=0.8), pruning=EntropicPruning(budget=0.5))
    assert dense.run([work]).completions[0].tokens == full.run([work]).completions[0].tokens
    assert np.ptp(full.trace.tokens["temperature"]) > 0
    assert full.trace.steps["cells"].max() < dense.trace.steps["cells"].max()
    assert ledgers_are_true(full) == 0


def test_a_forced_token_that_ends_the_text_ends_the_request() -> None:
    report = simulated(**PLAIN).run([Request(prompt=ids(9), max_tokens=9, forced=(5, 6, 0, 7))])
    assert report.completions[0].tokens == [5, 6, 0]
    assert report.completions[0].finish_reason == "end"


@pytest.mark.parametrize("token", [512, 1 << 20])
def test_forced_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    engine = simulated(**PLAIN)
    with pytest.raises(PromptError, match="between 0 and 511"):
        engine.submit(Request(prompt=ids(9), forced=(1, token)))
    assert engine.idle


@pytest.mark.parametrize("token", [-2, 1 << 40])
def test_forced_tokens_that_are_no_ids_are_refused(token: int) -> None:
    with pytest.raises(ValidationError, match="forced"):
        Request(prompt="Hi", forced=(token,))
