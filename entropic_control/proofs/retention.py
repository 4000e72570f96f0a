"""Claim: pruning never drops a sink or the recent window, and what it holds over a whole run is bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers import Pruning
from entropic_control.controllers.base import Array
from entropic_control.controllers.pruning import BLOCK, Blocks
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.pruningrun import Run, allowed

PROMPT_SHARE = 0.75
"""Part of the claim's sequence that is its prompt."""


@dataclass(frozen=True)
class Retention(Claim):
    """Numbers: what stays of a long sequence after a pruning, and at most over the whole run."""

    name: ClassVar[str] = "retention"
    statement: ClassVar[str] = (
        "every pruning keeps the sinks and the recent window, no more blocks than the budget and as many "
        "as it allows; after every step of a run that may prune (long enough, the prompt read or "
        "`during_prefill`, the gate open) no more is held than the budget and its slack; after other steps "
        "everything may be held"
    )
    source: ClassVar[str] = "invariants of the keep rule; sinks: Xiao et al., ICLR 2024"

    pruning: Pruning
    length: int
    kept_blocks: int
    """Blocks of 16 that stay of a full sequence of `length` tokens."""
    most_open: int
    """Cells that can be held at the end of a run of `length` tokens whose gate is open."""
    most: int
    """Cells that can be held after any step of that run, whatever its entropies."""

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        rests = [Assumption("the engine evicts what it is asked to")]
        if self.pruning.needs_attention and self.pruning.prunes:
            rests.append(Assumption("the engine measures attention: before that nothing is pruned"))
        return tuple(rests)

    @property
    def figures(self) -> dict[str, float]:
        budget = self.pruning.budget_blocks(self.length, 1)
        return {
            "length": float(self.length),
            "blocks kept": float(self.kept_blocks),
            "most cells at the end, gate open": float(self.most_open),
            "most cells of the run": float(self.most),
            "most cells over the budget": self.most / budget,
        }

    def check(self) -> list[str]:
        """The real rule on the full sequence, and whole runs of it with the gate open and closed."""
        n = -(-self.length // BLOCK)
        surprisal = np.random.default_rng(0).random((n, BLOCK))
        kept = self.pruning.keep(Blocks(np.arange(n), surprisal, self.length, self.length))
        faults = []
        if int(kept.sum()) != self.kept_blocks:
            faults.append(f"{int(kept.sum())} blocks stay, not {self.kept_blocks}")
        if self.kept_blocks > max(
            self.pruning.budget_blocks(self.length), n if not self.pruning.prunes else 0
        ):
            faults.append(f"{self.kept_blocks} blocks exceed the budget")
        if self.most_open != allowed(self.pruning, self.length, 1, open=True):
            faults.append(f"the bound with the gate open is not {self.most_open} cells")
        if self.most != most_of_run(self.pruning, self.length):
            faults.append(f"the bound of a run is not {self.most} cells")
        for entropy in (0.0, 1e3):
            found, most = _followed(self.pruning, self.length, 1, np.array([entropy]))
            faults += [found] if found else []
            if most > self.most:
                faults.append(f"{most} cells were held, beyond the bound of {self.most}")
        return faults

    def again(self) -> Retention:
        return retention(self.pruning, self.length)

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random ledgers through the real rule; random runs, init, update and keep at each step."""
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
            budget = last if p.kind == "none" else p.budget_blocks(length, size)
            if len(kept) != min(len(number), max(budget, len(fixed))):
                return f"{len(kept)} of {len(number)} blocks stay at a budget of {budget}"
        for _ in range(max(trials // 500, 2)):
            length = int(rng.integers(64, 2 * p.min_tokens + 1000))
            level, calm = rng.exponential(4.0, 16), rng.random(16) < 0.5
            size = int(rng.choice([1, BLOCK]))
            found, _ = _followed(p, length, size, np.where(calm, 0.0, level), rng)
            if found:
                return found
        return None


def retention(pruning: Pruning, length: int = 8192) -> Retention:
    """What `pruning` keeps of a sequence of `length` tokens, and holds of it on the way."""
    n = -(-length // BLOCK)
    kept = n if pruning.kind == "none" else min(n, pruning.budget_blocks(length))
    return Retention(
        pruning,
        length,
        kept,
        allowed(pruning, length, 1, open=True),
        most_of_run(pruning, length),
    )


def most_of_run(pruning: Pruning, length: int) -> int:
    """Cells that can be held after a step of a run of `length` tokens, whatever its entropies."""
    prompt, open = int(PROMPT_SHARE * length), _never_gated(pruning)
    read = prompt + pruning.needs_attention  # of which nothing is known before a token looked back
    # What is allowed rises with the length as long as the rules stay the same.
    ends = (min(pruning.min_tokens, length), prompt, length)
    return max(
        allowed(pruning, place - back, 1, open=open, reading=place - back < read)
        for place in ends
        for back in (0, 1)
    )


def _never_gated(pruning: Pruning) -> bool:
    """Whether the policy finds every sequence prunable, at any entropy."""
    state = pruning.init(1)
    for _ in range(50):
        prunable, state = pruning.update(state, Run.reading(1e3))
        if not bool(prunable[0]):
            return False
    return True


def _followed(
    pruning: Pruning,
    length: int,
    size: int,
    entropy: Array,
    rng: np.random.Generator | None = None,
) -> tuple[str | None, int]:
    """A run of `length` tokens; what went beyond what is allowed, and the most cells held.

    The entropies, nats, take turns, 37 steps each.
    """
    rng = rng or np.random.default_rng(0)
    run, prompt, most = Run(pruning, length, size, rng), int(PROMPT_SHARE * length), 0
    stride = int(rng.choice([128, 512]))
    while run.length < length:
        reading = run.length + stride < prompt
        ahead = stride if reading else max(prompt - run.length, 1)
        run.step(ahead, reading, float(entropy[run.steps // 37 % len(entropy)]))
        most = max(most, run.cells)
        missing = run.missing() if run.pruned else ()
        if len(missing):
            return f"blocks {list(missing)} had to stay of {run.length} tokens", most
        bound = allowed(pruning, run.length, size, open=run.open, reading=reading)
        if run.blocks * size > bound:
            return (
                f"{run.blocks * size} cells are held after {run.length} tokens, {bound} may be: budget "
                f"{pruning.budget}, gate {'open' if run.open else 'closed'}"
            ), most
    return None, most
