"""Claim: the certificate for every gain stands in rational arithmetic; an outside checker can have it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import numpy as np

from entropic_control.controllers import PITemperature
from entropic_control.controllers.base import Array
from entropic_control.errors import ConfigError
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.rational import exact, exact_corners, exact_decrease, simplest
from entropic_control.proofs.scheduled import LEAST_GAIN, ScheduledGain, certified
from entropic_control.proofs.smt import decrease_query
from entropic_control.proofs.varentropy import largest

ABOVE = Fraction(1, 10**6)
"""By which share the largest slope is rounded up, so that its own rounding cannot matter."""


@dataclass(frozen=True)
class ExactGain(Claim):
    """Numbers: P, in fractions with as few digits as will do."""

    name: ClassVar[str] = "exact arithmetic"
    statement: ClassVar[str] = (
        "in rational arithmetic, with no rounding between certificate and verdict: x' P x grows for no "
        "slope of the entropy that the vocabulary allows and no measured varentropy, and falls for every "
        "slope above the least"
    )
    source: ClassVar[str] = (
        "pivots of LDL': Golub and Van Loan, Matrix Computations, 2013, section 4.1; a convex function "
        "over a polytope is largest at a corner: Boyd et al., LMIs, 1994, section 5.1"
    )

    controller: PITemperature
    delay: int
    vocab: int
    high: float
    """No slope of this vocabulary is above it, nats."""
    P: Array | None
    """Floats of few digits, shape (n, n)."""

    @property
    def low(self) -> Fraction:
        """Least slope, nats: 0 at a delay of one token."""
        return Fraction(0 if self.delay == 1 else LEAST_GAIN)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        return (
            Assumption(
                "floats are taken as the rationals they are; `update` itself rounds to 53 bits"
            ),
        )

    @property
    def figures(self) -> dict[str, float]:
        figures = {"gain from [nats]": float(self.low), "gain to [nats]": self.high}
        if self.P is not None:
            figures["binary digits of P"] = float(
                max(
                    max(f.numerator.bit_length(), f.denominator.bit_length())
                    for f in exact(self.P).flat
                )
            )
        return figures

    def check(self) -> list[str]:
        """Pivots at the corners, whose matrices come out of the real `law`."""
        if self.P is None:
            return [f"no certificate was found for slopes up to {self.high:.4g} nats"]
        if self.delay < 1 or self.high != highest(self.vocab):
            return [f"{self.delay} token(s) of delay, slopes up to {self.high:g}: no such loop"]
        corners = exact_corners(self.controller, self.delay, self.low, self.high)
        faults = exact_decrease(self.P, corners, strict=False)
        # At a slope of 0 nothing pulls ln T anywhere; a mixture with a falling corner falls.
        return faults or exact_decrease(self.P, corners[len(corners) // 2 :])

    def covers(self, kp: tuple[float, float], ki: tuple[float, float]) -> list[str]:
        """Why this P does not serve every kp and ki of the ranges, whichever a token has; empty if it does.

        A is affine in the slope, in kp over the divisor and in ki each, so the corners are enough.
        """
        if self.P is None:
            return self.check()
        faults = []
        for proportional in dict.fromkeys(kp):
            for integral in dict.fromkeys(ki):
                changed = self.controller.replace(kp=proportional, ki=integral)
                found = replace(self, controller=changed).check()
                faults += [f"kp {proportional:g}, ki {integral:g}: {fault}" for fault in found]
        return faults

    def again(self) -> ExactGain:
        """The claim made anew."""
        return exact_gain(self.controller, self.vocab, self.delay)

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """An adversary picks each token's slope and varentropy against the real `update`."""
        if self.P is None:
            return "there is no P to test"
        P, low, high = self.P, float(self.low), self.high
        return ScheduledGain(self.controller, self.delay, low, high, P, high).falsify(trials, seed)

    def smt(self) -> str:
        """The claim's negation in SMT-LIB 2: an outside solver that answers unsat has proven the claim.

        Raises
        ------
        ConfigError
            If there is no certificate.
        """
        if self.P is None:
            raise ConfigError(f"nothing to export: {self.check()[0]}; lower kp and ki")
        c = self.controller
        least, most = c.divisor_bounds
        kp = Fraction(c.kp)
        shares = kp / Fraction(most) if np.isfinite(most) else Fraction(0), kp / Fraction(least)
        return decrease_query(c, self.delay, exact(self.P), self.low, self.high, shares)


def smt_of(claims: Iterable[Claim]) -> str:
    """The SMT-LIB text of the claim among `claims` that has one, for an outside checker.

    Raises
    ------
    ConfigError
        If none has: it takes a 'pi' temperature with gains that can be certified.
    """
    for claim in claims:
        if isinstance(claim, ExactGain):
            return claim.smt()
    raise ConfigError(
        "no claim has a certificate for an outside checker: choose a temperature of kind 'pi'"
    )


def exact_gain(controller: PITemperature, vocab: int, delay: int = 1) -> ExactGain:
    """Find P in floats, then as few digits of it as make a certificate in fractions."""
    claim = ExactGain(controller, delay, vocab, highest(vocab), None)
    P = certified(controller, delay, float(claim.low), claim.high)
    if P is None:
        return claim
    matrices = exact_corners(controller, delay, claim.low, claim.high)
    short = simplest(P, matrices[len(matrices) // 2 :])
    return replace(claim, P=P if exact_decrease(short, matrices, strict=False) else short)


def highest(vocab: int) -> float:
    """A slope that none is above, whatever the rounding of the largest varentropy, nats."""
    return float(Fraction(largest(vocab).bound) * (1 + ABOVE))
