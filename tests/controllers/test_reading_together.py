"""Which prompts are read together: those that decode cheaply together, not those that fill a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entropic_control.controllers import EntropicPriority
from entropic_control.controllers.base import Array
from entropic_control.controllers.priority import Candidates, Limits, Plan

pytestmark = pytest.mark.filterwarnings("error")


class Padded:
    """Every row pays for the longest; a step costs 10 ms by itself."""

    def __init__(self, step: float = 10e-3) -> None:
        self.step = step

    def decode(self, rows: Array, longest: Array) -> Array:
        return np.asarray(self.step + rows * (2e-3 + 5e-6 * longest))

    def prefill(self, tokens: Array, cells: Array) -> Array:
        return np.asarray(tokens * (4e-3 + 1e-6 * (cells + tokens / 2)))


def plan(prompt: list[int], cells: list[int], step: float = 10e-3, **parameters: Any) -> Plan:
    """What the policy does with requests that still have 100 tokens to write."""
    n = len(prompt)
    policy = EntropicPriority(**parameters)
    found = Candidates(
        arrival=np.arange(n),
        waited=np.zeros(n, int),
        prompt_left=np.array(prompt),
        decode_left=np.full(n, 100),
        cells=np.array(cells),
        slack=np.full(n, np.inf),
        seated=np.ones(n, bool),
    )
    return policy.plan(policy.init(n), found, Padded(step), Limits(0, 512))


def test_a_long_prompt_does_not_fill_the_step_of_a_short_one() -> None:
    found = plan([2000, 50], [0, 0])
    assert (found.rows.tolist(), found.tokens.tolist()) == ([1], [50])


def test_prompts_of_about_one_length_are_read_in_one_step() -> None:
    found = plan([120, 50, 90], [0, 0, 0])
    assert sorted(found.rows.tolist()) == [0, 1, 2]
    assert found.tokens.sum() == 260


def test_a_prompt_is_read_first_if_its_row_is_cheaper_in_company_than_alone() -> None:
    # Four times as long as the row at work: its 300 cells more cost 2 x 1.5 ms, a step of its own 10 ms.
    assert plan([400, 0], [0, 100]).reason == "prompts: best gain per cost"
    # Where a step costs next to nothing, company does not pay.
    assert plan([400, 0], [0, 100], step=1e-4).reason == "decoding set: best gain per cost"
    # A full set needs no more.
    full = plan([400] + [0] * 8, [0] + [100] * 8)
    assert full.reason == "decoding set: best gain per cost"


def test_a_single_prompt_is_read_though_nobody_decodes() -> None:
    found = plan([3000, 3000], [0, 0], company=1.0)
    assert found.rows.tolist() == [0]
    assert found.tokens.tolist() == [512]
