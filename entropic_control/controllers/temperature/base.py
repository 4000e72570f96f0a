"""The temperature family: what sampling temperature the next token is drawn at.

Convention: measure what you sample. H[t] is the entropy of the distribution that token t is drawn
from, under the command of step t; `update` turns that reading into the command of step t + 1.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from entropic_control.controllers.base import Array, Controller, Linear, Rows
from entropic_control.controllers.state import rows_of


class Command(NamedTuple):
    """What one step samples under, arrays of shape (rows,)."""

    temperature: Array
    max_surprisal: Array | None = None
    """Tokens above this surprisal, nats, are cut off after the temperature; None cuts nothing."""


Law = tuple[Any, tuple[float, ...]]
"""A controller's update of some rows, for the compiled pass that measures them: its state, arrays of shape
(rows,), float64, and its gains."""


class TemperatureController(Controller):
    """Base of the temperature controllers."""

    family: ClassVar[str] = "temperature"
    reads_logits: ClassVar[bool] = False
    """Whether `command` needs the logits of the step it commands (feed-forward kinds)."""

    @abstractmethod
    def init(self, rows: int = 1, *, dtype: Any = np.float64, **overrides: ArrayLike) -> Any:
        """The state of `rows` fresh sequences; `overrides` set overridable fields by row."""

    @abstractmethod
    def command(self, state: Any, logits: Rows | None = None) -> Command:
        """What to sample this step under.

        Parameters
        ----------
        state
            The state of the rows.
        logits : array, shape (rows, vocab), optional
            The raw logits of this step; given only to kinds with `reads_logits`.
        """

    @abstractmethod
    def update(self, state: Any, reading: Any) -> tuple[Array, Any]:
        """Take in what a step measured.

        Returns
        -------
        temperature : array, shape (rows,)
            The temperature for the next step; for feed-forward kinds the last one in force.
        state
            The state after the step. Rows with an invalid reading keep theirs.
        """

    @property
    def compiled_gains(self) -> tuple[float, ...] | None:
        """Gains with which the compiled `Law` does what `update` does; None if it is not compiled."""
        return None

    @abstractmethod
    def linearize(self, varentropy: float = 1.0) -> Linear:
        """The controller for small signals about a point where V = `varentropy` and nothing clips.

        Input: the deviation of the entropy measured at step t, nats (for mirostat: of the surprisal).
        Output: the deviation of the command that `update` returns at step t, as ln T (for mirostat:
        the surprisal limit). The engine's delay of one token between the two is not part of it.
        """

    def track(self, state: Any, temperature: Array) -> Any:
        """The state if the command for the next step were `temperature`, shape (rows,).

        A wrapper that changes a command calls this, so that kinds which integrate their own output go
        on from what is in force. Rows whose own command it is keep their state bit for bit.
        """
        return state

    def targets(self, state: Any) -> Array | None:
        """The entropy each row aims at, nats, shape (rows,); None for kinds without one."""
        return None

    def feasible(self, state: Any, live: Array) -> Array:
        """Whether each row's target can be met by any temperature with `live` tokens, shape (rows,).

        Kinds without a target are always feasible.
        """
        target = self.targets(state)
        if target is None:
            return np.ones(np.shape(live), np.bool_)
        # A distribution over n tokens has an entropy in (0, ln n).
        return np.asarray(target < np.log(np.maximum(live, 1)))

    def saturated(self, state: Any) -> Array:
        """-1 at the lower temperature bound, +1 at the upper, 0 between, shape (rows,)."""
        return np.zeros(rows_of(state), np.intp)
