"""The speculation family: which tokens are guessed ahead, to be verified in one step.

A guess costs time, never a token: the engine draws every token itself, by the same numbers as without
a guess, and goes on along it only while it says the same.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from entropic_control.controllers.base import Array, Controller, Linear
from entropic_control.controllers.priority.base import Cost
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.speculation.worth import paying


class Speculation(Controller):
    """Base of the speculation controllers."""

    family: ClassVar[str] = "speculation"
    drafts: ClassVar[bool] = True
    """Whether it ever guesses anything."""

    @abstractmethod
    def init(self, rows: int = 1, *, dtype: Any = None) -> Any:
        """The state of `rows` fresh sequences."""

    @abstractmethod
    def update(self, state: Any, reading: Reading) -> tuple[Array, Any]:
        """Take in a reading; returns how many tokens to guess at most, shape (rows,), and the state."""

    @abstractmethod
    def linearize(self, varentropy: float = 1.0) -> Linear:
        """From the raw entropy, nats, to the tokens to guess at most, before they are rounded."""

    @abstractmethod
    def guess(self, state: Any, tokens: Array) -> Array:
        """What may follow `tokens`, shape (n,), of one sequence: token ids, shape (k,), maybe none.

        A function of its arguments alone.
        """

    @abstractmethod
    def chances(self, state: Any, guess: Array) -> Array:
        """How probable it is that the first i + 1 tokens of a guess are all right, shape (k,)."""

    @abstractmethod
    def learn(self, state: Any, right: int, wrong: bool) -> Any:
        """The state of one sequence after the first `right` tokens of a guess came true, and, if
        `wrong`, the next one did not."""

    def plan(
        self, chances: Sequence[Array], rows: int, longest: int, cost: Cost, room: int
    ) -> Array:
        """How many tokens of each guess to try in one step; see `paying`."""
        return paying(chances, rows, longest, cost, room)
