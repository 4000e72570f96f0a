"""A request at work: its tokens, its place in the KV cache, its controller states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from entropic_control.controllers.base import Array
from entropic_control.controllers.pruning import BLOCK, Survey
from entropic_control.ledger import Ledger
from entropic_control.request import FinishReason, Request
from entropic_control.text import TextStream


class _CaughtUp:
    """An attribute that is brought up to date when it is looked at."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, work: Sequence, owner: type) -> Any:
        work.catch_up()
        return getattr(work, self._name)

    def __set__(self, work: Sequence, value: Any) -> None:
        setattr(work, self._name, value)


class Sequence:
    """The mutable side of one request. The engine owns it; controllers see only its states.

    Parameters
    ----------
    request : Request
        With every default filled in.
    number : int
        Place in the order of arrival.
    prompt : array, shape (n,), int32
        Token ids.
    limit : int
        Tokens it may generate at most, the context considered.
    capacity : int
        Tokens the backend's context holds.
    block : int
        Tokens that the backend evicts together.
    """

    priority = _CaughtUp()
    pruning = _CaughtUp()
    prunable = _CaughtUp()

    def __init__(
        self,
        request: Request,
        number: int,
        prompt: Array,
        limit: int,
        capacity: int,
        block: int = BLOCK,
    ) -> None:
        self.request = request
        self.id = request.id or str(number)
        self.number = number
        self.prompt = prompt
        self.limit = limit
        self.seed = request.seed or 0
        self.tokens: list[int] = []
        self._ids: Array | None = None
        self._known = 0
        self.ledger = Ledger(capacity, block)
        self.text = TextStream(request.stop or ())
        self.slot: int | None = None
        self.swapped: bytes | None = None
        """KV taken out of the engine while the request is preempted."""
        self.swap_seconds = 0.0
        """What taking it out took."""
        self.claimed = False
        """Whether it made another give way by its deadline or its worth: once is enough."""
        self.survey: Survey | None = None
        """What pruning assumes of the prompt's surprisals, and wants to know; None where no surprisal
        matters to it."""
        self.prunable = True
        self.observed = False
        """Whether a dry run has noted what pruning would do."""
        self.start = 1.0
        """The temperature of a dry run."""
        self.catch_up: Callable[[], None] = lambda: None
        """Brings `priority`, `pruning` and `prunable` up to date."""
        self.temperature: Any = None
        self.priority = None
        self.pruning = None
        self.speculation: Any = None
        self.guess: Array = self.prompt[:0]
        """What was last guessed to follow, shape (n,), int32."""
        self.draft: list[int] = []
        """The part of it that the next step is to verify."""
        self.served = 0
        """The step that served it last."""
        self.raw_entropy = float("nan")
        self.tau = 0.0
        self.arrived = 0.0
        self.first_token: float | None = None
        self.finished: float | None = None
        self.reason: FinishReason | None = None
        self.error: Exception | None = None
        self.longest_wait = 0
        self.preemptions = 0

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that are not in the KV cache yet."""
        return max(len(self.prompt) - self.ledger.length, 0)

    @property
    def decode_left(self) -> int:
        """Tokens it may still generate."""
        return self.limit - len(self.tokens)

    @property
    def forced(self) -> int:
        """The token that takes the place of the next draw; -1 for none."""
        place, forced = len(self.tokens), self.request.forced
        return forced[place] if place < len(forced) else -1

    @property
    def deadline(self) -> float:
        """When it is cut off, by the backend's clock; inf without a deadline."""
        if self.request.deadline is None:
            return float("inf")
        return self.arrived + self.request.deadline

    def so_far(self) -> Array:
        """The tokens of prompt and text, shape (n,), int32: a view that holds until more are known."""
        if self._ids is None:
            self._ids = np.zeros(len(self.prompt) + self.limit, np.int32)
            self._ids[: len(self.prompt)] = self.prompt
            self._known = len(self.prompt)
        total = len(self.prompt) + len(self.tokens)
        self._ids[self._known : total] = self.tokens[self._known - len(self.prompt) :]
        self._known = total
        return self._ids[:total]

    def upcoming(self, count: int) -> Array:
        """The next `count` tokens to feed: of the prompt, or the last sampled one and its draft."""
        if self.prompt_left:
            return self.prompt[self.ledger.length : self.ledger.length + count]
        return np.array(self.tokens[-1:] + self.draft, np.int32)

    def following(self, count: int) -> Array | None:
        """The prompt tokens that follow the next `count`, -1 where their surprisal is not wanted."""
        at = self.ledger.length + 1
        if self.survey is None or at >= len(self.prompt):
            return None
        wanted = self.survey.measured[at : at + count]
        if not wanted.any():
            return None
        return np.where(wanted, self.prompt[at : at + count], -1).astype(np.int32)

    def learn(self, start: int, surprisal: Array) -> None:
        """Note the measured surprisals, nats, of the prompt's tokens from position `start` on."""
        assert self.survey is not None
        self.ledger.record(start, surprisal + self.survey.extra[start : start + len(surprisal)])
