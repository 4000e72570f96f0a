"""What a proof hands over: a claim with the numbers that let anyone check it again."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from entropic_control.proofs.subject import Subject

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

    `certify` makes the claims about a subject; `check` verifies the fields by a way that did not produce
    them; `falsify` drives the real controllers through random and adversarial cases and looks for one
    that breaks the statement. `entropic_control.proofs.claim` registers a class of one's own.
    """

    name: ClassVar[str]
    statement: ClassVar[str]
    source: ClassVar[str]

    broken: tuple[str, ...] = field(default=(), kw_only=True)
    """Premises that the configuration breaks, in words: with any, the claim does not hold."""

    @classmethod
    def certify(cls, subject: Subject) -> Iterable[Claim | str]:  # noqa: ARG003
        """The claims of this kind about a subject, none where it does not apply; strings are notes."""
        return ()

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

    def again(self) -> Claim | None:
        """The claim made anew from what was asked of it; None where `check` goes over every number."""
        return None

    @cached_property
    def faults(self) -> list[str]:
        """Broken premises, what `check` found, numbers that come out otherwise when the claim is made
        `again`, and every assumption that a trace contradicts.

        A check that raises has found something too.
        """
        try:
            found = list(self.check()) or different(self, self.again())
        except Exception as error:  # noqa: BLE001 (a forged number may break any computation)
            found = [f"the check came to no end: {type(error).__name__}: {error}"]
        violated = [str(a) for a in self.assumptions if a.verdict is False]
        return [f"broken premise: {text}" for text in self.broken] + found + violated

    @property
    def holds(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        lines = [f"[{'holds' if self.holds else 'FAILS'}] {self.name}: {self.statement}"]
        lines += [f"    because: {fault}" for fault in self.faults]
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        return "\n".join(lines + ([f"    {numbers}"] if numbers else []))


def different(claim: Claim, again: Claim | None) -> list[str]:
    """The fields of a claim that are not what they are when it is made again."""
    if again is None:
        return []
    pairs = [(f.name, getattr(claim, f.name), getattr(again, f.name)) for f in fields(claim)]
    return [
        f"{name} is {_short(new)} when it is worked out again, not {_short(old)}"
        for name, old, new in pairs
        if name != "broken" and not same(old, new)
    ]


def same(one: Any, other: Any) -> bool:
    """Whether two values agree in all their numbers, to rounding."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, bool | int | float | np.ndarray | np.number):
        if not isinstance(other, bool | int | float | np.ndarray | np.number):
            return False
        equal = np.shape(one) == np.shape(other)
        return equal and bool(np.allclose(one, other, rtol=1e-9, atol=1e-12))
    if is_dataclass(one) and type(one) is type(other):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    return bool(one == other)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Unfinished(Claim):
    """A claim that could not be made."""

    name: str  # type: ignore[misc]
    why: str

    statement: ClassVar[str] = "this claim could not be made"
    source: ClassVar[str] = "the error it raised"

    @property
    def figures(self) -> dict[str, float]:
        return {}

    def check(self) -> list[str]:
        return [self.why]

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:  # noqa: ARG002
        return self.why


class Certificate:
    """The claims about one configuration.

    Parameters
    ----------
    subject : str
        What is certified, in words.
    claims : sequence of Claim
        All of them; the certificate holds when each does.
    notes : sequence of str
        Parts that no claim covers, in words.
    trials : int
        Cases that each claim's falsifier tries; 0 leaves it at the checks.
    """

    def __init__(
        self, subject: str, claims: Sequence[Claim], notes: Sequence[str] = (), trials: int = 0
    ) -> None:
        self.subject = subject
        self.claims = tuple(claims)
        self.notes = tuple(notes)
        self.trials = trials
        self.counterexamples: dict[str, str] = {}
        for claim in self.claims if trials else ():
            found = _counterexample(claim, trials)
            if found is not None:
                self.counterexamples[claim.name] = found

    @property
    def holds(self) -> bool:
        """Whether every claim holds and no falsifier found a counterexample."""
        return all(claim.holds for claim in self.claims) and not self.counterexamples

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
        lines = [
            f"{self.subject}: {count} of {len(self.claims)} claims hold",
            *map(str, self.claims),
        ]
        lines += [
            f"counterexample to {name}: {found}" for name, found in self.counterexamples.items()
        ]
        if self.trials and not self.counterexamples:
            lines.append(f"no counterexample in {self.trials} trials of each claim")
        lines += ["rests on:", *(f"  - {assumption}" for assumption in self.assumptions)]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The whole certificate as JSON can hold it; figures that are not finite become strings."""
        return {
            "subject": self.subject,
            "holds": self.holds,
            "claims": [_claim_dict(claim) for claim in self.claims],
            "trials": self.trials,
            "counterexamples": self.counterexamples,
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2)


def _counterexample(claim: Claim, trials: int) -> str | None:
    try:
        return claim.falsify(trials)
    except Exception as error:  # noqa: BLE001 (a controller that raises is a counterexample)
        return f"{type(error).__name__}: {error}"


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
