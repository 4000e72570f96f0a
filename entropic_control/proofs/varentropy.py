"""Claim: the plant's gain is the varentropy, which is never negative and bounded by the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers.base import Array
from entropic_control.controllers.softmax import moments
from entropic_control.proofs.claim import TRIALS, Claim


@dataclass(frozen=True)
class VarentropyGain(Claim):
    """Numbers: the largest varentropy of `vocab` tokens and the distribution that attains it."""

    name: ClassVar[str] = "plant gain"
    statement: ClassVar[str] = (
        "dH/d(ln T) equals the varentropy V of what is sampled, and 0 <= V <= V_max of the vocabulary"
    )
    source: ClassVar[str] = (
        "derivative of the softmax family; V_max: Reeb and Wolf, IEEE Trans. Information Theory 61, "
        "2015, section 'tight bound on the variance of the surprisal'"
    )

    vocab: int
    bound: float
    """V_max, nats^2."""
    rest: float
    """Probability that the extremal distribution spreads evenly over all tokens but one."""

    @property
    def figures(self) -> dict[str, float]:
        return {"V_max [nats^2]": self.bound, "vocabulary": float(self.vocab)}

    def attaining(self, vocab: int | None = None) -> Array:
        """The extremal distribution, shape (vocab,): one token against all others alike."""
        n = vocab or self.vocab
        return np.concatenate([[1 - self.rest], np.full(n - 1, self.rest / (n - 1))])

    def check(self) -> list[str]:
        """The distribution attains the bound, is stationary, and the bound lies in its known window."""
        faults = []
        row = np.log(self.attaining())
        attained = moments(row, 1.0).varentropy
        if abs(attained - self.bound) > 1e-9 * max(self.bound, 1.0):
            faults.append(
                f"the distribution has V = {attained:.6g}, not the bound {self.bound:.6g}"
            )
        base = np.log(self.vocab - 1) ** 2 / 4
        if self.vocab > 2 and not base < self.bound < base + 1:
            faults.append(f"V_max {self.bound:.6g} lies outside ({base:.6g}, {base + 1:.6g})")
        nearby = [_two_level(self.vocab, self.rest * f) for f in (0.9, 0.99, 1.01, 1.1)]
        if max(nearby) > self.bound:
            faults.append("a neighbouring distribution has a larger varentropy")
        return faults

    def again(self) -> VarentropyGain:
        return largest(self.vocab)

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random rows through the real measurement, and a climb towards larger varentropy."""
        rng = np.random.default_rng(seed)
        step = 1e-4
        for _ in range(trials):
            n = int(rng.integers(2, 200))
            row = rng.normal(0, np.exp(rng.uniform(-2, 2.5)), n) * rng.choice([1.0, 1.0, 30.0], n)
            u = rng.uniform(-2, 2)
            here = moments(row, float(np.exp(u)))
            above, below = (moments(row, float(np.exp(u + h))).entropy for h in (step, -step))
            slope = (above - below) / (2 * step)
            if abs(slope - here.varentropy) > 1e-4 * (1 + here.varentropy):
                return f"dH/d(ln T) = {slope:.6g} where the measured varentropy is {here.varentropy:.6g}"
            if not -1e-9 <= here.varentropy <= largest(n).bound * (1 + 1e-9):
                return f"V = {here.varentropy:.6g} of {n} tokens, beyond {largest(n).bound:.6g}"
        return self._climb(rng, max(trials // 100, 1))

    def _climb(self, rng: np.random.Generator, starts: int) -> str | None:
        """Gradient ascent of V from `starts` random distributions of up to 64 tokens, against V_max."""
        n = int(rng.integers(3, 65))
        p = rng.dirichlet(np.full(n, 0.3), size=starts) + 1e-12
        for _ in range(300):
            p /= p.sum(axis=1, keepdims=True)
            surprise = -np.log(p)
            centred = surprise - (p * surprise).sum(axis=1, keepdims=True)
            p *= np.exp(0.05 * (centred**2 - 2 * centred))
        p /= p.sum(axis=1, keepdims=True)
        most = max(moments(np.log(row), 1.0).varentropy for row in p)
        bound = self.bound if n == self.vocab else largest(n).bound
        return f"ascent found V = {most:.6g} with {n} tokens" if most > bound + 1e-9 else None


def largest(vocab: int) -> VarentropyGain:
    """The largest varentropy of a distribution over `vocab` tokens.

    At the maximum all tokens but one are alike; with r their total probability and m their number,
    V = r (1 - r) ln^2(m (1 - r) / r) is stationary where (1 - 2r) ln(m (1 - r) / r) = 2.
    """
    if vocab < 2:
        return VarentropyGain(max(vocab, 1), 0.0, 0.0)
    low, high = 1e-12, 0.5
    for _ in range(60):  # the left side falls from above 2 to 0 on the way to r = 1/2
        rest = 0.5 * (low + high)
        above = (1 - 2 * rest) * np.log((vocab - 1) * (1 - rest) / rest) > 2
        low, high = (rest, high) if above else (low, rest)
    return VarentropyGain(vocab, _two_level(vocab, rest), rest)


def _two_level(vocab: int, rest: float) -> float:
    return float(rest * (1 - rest) * np.log((vocab - 1) * (1 - rest) / rest) ** 2)
