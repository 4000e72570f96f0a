"""The priority family: which sequences get the next step.

A policy supplies an index; the base turns the index into a plan for one step. The arrays have one row
a live request (running or waiting).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from entropic_control.controllers.base import Array, Controller, Linear
from entropic_control.controllers.signals import Reading


class Candidates(NamedTuple):
    """The requests that could be served, arrays of shape (n,)."""

    arrival: Array
    """Position in the order of arrival, an integer, unique."""
    waited: Array
    """Steps since the request was last served, or arrived."""
    prompt_left: Array
    """Prompt tokens that are not in the KV cache yet; 0 means decoding."""
    decode_left: Array
    """Tokens it may still generate, at most."""
    cells: Array
    """KV cells it holds."""
    slack: Array
    """Seconds to its deadline, inf without one."""
    seated: Array
    """Whether it holds a slot of the backend."""


class Cost(Protocol):
    """Predicted seconds of a step; owned and fitted by the backend."""

    def decode(self, rows: Array, longest: Array) -> Array:
        """Seconds to decode one token for `rows` sequences, the longest holding `longest` cells."""

    def prefill(self, tokens: Array, cells: Array) -> Array:
        """Seconds to prefill `tokens` prompt tokens of a sequence that holds `cells` cells."""

    def swap(self, cells: int) -> float:
        """Seconds to take `cells` KV cells out of the engine and to put them back."""


Forced = Literal["", "deadline", "patience"]
"""What the first row of a plan goes ahead for: nothing but its worth, its deadline, its wait."""


class Limits(NamedTuple):
    """What one step can hold."""

    free_slots: int
    step_tokens: int
    """Tokens of one step, decode rows and prompt chunks together."""


class Plan(NamedTuple):
    """The work of one step: row numbers of the candidates and the tokens each gets.

    A row without a slot, where none is free or cells are short, is left out until there is room, unless
    it is the first: that one may ask the engine to take a slot from the lowest in `order`, if it is
    `forced` or if the swap `pays`.
    """

    rows: Array
    tokens: Array
    reason: str
    forced: Forced = ""


class Priority(Controller):
    """Base of the priority controllers."""

    family: ClassVar[str] = "priority"
    overtaking: ClassVar[bool] = False
    """Whether a request that there is room for may start before one that waits for more room; only a
    policy that bounds waits by itself can let it."""

    @abstractmethod
    def init(self, rows: int = 1, *, dtype: Any = np.float64) -> Any:
        """The state of `rows` fresh sequences."""

    @abstractmethod
    def update(self, state: Any, reading: Reading) -> tuple[Array, Any]:
        """Take in a reading; returns the expected gain of a step, nats, shape (rows,), and the state."""

    @abstractmethod
    def linearize(self, varentropy: float = 1.0) -> Linear:
        """From the fall of the entropy in a step, nats (positive), to the expected gain, nats."""

    @abstractmethod
    def index(self, state: Any, candidates: Candidates, cost: Cost) -> Array:
        """The index of each candidate, shape (n,): the higher, the sooner."""

    def order(self, state: Any, candidates: Candidates, cost: Cost) -> Array:
        """Row numbers from first to last; ties go to the earlier arrival."""
        return np.lexsort((candidates.arrival, -self.index(state, candidates, cost)))

    def pays(
        self,
        state: Any,
        candidates: Candidates,
        cost: Cost,
        coming: int,
        going: int,
    ) -> bool:
        """Whether it pays to serve row `coming` in the place of row `going`, which is swapped out and back.

        Never, unless a policy knows what a place in its order is worth.
        """
        return False

    def plan(self, state: Any, candidates: Candidates, cost: Cost, limits: Limits) -> Plan:
        """The next step: every decoding row, then prompt chunks while tokens are left.

        This is what continuous-batching servers do; the index decides who is left out when the step
        is full, and whose prompt comes first.
        """
        order = eligible(self.order(state, candidates, cost), candidates, limits.free_slots)
        decoding = candidates.prompt_left[order] == 0
        rows = order[decoding][: limits.step_tokens]
        prompts, tokens = fill(order[~decoding], candidates, limits.step_tokens - len(rows))
        return Plan(
            np.concatenate([rows, prompts]),
            np.concatenate([np.ones(len(rows), np.intp), tokens]),
            "all decoding rows, then prompts in order",
        )


def eligible(order: Array, candidates: Candidates, free_slots: int) -> Array:
    """`order` without the requests that would need more slots than are free."""
    unseated = ~candidates.seated[order]
    return order[~unseated | (np.cumsum(unseated) <= free_slots)]


def fill(order: Array, candidates: Candidates, room: int) -> tuple[Array, Array]:
    """Prompt chunks in `order` until `room` tokens are given out: row numbers and tokens."""
    left = candidates.prompt_left[order]
    before = np.cumsum(left) - left
    tokens = np.clip(room - before, 0, left).astype(np.intp)
    return order[tokens > 0], tokens[tokens > 0]
