"""Claim: mean-square stability for every law of the text's gains whose mean is not zero.

A' P A is convex in A, and A is affine in (g, g q). So for a token whose slope g in [0, G] has, given all
that came before, the mean mu or more, and whatever varentropy was measured,

    E[A' P A]  <=  (1 - mu / G) A0' P A0  +  (mu / G) A1' P A1

where A0 is a token that says nothing (g = 0) and A1 one of the corners at g = G. Two matrices therefore
stand for every distribution, dependent tokens included; only the mean of the slope enters.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np
from scipy.linalg import eigh

from entropic_control.controllers import PITemperature
from entropic_control.controllers.base import Array
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.exactgain import highest
from entropic_control.proofs.quadratic import quadratic_form
from entropic_control.proofs.rational import exact_corners, exact_mean_decrease
from entropic_control.proofs.rollout import Rollout, centres, rollout
from entropic_control.proofs.scheduled import certified, corners
from entropic_control.proofs.signals import Signals

LEAST_MEAN = 0.25
"""Mean slope of the entropy that a text is asked for, nats; that of a lively model is 1 to 3."""
WINDOW = 64
"""Tokens whose mean slope is looked at on a trace."""


@dataclass(frozen=True)
class AnyLaw(Claim):
    """Numbers: P, the decay it proves, and what noise can do."""

    name: ClassVar[str] = "every law of gains"
    statement: ClassVar[str] = (
        "for every distribution of the tokens' slopes whose mean, given the past, is at least the least "
        "mean, and whatever varentropy is measured, the mean of x' P x falls by the decay a token, and "
        "under noise of any colour the rms of I - u* ends at or below noise gain times that of the noise"
    )
    source: ClassVar[str] = (
        "stochastic Lyapunov functions: Kushner, Stochastic Stability and Control, 1967, chapter 8; "
        "convexity of A' P A in A: Boyd et al., LMIs, 1994, section 5.1"
    )

    controller: PITemperature
    vocab: int
    mean: float
    """Least mean slope of a token given those before it, nats."""
    P: Array | None
    """Diagonal, shape (2, 2)."""
    decay: float
    """E[x' P x] after a token over x' P x before it, at most."""
    noise_gain: float
    """Rms of I - u* in the long run per rms of noise, 1/nats."""
    high: float
    """No slope of this vocabulary is above it, nats."""
    calmest: float | None = None
    """Least mean varentropy over WINDOW tokens of a trace, nats."""
    trace: tuple[Signals, ...] | None = None

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        lively = None if self.calmest is None else self.calmest >= self.mean
        return (
            Assumption("a command takes effect at the next token"),
            Assumption(
                "the temperature bounds do not cut (where they do, x' P x still does not grow)"
            ),
            Assumption(
                f"a token's slope has a mean of {self.mean:g} nats or more given those before it "
                f"(on a trace: the mean varentropy of every {WINDOW} tokens)",
                lively,
            ),
            Assumption("noise does not foresee the slopes of later tokens"),
        )

    @property
    def figures(self) -> dict[str, float]:
        figures = {
            "least mean slope [nats]": self.mean,
            "decay of the mean square per token, at most": self.decay,
            "noise gain to I - u* [1/nat], at most": self.noise_gain,
        }
        if self.calmest is not None:
            figures[f"least mean varentropy of {WINDOW} tokens [nats]"] = self.calmest
        return figures

    def check(self) -> list[str]:
        """Fractions for the decrease and its rate from both sides; the noise gain from P and the rate."""
        if self.P is None:
            return [f"no certificate was found for slopes up to {self.high:.4g} nats"]
        if np.any(np.diag(np.diag(self.P)) != self.P):
            return ["P is not diagonal, so bounds that cut could stretch x"]
        if self.high != highest(self.vocab):
            return [f"{self.high:g} nats is not the largest slope of {self.vocab} tokens"]
        if not 0 < self.mean <= self.high:
            return [f"a mean slope of {self.mean:g} nats is not one of this vocabulary"]
        if not 0 < self.decay < 1:
            return [f"the mean square need not fall: {self.decay:.6g} a token"]
        faults = []
        for rate, holds in ((self.decay * (1 + 1e-6), True), (self.decay * (1 - 1e-6), False)):
            wrong = exact_mean_decrease(self.P, _laws(self.controller, self.high, self.mean, rate))
            if holds and wrong:
                faults += wrong
            elif not holds and not wrong:
                faults.append(f"the mean square falls faster than by {self.decay:.8g} a token")
        series = _noise_series(self.controller, self.P, self.decay)
        if not abs(series - self.noise_gain) <= 1e-4 * series:
            faults.append(f"the noise gain is {series:.6g} per nat, not {self.noise_gain:.6g}")
        return faults + ([] if self._calmest_again() else ["the calmest stretch is another"])

    def _calmest_again(self) -> bool:
        """Whether the calmest stretch of the trace is as calm as it is said to be, by sums that run."""
        if self.trace is None or self.calmest is None:
            return self.trace is None and self.calmest is None
        least = np.inf
        for one in self.trace:
            sums = np.concatenate([[0.0], np.cumsum(one.varentropy)])
            size = min(WINDOW, len(one.varentropy))
            least = min(least, float((sums[size:] - sums[:-size]).min()) / size)
        return bool(abs(least - self.calmest) <= 1e-9 * (1 + least))

    def again(self) -> AnyLaw:
        """The claim made anew."""
        trace = None if self.trace is None else list(self.trace)
        return any_law(self.controller, self.vocab, self.mean, trace)

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random laws of slopes, dependent on x, against the real `update`: their exact means."""
        if self.P is None:
            return "there is no P to test"
        rng = np.random.default_rng(seed)
        P, high = self.P, self.high
        centre = centres(self.controller, trials, rng)
        c = self.controller.replace(bounds=(1e-9, 1e9))
        loops = rollout(c, trials)
        for _ in range(10):  # away from the start
            noise, v = rng.normal(0, 1, trials), np.exp(rng.uniform(-3, 3.4, trials))
            loops = loops.step(c.target + noise, v)
        for token in range(30):
            size = quadratic_form(P, _state(loops, centre))
            # Two slopes of any size about a mean that is just met.
            calm = np.where(rng.random(trials) < 0.5, 0.0, rng.uniform(0, self.mean, trials))
            lively = np.where(rng.random(trials) < 0.5, high, rng.uniform(self.mean, high, trials))
            chance = (self.mean - calm) / np.maximum(lively - calm, 1e-12)
            v = np.exp(rng.uniform(-5, 3.6, trials))
            ends = [loops.step(c.target + g * (loops.in_force - centre), v) for g in (calm, lively)]
            sizes = [quadratic_form(P, _state(end, centre)) for end in ends]
            mean = (1 - chance) * sizes[0] + chance * sizes[1]
            if np.any(mean > self.decay * size * (1 + 1e-9) + 1e-12):
                worst = int(np.argmax(mean - self.decay * size))
                return f"the mean of x' P x went from {size[worst]:.6g} to {mean[worst]:.6g}"
            loops = ends[token % 2]
        return self._wandered(rng, min(trials, 2_000))

    def _wandered(self, rng: np.random.Generator, rows: int) -> str | None:
        """The worst two-valued law under coloured noise, long enough to wander."""
        sigma, chance, level = 0.05, self.mean / self.high, 0.0
        c = self.controller.replace(bounds=(1e-6, 1e6))
        loops = rollout(c, rows)
        centre, n = loops.in_force, np.zeros(rows)
        for _ in range(400):
            n = 0.9 * n + sigma * np.sqrt(1 - 0.81) * rng.normal(size=rows)
            g = np.where(rng.random(rows) < chance, self.high, 0.0)
            loops = loops.step(c.target + g * (loops.in_force - centre) + n, g)
            level = max(level, float(np.sqrt(np.mean((loops.state.integral - centre) ** 2))))
        if level > self.noise_gain * sigma:
            return f"noise of rms {sigma:g} moved I by {level:.4g}, beyond {self.noise_gain * sigma:.4g}"
        return None


def any_law(
    controller: PITemperature,
    vocab: int,
    mean: float = LEAST_MEAN,
    trace: list[Signals] | None = None,
) -> AnyLaw:
    """P for every slope that the vocabulary allows, and the decay it proves for a mean of `mean` nats."""
    high = highest(vocab)
    calmest = None if trace is None else _calmest(trace)
    seen = None if trace is None else tuple(trace)
    P = certified(controller, 1, 0.0, high)
    if P is None:
        return AnyLaw(controller, vocab, mean, None, 1.0, np.inf, high, calmest, seen)
    ends = corners(controller, 1, 0.0, high)
    calm, weight = ends[0], mean / high
    decay = max(
        float(eigh((1 - weight) * calm.T @ P @ calm + weight * A.T @ P @ A, P)[0].max())
        for A in ends[2:]
    )
    gain = np.inf
    if decay < 1:
        entering = np.array([controller.filter, -controller.ki])
        size = float(np.sqrt(entering @ P @ entering))
        gain = size / (1 - np.sqrt(decay)) / float(np.sqrt(P[1, 1]))
    return AnyLaw(controller, vocab, mean, P, decay, float(gain), high, calmest, seen)


def _laws(
    controller: PITemperature, high: float, mean: float, rate: float
) -> list[list[tuple[Fraction, Array]]]:
    """The two-valued laws that stand for all others, over the root of the rate, in fractions."""
    ends = exact_corners(controller, 1, 0, high)
    half = len(ends) // 2
    weight, inverse = Fraction(mean) / Fraction(high), 1 / Fraction(rate)
    return [
        [((1 - weight) * inverse, ends[0]), (weight * inverse, lively)] for lively in ends[half:]
    ]


def _noise_series(controller: PITemperature, P: Array, decay: float) -> float:
    """Noise of unit rms, each token's share of sqrt(x' P x) added up, in units of I - u*."""
    entering = np.array([[controller.filter, -controller.ki]])
    size = np.sqrt(quadratic_form(P, entering)[0] / P[1, 1])
    ages = np.arange(int(np.ceil(30 / -np.log(decay))))
    return float(size * (decay ** (ages / 2)).sum())


def _state(loops: Rollout, centre: Array) -> Array:
    """(F[H] - H*, I - u*), shape (rows, 2)."""
    target = loops.controller.target  # type: ignore[attr-defined]
    return np.column_stack([loops.state.entropy - target, loops.state.integral - centre])


def _calmest(trace: list[Signals]) -> float:
    """The least mean varentropy of WINDOW tokens in a row (of a shorter request: of all), nats."""
    least = []
    for one in trace:
        size = min(WINDOW, len(one.varentropy))
        least.append(np.convolve(one.varentropy, np.full(size, 1 / size), "valid").min())
    return float(min(least))
