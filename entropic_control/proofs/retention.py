"""Claim: pruning never drops a sink or the recent window, and never exceeds its budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers import Pruning
from entropic_control.controllers.pruning import BLOCK, Blocks
from entropic_control.proofs.claim import TRIALS, Claim


@dataclass(frozen=True)
class Retention(Claim):
    """Numbers: what stays of a long sequence."""

    name: ClassVar[str] = "retention"
    statement: ClassVar[str] = (
        "every pruning keeps the sinks and the recent window, keeps no more blocks than the budget, and "
        "keeps as many as the budget allows"
    )
    source: ClassVar[str] = "invariants of the keep rule; sinks: Xiao et al., ICLR 2024"

    pruning: Pruning
    length: int
    kept_blocks: int
    """Blocks that stay of a full sequence of `length` tokens."""

    @property
    def figures(self) -> dict[str, float]:
        return {"length": float(self.length), "blocks kept": float(self.kept_blocks)}

    def check(self) -> list[str]:
        """The real rule on the full sequence, counted again by hand."""
        n = -(-self.length // BLOCK)
        surprisal = np.random.default_rng(0).random((n, BLOCK))
        kept = self.pruning.keep(Blocks(np.arange(n), surprisal, self.length, self.length))
        if int(kept.sum()) != self.kept_blocks:
            return [f"{int(kept.sum())} blocks stay, not {self.kept_blocks}"]
        if self.kept_blocks > max(
            self.pruning.budget_blocks(self.length), n if self._keeps_all else 0
        ):
            return [f"{self.kept_blocks} blocks exceed the budget"]
        return []

    @property
    def _keeps_all(self) -> bool:
        return self.pruning.kind == "none"

    def again(self) -> Retention:
        return retention(self.pruning, self.length)

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random ledgers of either block size, already pruned before, through the real rule."""
        rng = np.random.default_rng(seed)
        p = self.pruning
        for _ in range(trials):
            length, size = int(rng.integers(1, 6000)), int(rng.choice([1, BLOCK]))
            last = -(-length // size)
            start = np.arange(last) * size
            window = (-(-length // BLOCK) - p.recent) * BLOCK
            must = (start < p.sinks * BLOCK) | (start >= window)
            held = must | (rng.random(last) < rng.choice([0.3, 0.7, 1.0]))
            number = np.flatnonzero(held)
            surprisal = rng.exponential(3, (len(number), size))
            blocks = Blocks(number, surprisal, length, len(number) * size, size)
            kept, fixed = set(number[p.keep(blocks)].tolist()), set(np.flatnonzero(must).tolist())
            if not fixed <= kept:
                return f"blocks {sorted(fixed - kept)} of a {length}-token sequence were dropped"
            budget = last if self._keeps_all else p.budget_blocks(length, size)
            if len(kept) != min(len(number), max(budget, len(fixed))):
                return f"{len(kept)} of {len(number)} blocks stay at a budget of {budget}"
        return None


def retention(pruning: Pruning, length: int = 8192) -> Retention:
    """What `pruning` keeps of a sequence of `length` tokens."""
    n = -(-length // BLOCK)
    kept = n if pruning.kind == "none" else min(n, pruning.budget_blocks(length))
    return Retention(pruning, length, kept)
