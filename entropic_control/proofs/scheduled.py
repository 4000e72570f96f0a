"""Claim: under the varentropy schedule one certificate serves every model and every text.

Divide the filtered entropy error by the divisor d = max(F[V], v_min) and call it x. A token of varentropy
V then turns x into m x + b u with m = (1 - filter) d / d' and b = filter g / d', d' being the next
divisor and g the slope of the entropy, g = V where the measurement is right. F[V] is the same filter,
so m + b = 1 away from the floor: the loop is that of a plant of gain one behind a filter whose
coefficient moves with the text. V_max, the model and the text are gone from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from entropic_control.controllers import PITemperature
from entropic_control.controllers.base import Array
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.fastgain import decrease
from entropic_control.proofs.loop import closed_loop
from entropic_control.proofs.quadratic import (
    common_quadratic,
    fastest,
    growth,
    least_feasible,
    quadratic_form,
)
from entropic_control.proofs.rollout import Rollout, centres, replay, rollout
from entropic_control.proofs.signals import Signals

MISMATCH = (0.85, 1.2)
"""The true slope over the measured varentropy that a certificate or a design allows for."""


@dataclass(frozen=True)
class ScheduledGain(Claim):
    """Numbers: P for all tokens whose varentropy is at least `share` of its running mean."""

    name: ClassVar[str] = "varentropy schedule"
    statement: ClassVar[str] = (
        "with the schedule, x' P x falls at every token, for every model, text and temperature bound, "
        "while V >= share max(F[V], v_min)"
    )
    source: ClassVar[str] = (
        "gain scheduling: Rugh and Shamma, Automatica 36, 2000; quadratic stability of a polytope: Boyd "
        "et al., LMIs in System and Control Theory, 1994, section 5.1"
    )

    controller: PITemperature
    delay: int
    share: float
    mismatch: tuple[float, float]
    """Range of the true slope over the measured varentropy."""
    P: Array | None
    least_share: float
    """Smallest share for which a P exists."""
    factor: float
    """Largest factor on kp and ki for which a P exists at this share."""
    drift: float | None
    """Mean of ln ||A||_P over the tokens of a trace: below 0, the loop contracts on that text, calm
    tokens included."""

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        low, high = self.mismatch
        return (
            Assumption(f"the slope of the entropy is within [{low:g}, {high:g}] of the measured V"),
            Assumption(
                "calm tokens (V below the share) are outweighed by the others",
                None if self.drift is None else self.drift < 0,
            ),
            Assumption("the temperature that meets the target lies within the bounds"),
        )

    @property
    def figures(self) -> dict[str, float]:
        figures = {
            "share": self.share,
            "least provable share": self.least_share,
            "factor left on kp and ki": self.factor,
        }
        if self.P is not None:
            figures["contraction per token"] = float(growth(self.P, self._vertices()).max())
        if self.drift is not None:
            figures["mean log contraction on the trace"] = self.drift
        return figures

    def check(self) -> list[str]:
        """Eigenvalues at the vertices; and that random tokens stay within the polytope they span."""
        if self.P is None:
            return [
                f"no common Lyapunov function exists for kp {self.controller.kp:g}, ki "
                f"{self.controller.ki:g} with a delay of {self.delay} and slopes within "
                f"[{self.mismatch[0]:g}, {self.mismatch[1]:g}] of the measured V; "
                + (
                    f"multiply kp and ki by {self.factor:.3g}"
                    if self.factor
                    else "lower ki against kp"
                )
            ]
        faults = decrease(self.P, self._vertices())
        error = self._model_error()
        if error > 1e-9:
            faults.append(f"the token matrices miss what update does by {error:.3g}")
        return faults

    def _model_error(self) -> float:
        """How far A x is from what the real `update` makes of x, over tokens of any varentropy."""
        rng = np.random.default_rng(0)
        c = self.controller
        varentropy = np.exp(rng.uniform(-4, 3, 60))
        one = Signals(np.ones(60), varentropy, np.zeros(60))
        centre = np.array([np.log(c.start) + 1e-3])
        loops, worst = rollout(c, 1, self.delay), 0.0
        for v, m, b in zip(varentropy, *coefficients(c, one), strict=True):
            x = self._state(loops, centre)[0]
            loops = loops.step(c.target + v * (loops.in_force - centre), np.array([v]))
            predicted = token_matrix(c, self.delay, float(m), float(b)) @ x
            worst = max(worst, float(np.abs(predicted - self._state(loops, centre)[0]).max()))
        return worst

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """An adversary picks each token's varentropy and slope against the real `update`."""
        P = self.P
        if P is None:
            return "there is no P to test"
        rng = np.random.default_rng(seed)
        c = self.controller
        centre = centres(c, trials, rng)
        loops = rollout(c, trials, self.delay)
        for _ in range(10):
            v = np.exp(rng.uniform(-3, 3.4, trials))
            loops = loops.step(c.target + rng.normal(0, 1, trials) * v, v)
        size = quadratic_form(P, self._state(loops, centre))
        for token in range(50):
            options = []
            for ratio in (self.mismatch[0], self.mismatch[1]):
                for extreme in (0.0, 1.0):
                    v = self._varentropy(loops, rng, trials, extreme)
                    options.append(loops.step(c.target + ratio * v * (loops.in_force - centre), v))
            sizes = np.array([quadratic_form(P, self._state(option, centre)) for option in options])
            worst = int(np.argmax((sizes / np.maximum(size, 1e-300)).max(axis=1)))
            before, size, loops = size, sizes[worst], options[worst]
            if np.any(size > before * (1 + 1e-9) + 1e-12):
                return f"x' P x grew from {before[np.argmax(size - before)]:.6g} at token {token}"
        return None

    def _varentropy(
        self, loops: Rollout, rng: np.random.Generator, rows: int, extreme: float
    ) -> Array:
        """Varentropies that respect the share: at its edge or far above it, some in between."""
        c = self.controller
        # V >= s max(F', v_min) with F' = (1 - filter) F + filter V.
        least = np.maximum(
            self.share
            * (1 - c.filter)
            * loops.state.varentropy
            / max(1 - self.share * c.filter, 1e-12),
            self.share * c.v_min,
        )
        spread = np.where(rng.random(rows) < 0.5, extreme, rng.random(rows))
        return np.asarray(least * (1 + 1e-9) * 1e3**spread)

    def _state(self, loops: Rollout, centre: Array) -> Array:
        """Scaled errors, then commands from new to old, shape (rows, 1 + delay)."""
        return np.column_stack([-loops.state.error, *(u - centre for u in loops.queue[::-1])])

    def _vertices(self) -> list[Array]:
        return vertices(self.controller, self.delay, self.share, self.mismatch)


