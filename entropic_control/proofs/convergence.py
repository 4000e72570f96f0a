"""Claim: the mean of the error goes to zero as 1/N, for any plant, while the bounds do not cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers import PITemperature
from entropic_control.controllers.softmax import moments
from entropic_control.proofs.bounded import bounded
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.margins import margins
from entropic_control.proofs.rollout import rollout
from entropic_control.proofs.signals import Signals

CUT_SHARE = 0.05
"""Share of tokens at a temperature bound above which a target counts as out of reach on a trace."""


@dataclass(frozen=True)
class Convergence(Claim):
    """Numbers: B with |sum of errors| <= B after any number of tokens off the bounds."""

    name: ClassVar[str] = "mean entropy"
    statement: ClassVar[str] = (
        "the target is below ln(vocab), and the mean error of N tokens is at most B / N off the bounds; "
        "at the upper bound entropy can only stay below the target, at the lower only above"
    )
    source: ClassVar[str] = (
        "telescoping u' = u + kp (e' - e) + ki e'; integral action: Astrom and Hagglund, Advanced PID "
        "Control, 2006, chapter 3; H rises with T because dH/d(ln T) is a variance"
    )

    controller: PITemperature
    vocab: int
    sum_bound: float
    """B: the error is in nats without the schedule, in nats over nats^2 with it."""
    settling: float
    """Tokens in which the linear loop at gain `v_start` falls to 2 %."""
    at_bounds: float | None = None
    """Share of the tokens of a trace drawn at a temperature bound."""

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        kept = None if self.at_bounds is None else self.at_bounds <= CUT_SHARE
        return (Assumption("the bounds leave room for the target", kept),)

    @property
    def figures(self) -> dict[str, float]:
        c = self.controller
        figures = {
            "B": self.sum_bound,
            "tokens to a mean error of 0.1": self.sum_bound / 0.1,
            "settling [tokens]": self.settling,
            "target over ln(vocab)": c.target / float(np.log(self.vocab)),
        }
        if self.at_bounds is not None:
            figures["share of tokens at a bound"] = self.at_bounds
        return figures

    def check(self) -> list[str]:
        """The target against ln(vocab); B against the extreme of its own telescope."""
        c = self.controller
        if c.target >= np.log(self.vocab):
            return [
                f"the target {c.target:g} nats is out of reach: {self.vocab} tokens hold less than "
                f"{np.log(self.vocab):.4g} nats at any temperature"
            ]
        low, high = bounded(c, self.vocab).error
        u_low, u_high = np.log(c.bounds)
        extreme = max(
            abs((u1 - u0 - c.kp * (e1 - e0)) / c.ki)
            for u0 in (u_low, u_high)
            for u1 in (u_low, u_high)
            for e0 in (low, high)
            for e1 in (low, high)
        )
        if extreme > self.sum_bound * (1 + 1e-9):
            return [f"the sum of errors can reach {extreme:.6g}, beyond B = {self.sum_bound:.6g}"]
        return []

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random and one-sided readings through the real loop; random rows between the bounds."""
        rng = np.random.default_rng(seed)
        c = self.controller
        loops = rollout(c, trials)
        total, free = np.zeros(trials), np.ones(trials, bool)
        above, below = free.copy(), free.copy()
        bias = rng.normal(0, 0.3, trials)
        u0, e0 = loops.state.log_temperature, loops.state.error
        for _ in range(150):
            v = np.exp(rng.uniform(-3, 3, trials))
            h = c.target + bias + v * (loops.in_force - u0) * 0.5 + rng.normal(0, 1, trials)
            loops = loops.step(np.clip(h, 0.0, np.log(self.vocab)), v)
            total += loops.state.error
            side = c.saturated(loops.state)
            above &= side <= 0
            below &= side >= 0
            if np.any(np.abs(total[above & below]) > self.sum_bound):
                return f"off the bounds the errors sum to {np.abs(total[above & below]).max():.6g}"
            rest = loops.state.log_temperature - u0 - c.kp * (loops.state.error - e0)
            gap = rest / c.ki - total
            # What the clip took away: downwards at the upper bound, upwards at the lower.
            if np.any(gap[above] < -1e-6) or np.any(gap[below] > 1e-6):
                return "the sum of errors is not what the commands telescope to"
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
    """B = (ln(high / low) + kp (largest - smallest error)) / ki, and the linear rate."""
    low, high = bounded(controller, vocab).error
    u_low, u_high = np.log(controller.bounds)
    total = float((u_high - u_low + controller.kp * (high - low)) / controller.ki)
    at = None
    if trace is not None:
        u = np.concatenate([one.log_temperature for one in trace])
        at = float(np.mean((u <= u_low + 1e-9) | (u >= u_high - 1e-9)))
    settling = margins(controller, controller.v_start, delay).settling
    return Convergence(controller, vocab, total, float(settling), at)
