"""Claim: an estimate lies between its bounds, and so does the entropy of the full row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers import Estimator, FullEntropy, TopKEntropy
from entropic_control.controllers.base import Array
from entropic_control.controllers.estimators import Estimate
from entropic_control.controllers.softmax import Moments, moments
from entropic_control.proofs.claim import TRIALS, Claim
from entropic_control.proofs.subject import Subject
from entropic_control.proofs.table import claim

ROWS = 40
"""Rows of the example."""
ROUNDING = 1e-5
"""Nats that single precision may be off."""


@claim("estimator")
@dataclass(frozen=True)
class Estimates(Claim):
    """Numbers: the widest bounds and the largest error on the example rows."""

    name: ClassVar[str] = "estimate"
    statement: ClassVar[str] = (
        "lower <= estimate <= upper, the full row's entropy is between them too, the mass outside what was "
        "seen is a share, and decisions see a finite entropy that is not negative"
    )
    source: ClassVar[str] = "the row's own moments, in double precision"

    estimator: Estimator
    widest: float
    """Nats."""
    error: float
    """Largest |estimate - entropy|, nats."""

    @classmethod
    def certify(cls, subject: Subject) -> Iterable[Claim | str]:
        seen = subject.estimator
        if seen is not None and type(seen) is not FullEntropy:
            yield estimates(seen)

    @property
    def figures(self) -> dict[str, float]:
        return {"widest bounds [nats]": self.widest, "largest error [nats]": self.error}

    def check(self) -> list[str]:
        """The example rows again."""
        rng = np.random.default_rng(6)
        found = []
        for _ in range(ROWS):
            row, of = _row(rng)
            fault = wrong(self.estimator, row, of)
            if fault:
                return [fault]
            found.append(_spread(self.estimator.estimate(row, of), row, of))
        again = np.max(found, axis=0)
        if not np.allclose(again, (self.widest, self.error), rtol=1e-9, atol=1e-12):
            return [f"width and error are {again}, not {(self.widest, self.error)}"]
        return []

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random rows, flat, steep, tied and masked, at random temperatures."""
        rng = np.random.default_rng(seed)
        for _ in range(trials):
            fault = wrong(self.estimator, *_row(rng))
            if fault:
                return fault
        return None


def estimates(estimator: Estimator) -> Estimates:
    """Look at the example rows through `estimator`."""
    rng = np.random.default_rng(6)
    rows = [_row(rng) for _ in range(ROWS)]
    found = [_spread(estimator.estimate(row, of), row, of) for row, of in rows]
    widest, error = np.max(found, axis=0)
    return Estimates(estimator, float(widest), float(error))


def wrong(estimator: Estimator, row: Array, of: Moments) -> str | None:
    """What is wrong with the estimate of a row, in words."""
    before = row.copy()
    seen = estimator.estimate(row, of)
    truth = moments(row.astype(np.float64), of.temperature).entropy
    if not np.array_equal(row, before):
        return "the row is written to"
    if not np.isfinite(seen).all():
        return f"the estimate is {seen}"
    if not seen.lower - ROUNDING <= seen.entropy <= seen.upper + ROUNDING:
        bounds = f"[{seen.lower:.6g}, {seen.upper:.6g}]"
        return f"the estimate {seen.entropy:.6g} is outside its own bounds {bounds}"
    if not seen.lower - ROUNDING <= truth <= seen.upper + ROUNDING:
        return f"the entropy {truth:.6g} is outside the bounds [{seen.lower:.6g}, {seen.upper:.6g}]"
    if not -ROUNDING <= seen.tail_mass <= 1 + ROUNDING:
        return f"the mass outside what was seen is {seen.tail_mass:.6g}"
    if seen != estimator.estimate(row, of):
        return "the same row is estimated in two ways"
    named = _named(estimator, seen, truth)
    if named is not None and not abs(named - seen.entropy) <= ROUNDING * (1 + abs(named)):
        return f"the estimate is {seen.entropy:.6g} where its kind says {named:.6g}"
    decided = estimator.decision_entropy(row, moments(row, 1.0))
    if not (np.isfinite(decided) and decided >= -ROUNDING):
        return f"decisions are shown an entropy of {decided}"
    return None


def _named(estimator: Estimator, seen: Estimate, truth: float) -> float | None:
    """The entropy that a known kind promises; None for others."""
    if isinstance(estimator, FullEntropy):
        return truth
    if isinstance(estimator, TopKEntropy):
        return {"conservative": seen.upper, "lower": seen.lower, "exact": truth}[estimator.tail]
    return None


def _spread(seen: Estimate, row: Array, of: Moments) -> tuple[float, float]:
    truth = moments(row.astype(np.float64), of.temperature).entropy
    return seen.upper - seen.lower, abs(seen.entropy - truth)


def _row(rng: np.random.Generator) -> tuple[Array, Moments]:
    """A random row, and its moments at a random temperature."""
    size = int(rng.integers(2, 500))
    row = rng.normal(0, np.exp(rng.uniform(-2, 2)), size)
    shape = rng.integers(4)
    if shape == 1:
        row = np.round(row)
    elif shape == 2:
        row[rng.random(size) < 0.5] = -np.inf
        row[int(rng.integers(size))] = 1.0
    elif shape == 3:
        row[np.argsort(row)[: size // 2]] -= 20.0
    row = row.astype(np.float32 if rng.random() < 0.3 else np.float64)
    return row, moments(row, float(np.exp(rng.uniform(-1.5, 0.7))))
