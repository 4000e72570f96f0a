"""Claim: the controller that runs is the one that is analysed, and nothing drives it out of its bounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers import TemperatureController
from entropic_control.proofs.claim import TRIALS, Claim, same
from entropic_control.proofs.lockstep import contract, direction, drive, large_signal, small_signal
from entropic_control.proofs.subject import Subject
from entropic_control.proofs.table import claim

ROWS, TOKENS = 24, 300
"""Size of the run under bounded readings."""


@claim("temperature")
@dataclass(frozen=True)
class Conformance(Claim):
    """Numbers: how near small responses are to the linear model, and what ln T reaches in a run."""

    name: ClassVar[str] = "conformance"
    statement: ClassVar[str] = (
        "init, command and update, replayed in lockstep as the engine does, answer small readings as "
        "linearize says, keep any bounded readings within the bounds, sample under what update returns, "
        "and treat rows, precisions and per-request settings alike"
    )
    source: ClassVar[str] = (
        "conformance testing of the object that runs; linear response about a point of rest"
    )

    controller: TemperatureController
    vocab: int
    mismatch: float
    """Largest difference of a small response from the linear one, as a share."""
    reach: tuple[float, float]
    """Least and largest ln T in the run under bounded readings."""
    largest_reading: float
    """Entropy up to which readings go, nats."""

    @classmethod
    def certify(cls, subject: Subject) -> Iterable[Claim | str]:
        if subject.temperature is not None:
            yield conformance(subject.temperature, subject.vocab)

    @property
    def figures(self) -> dict[str, float]:
        return {
            "mismatch of small responses": self.mismatch,
            "ln T reached from": self.reach[0],
            "ln T reached to": self.reach[1],
            "readings up to [nats]": self.largest_reading,
        }

    def check(self) -> list[str]:
        """Both runs again, for the numbers and for what is wrong in them; then the contract."""
        again, mismatch, small, large = _both(self.controller, self.vocab)
        faults = [*small, *large]
        said = self.mismatch, self.reach, self.largest_reading
        found = mismatch, again, float(np.log(self.vocab))
        if not faults and not same(said, found):
            faults.append(f"the runs give {found}, not {said}")
        if not faults:
            faults += contract(self.controller, self.vocab, np.random.default_rng(3))
        return faults

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Other small readings, many rows of bounded ones, and the contract on others still."""
        rng = np.random.default_rng(seed)
        rows = min(max(trials, 8), 200) if not self.controller.reads_logits else 8
        _, faults = small_signal(self.controller, rng)
        inputs = drive(self.controller, self.vocab, rows, TOKENS, rng)
        faults += large_signal(self.controller, inputs)[1] or direction(self.controller, self.vocab)
        for _ in range(max(min(trials // 100, 20), 1)):
            faults += contract(self.controller, self.vocab, rng)
        return faults[0] if faults else None


def _both(
    controller: TemperatureController, vocab: int
) -> tuple[tuple[float, float], float, list[str], list[str]]:
    rows, tokens = (4, 60) if controller.reads_logits else (ROWS, TOKENS)
    with np.errstate(all="ignore"):  # a controller that overflows is reported in words
        mismatch, small = small_signal(controller, np.random.default_rng(1))
        inputs = drive(controller, vocab, rows, tokens, np.random.default_rng(2))
        reach, large = large_signal(controller, inputs)
        large = large or direction(controller, vocab)
    return reach, round(mismatch, 9), small, large


def conformance(controller: TemperatureController, vocab: int = 49_152) -> Conformance:
    """Replay `controller` on a vocabulary of `vocab` tokens."""
    reach, mismatch, _, _ = _both(controller, vocab)
    return Conformance(controller, vocab, mismatch, reach, float(np.log(vocab)))
