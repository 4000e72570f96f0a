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
            "factor left on kp and ki": self.clipped / self.high,
        }
        if self.P is not None:
            rate = float(
                growth(self.P, vertices(self.controller, self.delay, self.low, self.high)).max()
            )
            figures["contraction per token"] = rate
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
        faults = decrease(self.P, vertices(self.controller, self.delay, self.low, self.high))
        if self.clipped > self.circle * 1.01:
            faults.append("the bound with clipping exceeds the circle criterion's without")
        family = partial(vertices, self.controller, self.delay, self.low, clips=(1.0,))
        if np.isfinite(self.circle):
            if common_quadratic(family(max(0.98 * self.circle, self.low))) is None:
                faults.append(
                    f"no P exists at 98 % of the circle criterion's gain {self.circle:.4g}"
                )
            if common_quadratic(family(1.02 * self.circle)) is not None:
                faults.append(
                    f"a P exists at 102 % of the circle criterion's gain {self.circle:.4g}"
                )
        return faults

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
    centre: Array
    predicted: Array
    """ln T that the model expects of the last step, before the bounds."""

    @classmethod
    def start(cls, controller: TemperatureController, delay: int, centre: Array) -> _Tracked:
        real, model = rollout(controller, len(centre), delay), controller.linearize()
        internal = np.zeros((len(centre), model.A.shape[0]))
        return cls(real, model, internal, centre, real.in_force)

    def step(self, error: Array) -> _Tracked:
        """One token that measures `error` nats above the target."""
        predicted = self.internal @ self.model.C[0] + self.model.D[0, 0] * error + self.centre
        internal = self.internal @ self.model.A.T + np.outer(error, self.model.B[:, 0])
        real = self.real.step(target_of(self.real.controller) + error)
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
        top = min(circle, 1e3)
        clipped = 1 / least_feasible(lambda inverse: holds(1 / inverse), 1 / top, 1 / low)
    P = fastest(vertices(controller, delay, low, high))
    return FastGain(controller, delay, low, high, P, circle, clipped)


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
    return [closed_loop(model, g, delay, clip) for g in (low, high) for clip in clips]


def decrease(P: Array, matrices: list[Array]) -> list[str]:
    """What is wrong with P as a Lyapunov function of all the matrices, by eigenvalues."""
    faults = []
    if np.linalg.eigvalsh(P).min() <= 0:
        faults.append("P is not positive definite")
    worst = max(float(np.linalg.eigvalsh(A.T @ P @ A - P).max()) for A in matrices)
    if worst >= 0:
        faults.append(f"A' P A - P has the eigenvalue {worst:.3g} >= 0 at a vertex")
    return faults
