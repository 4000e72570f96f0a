"""Claim: no request waits longer than its patience and one step for every other live request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from entropic_control.controllers import EntropicPriority
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.queueing import PaddedCost, Queue, random_queue
from entropic_control.proofs.subject import Subject


@dataclass(frozen=True)
class Seating:
    """What an engine can hold at once.

    Parameters
    ----------
    slots : int or None
        Sequences; None for as many as are live.
    can_swap : bool
        Whether a sequence's KV can be taken out and put back.
    cells : int or None
        KV cells of all slots together; None gives every slot its whole context.
    step_tokens : int
        Tokens of one step.
    context : int
        Tokens that a request may reach, its prompt included.
    max_tokens : int
        Tokens that a request generates at most.
    """

    slots: int | None = None
    can_swap: bool = True
    cells: int | None = None
    step_tokens: int = 512
    context: int = 8192
    max_tokens: int = 256

    @classmethod
    def of(cls, subject: Subject) -> Seating:
        """What the engine of a subject can hold; the defaults where it does not say.

        vLLM seats requests by itself: what it holds at once is not known here, so that one that waits is
        sure of a seat only where running requests give theirs to it.
        """
        names = ("slots", "cells", "step_tokens", "context", "max_tokens")
        said = {name: getattr(subject, name) for name in names}
        known = {name: value for name, value in said.items() if value is not None}
        if subject.preempts is not None:
            known["can_swap"] = subject.preempts
        if subject.backend == "vllm":
            known["slots"] = 1
        found = cls(**known)
        return replace(found, max_tokens=min(found.max_tokens, found.context))

    def swaps(self, live: int) -> bool:
        """Whether one of `live` requests that must go ahead can be seated at the next step."""
        roomy = self.slots is None or self.slots >= live
        return self.can_swap or (roomy and not self.tight(live))

    def tight(self, live: int) -> bool:
        """Whether the cells can run out before the slots do."""
        seated = live if self.slots is None else min(live, self.slots)
        return self.cells is not None and self.cells < seated * self.context

    def steps(self, live: int) -> int:
        """Steps that serve one of `live` requests to its end, at most, if it is not left out of them.

        A step that reads prompts is full, or ends a prompt. Where cells are tight it may read one token.
        """
        if self.tight(live):
            return self.context
        return self.max_tokens + (self.context - self.max_tokens) // self.step_tokens + 1


@dataclass(frozen=True)
class BoundedWaiting(Claim):
    """Numbers: the bound for `live` requests, and the wait that an adversarial stream attains."""

    name: ClassVar[str] = "bounded waiting"
    statement: ClassVar[str] = (
        "whatever arrives, with at most `live` requests at a time (two or more) none is passed over more "
        "than patience + live - 2 times in a row where one that waited too long can be seated at once, "
        "and else no more than patience and the steps that all others need to their end"
    )
    source: ClassVar[str] = (
        "aging: each step serves the longest-waiting overdue request, no newcomer gets ahead of it, and "
        "whoever was served last is not overdue; without a swap it waits until others leave, and none "
        "takes their seats before it"
    )

    priority: EntropicPriority
    live: int
    seating: Seating
    bound: int
    """Steps."""
    attained: int
    """Steps that a request waited in the adversarial stream."""

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        rests = [Assumption("the engine serves the plan, and no step fails")]
        if self.seating.swaps(self.live):
            rests.append(Assumption("a slot is freed at once for an overdue request without one"))
        elif self.seating.tight(self.live):
            rests.append(Assumption(f"no request is longer than {self.seating.context} tokens"))
        else:
            rests.append(
                Assumption(
                    f"no request is longer than {self.seating.context} tokens, nor generates more than "
                    f"{self.seating.max_tokens}"
                )
            )
        return tuple(rests)

    @property
    def figures(self) -> dict[str, float]:
        return {
            "live requests": float(self.live),
            "longest wait [steps]": float(self.bound),
            "attained by an adversary [steps]": float(self.attained),
        }

    def check(self) -> list[str]:
        """The adversarial stream again: it must stay within the bound, and reach it where seats swap."""
        bound = longest_wait(self.priority.patience, self.live, self.seating)
        if self.bound != bound:
            return [f"with {self.seating} the bound is {bound} steps, not {self.bound}"]
        attained = _attained(self.priority, self.live, self.seating)
        if self.attained != attained:
            return [f"the adversary attains {attained} steps, not {self.attained}"]
        if self.attained > self.bound:
            return [f"a request waited {self.attained} steps, beyond the bound of {self.bound}"]
        if self.seating.swaps(self.live) and self.attained < self.bound:
            return [
                f"the bound of {self.bound} steps is not tight: at most {self.attained} were reached"
            ]
        return []

    def again(self) -> BoundedWaiting:
        return bounded_waiting(self.priority, self.live, self.seating)

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
            found = self._streamed(rng, priority)
            if found is not None:
                return found
        return None

    def _streamed(self, rng: np.random.Generator, priority: EntropicPriority) -> str | None:
        """A random stream of at most six requests on an engine that swaps as the claim's does."""
        slots = (
            6 if self.seating.slots is None else min(self.seating.slots, int(rng.integers(1, 7)))
        )
        room = int(rng.choice([1, 4, 64]))
        seating = Seating(slots, self.seating.can_swap, None, room, 88, 8)
        bound = longest_wait(priority.patience, 6, seating)
        queue = Queue(priority, PaddedCost(), slots, room, self.seating.can_swap)
        for _ in range(120):
            if len(queue) < 6 and rng.random() < 0.7:
                queue.admit(
                    int(rng.integers(1, 81)),
                    int(rng.integers(1, 9)),
                    float(rng.uniform(0.02, 3)),
                    slack=float(rng.exponential(1.0)) if rng.random() < 0.3 else np.inf,
                )
            if not len(queue):
                continue
            queue.step()
            longest = int(queue.waited.max(initial=0))
            if longest > bound:
                return f"a request waited {longest} steps with 6 live, patience 6 and {seating}"
        return None


