"""A fixed temperature: the trivial member of the family."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from entropic_control.controllers.base import Array, Linear, Rows, static
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.temperature.base import Command, TemperatureController


class FixedState(NamedTuple):
    temperature: Array
    """Shape (rows,)."""


class FixedTemperature(TemperatureController):
    """Samples at one temperature; 0 is greedy.

    Parameters
    ----------
    temperature : float
        The temperature, a per-request setting.
    """

    overridable: ClassVar[frozenset[str]] = frozenset({"temperature"})
    kind: Literal["fixed"] = "fixed"
    temperature: float = Field(1.0, ge=0)

    def init(self, rows: int = 1, *, dtype: Any = np.float64, **overrides: ArrayLike) -> FixedState:
        self.check_overrides(overrides)
        return FixedState(self.overridden(rows, dtype, overrides, "temperature"))

    def command(self, state: FixedState, logits: Rows | None = None) -> Command:
        return Command(state.temperature)

    def update(self, state: FixedState, reading: Reading) -> tuple[Array, FixedState]:
        return state.temperature, state

    def linearize(self, varentropy: float = 1.0) -> Linear:
        return static("entropy [nats]", "ln temperature")
