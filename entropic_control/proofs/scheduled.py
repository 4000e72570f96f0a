"""Claim: one certificate serves every model, every text and every divisor.

Let x = (F[H] - H*, I - u*), where u* is the ln T that meets the target. A token whose entropy answers to
ln T by a mean slope g, under a proportional gain q = kp / divisor, turns x into A(g, q) x:

    F[H] - H*  <-  (1 - a - a g q) (F[H] - H*) + a g (I - u*)
    I - u*     <-  ki g q (F[H] - H*) + (1 - ki g) (I - u*)

A is affine in (g, g q), so a P that no corner of their region stretches is stretched by none of its points,
in any order of tokens. g is a mean of varentropies (mean value theorem), so it lies between 0 and what the
vocabulary allows, calm tokens included; q lies between 0 and kp / v_min, whatever was measured. Bounds that
cut the command make g smaller, and bounds that cut the integral bring it nearer to u*: with a diagonal P
neither can stretch x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from scipy.optimize import minimize_scalar

from entropic_control.controllers import PITemperature
from entropic_control.controllers.base import Array
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.quadratic import (
    common_quadratic,
    growth,
    least_feasible,
    quadratic_form,
)
from entropic_control.proofs.rollout import Rollout, centres, rollout
from entropic_control.proofs.varentropy import largest

LEAST_GAIN = 0.1
"""Slope from which on a loop with a longer delay is asked to contract, nats."""


@dataclass(frozen=True)
class ScheduledGain(Claim):
    """Numbers: P for all gains up to `high`, and how far the gains could go."""

    name: ClassVar[str] = "every gain"
    statement: ClassVar[str] = (
        "without noise and with a fixed ln T that meets the target, x' P x grows at no token, and falls "
        "where the entropy answers to ln T at all: for every model, text, varentropy and temperature bound"
    )
    source: ClassVar[str] = (
        "quadratic stability of a polytope: Boyd et al., LMIs in System and Control Theory, 1994, section "
        "5.1; gain scheduling: Rugh and Shamma, Automatica 36, 2000"
    )

    controller: PITemperature
    delay: int
    low: float
    """Least slope of the entropy, nats: 0 at a delay of one token."""
    high: float
    """Largest slope, nats."""
    P: Array | None
    provable: float
    """The largest slope for which a P exists, nats."""

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        bounds = "the temperature that meets the target lies within the bounds"
        if self.delay > 1:
            bounds += ", and they cut nothing"
        return (
            Assumption(bounds),
            Assumption(
                f"the entropy moves with ln T by a slope in [{self.low:g}, {self.high:.4g}] nats: a mean "
                "of varentropies, by the mean value theorem, where the tokens that truncation leaves "
                "do not depend on the temperature"
            ),
        )

    @property
    def figures(self) -> dict[str, float]:
        figures = {
            "gain to [nats]": self.high,
            "provable gain [nats]": self.provable,
        }
        if self.P is not None:
            figures["contraction per token at a gain of 1 nat"] = self._contraction(self.P)
        return figures

    def _contraction(self, P: Array) -> float:
        q = proportional(self.controller)
        return float(
            growth(P, [token_matrix(self.controller, self.delay, 1.0, r) for r in q]).max()
        )

    def check(self) -> list[str]:
        """Eigenvalues at the corners, the edge of what is provable from both sides, A against `update`."""
        c = self.controller
        if not 0 <= self.low < self.high < np.inf:
            return [f"[{self.low:g}, {self.high:g}] is no range of slopes"]
        if self.P is None:
            return [
                f"no common Lyapunov function exists for kp {c.kp:g}, ki {c.ki:g} with a delay of "
                f"{self.delay} and slopes up to {self.high:.4g} nats (up to {self.provable:.4g} there is "
                "one): lower kp and ki, or raise v_min"
            ]
        faults = not_growing(self.P, corners(c, self.delay, self.low, self.high))
        if self.delay == 1 and np.any(np.diag(np.diag(self.P)) != self.P):
            faults.append("P is not diagonal, so bounds that cut could stretch x")
        edge = partial(_holds, c, self.delay, self.low)
        if not edge(0.99 * self.provable) or edge(1.01 * self.provable):
            faults.append(f"{self.provable:.6g} is not the largest provable slope")
        error = self._model_error()
        if error > 1e-9:
            faults.append(f"the token matrices miss what update does by {error:.3g}")
        return faults

    def again(self) -> ScheduledGain:
        return scheduled_gain(self.controller, self.delay, high=self.high)

    def _model_error(self) -> float:
        """How far A x is from what the real `update` makes of x, over tokens of any varentropy."""
        rng = np.random.default_rng(0)
        c = self.controller
        centre = np.array([np.log(c.start) + 1e-3])
        loops, worst = rollout(c.replace(bounds=(1e-9, 1e9)), 1, self.delay), 0.0
        q = c.kp / c.divisor(loops.state.varentropy)
        for v in np.exp(rng.uniform(-4, 3, 60)):
            x = self._state(loops, centre)[0]
            loops = loops.step(c.target + v * (loops.in_force - centre), np.array([v]))
            after = c.kp / c.divisor(loops.state.varentropy)
            acting = q if self.delay == 1 else after
            predicted = token_matrix(c, self.delay, float(v), float(acting[0])) @ x
            worst = max(worst, float(np.abs(predicted - self._state(loops, centre)[0]).max()))
            q = after
        return worst

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """An adversary picks each token's slope and varentropy against the real `update` and its bounds."""
        P = self.P
        if P is None:
            return "there is no P to test"
        rng = np.random.default_rng(seed)
        c = self.controller
        centre = centres(c, trials, rng)
        # With a longer delay the claim is about a loop that its bounds do not cut.
        driven = c if self.delay == 1 else c.replace(bounds=(1e-9, 1e9))
        loops = rollout(driven, trials, self.delay)
        for _ in range(10):  # away from the start
            loops = loops.step(
                c.target + rng.normal(0, 1, trials), np.exp(rng.uniform(-3, 3.4, trials))
            )
        size = quadratic_form(P, self._state(loops, centre))
        for token in range(50):
            options = []
            for slope in (self.low, self.high, rng.uniform(self.low, self.high, trials)):
                v = np.exp(rng.uniform(-5, 3.6, trials))
                options.append(loops.step(c.target + slope * (loops.in_force - centre), v))
            sizes = np.array([quadratic_form(P, self._state(option, centre)) for option in options])
            worst = int(np.argmax((sizes / np.maximum(size, 1e-300)).max(axis=1)))
            before, size, loops = size, sizes[worst], options[worst]
            if np.any(size > before * (1 + 1e-9) + 1e-12):
                return f"x' P x grew from {before[np.argmax(size - before)]:.6g} at token {token}"
        return None

    def _state(self, loops: Rollout, centre: Array) -> Array:
        """x, then the commands on their way from new to old, shape (rows, 1 + delay)."""
        commands = [u - centre for u in loops.queue[:0:-1]]
        state = loops.state
        if self.delay > 1:
            commands = [u - centre for u in loops.queue[::-1]]
        return np.column_stack(
            [state.entropy - self.controller.target, state.integral - centre, *commands]
        )