def bounded_waiting(
    priority: EntropicPriority, live: int = 16, seating: Seating | None = None
) -> BoundedWaiting:
    """The bound for `live` requests on an engine that seats them so; by default it can swap.

    Its tightness is shown on a shortened patience: an adversary's wait grows by exactly one step for each
    step of patience.
    """
    seating = seating or Seating()
    bound = longest_wait(priority.patience, live, seating)
    return BoundedWaiting(priority, live, seating, bound, _attained(priority, live, seating))


def longest_wait(patience: int, live: int, seating: Seating | None = None) -> int:
    """The bound in steps; by default for an engine that can swap.

    When a request falls overdue, at most live - 2 others are ahead of it. Where it cannot be seated at
    once, all others may have to end first: they are served one by one in the worst case.
    """
    if seating is None or seating.swaps(live):
        return patience + live - 2
    return patience + (live - 1) * seating.steps(live)


def _attained(priority: EntropicPriority, live: int, seating: Seating) -> int:
    short = min(priority.patience, 16)
    hasty = priority.replace(patience=short)
    if seating.swaps(live):
        return adversarial_wait(hasty, live) + priority.patience - short
    return _kept_out(hasty, live, seating)


def _kept_out(priority: EntropicPriority, live: int, seating: Seating) -> int:
    """The wait of the last of `live` equal requests where none gives up its slot, in steps."""
    slots = min(seating.slots or live, live - 1)
    tokens = min(seating.max_tokens, 16)
    queue = Queue(priority, PaddedCost(), slots, step_tokens=1, can_swap=False)
    for _ in range(live):
        queue.admit(prompt=1, decode=tokens)
    longest = 0
    while len(queue):
        queue.step()
        longest = max(longest, int(queue.waited.max(initial=0)))
    return longest


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
