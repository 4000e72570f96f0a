"""Claim: the mean entropy goes to the target as 1/N, for any plant, while the bounds do not cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers import PITemperature
from entropic_control.controllers.base import Array
from entropic_control.controllers.softmax import moments
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.margins import margins
from entropic_control.proofs.rollout import replay, rollout
from entropic_control.proofs.signals import Signals

CUT_SHARE = 0.05
"""Share of the tokens of a trace at which the bounds cut, above which the target counts as out of reach."""


@dataclass(frozen=True)
class Convergence(Claim):
    """Numbers: B with |sum of (H* - H)| <= B nats after any number of tokens off the bounds."""

    name: ClassVar[str] = "mean entropy"
    statement: ClassVar[str] = (
        "whatever the model and the text, the mean of H over N tokens is within B / N of the target off "
        "the bounds; at the upper bound it can only stay below the target, at the lower only above"
    )
    source: ClassVar[str] = (
        "telescoping I' = I + ki (H* - H); integral action: Astrom and Hagglund, Advanced PID Control, "
        "2006, chapter 3; H rises with T because dH/d(ln T) is a variance"
    )

    controller: PITemperature
    vocab: int
    sum_bound: float
    """B, nats."""
    settling: float
    """Tokens in which the linear loop at gain `v_start` falls to 2 %."""
    fill: float
    """The target over ln(vocab)."""
    delay: int = 1
    trace: tuple[Signals, ...] = ()

    @property
    def cut(self) -> Array:
        """Whether the bounds cut the integral, by token of the trace."""
        return np.concatenate([_cut(self.controller, one) for one in self.trace])

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        kept = None if not self.trace else bool(self.cut.mean() <= CUT_SHARE)
        return (Assumption("the bounds leave room for the target", kept),)

    @property
    def figures(self) -> dict[str, float]:
        figures = {
            "B [nats]": self.sum_bound,
            "tokens to a mean within 0.1 nats": self.sum_bound / 0.1,
            "settling [tokens]": self.settling,
            "target over ln(vocab)": self.fill,
        }
        if self.trace:
            figures["share of tokens cut by a bound"] = float(self.cut.mean())
            figures["largest sum on the trace [nats]"] = self._largest_sum()
        return figures

    def _largest_sum(self) -> float:
        """The largest |sum of (H* - H)| over any tokens in a row of a request that no bound cut, nats."""
        largest = 0.0
        for one in self.trace:
            aim = self.controller.target if one.target is None else one.target
            total = np.concatenate([[0.0], np.cumsum(aim - one.entropy)])
            edges = np.flatnonzero(_cut(self.controller, one)) + 1
            for run in np.split(total, edges):
                largest = max(largest, float(np.ptp(run)) if run.size else 0.0)
        return largest

    def check(self) -> list[str]:
        """The target against ln(vocab); B against what the real integral sums up from bound to bound."""
        c = self.controller
        if not c.target < np.log(self.vocab):
            return [
                f"the target {c.target:g} nats is out of reach: {self.vocab} tokens hold less than "
                f"{np.log(self.vocab):.4g} nats at any temperature"
            ]
        faults = []
        summed = self._from_bound_to_bound()
        if not abs(summed - self.sum_bound) <= 1e-6 * summed:
            faults.append(
                f"from bound to bound the integral sums {summed:.6g} nats, and B is {self.sum_bound:.6g}"
            )
        settling = margins(c, c.v_start, self.delay).settling
        if not abs(self.settling - settling) <= 1e-6 * settling:
            faults.append(
                f"the linear loop settles in {settling:.6g} tokens, not {self.settling:.6g}"
            )
        if self.trace and self._largest_sum() > self.sum_bound * (1 + 1e-6):
            faults.append(
                f"on the trace the errors sum to {self._largest_sum():.6g} nats off the bounds, beyond B"
            )
        return faults

    def again(self) -> Convergence:
        return convergence(self.controller, self.vocab, self.delay, list(self.trace))

    def _from_bound_to_bound(self) -> float:
        """Nats below the target that take the real integral from the lower bound to the upper."""
        c = self.controller
        loops = rollout(c, 1)
        low, high = c.log_bounds
        state = loops.state._replace(integral=np.array([low]), log_temperature=np.array([low]))
        loops, total = loops._replace(state=state), 0.0
        error = (high - low) / c.ki / 64
        for _ in range(10_000):
            after = loops.step(np.array([c.target - error]), 1.0)
            moved = float(after.state.integral[0] - loops.state.integral[0])
            total += error * moved / (c.ki * error)  # the last step may be cut short
            if after.state.integral[0] >= high:
                return total
            loops = after
        return np.inf

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random, one-sided and alternating calm and lively readings through the real loop; random rows."""
        rng = np.random.default_rng(seed)
        c = self.controller
        loops = rollout(c, trials)
        low, high = c.log_bounds
        total = np.zeros(trials)
        above, below = np.ones((2, trials), bool)
        bias, period = rng.normal(0, 0.3, trials), rng.integers(1, 40, trials)
        start = loops.state.integral
        for token in range(150):
            lively = (token // period) % 2 == 0
            v = np.where(
                lively, np.exp(rng.uniform(-1, 3.4, trials)), np.exp(rng.uniform(-6, 0, trials))
            )
            h = c.target + bias + v * (loops.in_force - start) * 0.5 + rng.normal(0, 1, trials)
            h = np.clip(h, 0.0, np.log(self.vocab))
            loops = loops.step(h, v)
            total += c.target - h
            above &= loops.state.integral > low
            below &= loops.state.integral < high
            if np.any(np.abs(total[above & below]) > self.sum_bound * (1 + 1e-9)):
                return f"off the bounds the errors sum to {np.abs(total[above & below]).max():.6g} nats"
            gap = (loops.state.integral - start) / c.ki - total
            # What the clip took away: downwards at the upper bound, upwards at the lower.
            if np.any(gap[above] > 1e-6) or np.any(gap[below] < -1e-6):
                return "the sum of H* - H is not what the integral telescopes to"
        return self._monotone(rng, trials // 20)

    def _monotone(self, rng: np.random.Generator, rows: int) -> str | None:
        low, high = self.controller.bounds
        for _ in range(rows):
            row = rng.normal(0, np.exp(rng.uniform(-1, 2)), int(rng.integers(2, 300)))
            inside = float(np.exp(rng.uniform(np.log(low), np.log(high))))
            h = [moments(row, t).entropy for t in (low, inside, high)]
            if not h[0] <= h[1] + 1e-9 or not h[1] <= h[2] + 1e-9:
                return f"H fell as T rose: {h}"
        return None


def convergence(
    controller: PITemperature, vocab: int, delay: int = 1, trace: list[Signals] | None = None
) -> Convergence:
    """B = ln(high / low) / ki, and the linear rate."""
    low, high = controller.log_bounds
    settling = float(margins(controller, controller.v_start, delay).settling)
    total = (high - low) / controller.ki
    fill = controller.target / float(np.log(vocab)) if vocab > 1 else np.inf
    return Convergence(controller, vocab, total, settling, fill, delay, tuple(trace or ()))


def _cut(controller: PITemperature, one: Signals) -> Array:
    """Whether a bound cut the integral of the real controller, by token of a recorded request."""
    low, high = controller.log_bounds
    integral = np.array([after.state.integral[0] for _, after in replay(controller, one)])
    return np.asarray((integral <= low) | (integral >= high))
