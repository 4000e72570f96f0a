"""Claim: the bounds from the k most probable tokens always contain the full entropy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers import TopKEntropy
from entropic_control.controllers.base import Array
from entropic_control.controllers.estimators import tail_bounds, tail_bounds_unnormalised
from entropic_control.controllers.softmax import moments
from entropic_control.proofs.claim import TRIALS, Claim
from entropic_control.proofs.subject import Subject
from entropic_control.proofs.table import claim


@claim("estimator")
@dataclass(frozen=True)
class TopKBounds(Claim):
    """Numbers: the bounds of one example and the entropies of its two extreme tails."""

    name: ClassVar[str] = "top-k bounds"
    statement: ClassVar[str] = (
        "the entropy of the full row lies between the bounds from its k largest probabilities, and both "
        "bounds are attained"
    )
    source: ClassVar[str] = (
        "entropy is Schur-concave: Marshall and Olkin, Inequalities, 1979, chapter 3"
    )

    k: int
    vocab: int
    lower: float
    upper: float
    """Nats, for the example."""

    @classmethod
    def certify(cls, subject: Subject) -> Iterable[Claim | str]:
        if isinstance(subject.estimator, TopKEntropy):
            yield top_k_bounds(subject.estimator, subject.vocab)

    @property
    def figures(self) -> dict[str, float]:
        return {
            "k": float(self.k),
            "lower bound of the example [nats]": self.lower,
            "upper bound of the example [nats]": self.upper,
        }

    def check(self) -> list[str]:
        """The two extreme rows, measured in full, must meet the bounds."""
        flat, steep = (moments(_log(row), 1.0).entropy for row in _extremes(self.k, self.vocab))
        faults = []
        if not abs(flat - self.upper) <= 1e-9:
            faults.append(
                f"the flattest tail has {flat:.6g} nats, the upper bound is {self.upper:.6g}"
            )
        if not abs(steep - self.lower) <= 1e-9:
            faults.append(
                f"the steepest tail has {steep:.6g} nats, the lower bound is {self.lower:.6g}"
            )
        return faults

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random rows, tails pushed towards either extreme, through the bounds themselves.

        The estimator clamps its bounds to the entropy it measured: 'estimate' asks it.
        """
        rng = np.random.default_rng(seed)
        for _ in range(trials):
            n = int(rng.integers(2, 120))
            k = int(rng.integers(1, n))
            row = rng.normal(0, np.exp(rng.uniform(-2, 2)), n)
            order = np.argsort(row)[::-1]
            shape = rng.integers(3)
            if shape == 1:
                row[order[k:]] = row[order[k - 1]]  # all unseen tokens as likely as the k-th
            elif shape == 2:
                row[order[k + 1 :]] -= 30.0
            truth = moments(row, 1.0).entropy
            weights = np.sort(np.exp(row - row.max()))[::-1]
            for named, (low, high, mass) in (
                ("with", tail_bounds(weights[:k] / weights.sum(), n - k)),
                ("without", tail_bounds_unnormalised(weights[:k], n - k)),
            ):
                if not low - 1e-9 <= truth <= high + 1e-9:
                    return f"{truth:.6g} nats lie outside [{low:.6g}, {high:.6g}] {named} the normaliser"
                if mass < weights[k:].sum() / weights.sum() - 1e-9:
                    return f"the tail mass {mass:.6g} is below the true one"
        return None


def top_k_bounds(estimator: TopKEntropy, vocab: int = 49_152) -> TopKBounds:
    """The bounds on an example whose extreme tails are known."""
    k = min(estimator.k, vocab - 1)
    flat, _ = _extremes(k, vocab)
    lower, upper, _ = tail_bounds(flat[:k], vocab - k)
    return TopKBounds(k, vocab, lower, upper)


def _extremes(k: int, vocab: int) -> tuple[Array, Array]:
    """Rows with the same k largest probabilities: the tail spread evenly, and piled up."""
    share = min(0.8, 0.9 * k / vocab + 0.5)
    top = share * np.linspace(2.0, 1.0, k) / np.linspace(2.0, 1.0, k).sum()
    unseen = vocab - k
    each = min((1 - share) / unseen, top[-1])
    top[0] += 1 - top.sum() - each * unseen
    flat = np.concatenate([top, np.full(unseen, each)])
    mass = 1 - top.sum()
    whole = int(mass / top[-1])
    tail = np.zeros(unseen)
    tail[:whole] = top[-1]
    if whole < unseen:
        tail[whole] = mass - whole * top[-1]
    return flat, np.concatenate([top, tail])


def _log(row: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.log(row)
