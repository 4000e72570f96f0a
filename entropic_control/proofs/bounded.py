"""Claim: nothing the loop does leaves its box, whatever is measured, a gain of zero included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers import PITemperature
from entropic_control.controllers.base import Array
from entropic_control.controllers.temperature import PIState
from entropic_control.proofs.claim import TRIALS, Claim
from entropic_control.proofs.rollout import rollout
from entropic_control.proofs.varentropy import largest


@dataclass(frozen=True)
class Bounded(Claim):
    """Numbers: the box that the state never leaves."""

    name: ClassVar[str] = "boundedness"
    statement: ClassVar[str] = (
        "for any sequence of readings, ln T and its integral part stay in their bounds, F[H] in "
        "[0, ln vocab], and every command differs from the last by no more than the step bound"
    )
    source: ClassVar[str] = (
        "an average stays between what it averages; the clip acts on the integrator"
    )

    controller: PITemperature
    vocab: int
    log_temperature: tuple[float, float]
    filtered: tuple[float, float]
    error: tuple[float, float]
    """(H* - F[H]) over its divisor."""
    step: float
    """Largest change of ln T in a token."""

    @property
    def figures(self) -> dict[str, float]:
        return {
            "ln T from": self.log_temperature[0],
            "ln T to": self.log_temperature[1],
            "largest |error|": max(abs(e) for e in self.error),
            "largest step of ln T": self.step,
        }

    def check(self) -> list[str]:
        """The corners of the box under one real update stay inside it."""
        corners = np.array(
            [
                (i, h, h_new, v, v_new)
                for i in self.log_temperature
                for h in self.filtered
                for h_new in (0.0, np.log(self.vocab))
                for v in (0.0, largest(self.vocab).bound)
                for v_new in (0.0, largest(self.vocab).bound)
            ]
        ).T
        i, h, h_new, v, v_new = corners
        loops = rollout(self.controller, len(i))
        c = self.controller
        u = np.clip(i + c.kp * (c.target - h) / c.divisor(v), *self.log_temperature)
        state = loops.state._replace(log_temperature=u, integral=i, entropy=h, varentropy=v)
        after = loops._replace(state=state).step(h_new, v_new).state
        return self._outside(after, u)

    def _outside(self, state: PIState, before: Array) -> list[str]:
        faults, c = [], self.controller
        named = (
            ("ln T", state.log_temperature, self.log_temperature),
            ("F[H]", state.entropy, self.filtered),
            ("the integral", state.integral, self.log_temperature),
            ("the error", (c.target - state.entropy) / c.divisor(state.varentropy), self.error),
            ("the step of ln T", state.log_temperature - before, (-self.step, self.step)),
        )
        for name, values, (low, high) in named:
            if values.min() < low - 1e-9 or values.max() > high + 1e-9:
                faults.append(
                    f"{name} reaches [{values.min():.6g}, {values.max():.6g}], outside "
                    f"[{low:.6g}, {high:.6g}]"
                )
        return faults

    def again(self) -> Bounded:
        return bounded(self.controller, self.vocab)

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Readings at random and at the corners (all certain, all flat, zero gain) for 60 tokens."""
        rng = np.random.default_rng(seed)
        loops = rollout(self.controller, trials)
        top = np.log(self.vocab)
        for _ in range(60):
            h = np.where(
                rng.random(trials) < 0.5,
                rng.integers(2, size=trials) * top,
                rng.random(trials) * top,
            )
            v = np.where(rng.random(trials) < 0.4, 0.0, np.exp(rng.uniform(-5, 3.4, trials)))
            before = loops.state.log_temperature
            loops = loops.step(h, v)
            outside = self._outside(loops.state, before)
            if outside:
                return outside[0]
        return None


def bounded(controller: PITemperature, vocab: int) -> Bounded:
    """The box of `controller` on a vocabulary of `vocab` tokens."""
    low, high = (float(np.log(t)) for t in controller.bounds)
    top = float(np.log(vocab))
    # Unscheduled it is in nats; with the schedule it is divided by v_min or more.
    least = float(controller.divisor(np.array(0.0)))
    error = ((controller.target - top) / least, controller.target / least)
    span = error[1] - error[0]
    step = controller.kp * span + controller.ki * max(controller.target, top - controller.target)
    filtered = (0.0, max(top, controller.target))
    return Bounded(controller, vocab, (low, high), filtered, error, min(step, high - low))
