"""Claim: what dropping attention mass does to an output, and what a shift of mass does to an entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers.base import Array
from entropic_control.controllers.softmax import moments
from entropic_control.proofs.claim import TRIALS, Assumption, Claim


def output_error(mass: float, largest_value: float) -> float:
    """Bound of ||o - o'|| after blocks of attention mass `mass` are dropped and the rest renormalised.

    o - o' = e (mean of the dropped values - mean of the kept), and each mean is at most max ||v||.
    """
    return 2.0 * mass * largest_value


def entropy_change(distance: float, tokens: int) -> float:
    """Fannes-Audenaert: the most an entropy over `tokens` tokens differs at total variation `distance`.

    T ln(n - 1) + h(T), nats, with h the binary entropy (Audenaert, J. Physics A 40, 2007); ln n beyond
    T = 1 - 1/n, where it would fall again.
    """
    if distance <= 0 or tokens < 2:
        return 0.0
    if distance >= 1 - 1 / tokens:
        return float(np.log(tokens))
    binary = -distance * np.log(distance) - (1 - distance) * np.log1p(-distance)
    return float(distance * np.log(tokens - 1) + binary)


@dataclass(frozen=True)
class DroppedMass(Claim):
    """Numbers: both bounds at a mass, and what their extremal examples attain."""

    name: ClassVar[str] = "dropped mass"
    statement: ClassVar[str] = (
        "dropping attention mass e moves an attention output by at most 2 e max||v||, and a shift T of "
        "total variation moves an entropy over n tokens by at most T ln(n - 1) + h(T)"
    )
    source: ClassVar[str] = "triangle inequality; Audenaert, J. Physics A 40, 2007"

    mass: float
    tokens: int
    output_bound: float
    """Per unit of max||v||."""
    entropy_bound: float
    """Nats."""

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        return (Assumption("the dropped attention mass is the one the full cache would have had"),)

    @property
    def figures(self) -> dict[str, float]:
        return {
            "mass": self.mass,
            "output error over max||v||": self.output_bound,
            "entropy change [nats]": self.entropy_bound,
        }

    def check(self) -> list[str]:
        """Both bounds are attained: opposite values; a point mass that leaks evenly."""
        if not 0 < self.mass < 1:
            return [f"{self.mass:g} is no share of the attention"]
        faults = []
        value = np.array([1.0, 0.0])
        before, after = _attend(np.array([1 - self.mass, self.mass]), np.array([value, -value]), 1)
        attained = float(np.linalg.norm(before - after))
        if abs(attained - self.output_bound) > 1e-12:
            faults.append(
                f"opposite values move the output by {attained:.6g}, not {self.output_bound:.6g}"
            )
        leaked = np.full(self.tokens, self.mass / (self.tokens - 1))
        leaked[0] = 1 - self.mass
        change = moments(np.log(leaked), 1.0).entropy  # from a point mass, whose entropy is 0
        if abs(change - self.entropy_bound) > 1e-9:
            faults.append(
                f"the leaked point mass changes by {change:.6g}, not {self.entropy_bound:.6g}"
            )
        return faults

    def again(self) -> DroppedMass:
        return dropped_mass(self.mass, self.tokens)

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random and nearly extremal attention rows and distributions."""
        rng = np.random.default_rng(seed)
        for _ in range(trials // 2):
            n = int(rng.integers(2, 40))
            weight = rng.dirichlet(np.full(n, rng.choice([0.1, 1.0, 10.0])))
            values = rng.normal(size=(n, 4))
            kept = int(rng.integers(1, n))
            if rng.random() < 0.3:  # near the extreme: the two groups point opposite ways
                values = np.where(np.arange(n)[:, None] < kept, values[0], -values[0])
            before, after = _attend(weight, values, kept)
            bound = self.output_bound / self.mass * float(weight[kept:].sum())
            error, largest = np.linalg.norm(before - after), np.linalg.norm(values, axis=1).max()
            if error > bound * largest * (1 + 1e-9) + 1e-12:
                return f"mass {weight[kept:].sum():.4g} moved the output by {error:.6g}"
        for _ in range(trials - trials // 2):
            n = int(rng.integers(2, 60))
            p, q = rng.dirichlet(np.full(n, rng.choice([0.05, 1.0])), size=2)
            q = p + rng.choice([1.0, 0.1, 0.01]) * (q - p)
            p, q = np.maximum(p, 1e-300), np.maximum(q, 1e-300)
            change = abs(moments(np.log(p), 1.0).entropy - moments(np.log(q), 1.0).entropy)
            distance = 0.5 * float(np.abs(p - q).sum())
            if change > entropy_change(distance, n) + 1e-9:
                return f"total variation {distance:.4g} changed the entropy by {change:.6g} of {n} tokens"
        return None


def dropped_mass(mass: float = 0.05, tokens: int = 49_152) -> DroppedMass:
    """Both bounds when `mass` of the attention, or of the next-token distribution, moves."""
    return DroppedMass(mass, tokens, output_error(mass, 1.0), entropy_change(mass, tokens))


def _attend(weight: Array, values: Array, kept: int) -> tuple[Array, Array]:
    """The output of a row of attention in full, and over the first `kept` tokens renormalised."""
    rest = weight[:kept] / max(weight[:kept].sum(), 1e-300)
    return weight @ values, rest @ values[:kept]
