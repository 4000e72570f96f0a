"""The exact solve: every token is given the target entropy."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from entropic_control.controllers.base import Array
from entropic_control.controllers.softmax import moments
from entropic_control.controllers.temperature.feedforward import FeedForward, FeedForwardState

_PASSES = 50


class ExactTemperature(FeedForward):
    """Solves H(T) = H* at each step, by Newton's method on u = ln T, where dH/du = V is measured.

    What a loop that knew the future would do if all tokens should be equally uncertain. They should
    not: inside a word this heats certainty to noise. A rival of the PI loop, kept for the comparison. A
    truncation "after" the temperature is not foreseen: it takes its part of the entropy away.

    Parameters
    ----------
    target : float
        H*, nats; a per-request setting.
    bounds : (float, float)
        Temperature limits; a target outside what they allow gives the nearer one.
    tolerance : float
        How near H must come to the target, nats.
    """

    overridable: ClassVar[frozenset[str]] = frozenset({"target"})
    setting: ClassVar[str] = "target"
    kind: Literal["exact"] = "exact"
    target: float = Field(1.0, gt=0)
    bounds: tuple[float, float] = (0.1, 2.0)
    tolerance: float = Field(1e-3, gt=0)

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        low, high = self.bounds
        if not 0 < low < high:
            raise ValueError(f"bounds must be 0 < low < high, not {low:g}, {high:g}")
        return self

    def start(self, setting: Array) -> Array:
        return np.full_like(setting, np.clip(1.0, *self.bounds))

    def solve(self, row: Array, setting: float, last: float) -> float:
        """Newton's steps from `last`, kept inside a bracket that H, rising in u, makes possible.

        A step that leaves the bracket tries the temperature bound there, once, and bisects after.
        """
        bottom, top = (float(u) for u in np.log(self.bounds))
        low, high = bottom, top
        untried = {bottom, top}
        u = float(np.log(np.clip(last, *self.bounds)))
        for _ in range(_PASSES):
            of = moments(row, float(np.exp(u)))
            error = setting - of.entropy
            untried.discard(u)
            if abs(error) <= self.tolerance or u == (top if error > 0 else bottom):
                break
            low, high = (u, high) if error > 0 else (low, u)
            bound = top if error > 0 else bottom
            step = u + error / of.varentropy if of.varentropy > 0 else bound
            if low < step < high:
                u = step
            elif bound in untried:
                u = bound
            else:
                u = (low + high) / 2
        return {bottom: self.bounds[0], top: self.bounds[1]}.get(u, float(np.exp(u)))

    def saturated(self, state: FeedForwardState) -> Array:
        low, high = self.bounds
        return np.where(state.temperature >= high, 1, np.where(state.temperature <= low, -1, 0))

    def targets(self, state: FeedForwardState) -> Array:
        return state.setting
