"""The longest wait of real runs against the bound that is proven for their configuration."""

from __future__ import annotations

from typing import Any

import pytest
from engines import ids, simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_control import Request
from entropic_control.config import load_config
from entropic_control.controllers import EntropicPriority, NoPruning
from entropic_control.proofs.certify import certify
from entropic_control.proofs.waiting import Seating, bounded_waiting, longest_wait


def longest(
    priority: EntropicPriority, backend: dict[str, Any], load: list[tuple[int, ...]]
) -> int:
    engine = simulated(backend, priority=priority, pruning=NoPruning())
    engine.run(
        Request(prompt=ids(prompt, n), max_tokens=tokens, arrive=arrive / 10)
        for n, (prompt, tokens, arrive) in enumerate(load)
    )
    return max(work.longest_wait for work in engine.done)


@settings(max_examples=60, deadline=None)
@given(
    patience=st.sampled_from([1, 4, 30]),
    slots=st.integers(1, 6),
    swap=st.booleans(),
    cells=st.sampled_from([None, 150, 300]),
    step_tokens=st.sampled_from([8, 64, 512]),
    load=st.lists(
        st.tuples(st.integers(1, 80), st.integers(1, 40), st.integers(0, 20)),
        min_size=2,
        max_size=8,
    ),
)
def test_no_real_run_waits_longer_than_is_claimed(
    patience: int,
    slots: int,
    swap: bool,
    cells: int | None,
    step_tokens: int,
    load: list[tuple[int, ...]],
) -> None:
    backend = {
        "slots": slots,
        "can_swap": swap,
        "cells": cells,
        "step_tokens": step_tokens,
        "context": 128,
    }
    priority = EntropicPriority(patience=patience)
    seating = Seating(slots, swap, cells, step_tokens, 128, 40)
    # A step of the engine counts from the last service on, so that back to back is a wait of one.
    assert longest(priority, backend, load) <= 1 + longest_wait(patience, len(load), seating)


CASE: dict[str, Any] = {"kind": "simulated", "slots": 2, "can_swap": False}


def test_an_engine_that_cannot_swap_has_another_bound() -> None:
    """Three requests and two slots: the third waits for an end, however small the patience."""
    priority = EntropicPriority(patience=4)
    waited = longest(priority, {"slots": 2, "can_swap": False}, [(20, 300, 0)] * 3)
    assert waited == 300
    wrong = bounded_waiting(priority, live=3)
    assert wrong.bound == 5 < waited
    right = bounded_waiting(priority, 3, Seating(2, can_swap=False, max_tokens=300))
    assert right.holds
    assert waited <= right.bound <= 4 + 2 * (300 + 17)


@pytest.mark.parametrize(
    ("backend", "swaps"),
    [
        ({"kind": "simulated", "slots": 2}, True),
        ({"kind": "simulated", "slots": 2, "can_swap": False}, False),
        ({"kind": "simulated", "slots": 64, "can_swap": False}, True),
        ({"kind": "simulated", "slots": 64, "can_swap": False, "cells": 9000}, False),
        ({"kind": "llama_cpp", "slots": 2}, True),
        ({"kind": "vllm"}, False),
        ({"kind": "vllm", "voluntary_preemption": True}, True),
    ],
    ids=str,
)
def test_the_certificate_is_about_the_whole_configuration(
    backend: dict[str, Any], swaps: bool
) -> None:
    config = load_config({"backend": backend, "temperature": "fixed", "pruning": "none"})
    claim: Any = certify(config)["bounded waiting"]
    assert claim.holds
    short = config.priority.patience + claim.live - 2  # type: ignore[attr-defined]
    assert (claim.bound == short) == swaps
    assert claim.bound >= short
    assert any("slot is freed at once" in a.text for a in claim.assumptions) == swaps
