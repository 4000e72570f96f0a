"""A small queue around the real scheduler: requests arrive, wait, are served by its plans and leave."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from entropic_control.controllers import EntropicPriority, Priority
from entropic_control.controllers.base import Array
from entropic_control.controllers.priority import Candidates, FlowState, Limits, Plan

LONGEST = 4000
"""Cells of the longest row in a random queue."""


class PaddedCost(NamedTuple):
    """Seconds of a step on an engine that pads attention to the longest row, and of a prompt."""

    step: float = 0.004
    row: float = 0.002
    cell: float = 2e-6
    """Per row and cell of the longest row."""
    token: float = 0.001
    """Per prompt token."""

    def decode(self, rows: Array, longest: Array) -> Array:
        return np.asarray(self.step + rows * (self.row + self.cell * longest))

    def prefill(self, tokens: Array, cells: Array) -> Array:
        return np.asarray(tokens * (self.token + self.cell * (cells + tokens / 2)))

    def swap(self, cells: int) -> float:
        return 10 * self.cell * cells


class Queue:
    """Live requests by column, in order of arrival.

    Parameters
    ----------
    priority : Priority
        The policy under test; its real `plan` decides every step.
    cost : PaddedCost
    slots, step_tokens : int
        As the engine's limits.
    can_swap : bool
        Whether one that waited too long takes the slot of the last in the order; if not, it waits for
        a free one, and nobody overtakes it.
    """

    def __init__(
        self,
        priority: Priority,
        cost: PaddedCost,
        slots: int = 1 << 20,
        step_tokens: int = 64,
        can_swap: bool = True,
    ) -> None:
        self.priority, self.cost, self.slots, self.step_tokens = priority, cost, slots, step_tokens
        self.can_swap = can_swap
        self.arrival = self.waited = self.prompt = self.decode = self.cells = np.zeros(0, np.int64)
        self.seated = np.zeros(0, bool)
        self.flow = self.slack = np.zeros(0)
        self.count = 0

    def __len__(self) -> int:
        return len(self.arrival)

    def admit(
        self,
        prompt: int,
        decode: int,
        flow: float = 0.5,
        cells: int = 0,
        slack: float = np.inf,
    ) -> None:
        """A request arrives; with `cells` it is seated already and decoding.

        `slack` is the time to its deadline, seconds. Nobody leaves at a deadline here: what can no longer
        be had in time must be served some day too.
        """
        for name, value in (
            ("arrival", self.count),
            ("waited", 0),
            ("prompt", prompt),
            ("decode", decode),
            ("cells", cells),
            ("seated", cells > 0),
            ("flow", flow),
            ("slack", slack),
        ):
            setattr(self, name, np.append(getattr(self, name), value))
        self.count += 1

    def candidates(self, rows: Array | slice = slice(None)) -> Candidates:
        """What the policy sees, of all requests or some."""
        columns = (self.arrival, self.waited, self.prompt, self.decode, self.cells, self.slack)
        return Candidates(*(column[rows] for column in (*columns, self.seated)))

    def plan(self) -> Plan:
        """The policy's next step, as far as there are slots for it."""
        plan = self._planned(np.arange(len(self)))
        coming = ~self.seated[plan.rows]
        free = self.slots - int(self.seated.sum())
        if free < 1 and coming.any() and not self.can_swap:
            return self._planned(np.flatnonzero(self.seated))
        kept = ~coming | (np.cumsum(coming) <= max(free, 1))
        return plan._replace(rows=plan.rows[kept], tokens=plan.tokens[kept])

    def _planned(self, rows: Array) -> Plan:
        """A plan for some of the requests; its rows are those of all."""
        limits = Limits(self.slots - int(self.seated.sum()), self.step_tokens)
        plan = self.priority.plan(self._state(rows), self.candidates(rows), self.cost, limits)
        return plan._replace(rows=rows[plan.rows])

    def _state(self, rows: Array) -> Any:
        state: Any = self.priority.init(len(rows))
        if isinstance(state, FlowState):
            return FlowState(np.ones(len(rows)), self.flow[rows])
        return state

    def _seat(self, rows: Array) -> None:
        """Seat the rows of a plan; where slots are short, the last of the order gives way."""
        self.seated[rows] = True
        everyone = np.arange(len(self))
        over = int(self.seated.sum()) - self.slots
        if over > 0:
            order = self.priority.order(self._state(everyone), self.candidates(), self.cost)
            others = [row for row in order if self.seated[row] and row not in rows]
            self.seated[others[-over:]] = False

    def seconds(self, plan: Plan) -> float:
        """What the step costs."""
        prompts = self.prompt[plan.rows] > 0
        rows = plan.rows[~prompts]
        total = float(self.cost.prefill(plan.tokens[prompts], self.cells[plan.rows[prompts]]).sum())
        if len(rows):
            total += float(self.cost.decode(np.array(len(rows)), self.cells[rows].max()))
        return total

    def step(self) -> tuple[Plan, float]:
        """Plan and serve one step; the finished leave. Returns the plan and its seconds."""
        plan = self.plan()
        seconds = self.seconds(plan)
        rows, tokens = plan.rows, plan.tokens
        prompts = self.prompt[rows] > 0
        self.slack = self.slack - seconds
        self.waited = self.waited + 1
        self.waited[rows] = 0
        self._seat(rows)
        self.cells = self.cells.copy()
        self.cells[rows] += tokens
        self.prompt = self.prompt.copy()
        self.prompt[rows[prompts]] -= tokens[prompts]
        self.decode = self.decode.copy()
        self.decode[rows[~prompts]] -= 1
        self._keep((self.prompt > 0) | (self.decode > 0))
        return plan, seconds

    def _keep(self, mask: Array) -> None:
        for name in ("arrival", "waited", "prompt", "decode", "cells", "seated", "flow", "slack"):
            setattr(self, name, getattr(self, name)[mask])


def solo(cost: PaddedCost, prompt: Array, decode: Array, cells: Array) -> float:
    """Seconds that requests, arrays of shape (n,), would still take served one by one."""
    length = cells + prompt
    # Row by row over a decode: the sum of cost.decode(1, length + i), i below decode.
    middle = length + (decode - 1) / 2
    steps = decode * cost.decode(np.ones_like(middle), middle)
    return float(cost.prefill(prompt, cells).sum() + steps.sum())


def random_queue(rng: np.random.Generator, priority: EntropicPriority, most: int = 6) -> Queue:
    """A queue in the middle of its work: some decode, some have waited too long, some are due soon."""
    n = int(rng.integers(1, most + 1))
    queue = Queue(priority, PaddedCost(), step_tokens=int(rng.choice([1, 4, 64])))
    for _ in range(n):
        decoding = rng.random() < 0.6
        queue.admit(
            prompt=0 if decoding else int(rng.integers(1, 200)),
            decode=int(rng.integers(1, 100)),
            flow=float(np.exp(rng.uniform(-4, 1))),
            cells=int(rng.integers(1, LONGEST)) if decoding else 0,
            slack=float(rng.exponential(3.0)) if rng.random() < 0.3 else np.inf,
        )
    queue.waited = rng.integers(0, 2 * priority.patience, n)
    return queue
