"""EDT, entropy-based dynamic temperature: colder where the model is sure."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from entropic_control.controllers.base import Array
from entropic_control.controllers.softmax import moments
from entropic_control.controllers.temperature.feedforward import FeedForward


class EDTTemperature(FeedForward):
    """T = T0 N^(theta / H), with N = 0.8 (Zhang et al., arXiv:2403.14541).

    H is the entropy at T = 1, nats: T rises to T0 with it and falls to 0, greedy, without it.

    Parameters
    ----------
    temperature : float
        T0, a per-request setting.
    theta : float
        Entropy at which T is N T0, nats; 0 is a fixed temperature.
    base : float
        N.
    """

    overridable: ClassVar[frozenset[str]] = frozenset({"temperature"})
    setting: ClassVar[str] = "temperature"
    kind: Literal["edt"] = "edt"
    temperature: float = Field(1.0, ge=0)
    theta: float = Field(1.0, ge=0)
    base: float = Field(0.8, gt=0, lt=1)

    def solve(self, row: Array, setting: float, last: float) -> float:
        if self.theta == 0:
            return setting
        entropy = moments(row, 1.0).entropy
        return float(setting * self.base ** (self.theta / entropy)) if entropy > 0 else 0.0