def scheduled_gain(
    controller: PITemperature,
    delay: int = 1,
    share: float = 1.0,
    mismatch: tuple[float, float] = (1.0, 1.0),
    trace: list[Signals] | None = None,
) -> ScheduledGain:
    """Find P, the least share, and the mean contraction on a trace where there is one."""
    P = fastest(vertices(controller, delay, share, mismatch))
    most = (1 - 1e-6) / controller.filter
    least = np.inf
    if _holds(controller, delay, mismatch, most):
        least = least_feasible(partial(_holds, controller, delay, mismatch), 1e-3, most, 0.01)

    def scaled(inverse: float) -> bool:
        changed = controller.replace(kp=controller.kp / inverse, ki=controller.ki / inverse)
        return _holds(changed, delay, mismatch, share)

    factor = 1 / least_feasible(scaled, 1e-2, 1e3, 0.01) if scaled(1e3) else 0.0
    drift = None if trace is None else mean_log_growth(controller, delay, trace)
    return ScheduledGain(controller, delay, share, mismatch, P, least, factor, drift)


def _holds(
    controller: PITemperature, delay: int, mismatch: tuple[float, float], share: float
) -> bool:
    return common_quadratic(vertices(controller, delay, share, mismatch)) is not None


def token_matrix(
    controller: PITemperature, delay: int, keep: float, gain: float, clip: float = 1.0
) -> Array:
    """The closed loop over one token with m = `keep` and b = `gain`, built from `linearize`.

    In the scaled error the controller is its own unscheduled form with filter 1 - m for what it
    remembers and b for what it measures.
    """
    plain = controller.replace(schedule="none")
    remembers = plain.replace(filter=1.0).linearize()
    forgets = plain.replace(filter=0.5).linearize()
    # A and B are affine in the filter, so two of them give all, filter 0 included.
    A = remembers.A + 2 * keep * (forgets.A - remembers.A)
    C = remembers.C + 2 * keep * (forgets.C - remembers.C)
    model = remembers._replace(A=A, C=C, B=gain * remembers.B, D=gain * remembers.D)
    return closed_loop(model, 1.0, delay, clip).A


