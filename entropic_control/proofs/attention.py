"""Claim: what dropping attention mass does to an output, and what a shift of mass does to an entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers import Pruning
from entropic_control.controllers.base import Array
from entropic_control.controllers.pruning import BLOCK, Blocks
from entropic_control.controllers.softmax import moments
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.pruningrun import Run


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


def dropped_share(pruning: Pruning, length: int) -> float:
    """Bound of the measured attention mass that goes from a dense sequence of `length` tokens.

    What goes are the least attended of the n - f blocks that do not have to stay. Of n - k that go, each
    has no more than any that stays, so that their mass is largest where all have the same, and those
    that stay anyway have none: (n - k) / (n - f).
    """
    blocks = _dense(length, np.zeros(-(-length // BLOCK)))
    held = len(blocks.number)
    kept = min(held, pruning.budget_blocks(length))
    fixed = int(pruning.fixed(blocks).sum())
    return 0.0 if kept >= held else (held - kept) / (held - fixed)


def measures_mass(pruning: Pruning) -> bool:
    """Whether a policy ranks blocks by the attention they get, and by nothing else.

    The mass that any other drops is bounded by nothing but 1: surprisal, age and lots do not see it.
    """
    by = getattr(pruning, "by", "attention")
    alone = by == "attention" and getattr(pruning, "surprisal", 0.0) == 0.0
    return bool(pruning.needs_attention and alone)


@dataclass(frozen=True)
class DroppedMass(Claim):
    """Numbers: the mass that the policy can drop of a dense sequence, and what that does to an output."""

    name: ClassVar[str] = "dropped mass"
    statement: ClassVar[str] = (
        "pruning by attention drops at most the share e of the measured mass that the n - k blocks beyond "
        "its budget can have; dropping e moves an attention output by at most 2 e max||v||, and a shift T "
        "of total variation moves an entropy over n tokens by at most T ln(n - 1) + h(T)"
    )
    source: ClassVar[str] = (
        "the least of some numbers have no more than their share; triangle inequality; Audenaert, J. "
        "Physics A 40, 2007"
    )

    pruning: Pruning
    length: int
    tokens: int
    mass: float
    output_bound: float
    """Per unit of max||v||."""
    entropy_bound: float
    """Nats, where the next-token distribution shifts by `mass`."""

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        return (
            Assumption("every block's attention was measured, and the next tokens attend alike"),
        )

    @property
    def figures(self) -> dict[str, float]:
        return {
            "length": float(self.length),
            "mass": self.mass,
            "output error over max||v||": self.output_bound,
            f"entropy change at a shift of {self.mass:.3g} [nats]": self.entropy_bound,
        }

    def check(self) -> list[str]:
        """All bounds are attained: even attention; opposite values; a point mass that leaks evenly."""
        if not 0 < self.mass < 1:
            return [f"{self.mass:g} is no share of the attention"]
        faults = []
        if not measures_mass(self.pruning):
            faults.append(
                f"pruning '{self.pruning.kind}' does not rank by attention: any mass may go"
            )
        blocks = _dense(self.length, np.zeros(-(-self.length // BLOCK)))
        free = ~self.pruning.fixed(blocks)
        even = free / max(int(free.sum()), 1)
        dropped = float(even[~_kept(self.pruning, _dense(self.length, even))].sum())
        if abs(dropped - self.mass) > 1e-9:
            faults.append(f"of even attention {dropped:.6g} is dropped, not {self.mass:.6g}")
        value = np.array([1.0, 0.0])
        before, after = _attend(np.array([1 - self.mass, self.mass]), np.array([value, -value]), 1)
        attained = float(np.linalg.norm(before - after))
        if abs(attained - self.output_bound) > 1e-12:
            faults.append(
                f"opposite values move the output by {attained:.6g}, not {self.output_bound:.6g}"
            )
        if abs(self._leaked() - self.entropy_bound) > 1e-9:
            faults.append(
                f"the leaked point mass changes by {self._leaked():.6g}, not {self.entropy_bound:.6g}"
            )
        return faults

    def _leaked(self) -> float:
        """Entropy of a point mass that leaked `mass` evenly, as far as leaking raises it, nats."""
        mass = min(self.mass, 1 - 1 / self.tokens)
        leaked = np.full(self.tokens, max(mass, 1e-300) / (self.tokens - 1))
        leaked[0] = 1 - mass
        return float(moments(np.log(leaked), 1.0).entropy)  # from a point mass, whose entropy is 0

    def again(self) -> DroppedMass:
        return dropped_mass(self.pruning, self.tokens, self.length)

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random attention through the real policy; nearly extremal attention rows and distributions."""
        rng = np.random.default_rng(seed)
        for _ in range(trials // 10):
            length = int(rng.integers(1, 2 * self.length))
            mass = rng.dirichlet(np.full(-(-length // BLOCK), rng.choice([0.05, 1.0, 100.0])))
            dropped = float(mass[~_kept(self.pruning, _dense(length, mass))].sum())
            bound = dropped_share(self.pruning, length)
            if dropped > bound + 1e-9:
                return (
                    f"{dropped:.4g} of the attention is dropped of {length} tokens, not {bound:.4g}"
                )
        for _ in range(trials // 2):
            n = int(rng.integers(2, 40))
            weight = rng.dirichlet(np.full(n, rng.choice([0.1, 1.0, 10.0])))
            values = rng.normal(size=(n, 4))
            kept = int(rng.integers(1, n))
            if rng.random() < 0.3:  # near the extreme: the two groups point opposite ways
                values = np.where(np.arange(n)[:, None] < kept, values[0], -values[0])
            before, after = _attend(weight, values, kept)
            bound = output_error(float(weight[kept:].sum()), 1.0)
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


def dropped_mass(pruning: Pruning, tokens: int = 49_152, length: int = 8192) -> DroppedMass:
    """What `pruning` can drop of a dense sequence of `length` tokens, and what that does."""
    mass = dropped_share(pruning, length)
    return DroppedMass(
        pruning, length, tokens, mass, output_error(mass, 1.0), entropy_change(mass, tokens)
    )


def _dense(length: int, attention: Array) -> Blocks:
    """All blocks of a sequence, with their shares of the attention."""
    number = np.arange(-(-length // BLOCK))
    nats = np.random.default_rng(length).exponential(3.0, (len(number), BLOCK))
    return Blocks(number, nats, length, length, BLOCK, attention)


def _kept(pruning: Pruning, blocks: Blocks) -> Array:
    """What the policy leaves a token to attend to at its leanest: a mask (n,)."""
    if not pruning.selects:
        return pruning.keep(blocks)
    state = pruning.init(1)
    for _ in range(200):
        _, state = pruning.update(state, Run.reading(0.0))
    chosen = pruning.select(state, blocks)
    return np.ones(len(blocks.number), np.bool_) if chosen is None else chosen


def _attend(weight: Array, values: Array, kept: int) -> tuple[Array, Array]:
    """The output of a row of attention in full, and over the first `kept` tokens renormalised."""
    rest = weight[:kept] / max(weight[:kept].sum(), 1e-300)
    return weight @ values, rest @ values[:kept]
