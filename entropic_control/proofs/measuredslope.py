"""Claim: what is measured moves with ln T by the varentropy that is measured beside it.

With the tokens chosen before the temperature (or by rank, which no temperature changes) the entropy of what
is left has the varentropy of what is left as its slope. A set that grows with the temperature adds jumps,
and an estimator that sees a part of the row measures another entropy than the one whose varentropy it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers import Estimator, FullEntropy, NoTruncation, Truncation
from entropic_control.controllers.base import Array
from entropic_control.controllers.measurement import measure
from entropic_control.controllers.temperature import Command
from entropic_control.proofs.claim import TRIALS, Claim
from entropic_control.proofs.rollout import moves_temperature, stands_still
from entropic_control.proofs.subject import Subject
from entropic_control.proofs.table import claim

STEP = 0.02
"""Change of ln T over which a slope is taken, between three temperatures."""
MISMATCH = (0.85, 1.2)
"""The slope over the measured varentropy that counts as the same."""
LIVELY = 0.1
"""Varentropies below, nats^2, are left out of ratios: the loop rests there whatever the slope."""


@claim("temperature")
@dataclass(frozen=True)
class MeasuredSlope(Claim):
    """Numbers: the least and the largest slope over varentropy, through the truncation and estimator."""

    name: ClassVar[str] = "measured slope"
    statement: ClassVar[str] = (
        "through the truncation and the estimator, the entropy that is measured answers to ln T by a slope "
        "that is the measured varentropy, within the mismatch"
    )
    source: ClassVar[str] = (
        "dH/d(ln T) = Var(ln p) of a softmax over a set that does not depend on T; measured by the code "
        "that measures in the engine"
    )

    truncation: Truncation
    estimator: Estimator
    tokens: int
    """Tokens of a row."""
    ratio: tuple[float, float]
    """Least and largest slope over varentropy."""

    @classmethod
    def certify(cls, subject: Subject) -> Iterable[Claim | str]:
        if moves_temperature(subject.temperature) and not stands_still(subject.temperature):
            yield measured_slope(subject.truncation, subject.estimator, subject.vocab)

    @property
    def figures(self) -> dict[str, float]:
        return {"slope over V from": self.ratio[0], "slope over V to": self.ratio[1]}

    def check(self) -> list[str]:
        """The rows again; and the slopes within the mismatch."""
        found = _ratios(self.truncation, self.estimator, self.tokens, 7)
        again = (float(found.min()), float(found.max()))
        if not np.allclose(again, self.ratio, rtol=1e-6):
            return [
                f"slope over varentropy is in [{again[0]:.4g}, {again[1]:.4g}], not {self.ratio}"
            ]
        low, high = MISMATCH
        if low <= again[0] and again[1] <= high:
            return []
        why = []
        if not isinstance(self.truncation, NoTruncation) and self.truncation.place == "after":
            why.append(
                f"truncation '{self.truncation.kind}' placed after the temperature leaves other tokens at "
                "another temperature: set place to 'before'"
            )
        alone = _ratios(NoTruncation(), self.estimator, self.tokens, 7)
        if not (low <= alone.min() and alone.max() <= high):
            why.append(
                f"estimator '{self.estimator.kind}' reports another entropy than the one whose varentropy "
                "is measured: use 'full'"
            )
        return [
            f"the slope is {again[0]:.3g} to {again[1]:.3g} times the measured varentropy, beyond "
            f"[{low:g}, {high:g}]" + "".join(f"; {text}" for text in why)
        ]

    def again(self) -> MeasuredSlope:
        return measured_slope(self.truncation, self.estimator, self.tokens)

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Other rows, of other sizes."""
        rng = np.random.default_rng(seed)
        low, high = MISMATCH
        for _ in range(max(min(trials // 50, 40), 2)):
            size = int(rng.integers(32, max(min(self.tokens, 1024), 33)))
            found = _ratios(self.truncation, self.estimator, size, int(rng.integers(1 << 30)), 12)
            if found.size and not (low <= found.min() and found.max() <= high):
                ends = f"{found.min():.4g} to {found.max():.4g}"
                return f"a row of {size} tokens has a slope of {ends} times V"
        return None


def measured_slope(
    truncation: Truncation | None, estimator: Estimator | None, vocab: int = 49_152
) -> MeasuredSlope:
    """Measure slopes on rows of at most 2,048 tokens."""
    cut, seen = truncation or NoTruncation(), estimator or FullEntropy()
    tokens = min(vocab, 2048)
    found = _ratios(cut, seen, tokens, 7)
    ends = (float(found.min()), float(found.max())) if found.size else (1.0, 1.0)
    return MeasuredSlope(cut, seen, tokens, ends)


def _ratios(
    truncation: Truncation, estimator: Estimator, tokens: int, seed: int, rows: int = 32
) -> Array:
    """Slope over varentropy of random rows, flat and steep, between neighbouring temperatures."""
    rng = np.random.default_rng(seed)
    logits = np.array(
        [
            rng.normal(0, s, tokens) + (s if at % 2 else 0) * (rng.random(tokens) < 0.02) * 4
            for at, s in enumerate(np.geomspace(0.5, 6, rows))
        ]
    )
    start = rng.uniform(-0.7, 0.5, rows)
    # Simpson's rule: the mean slope over the interval against the mean of V at its ends and middle.
    ends = [
        measure(logits, Command(np.exp(start + at * STEP)), estimator, truncation).reading
        for at in (0.0, 0.5, 1.0)
    ]
    slope = (ends[2].entropy - ends[0].entropy) / STEP
    v = (ends[0].varentropy + 4 * ends[1].varentropy + ends[2].varentropy) / 6
    lively = v > LIVELY
    return np.asarray(slope[lively] / v[lively]) if lively.any() else np.ones(1)
