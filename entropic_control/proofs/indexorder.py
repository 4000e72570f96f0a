"""Claim: the index order uncovers entropy fastest in the independent-arms model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

import numpy as np

from entropic_control.controllers import EntropicPriority
from entropic_control.controllers.base import Array
from entropic_control.controllers.priority import Candidates, FlowState
from entropic_control.proofs.claim import TRIALS, Assumption, Claim

ARMS = 5
"""Requests in a brute-forced instance: 120 orders."""


class _OneByOne:
    """An engine that decodes one row at a time, each row with seconds per token of its own."""

    def __init__(self, seconds: Array) -> None:
        self.seconds = seconds

    def decode(self, rows: Array, longest: Array) -> Array:  # noqa: ARG002 (the protocol's)
        return np.asarray(rows * self.seconds)

    def prefill(self, tokens: Array, cells: Array) -> Array:  # noqa: ARG002
        return np.zeros(np.shape(tokens))

    def swap(self, cells: int) -> float:  # noqa: ARG002
        return 0.0


@dataclass(frozen=True)
class IndexOrder(Claim):
    """Numbers: the regret of the index order without and with set-up costs, against brute force."""

    name: ClassVar[str] = "index order"
    statement: ClassVar[str] = (
        "for independent requests served one by one, no order has uncovered more entropy by any budget "
        "than the order of the index (a request in progress counted by its share)"
    )
    source: ClassVar[str] = (
        "Smith, Naval Research Logistics Quarterly 3, 1956; Gittins, J. Royal Statistical Society B 41, "
        "1979; with set-up costs no index is optimal: Banks and Sundaram, Econometrica 62, 1994"
    )

    priority: EntropicPriority
    regret: float
    """Largest entropy, as a share of the total, by which any order was ahead at any budget."""
    set_up_mean: float
    """Mean loss of tau integrated over the budget, as a share, when each request costs a set-up."""
    set_up_worst: float

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        return (
            Assumption("a request's gain per token does not depend on when it is served"),
            Assumption("rows do not share a step: batching is the group rule's part"),
        )

    @property
    def figures(self) -> dict[str, float]:
        return {
            "regret at any budget": self.regret,
            "mean loss with set-up costs": self.set_up_mean,
            "worst loss with set-up costs": self.set_up_worst,
        }

    def check(self) -> list[str]:
        """The regret must be nothing, on fresh instances too."""
        again = max(self.regret, _regret(self.priority, np.random.default_rng(99), 50, 0.0)[0])
        if not 0 <= again <= 1e-9:
            return [f"some order is ahead of the index order by {again:.3g} of the total entropy"]
        if not 0 <= self.set_up_mean <= self.set_up_worst <= 1:
            return ["the losses with set-up costs are not shares in order"]
        return []

    def again(self) -> IndexOrder:
        return index_order(self.priority)

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random requests, extreme ones among them, against all orders at all budgets."""
        regret, _, _ = _regret(self.priority, np.random.default_rng(seed), trials, 0.0)
        if regret > 1e-9:
            return f"an order is ahead of the index order by {regret:.3g} of the total entropy"
        return None


def index_order(priority: EntropicPriority, instances: int = 200) -> IndexOrder:
    """Brute-force random instances without set-up costs, and with some of up to a request's cost."""
    regret, _, _ = _regret(priority, np.random.default_rng(0), instances, 0.0)
    _, mean, worst = _regret(priority, np.random.default_rng(1), instances, 1.0)
    return IndexOrder(priority, round(regret, 12), mean, worst)


def _regret(
    priority: EntropicPriority, rng: np.random.Generator, instances: int, set_up: float
) -> tuple[float, float, float]:
    """Largest shortfall at a budget, and mean and worst loss of the area under tau over budget."""
    pure = priority.replace(beta=0.0, gamma=0.0)
    orders = np.array(list(permutations(range(ARMS))))
    shortfall, losses = 0.0, []
    for _ in range(instances):
        gain = np.maximum(np.exp(rng.normal(0, 1.5, ARMS)), priority.entropy_floor)
        seconds, steps = np.exp(rng.normal(0, 1.5, ARMS)), rng.integers(1, 50, ARMS)
        total, cost = gain * steps, seconds * steps
        extra = set_up * rng.random(ARMS) * cost
        mine = _order(pure, gain, seconds, steps)
        at = int(np.flatnonzero((orders == mine).all(axis=1))[0])
        spent = np.cumsum((cost + extra)[orders], axis=1)
        found = np.cumsum(total[orders], axis=1)
        # tau is linear while one request is served, so the extremes over budgets are at the corners.
        if set_up == 0.0:
            lead = found - _tau(spent[at], found[at], spent)
            shortfall = max(shortfall, float(lead.max() / found[0, -1]))
        end = spent[0, -1]
        area = (total[orders] * (end - spent + cost[orders] / 2)).sum(axis=1)
        losses.append(1 - area[at] / area.max())
    return shortfall, float(np.mean(losses)), float(np.max(losses))


def _tau(spent: Array, found: Array, budget: Array) -> Array:
    """Entropy uncovered by an order at each budget."""
    return np.asarray(np.interp(budget, np.append(0.0, spent), np.append(0.0, found)))


def _order(priority: EntropicPriority, gain: Array, seconds: Array, steps: Array) -> Array:
    """What the real policy makes of the requests."""
    n = len(gain)
    candidates = Candidates(
        arrival=np.arange(n),
        waited=np.zeros(n, int),
        prompt_left=np.zeros(n, int),
        decode_left=steps,
        cells=np.zeros(n, int),
        slack=np.full(n, np.inf),
        seated=np.ones(n, bool),
    )
    return priority.order(FlowState(np.ones(n), gain), candidates, _OneByOne(seconds))
