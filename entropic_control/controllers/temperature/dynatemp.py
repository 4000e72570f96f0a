"""Dynamic temperature of llama.cpp: hotter where the model is unsure."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from entropic_control.controllers.base import Array
from entropic_control.controllers.softmax import moments
from entropic_control.controllers.temperature.feedforward import FeedForward


class DynamicTemperature(FeedForward):
    """T = low + (high - low) (H / ln n)^exponent, low and high being temperature -+ range.

    H is the entropy at T = 1 over the n live tokens of the step. After kalomaze, as llama.cpp has it
    (pull request 4972, `--dynatemp-range`, `--dynatemp-exp`); `low` is not below 0.

    Parameters
    ----------
    temperature : float
        The middle of the range, a per-request setting.
    range : float
        Half its width; 0 is a fixed temperature.
    exponent : float
        Above 1 only high entropies heat, below 1 low ones do too.
    """

    overridable: ClassVar[frozenset[str]] = frozenset({"temperature"})
    setting: ClassVar[str] = "temperature"
    kind: Literal["dynatemp"] = "dynatemp"
    temperature: float = Field(1.0, ge=0)
    range: float = Field(0.5, ge=0)
    exponent: float = Field(1.0, gt=0)

    def solve(self, row: Array, setting: float, last: float) -> float:
        raw = moments(row, 1.0)
        if self.range == 0 or raw.live == 1:
            return setting
        low, high = max(setting - self.range, 0.0), setting + self.range
        share = min(raw.entropy / float(np.log(raw.live)), 1.0)
        return float(low + (high - low) * share**self.exponent)
