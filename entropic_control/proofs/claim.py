"""What a proof hands over: a claim with the numbers that let anyone check it again."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

TRIALS = 10_000
"""Random plants (loops, distributions, streams) that a falsifier tries by default."""


class Assumption(NamedTuple):
    """Something a claim rests on, and whether a trace bears it out."""

    text: str
    verdict: bool | None = None
    """True or False where it was checked on a trace, None where it is assumed."""

    def __str__(self) -> str:
        how = {True: "checked on the trace", False: "VIOLATED on the trace", None: "assumed"}
        return f"{self.text} ({how[self.verdict]})"


@dataclass(frozen=True)
class Claim(ABC):
    """A statement about controllers, with its numeric certificate as fields.

    `check` verifies the fields by a way that did not produce them; `falsify` drives the real
    controllers through random and adversarial cases and looks for one that breaks the statement.
    """

    name: ClassVar[str]
    statement: ClassVar[str]
    source: ClassVar[str]

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What the statement rests on."""
        return ()

    @property
    @abstractmethod
    def figures(self) -> dict[str, float]:
        """The numbers worth reading, named with their units."""

    @abstractmethod
    def check(self) -> list[str]:
        """Why the claim does not hold, in words; empty where it does."""

    @abstractmethod
    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """A counterexample in words, None where `trials` cases gave none."""

    @cached_property
    def faults(self) -> list[str]:
        """What `check` found, and every assumption that a trace contradicts."""
        violated = [str(a) for a in self.assumptions if a.verdict is False]
        return self.check() + violated

    @property
    def holds(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        lines = [f"[{'holds' if self.holds else 'FAILS'}] {self.name}: {self.statement}"]
        lines += [f"    because: {fault}" for fault in self.faults]
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        return "\n".join(lines + ([f"    {numbers}"] if numbers else []))


class Certificate:
    """The claims about one configuration.

    Parameters
    ----------
    subject : str
        What is certified, in words.
    claims : sequence of Claim
        All of them; the certificate holds when each does.
    """

    def __init__(self, subject: str, claims: tuple[Claim, ...]) -> None:
        self.subject = subject
        self.claims = claims

    @property
    def holds(self) -> bool:
        """Whether every claim holds."""
        return all(claim.holds for claim in self.claims)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Every assumption once, in the order of the claims."""
        return tuple(dict.fromkeys(a for claim in self.claims for a in claim.assumptions))

    @property
    def figures(self) -> dict[str, float]:
        """Every figure, as 'claim: figure'."""
        return {
            f"{claim.name}: {name}": value
            for claim in self.claims
            for name, value in claim.figures.items()
        }

    def __getitem__(self, name: str) -> Claim:
        """The claim of that name."""
        return {claim.name: claim for claim in self.claims}[name]

    def __str__(self) -> str:
        count = sum(claim.holds for claim in self.claims)
        head = f"{self.subject}: {count} of {len(self.claims)} claims hold"
        assumed = [f"  - {assumption}" for assumption in self.assumptions]
        return "\n".join([head, *map(str, self.claims), "rests on:", *assumed])

    def to_json(self) -> str:
        """The whole certificate as JSON; infinite figures become the strings 'inf', 'nan'."""
        return json.dumps(
            {
                "subject": self.subject,
                "holds": self.holds,
                "claims": [_claim_dict(claim) for claim in self.claims],
            },
            indent=2,
        )


def _claim_dict(claim: Claim) -> dict[str, Any]:
    return {
        "name": claim.name,
        "statement": claim.statement,
        "source": claim.source,
        "holds": claim.holds,
        "faults": claim.faults,
        "figures": finite(claim.figures),
        "assumptions": [
            {"text": a.text, "checked": a.verdict is not None, "verdict": a.verdict}
            for a in claim.assumptions
        ],
    }


def finite(figures: Mapping[str, float]) -> dict[str, float | str]:
    """`figures` as JSON can hold them: numbers that are not finite become strings."""
    return {
        name: float(value) if np.isfinite(value) else str(float(value))
        for name, value in figures.items()
    }
