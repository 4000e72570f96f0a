"""Greedy tokens of the backend, through the engine, equal transformers' own `generate`."""

from __future__ import annotations

from typing import Any

import pytest
from families import FAMILIES, backend, engine, generated, model_of, prompt, requests, tokens_of

from entropic_control.controllers import RoundRobin, SlidingWindow

COUNT = 24
PROMPTS = [prompt(5, 1), prompt(40, 2), prompt(17, 3), prompt(100, 4)]


@pytest.mark.parametrize("attention", ["gathered", "kernels"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family: str, attention: str) -> None:
    """Prompts in chunks of at most 32 tokens, beside rows that decode already."""
    model = model_of(family)
    expected = [generated(model, tokens, COUNT) for tokens in PROMPTS]
    on = backend(model, attention=attention, step_tokens=32)
    run = engine(on, priority=RoundRobin())
    found = tokens_of(run.run(requests(*PROMPTS, tokens=COUNT)))
    assert found == expected
    steps = run.trace.steps
    assert ((steps["rows"] > 0) & (steps["prompt_tokens"] > 0)).any()  # both kinds in one step
    assert on.room() == 4 * 512


def test_the_interpreter_runs_the_same_kernels() -> None:
    """The Triton kernels themselves, prefill, decode and write, under a real model."""
    pytest.importorskip("triton")
    from entropic_control.kernels import _triton

    if not _triton.INTERPRETED:
        pytest.skip("triton was imported before these tests could set TRITON_INTERPRET=1")
    model = model_of("llama")
    expected = [generated(model, tokens, 4) for tokens in PROMPTS[:3]]
    on = backend(model, attention="kernels", kernels="interpreter", step_tokens=32)
    assert tokens_of(engine(on).run(requests(*PROMPTS[:3], tokens=4))) == expected


@pytest.mark.parametrize("attention", ["gathered", "kernels"])
def test_dense_equals_pruned_with_a_full_budget_bit_for_bit(attention: str) -> None:
    def entropies(pruning: Any) -> Any:
        parts = {} if pruning is None else {"pruning": pruning}
        run = engine(backend(attention=attention), **parts)
        report = run.run(requests(*PROMPTS, tokens=COUNT))
        return tokens_of(report), run.trace.tokens["raw_entropy"].tolist()

    dense = entropies(None)
    full = SlidingWindow(budget=1.0, min_tokens=0, slack=0.0)
    assert entropies(full) == dense
    # And a budget that is not full does show, or the comparison would mean nothing.
    assert entropies(full.replace(budget=160)) == dense  # everything is within the window
    assert entropies(full.replace(budget=48, sinks=1, recent=2))[1] != dense[1]
