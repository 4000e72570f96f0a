"""Claim: whatever gains a single request may set for itself, its loop stays within the certified set.

A request keeps its gains, so each pair of them needs a P of its own. The range of ki is cut into pieces;
over a piece the token matrix is affine in each of slope, proportional gain and ki, so that its corners hold
all its matrices in their convex hull, and one diagonal P that no corner stretches serves the piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.optimize import minimize_scalar

from entropic_control.controllers import PITemperature
from entropic_control.controllers.base import Array
from entropic_control.proofs.claim import TRIALS, Claim
from entropic_control.proofs.quadratic import common_quadratic, growth
from entropic_control.proofs.rollout import innermost
from entropic_control.proofs.scheduled import corners, not_growing, scheduled_gain
from entropic_control.proofs.subject import LEAST_GAIN, Subject
from entropic_control.proofs.table import claim

PIECES = 16
"""Parts of the range of ki, each with its own P."""


@claim("temperature")
@dataclass(frozen=True)
class RequestGains(Claim):
    """Numbers: for each piece of the range of ki, a P and what the corners stretch it by."""

    name: ClassVar[str] = "per-request gains"
    statement: ClassVar[str] = (
        "for every kp and ki that a request may set for itself, there is a P such that x' P x grows at no "
        "token, for every model, text and varentropy; other gains are refused"
    )
    source: ClassVar[str] = (
        "quadratic stability over a multi-affine family: its matrices lie in the convex hull of the "
        "corners (Zadeh and Desoer, Linear System Theory, 1963; Boyd et al., 1994, section 5.1)"
    )

    controller: PITemperature
    delay: int
    kp: tuple[float, float]
    ki: tuple[float, float]
    high: float
    """Largest slope of the entropy, nats."""
    certificates: tuple[Array, ...]
    """A P for each piece, from the least ki up; shorter than the pieces where there is none."""
    rates: tuple[float, ...]
    """Sums over the corners of each piece of the factors by which they stretch sqrt(x' P x)."""

    @classmethod
    def certify(cls, subject: Subject) -> Iterable[Claim | str]:
        if subject.temperature is None or not subject.request_ranges:
            return
        controller = innermost(subject.temperature)
        fields = type(controller).model_fields
        settable = {n: r for n, r in subject.request_ranges.items() if n in fields}
        if not settable:
            return
        if not isinstance(controller, PITemperature) or set(settable) - {"kp", "ki"}:
            yield (
                f"a request may set {', '.join(sorted(settable))} of '{controller.kind}' for itself: no "
                "claim covers that range"
            )
            return
        yield request_gains(controller, settable, subject.delay, subject.gain[1])

    @property
    def figures(self) -> dict[str, float]:
        return {
            "kp from": self.kp[0],
            "kp to": self.kp[1],
            "ki from": self.ki[0],
            "ki to": self.ki[1],
            "gain to [nats]": self.high,
        }

    def check(self) -> list[str]:
        """Eigenvalues at the corners of every piece, and the factors of all corners."""
        for name, (low, high) in (("kp", self.kp), ("ki", self.ki)):
            if not 0 <= low <= high < np.inf:
                return [f"[{low:g}, {high:g}] is no range of {name}"]
        pieces = _pieces(self.ki)
        if len(self.certificates) != len(pieces):
            at = pieces[min(len(self.certificates), len(pieces) - 1)]
            return [
                f"a request may set kp up to {self.kp[1]:g} and ki up to {self.ki[1]:g}, and from ki "
                f"{at[0]:.3g} on no P bears every slope up to {self.high:.3g} nats: raise v_min, or let "
                "requests set less"
            ]
        faults = []
        for ki, P, said in zip(pieces, self.certificates, self.rates, strict=True):
            found = _corners(self.controller, self.delay, self.kp, ki, self.high)
            faults += not_growing(P, found)
            if self.delay == 1 and np.any(np.diag(np.diag(P)) != P):
                faults.append("P is not diagonal, so bounds that cut could stretch x")
            if faults:
                break
            total = float(growth(P, found).sum())
            if not abs(total - said) <= 1e-9 * total:
                faults.append(
                    f"the corners from ki {ki[0]:.3g} on stretch by {total:.9g}, not {said:.9g}"
                )
        return faults

    def again(self) -> RequestGains:
        ranges = {"kp": self.kp, "ki": self.ki}
        return request_gains(self.controller, ranges, self.delay, self.high)

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random gains of the range, each with an adversary for its slopes."""
        rng = np.random.default_rng(seed)
        for _ in range(max(min(trials // 100, 12), 2)):
            kp = float(rng.choice([*self.kp, rng.uniform(*self.kp)]))
            ki = float(rng.choice([*self.ki, rng.uniform(*self.ki)]))
            own = scheduled_gain(self.controller.replace(kp=kp, ki=ki), self.delay, high=self.high)
            found = own.falsify(min(trials, 200), int(rng.integers(1 << 30)))
            if found:
                return f"kp {kp:.3g}, ki {ki:.3g}: {found}"
        return None


def request_gains(
    controller: PITemperature,
    ranges: Mapping[str, tuple[float, float]],
    delay: int = 1,
    high: float = 30.17,
) -> RequestGains:
    """Find a P for each piece of `ranges`, whose names are 'kp' and 'ki'; one left out keeps its value."""
    kp = ranges.get("kp", (controller.kp, controller.kp))
    ki = ranges.get("ki", (controller.ki, controller.ki))
    found: list[Array] = []
    rates: list[float] = []
    for piece in _pieces(ki):
        P = _serving(controller, delay, kp, piece, high)
        if P is None:
            break
        found.append(P)
        rates.append(float(growth(P, _corners(controller, delay, kp, piece, high)).sum()))
    return RequestGains(controller, delay, kp, ki, high, tuple(found), tuple(rates))


def _pieces(ki: tuple[float, float]) -> list[tuple[float, float]]:
    edges = np.geomspace(*ki, PIECES + 1) if ki[0] < ki[1] else np.array(ki)
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


def _corners(
    controller: PITemperature,
    delay: int,
    kp: tuple[float, float],
    ki: tuple[float, float],
    high: float,
) -> list[Array]:
    """The token matrices at every corner of the slopes, the proportional gains and a piece of ki."""
    low = 0.0 if delay == 1 else LEAST_GAIN
    at = [controller.replace(kp=p, ki=i) for p in dict.fromkeys(kp) for i in dict.fromkeys(ki)]
    return [A for one in at for A in corners(one, delay, low, high)]


def _serving(
    controller: PITemperature,
    delay: int,
    kp: tuple[float, float],
    ki: tuple[float, float],
    high: float,
) -> Array | None:
    """A P that no corner stretches, or None."""
    matrices = _corners(controller, delay, kp, ki, high)
    if delay > 1:
        return common_quadratic(matrices)
    stretching = [A for A in matrices if A[0, 1]]  # at a slope of 0 any diagonal P serves
    best = minimize_scalar(
        lambda log: growth(np.diag([np.exp(log), 1.0]), stretching).max(),
        bounds=(-14, 6),
        method="bounded",
        options={"xatol": 1e-7},
    )
    return np.diag([np.exp(best.x), 1.0]) if best.fun < 1 else None
