"""Claim: the unscheduled loop bears a plant gain that varies from token to token, bounds included."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np

from entropic_control.controllers import Linear, TemperatureController
from entropic_control.controllers.base import Array
from entropic_control.proofs.circle import circle_gain
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.loop import closed_loop, open_loop
from entropic_control.proofs.quadratic import (
    common_quadratic,
    fastest,
    growth,
    least_feasible,
    quadratic_form,
)
from entropic_control.proofs.rollout import Rollout, centres, rollout, target_of

MOST = 1e3
"""Nats up to which the largest provable gain is looked for; no vocabulary has a tenth of it."""


@dataclass(frozen=True)
class FastGain(Claim):
    """Numbers: P, and the largest gain for which one exists, with and without bounds that clip."""

    name: ClassVar[str] = "time-varying gain"
    statement: ClassVar[str] = (
        "for any gain dH/d(ln T) that varies within [low, high] from token to token, and whatever the "
        "temperature bounds cut off, x' P x falls at every token"
    )
    source: ClassVar[str] = (
        "quadratic stability of a polytope: Boyd et al., LMIs in System and Control Theory, 1994, "
        "section 5.1; the clip as a sector [0, 1], Khalil, Nonlinear Systems, 2002, section 7.1"
    )

    controller: TemperatureController
    delay: int
    low: float
    high: float
    P: Array | None
    circle: float
    """Largest high by the circle criterion, without bounds."""
    clipped: float
    """Largest high with bounds that clip, by a common P."""
    rates: tuple[float, ...]
    """Factors by which the vertices can stretch sqrt(x' P x), in a token."""
    spare: tuple[float, float]
    """The provable gain over the highest, and the highest over the lowest."""

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        return (
            Assumption("the controller is its linearization, its bounds aside"),
            Assumption(
                "the entropy moves with ln T by a slope between two token gains (mean value)"
            ),
            Assumption("the temperature that meets the target lies within the bounds"),
        )

    @property
    def figures(self) -> dict[str, float]:
        figures = {
            "gain from [nats]": self.low,
            "gain to [nats]": self.high,
            "provable gain [nats]": self.clipped,
            "provable gain without bounds [nats]": self.circle,
            "factor left on kp and ki": self.spare[0],
        }
        if self.rates:
            figures["contraction per token"] = max(self.rates)
        return figures

    def check(self) -> list[str]:
        """Eigenvalues of P and of A' P A - P at the vertices; the circle criterion against both sides."""
        if self.P is None:
            return [
                f"no common Lyapunov function exists for gains in [{self.low:g}, {self.high:g}] nats; the "
                f"largest provable gain is {self.clipped:.3g}, so divide the gains by "
                f"{self.high / self.clipped:.3g}, or by the varentropy as a schedule does"
                if self.clipped > 0
                else f"the loop is unstable at gain {self.low:g} already"
            ]
        corners = vertices(self.controller, self.delay, self.low, self.high)
        if self.P.shape != corners[0].shape:
            return [f"P has shape {self.P.shape}, the loop {corners[0].shape}"]
        faults = decrease(self.P, corners)
        rates = growth(self.P, corners) if self.P.size and not faults else np.zeros(0)
        if not faults and not (
            rates.shape == np.shape(self.rates) and np.allclose(rates, self.rates, rtol=1e-9)
        ):
            faults.append(f"the vertices stretch by {rates}, not {self.rates}")
        spare = self.clipped / self.high, self.high / self.low
        if not np.allclose(spare, self.spare, rtol=1e-9):
            faults.append(f"the ratios of the gains are {spare}, not {self.spare}")
        if not self.clipped <= self.circle * 1.01:
            faults.append("the bound with clipping exceeds the circle criterion's without")
        return (
            faults
            + self._edge("circle criterion's gain", self.circle, 0.02, (1.0,))
            + self._edge("provable gain", self.clipped, 0.01, (0.0, 1.0))
        )

    def _edge(self, name: str, edge: float, within: float, clips: tuple[float, ...]) -> list[str]:
        """A common P must exist just below the gain and must not just above."""
        if not self.low > 0 or not edge >= self.low:
            return [f"the {name} {edge:.6g} is below the range, which starts at {self.low:.6g}"]

        def exists(gain: float) -> bool:
            found = vertices(self.controller, self.delay, self.low, gain, clips)
            return common_quadratic(found) is not None

        below, above = (min(edge * (1 + side), MOST) for side in (-within, within))
        if not exists(max(below, self.low)):
            return [f"no P exists just below the {name} {edge:.6g}"]
        if above < MOST and exists(above):
            return [f"a P exists beyond the {name} {edge:.6g}"]
        return [] if edge < MOST or edge in (MOST, np.inf) else [f"the {name} is beyond {MOST:g}"]

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """An adversary picks each token's gain to make x' P x grow, against the real `update`."""
        if self.P is None:
            return "there is no P to test"
        rng = np.random.default_rng(seed)
        centre = centres(self.controller, trials, rng)
        loops = _Tracked.start(self.controller, self.delay, centre)
        for _ in range(10):
            loops = loops.step(rng.normal(0, 2, trials))
        size = loops.size(self.P)
        for token in range(50):
            deviation = loops.real.in_force - centre
            gains = (self.low, self.high, rng.uniform(self.low, self.high, trials))
            sizes = [loops.step(g * deviation).size(self.P) for g in gains]
            pick = np.where(
                rng.random(trials) < 0.8, np.argmax(sizes, axis=0), rng.integers(3, size=trials)
            )
            loops = loops.step(np.choose(pick, np.broadcast_arrays(*gains)) * deviation)
            before, size = size, loops.size(self.P)
            if loops.mismatch() > 1e-9:
                return "update and linearize disagree on a command"
            if np.any(size > before * (1 + 1e-9) + 1e-12):
                return f"x' P x grew from {before[np.argmax(size - before)]:.6g} at token {token}"
        return None


class _Tracked(NamedTuple):
    """Real loops beside their linear model, which supplies the states that only it names."""

    real: Rollout
    model: Linear
    internal: Array
    """The model's own states, deviations from rest, shape (rows, n)."""
    integral: int | None
    centre: Array
    predicted: Array
    """ln T that the model expects of the last step, before the bounds."""

    @classmethod
    def start(cls, controller: TemperatureController, delay: int, centre: Array) -> _Tracked:
        real, model = rollout(controller, len(centre), delay), controller.linearize()
        internal, integral = np.zeros((len(centre), model.A.shape[0])), integral_of(model)
        if integral is not None:
            internal[:, integral] = real.in_force - centre
        return cls(real, model, internal, integral, centre, real.in_force)

    def step(self, error: Array) -> _Tracked:
        """One token that measures `error` nats above the target."""
        predicted = self.internal @ self.model.C[0] + self.model.D[0, 0] * error + self.centre
        internal = self.internal @ self.model.A.T + np.outer(error, self.model.B[:, 0])
        real = self.real.step(target_of(self.real.controller) + error)
        if self.integral is not None:
            internal[:, self.integral] = real.queue[-1] - self.centre
        return self._replace(real=real, internal=internal, predicted=predicted)

    def mismatch(self) -> float:
        """How far the last real command is from the model's, bounds applied."""
        low, high = getattr(self.real.controller, "bounds", (1e-300, 1e300))
        expected = np.clip(self.predicted, np.log(low), np.log(high))
        gap = np.abs(self.real.queue[-1] - expected) / (1 + np.abs(expected))
        return 0.0 if self.internal.shape[1] == 0 else float(gap.max())

    def size(self, P: Array) -> Array:
        """x' P x, x as in `closed_loop`: the model's states, then commands from new to old."""
        chain = [u - self.centre for u in self.real.queue[::-1]]
        x = np.column_stack([self.internal, *chain])
        return quadratic_form(P, x)


def fast_gain(
    controller: TemperatureController, low: float, high: float, delay: int = 1
) -> FastGain:
    """Find P for gains in [low, high] nats, and how far the gain could go."""
    circle = circle_gain(open_loop(controller, 1.0, delay), low)
    holds = partial(_holds, controller, delay, low)
    clipped = 0.0
    if circle > low and holds(low):
        top = min(circle, MOST)
        clipped = 1 / least_feasible(lambda inverse: holds(1 / inverse), 1 / top, 1 / low)
    corners = vertices(controller, delay, low, high)
    P = fastest(corners)
    rates = growth(P, corners).tolist() if P is not None and P.size else []
    spare = clipped / high, high / low if low else np.inf
    return FastGain(controller, delay, low, high, P, circle, clipped, tuple(rates), spare)


def _holds(controller: TemperatureController, delay: int, low: float, high: float) -> bool:
    return common_quadratic(vertices(controller, delay, low, high)) is not None


def vertices(
    controller: TemperatureController,
    delay: int,
    low: float,
    high: float,
    clips: tuple[float, ...] = (0.0, 1.0),
) -> list[Array]:
    """The closed loop at the ends of the gain, with the clip open and shut."""
    model = controller.linearize()
    integral, found = integral_of(model), []
    for clip in clips:
        for g in (low, high):
            A = closed_loop(model, g, delay, clip)
            if integral is not None:
                A[integral] *= clip  # what is cut is the integral itself: its anti-windup
            found.append(A)
    return found


def integral_of(model: Linear) -> int | None:
    """The state that is the command itself, in which a velocity form keeps its integral; None without."""
    for row in range(model.A.shape[0]):
        if np.array_equal(model.A[row], model.C[0]) and model.B[row, 0] == model.D[0, 0]:
            return row
    return None


def decrease(P: Array, matrices: list[Array]) -> list[str]:
    """What is wrong with P as a Lyapunov function of all the matrices, by eigenvalues."""
    faults = []
    if not np.isfinite(P).all() or not np.array_equal(P, P.T):
        return ["P is not symmetric and finite"]
    if not P.size:
        return []
    if not np.linalg.eigvalsh(P).min() > 0:
        faults.append("P is not positive definite")
    if not abs(np.trace(P) - 1) <= 1e-6:
        faults.append(f"P has the trace {np.trace(P):.6g}, not 1")
    worst = max(float(np.linalg.eigvalsh(A.T @ P @ A - P).max()) for A in matrices)
    if not worst < 0:
        faults.append(f"A' P A - P has the eigenvalue {worst:.3g} >= 0 at a vertex")
    return faults