def vertices(
    controller: PITemperature, delay: int, share: float, mismatch: tuple[float, float]
) -> list[Array]:
    """The corners (m, b) that hold every token with V >= share max(F', v_min), clip open and shut.

    With s = filter share: away from the floor (1 - b, b), b in [s, 1]; leaving the floor m is at most
    1 - filter and b at most 1; on the floor m is 1 - filter or more and b >= s.
    """
    a, s = controller.filter, min(controller.filter * share, 1.0)
    corners = [(1 - s, s), (0.0, 1.0), (1 - a, 1.0), (min(1 - a, 1 - s), s)]
    return [
        token_matrix(controller, delay, m, b * ratio, clip)
        for m, b in corners
        for ratio in dict.fromkeys(mismatch)
        for clip in (0.0, 1.0)
    ]


def mean_log_growth(controller: PITemperature, delay: int, trace: list[Signals]) -> float:
    """The mean over a trace of ln ||A||_P, clip open or shut, with the P that makes it least.

    Below 0 the product of the token matrices of that text shrinks, though single calm tokens (whose
    varentropy is near 0, so that they say nothing about the temperature) stretch.
    """
    from scipy.optimize import minimize

    # A is affine in m and in b: three corners give the matrix of every token.
    m, b = np.concatenate([coefficients(controller, one) for one in trace], axis=1)
    tokens = []
    for clip in (0.0, 1.0):
        base, keep, gain = (
            token_matrix(controller, delay, *at, clip) for at in ((0, 0), (1, 0), (0, 1))
        )
        tokens.append(base + np.multiply.outer(m, keep - base) + np.multiply.outer(b, gain - base))
    n = tokens[0].shape[-1]
    lower = np.tril_indices(n)

    def mean(root: Array, stride: int = 1) -> float:
        L = np.zeros((n, n))
        L[lower] = root
        L[np.diag_indices(n)] = np.exp(np.diag(L))
        return float(np.log(np.max([growth(L @ L.T, A[::stride]) for A in tokens], axis=0)).mean())

    # Found on a few hundred tokens, judged on all.
    best = minimize(
        mean,
        np.zeros(len(lower[0])),
        args=(len(m) // 400 + 1,),
        method="Nelder-Mead",
        options={"maxiter": 60 * n},
    )
    return mean(best.x)


def coefficients(controller: PITemperature, one: Signals) -> tuple[Array, Array]:
    """m and b of every token of a request, from what the real controller's filter makes of it."""
    pairs = [(b.state.varentropy[0], a.state.varentropy[0]) for b, a in replay(controller, one)]
    before, after = controller.divisor(np.array(pairs)).T
    a = controller.filter
    return (1 - a) * before / after, a * one.varentropy / after
