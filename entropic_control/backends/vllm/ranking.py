"""The order of requests by the priority controller, for a scheduler that keeps its own queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from entropic_control.backends.cost import CostModel, Shape, Weights
from entropic_control.controllers.base import Array
from entropic_control.controllers.priority.base import Candidates, Limits, Priority
from entropic_control.controllers.signals import reading
from entropic_control.controllers.state import split, stack

PRIOR = Weights(
    step=5e-3, row=5e-3, row_cell=1e-6, prompt_token=3e-3, prompt_read=1e-6, measured=1e-4
)
"""Of a 135M model on one CPU core; only the ratios matter much, and the fit soon replaces them."""


class View(NamedTuple):
    """A request as ranking sees it."""

    id: str
    wish: int
    """The priority its sender gave it; lower goes first, whatever the index says."""
    prompt_left: int
    decode_left: int
    cells: int
    seated: bool


class Ranked(NamedTuple):
    """An order of requests and why it is this one."""

    ids: list[str]
    """From first to last."""
    indices: dict[str, float]
    """The priority controller's index of each."""
    waited: dict[str, int]
    """Steps since each was served last."""
    reason: str


class Ranking:
    """The states of the priority controller, by request.

    Parameters
    ----------
    priority : Priority
        Whose index and aging decide.
    """

    def __init__(self, priority: Priority) -> None:
        self.cost = CostModel(PRIOR)
        self._priority = priority
        self._states: dict[str, Any] = {}
        self._arrival: dict[str, int] = {}
        self._served: dict[str, int] = {}
        self._arrived = 0
        self._step = 0

    def arrive(self, id: str) -> None:
        """A request came in."""
        self._states[id] = self._priority.init(1)
        self._arrival[id] = self._arrived
        self._served[id] = self._step
        self._arrived += 1

    def forget_all_but(self, ids: Mapping[str, Any]) -> None:
        """Drop the requests that are not among `ids`."""
        for id in [id for id in self._states if id not in ids]:
            del self._states[id], self._arrival[id], self._served[id]

    def served(self, ids: Sequence[str]) -> None:
        """A step was scheduled that serves these requests."""
        self._step += 1
        for id in ids:
            if id in self._served:
                self._served[id] = self._step

    def heard(self, raw_entropy: Mapping[str, float]) -> None:
        """The last step measured these raw entropies, nats."""
        ids = [id for id in raw_entropy if id in self._states]
        if not ids:
            return
        of = reading(np.array([raw_entropy[id] for id in ids]))
        _, state = self._priority.update(stack([self._states[id] for id in ids]), of)
        for id, own in zip(ids, split(state, len(ids)), strict=True):
            self._states[id] = own

    def observe(self, shape: Shape, seconds: float) -> None:
        """Learn what a step costs."""
        self.cost.observe(shape, seconds)

    def rank(self, views: Sequence[View], limits: Limits) -> Ranked:
        """Order by the senders' wishes, then by what the controller would run next, then by index."""
        candidates = self._candidates(views)
        state = stack([self._states[view.id] for view in views])
        plan = self._priority.plan(state, candidates, self.cost, limits)
        index = self._priority.index(state, candidates, self.cost)
        order = self._priority.order(state, candidates, self.cost)
        order = np.concatenate([plan.rows, order[~np.isin(order, plan.rows)]])
        wish = np.array([view.wish for view in views])
        order = order[np.argsort(wish[order], kind="stable")]
        ids = [view.id for view in views]
        return Ranked(
            ids=[ids[row] for row in order],
            indices=dict(zip(ids, index.tolist(), strict=True)),
            waited=dict(zip(ids, candidates.waited.tolist(), strict=True)),
            reason=plan.reason,
        )

    def _candidates(self, views: Sequence[View]) -> Candidates:
        def column(values: list[Any]) -> Array:
            return np.array(values)

        return Candidates(
            arrival=column([self._arrival[view.id] for view in views]),
            waited=column([self._step - self._served[view.id] for view in views]),
            prompt_left=column([view.prompt_left for view in views]),
            decode_left=column([view.decode_left for view in views]),
            cells=column([view.cells for view in views]),
            slack=np.full(len(views), np.inf),
            seated=column([view.seated for view in views]),
        )
