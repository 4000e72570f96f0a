"""Claim: a truncation leaves the tokens that its rule says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers import NoTruncation, Truncation
from entropic_control.controllers.base import Array
from entropic_control.controllers.softmax import moments
from entropic_control.controllers.truncation import MinP, TopK, TopP
from entropic_control.proofs.claim import TRIALS, Claim
from entropic_control.proofs.subject import Subject
from entropic_control.proofs.table import claim

ROWS = 40
"""Rows of the example whose kept tokens are counted."""


@claim("truncation")
@dataclass(frozen=True)
class Cutting(Claim):
    """Numbers: tokens kept of the example rows, and the least mass that they kept."""

    name: ClassVar[str] = "truncation"
    statement: ClassVar[str] = (
        "of every row some token is kept, never a masked one, the same each time; and top_k keeps the k "
        "most probable, top_p the fewest with mass p, min_p those within a factor p of the first"
    )
    source: ClassVar[str] = "the definitions, worked out token by token on the sorted row"

    truncation: Truncation
    kept: int
    mass: float

    @classmethod
    def certify(cls, subject: Subject) -> Iterable[Claim | str]:
        cut = subject.truncation
        if cut is not None and type(cut) is not NoTruncation:
            yield cutting(cut)

    @property
    def figures(self) -> dict[str, float]:
        return {"tokens kept of the example rows": float(self.kept), "least mass kept": self.mass}

    def check(self) -> list[str]:
        """Every example row against the rule, and the numbers again."""
        rng = np.random.default_rng(5)
        kept, mass = 0, 1.0
        for _ in range(ROWS):
            row, temperature = _row(rng)
            fault = wrong(self.truncation, row, temperature)
            if fault:
                return [fault]
            mask = expected(self.truncation, row, temperature)
            if mask is None:
                mask = self.truncation.keep(row, moments(row, temperature))
            p = _softmax(row, temperature)
            kept, mass = kept + int(mask.sum()), min(mass, float(p[mask].sum()))
        if kept != self.kept or not abs(mass - self.mass) <= 1e-6:
            return [
                f"{kept} tokens and a mass of {mass:.6g} are kept, not {self.kept} and {self.mass:.6g}"
            ]
        return []

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random rows, with ties and masks among them, in either precision."""
        rng = np.random.default_rng(seed)
        for _ in range(trials):
            row, temperature = _row(rng)
            fault = wrong(self.truncation, row, temperature)
            if fault:
                return fault
        return None


def cutting(truncation: Truncation) -> Cutting:
    """Count what `truncation` keeps of the example rows."""
    rng = np.random.default_rng(5)
    kept, mass = 0, 1.0
    for _ in range(ROWS):
        row, temperature = _row(rng)
        mask = truncation.keep(row, moments(row, temperature))
        p = _softmax(row, temperature)
        kept, mass = kept + int(np.sum(mask)), min(mass, float(p[np.asarray(mask, bool)].sum()))
    return Cutting(truncation, kept, mass)


def wrong(truncation: Truncation, row: Array, temperature: float) -> str | None:
    """What is wrong with the tokens kept of a row, in words."""
    of, before = moments(row, temperature), row.copy()
    mask = np.asarray(truncation.keep(row, of))
    if mask.shape != row.shape or mask.dtype != np.bool_:
        return f"the mask has shape {mask.shape} and type {mask.dtype} for {row.size} tokens"
    if not np.array_equal(row, before):
        return "the row is written to"
    if not mask.any():
        return f"no token is kept of a row of {row.size}"
    if np.any(mask & np.isneginf(row)):
        return "a masked token is kept"
    if not np.array_equal(mask, truncation.keep(row, of)):
        return "the same row is cut in two ways"
    right = expected(truncation, row, temperature)
    if (
        right is not None
        and not np.array_equal(mask, right)
        and not _on_the_edge(truncation, row, temperature, mask)
    ):
        return (
            f"'{truncation.kind}' keeps {int(mask.sum())} of {row.size} tokens where its rule keeps "
            f"{int(right.sum())}"
        )
    return None


def expected(truncation: Truncation, row: Array, temperature: float) -> Array | None:
    """The mask that the rule of a known kind gives, worked out on the sorted row; None for others."""
    p = _softmax(row, temperature)
    order = np.argsort(-row.astype(np.float64), kind="stable")
    live = int(np.isfinite(row).sum())
    if isinstance(truncation, TopK):
        count = min(truncation.k, live)
    elif isinstance(truncation, TopP):
        mass = np.cumsum(p[order])
        count = (
            live
            if truncation.p == 1
            else min(int(np.searchsorted(mass, truncation.p * (1 - 1e-9))) + 1, live)
        )
    elif isinstance(truncation, MinP):
        count = int((p >= truncation.p * p.max() * (1 - 1e-9)).sum())
    elif isinstance(truncation, NoTruncation):
        count = live
    else:
        return None
    mask = np.zeros(row.shape, np.bool_)
    mask[order[:count]] = True
    return mask


def _on_the_edge(truncation: Truncation, row: Array, temperature: float, mask: Array) -> bool:
    """Whether rounding alone explains the difference: the token at the threshold is within it."""
    p = _softmax(row, temperature)
    right = expected(truncation, row, temperature)
    if right is None or not isinstance(truncation, TopP | MinP):
        return False
    differing = np.flatnonzero(mask != right)
    if isinstance(truncation, MinP):
        return bool(np.all(np.abs(p[differing] / (truncation.p * p.max()) - 1) < 1e-4))
    masses = [float(p[m].sum()) for m in (mask, right)]
    return len(differing) == 1 and min(abs(m - truncation.p) for m in masses) < 1e-5


def _row(rng: np.random.Generator) -> tuple[Array, float]:
    """A random row, some with ties or masked tokens, in single or double precision, and a temperature."""
    size = int(rng.integers(2, 600))
    row = rng.normal(0, np.exp(rng.uniform(-1, 2)), size)
    shape = rng.integers(4)
    if shape == 1:
        row = np.round(row)
    elif shape == 2:
        row[rng.random(size) < 0.5] = -np.inf
        row[int(rng.integers(size))] = 1.0
    dtype = np.float32 if rng.random() < 0.5 else np.float64
    return row.astype(dtype), float(np.exp(rng.uniform(-1, 0.7)))


def _softmax(row: Array, temperature: float) -> Array:
    z = row.astype(np.float64) / temperature
    p = np.exp(z - z.max())
    return np.asarray(p / p.sum())
