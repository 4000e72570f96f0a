"""Claim: no request waits longer than its patience and one step for every other live request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers import EntropicPriority
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.queueing import PaddedCost, Queue, random_queue


@dataclass(frozen=True)
class BoundedWaiting(Claim):
    """Numbers: the bound for `live` requests, and the wait that an adversarial stream attains."""

    name: ClassVar[str] = "bounded waiting"
    statement: ClassVar[str] = (
        "whatever arrives, with at most `live` requests at a time (two or more) none is passed over more "
        "than patience + live - 2 times in a row"
    )
    source: ClassVar[str] = (
        "aging: each step serves the longest-waiting overdue request, no newcomer gets ahead of it, and "
        "whoever was served last is not overdue"
    )

    priority: EntropicPriority
    live: int
    bound: int
    """Steps."""
    attained: int
    """Steps that a request waited in the adversarial stream."""

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        return (
            Assumption(
                "the engine serves the plan, and frees a slot for an overdue request without one"
            ),
        )

    @property
    def figures(self) -> dict[str, float]:
        return {
            "live requests": float(self.live),
            "longest wait [steps]": float(self.bound),
            "attained by an adversary [steps]": float(self.attained),
        }

    def check(self) -> list[str]:
        """The adversarial stream again: it must reach the bound and not pass it."""
        short, patience = min(self.live, 8), min(self.priority.patience, 16)
        reached = adversarial_wait(self.priority.replace(patience=patience), short)
        if reached != longest_wait(patience, short):
            return [
                f"{short} requests with patience {patience} waited {reached} steps, not the bound"
            ]
        if self.attained > self.bound:
            return [f"a request waited {self.attained} steps, beyond the bound of {self.bound}"]
        if self.attained < self.bound:
            return [
                f"the bound of {self.bound} steps is not tight: at most {self.attained} were reached"
            ]
        return []

    def again(self) -> BoundedWaiting:
        return bounded_waiting(self.priority, self.live)

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random states: does the plan hold the longest-waiting overdue? Random streams: the bound."""
        rng = np.random.default_rng(seed)
        priority = self.priority.replace(patience=6)
        for _ in range(trials):
            queue = random_queue(rng, priority)
            waited, plan = queue.waited, queue.plan()
            if waited.max() >= priority.patience and int(np.argmax(waited)) not in plan.rows:
                return f"a request that waited {waited.max()} steps is not in the plan {plan.rows}"
            if not plan.rows.size:
                return "nothing is served though requests are live"
        for _ in range(max(trials // 500, 1)):
            queue = random_queue(rng, priority)
            queue.waited = np.zeros_like(queue.waited)
            for _ in range(60):
                if len(queue) < 6 and rng.random() < 0.7:
                    queue.admit(
                        int(rng.integers(1, 80)),
                        int(rng.integers(1, 9)),
                        float(rng.uniform(0.02, 3)),
                        slack=float(rng.exponential(1.0)) if rng.random() < 0.3 else np.inf,
                    )
                if not len(queue):
                    continue
                queue.step()
                longest = int(queue.waited.max(initial=0))
                if longest > longest_wait(priority.patience, 6):
                    return f"a request waited {longest} steps with 6 live and patience 6"
        return None


def bounded_waiting(priority: EntropicPriority, live: int = 16) -> BoundedWaiting:
    """The bound for `live` requests, its tightness shown on a shortened patience.

    An adversary's wait grows by exactly one step for each step of patience, so the stream is run with
    a small one and the rest is added.
    """
    short = min(priority.patience, 16)
    attained = adversarial_wait(priority.replace(patience=short), live) + priority.patience - short
    return BoundedWaiting(priority, live, longest_wait(priority.patience, live), attained)


def longest_wait(patience: int, live: int) -> int:
    """The bound in steps. When a request falls overdue, at most live - 2 others are ahead of it."""
    return patience + live - 2


def adversarial_wait(priority: EntropicPriority, live: int) -> int:
    """The longest wait an adversary causes among `live` requests, in steps.

    Steps hold one token. A favourite with the highest gain is served until the others, all arrived
    together, are overdue; then they are served one by one, and the last has waited for all.
    """
    queue = Queue(priority, PaddedCost(), step_tokens=1)
    for _ in range(live - 1):
        queue.admit(prompt=0, decode=1, flow=priority.entropy_floor, cells=4000)
    queue.admit(prompt=0, decode=10 * (priority.patience + live), flow=50.0, cells=1)
    longest = 0
    for _ in range(priority.patience + live + 1):
        waited, plan = queue.waited, queue.plan()
        longest = max(longest, int(waited[plan.rows].max()))
        queue.step()
    return longest
