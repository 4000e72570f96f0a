"""No speculation: the trivial member of the family."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from entropic_control.controllers.base import Array, Linear, static
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.speculation.base import Speculation
from entropic_control.controllers.state import NoState


class NoSpeculation(Speculation):
    """Guesses nothing: one token a sequence and step."""

    drafts: ClassVar[bool] = False
    kind: Literal["none"] = "none"

    def init(self, rows: int = 1, *, dtype: Any = np.float64) -> NoState:
        return NoState()

    def update(self, state: NoState, reading: Reading) -> tuple[Array, NoState]:
        return np.zeros(reading.entropy.shape, np.intp), state

    def linearize(self, varentropy: float = 1.0) -> Linear:
        return static("entropy [nats]", "draft [tokens]")

    def guess(self, state: NoState, tokens: Array) -> Array:
        return tokens[:0]

    def chances(self, state: NoState, guess: Array) -> Array:
        return np.zeros(len(guess))

    def learn(self, state: NoState, right: int, wrong: bool) -> NoState:
        return state
