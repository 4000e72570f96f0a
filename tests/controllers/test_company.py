"""Small decoding sets wait for prompts of about their length, and for no others."""

from __future__ import annotations

import numpy as np
import pytest

from entropic_control.backends.cost import CostModel
from entropic_control.backends.simulated import SimulatedConfig
from entropic_control.controllers.priority import Candidates, EntropicPriority, Limits

COST = CostModel(SimulatedConfig().costs())


def prompts_first(rows: int, cells: int, prompt: int, **fields: float) -> bool:
    """Whether a prompt goes before `rows` decoding rows of `cells` cells."""
    count = rows + 1
    candidates = Candidates(
        arrival=np.arange(count),
        waited=np.zeros(count, np.intp),
        prompt_left=np.array([0] * rows + [prompt]),
        decode_left=np.full(count, 200),
        cells=np.array([cells] * rows + [0]),
        slack=np.full(count, np.inf),
        seated=np.ones(count, np.bool_),
    )
    priority = EntropicPriority(**fields)
    plan = priority.plan(priority.init(count), candidates, COST, Limits(0, 512))
    return bool(plan.rows[0] == rows)


def test_a_single_row_waits_for_a_prompt_of_its_length_to_join_it() -> None:
    assert prompts_first(1, 1500, 1500)
    assert not prompts_first(1, 1500, 1500, company=1)


def test_a_row_waits_for_no_prompt_that_is_much_longer() -> None:
    assert not prompts_first(1, 300, 1500)


@pytest.mark.parametrize("rows", [8, 12])
def test_a_set_with_company_enough_waits_for_nobody(rows: int) -> None:
    assert not prompts_first(rows, 1500, 1500)


def test_more_company_waits_less() -> None:
    waits = [prompts_first(rows, 2000, 1900) for rows in range(1, 9)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0]
    assert not waits[-1]
