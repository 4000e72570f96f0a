"""Feed-forward kinds: the temperature of a step is computed from the logits of that step."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from entropic_control.controllers.base import Array, Linear, Rows, static
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.softmax import invalid, working_precision
from entropic_control.controllers.state import choose
from entropic_control.controllers.temperature.base import Command, TemperatureController


class FeedForwardState(NamedTuple):
    """Arrays of shape (rows,)."""

    setting: Array
    """The request's own value of the overridable field."""
    temperature: Array
    """The last one in force."""


class FeedForward(TemperatureController):
    """Base of the feed-forward kinds: a subclass says what temperature a row of logits asks for."""

    reads_logits: ClassVar[bool] = True
    setting: ClassVar[str]
    """The overridable field."""

    @abstractmethod
    def solve(self, row: Array, setting: float, last: float) -> float:
        """The temperature for a valid row of logits, shape (vocab,), the last one being `last`."""

    def start(self, setting: Array) -> Array:
        """What stands for the last temperature before the first, shape (rows,)."""
        return setting

    def init(
        self, rows: int = 1, *, dtype: Any = np.float64, **overrides: ArrayLike
    ) -> FeedForwardState:
        self.check_overrides(overrides)
        setting = self.overridden(rows, dtype, overrides, self.setting)
        return FeedForwardState(setting, self.start(setting))

    def command(self, state: FeedForwardState, logits: Rows | None = None) -> Command:
        if logits is None:
            raise ValueError(f"temperature '{self.kind}' needs the logits of the step it commands")
        temperature = state.temperature.copy()
        for index, logit_row in enumerate(logits):
            row = working_precision(logit_row)
            if not invalid(row):
                setting, last = float(state.setting[index]), float(state.temperature[index])
                temperature[index] = self.solve(row, setting, last)
        return Command(temperature)

    def update(self, state: FeedForwardState, reading: Reading) -> tuple[Array, FeedForwardState]:
        temperature = reading.temperature.astype(state.temperature.dtype, copy=False)
        new = FeedForwardState(state.setting, temperature)
        state = choose(reading.valid, new, state)
        return state.temperature, state

    def linearize(self, varentropy: float = 1.0) -> Linear:
        """Past entropies move nothing."""
        return static("entropy [nats]", "ln temperature")
