"""Claim: the scheduler is work-conserving, and stable below the load that serving one by one bears."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers import EntropicPriority
from entropic_control.controllers.priority import Plan
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.queueing import PaddedCost, Queue, random_queue, solo

LIGHT, HEAVY = 0.8, 3.0
"""Loads of the two simulations, as shares of what serving one by one bears."""


@dataclass(frozen=True)
class WorkConservation(Claim):
    """Numbers: the backlog per second of simulated time under a light and a crushing load."""

    name: ClassVar[str] = "work conservation"
    statement: ClassVar[str] = (
        "while requests are live every step serves some, no set takes longer than its rows one by one, "
        "so any load below one solo second per second leaves queues bounded"
    )
    source: ClassVar[str] = (
        "Foster-Lyapunov drift of the solo work: Meyn and Tweedie, Markov Chains and Stochastic "
        "Stability, 1993, chapter 11; Neely, Stochastic Network Optimization, 2010, chapter 3"
    )

    priority: EntropicPriority
    dearest: float
    """The largest ratio, in random queues, of a set's seconds to those of its rows one by one."""
    drift_light: float
    """Growth of the solo work in the queue, seconds per second, at the light load."""
    drift_heavy: float
    arrivals: float
    """Solo seconds that arrived per second at the heavy load."""
    gain_of_batching: float
    """Solo seconds served per second of the engine at the heavy load."""

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        return (Assumption("the cost model's seconds are the engine's"),)

    @property
    def figures(self) -> dict[str, float]:
        return {
            "dearest set over its rows": self.dearest,
            f"backlog drift at load {LIGHT:g} [s/s]": self.drift_light,
            f"backlog drift at load {HEAVY:g} [s/s]": self.drift_heavy,
            "solo seconds served per second": self.gain_of_batching,
        }

    def check(self) -> list[str]:
        """Ratios in order; a light load must not pile up, and batching must pay."""
        faults = []
        if not self.dearest <= 1 + 1e-9:
            faults.append(f"a set cost {self.dearest:.3g} times its rows one by one")
        if self.drift_light > 0.1:
            faults.append(f"at load {LIGHT:g} the backlog grows by {self.drift_light:.3g} s/s")
        if self.gain_of_batching < 1:
            faults.append(f"the engine serves {self.gain_of_batching:.3g} solo seconds per second")
        balance = self.arrivals - self.gain_of_batching
        if abs(balance - self.drift_heavy) > 1e-6:
            faults.append(
                f"arrivals less service are {balance:.3g} s/s, the backlog grew by {self.drift_heavy:.3g}"
            )
        return faults

    def again(self) -> WorkConservation:
        return work_conservation(self.priority)

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random queues: is a plan empty, or its set dearer than its rows one by one?"""
        rng = np.random.default_rng(seed)
        for _ in range(trials):
            queue = random_queue(rng, self.priority)
            plan = queue.plan()
            if not plan.rows.size:
                return "nothing is served though requests are live"
            if int(plan.tokens.sum()) > queue.step_tokens:
                return f"the plan holds {plan.tokens.sum()} tokens, a step {queue.step_tokens}"
            ratio = _ratio(queue, plan)
            if ratio > 1 + 1e-9:
                return f"a set of {len(plan.rows)} rows costs {ratio:.4g} times its rows one by one"
        return None


def work_conservation(priority: EntropicPriority, steps: int = 300) -> WorkConservation:
    """Simulate the two loads around the real `plan`."""
    rng = np.random.default_rng(2)
    dearest = 0.0
    for _ in range(200):
        queue = random_queue(rng, priority)
        dearest = max(dearest, _ratio(queue, queue.plan()))
    light, _, _ = _simulate(priority, LIGHT, steps)
    heavy, arrivals, served = _simulate(priority, HEAVY, steps)
    return WorkConservation(priority, dearest, light, heavy, arrivals, served)


def _ratio(queue: Queue, plan: Plan) -> float:
    """Seconds of a decoding set over those of its rows one by one; 0 for prompts."""
    cells = queue.cells[plan.rows]
    if (queue.prompt[plan.rows] > 0).any():
        return 0.0
    return queue.seconds(plan) / float(queue.cost.decode(np.ones(len(cells)), cells).sum())


def _simulate(priority: EntropicPriority, load: float, steps: int) -> tuple[float, float, float]:
    """Backlog drift, arrivals and service in solo seconds per second, after a quarter of the steps."""
    rng = np.random.default_rng(1)
    queue = Queue(priority, PaddedCost())
    clock = arrived = served = next_arrival = 0.0
    start = (0.0, 0.0, 0.0, 0.0)
    for step in range(steps):
        while next_arrival <= clock or not len(queue):
            clock = max(clock, next_arrival)
            prompt, decode = rng.integers(8, 120, 1), rng.integers(4, 24, 1)
            work = solo(queue.cost, prompt, decode, np.zeros(1))
            queue.admit(int(prompt[0]), int(decode[0]), float(rng.uniform(0.05, 2)))
            arrived += work
            next_arrival += rng.exponential(work / load)
        if step == steps // 4:
            start = (clock, arrived, served, _backlog(queue))
        cells, prompts = queue.cells, queue.prompt
        plan, seconds = queue.step()
        clock += seconds
        row, tokens = plan.rows, plan.tokens
        prefill = prompts[row] > 0
        served += solo(
            queue.cost, np.where(prefill, tokens, 0), np.where(prefill, 0, 1), cells[row]
        )
    span = clock - start[0]
    drift = (_backlog(queue) - start[3]) / span
    return drift, (arrived - start[1]) / span, (served - start[2]) / span


def _backlog(queue: Queue) -> float:
    return solo(queue.cost, queue.prompt, queue.decode, queue.cells)