def scheduled_gain(
    controller: PITemperature, delay: int = 1, vocab: int = 49_152, high: float | None = None
) -> ScheduledGain:
    """Find P for every slope that the vocabulary allows, or up to `high` nats, and how far one exists."""
    low = 0.0 if delay == 1 else LEAST_GAIN
    most = largest(vocab).bound if high is None else high
    holds = partial(_holds, controller, delay, low)
    provable = 0.0
    if holds(max(low * 1.01, 1e-2)):
        provable = 1 / least_feasible(lambda inverse: holds(1 / inverse), 1e-4, 1e2, 1e-3)
    return ScheduledGain(
        controller, delay, low, most, certified(controller, delay, low, most), provable
    )


def certified(controller: PITemperature, delay: int, low: float, high: float) -> Array | None:
    """A P that no slope in [low, high] nats stretches, for any divisor; None where none was found."""
    if delay > 1:
        return common_quadratic(corners(controller, delay, low, high))
    # At a slope of 0 the matrix is diagonal, and every diagonal P serves.
    stretching = corners(controller, delay, high, high)
    best = minimize_scalar(
        lambda log: growth(np.diag([np.exp(log), 1.0]), stretching).max(),
        bounds=(-14, 6),
        method="bounded",
        options={"xatol": 1e-7},
    )
    return np.diag([np.exp(best.x), 1.0]) if best.fun < 1 else None


def _holds(controller: PITemperature, delay: int, low: float, high: float) -> bool:
    return certified(controller, delay, low, high) is not None


def proportional(controller: PITemperature) -> tuple[float, float]:
    """The least and the largest proportional gain, whatever varentropy was measured, 1/nats."""
    least, most = controller.divisor_bounds
    return controller.kp / most, controller.kp / least


def corners(controller: PITemperature, delay: int, low: float, high: float) -> list[Array]:
    """A at the corners of the region of slopes and proportional gains, that of the least slope first."""
    ends = [(low, q) for q in proportional(controller)] + [
        (high, q) for q in proportional(controller)
    ]
    return [token_matrix(controller, delay, g, q) for g, q in ends]


def token_matrix(controller: PITemperature, delay: int, slope: float, q: float) -> Array:
    """The closed loop over one token off the bounds: x as in this module, then the commands on their way.

    Parameters
    ----------
    slope : float
        g, nats.
    q : float
        kp over the divisor, 1/nats: of the command in force at a delay of one token, else of the next.
    """
    a, ki = controller.filter, controller.ki
    n = 2 if delay == 1 else 2 + delay
    A = np.zeros((n, n))
    A[0, 0], A[1, 1] = 1 - a, 1.0
    # The deviation of the command in force, as a row that x is multiplied by.
    in_force = np.zeros(n)
    if delay == 1:
        in_force[:2] = -q, 1.0
    else:
        in_force[-1] = 1.0
    A[0] += a * slope * in_force
    A[1] -= ki * slope * in_force
    if delay > 1:
        A[2] = A[1] - q * A[0]
        for link in range(3, n):
            A[link, link - 1] = 1.0
    return A


def not_growing(P: Array, matrices: Sequence[Array]) -> list[str]:
    """What is wrong with P as a quadratic form that no matrix stretches, by eigenvalues."""
    if not np.all(np.isfinite(P)) or np.linalg.eigvalsh(P).min() <= 0:
        return ["P is not positive definite"]
    worst = max(float(np.linalg.eigvalsh(A.T @ P @ A - P).max()) for A in matrices)
    if worst > 0:
        return [f"A' P A - P has the eigenvalue {worst:.3g} > 0 at a corner"]
    return []
