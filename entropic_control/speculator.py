"""Draft and verify: tokens guessed ahead go through the model in one step, and only what holds stays.

The engine draws every token itself, with the controllers in the state they have at its position and by
the random number of its position; a draft only says which logits the step computes. So the tokens, the
states and the readings are those of plain decoding, whatever was guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import numpy as np

from entropic_control.backends.base import Backend, Reversible
from entropic_control.config import Config
from entropic_control.controllers import hooks
from entropic_control.controllers.base import Array
from entropic_control.errors import ControllerFault
from entropic_control.loops import failure
from entropic_control.pruner import is_due
from entropic_control.seats import Share
from entropic_control.sequence import Sequence as Work

Row = tuple[Work, Array]
"""A sequence and the logits its next token is drawn from."""


class Speculator:
    """Drafts for the sequences of a step, and verifies what came of them.

    Parameters
    ----------
    config : Config
        Whose speculation it is.
    backend : Backend
        One with `can_rollback`.
    """

    def __init__(self, config: Config, backend: Backend) -> None:
        self._speculation = config.speculation
        self._pruning = config.pruning
        self._backend = cast(Reversible, backend)

    def propose(self, shares: Sequence[Share]) -> None:
        """Give every decoding sequence of a step the draft that is worth its time, or none.

        Drafts take the room that the step leaves: no other sequence gives way for a guess. A sequence
        whose guess fails has a fault; if the plan of all guesses fails, nothing is drafted.
        """
        decoding = [work for work, _ in shares if not work.prompt_left]
        taken = sum(tokens for _, tokens in shares)
        room = min(self._backend.capabilities.step_tokens, self._backend.room()) - taken
        guessing, chances = [], []
        for work in decoding:
            work.draft = []
            try:
                guess = self._guess(work)
                work.guess = guess[: work.decode_left - 1]  # the last of all is drawn and never fed
                if work.guess.size:
                    chances.append(self._chances(work))
                    guessing.append(work)
            except ControllerFault as fault:
                work.fault = failure(work, fault)
        if not guessing or room < 1:
            return
        longest = max(self._backend.extent(work.slot) for work in decoding if work.slot is not None)
        try:
            lengths = self._lengths(chances, len(decoding), longest, room)
        except ControllerFault:
            return  # a draft changes no token
        for work, length in zip(guessing, lengths, strict=True):
            work.draft = work.guess[:length].tolist()

    def _guess(self, work: Work) -> Array:
        hook = self._speculation.guess
        guess = hooks.ask(hook, work.speculation, work.so_far())
        size = len(guess) if isinstance(guess, np.ndarray) and guess.ndim else 0
        found = hooks.column(hook, guess, size, "iu")
        vocab = self._backend.capabilities.vocab
        if size and not (found.min() >= 0 and found.max() < vocab):
            raise hooks.fault(
                hook, f"returned {hooks.described(found)}, not token ids below {vocab}"
            )
        return found

    def _chances(self, work: Work) -> Array:
        hook = self._speculation.chances
        return hooks.finite(hook, hooks.ask(hook, work.speculation, work.guess), len(work.guess))

    def _lengths(self, chances: list[Array], rows: int, longest: int, room: int) -> list[int]:
        hook = self._speculation.plan
        told = hooks.ask(hook, chances, rows, longest, self._backend.cost, room)
        lengths: list[int] = hooks.column(hook, told, len(chances), "iu").tolist()
        most = [len(own) for own in chances]
        within = all(0 <= length <= size for length, size in zip(lengths, most, strict=True))
        if not within or sum(lengths) > room:
            raise hooks.fault(hook, f"drafts {lengths} of {most} tokens, where {room} have room")
        return lengths

    @staticmethod
    def withdraw(works: Iterable[Work]) -> bool:
        """Drop all drafts; returns whether there were any."""
        drafted = [work for work in works if work.draft]
        for work in drafted:
            work.draft = []
        return bool(drafted)

    def verify(
        self, runs: Sequence[tuple[Work, list[Array]]], draw: Callable[[list[Row]], float]
    ) -> float:
        """Draw tokens along the drafts, position by position, as long as they say the same.

        Parameters
        ----------
        runs : sequence of (sequence, logits)
            Logits after the last token of each sequence and after each token of its draft.
        draw : function
            Draws a token for each of some rows and accounts for it; returns the entropic time, nats.

        Returns
        -------
        float
            The entropic time of all positions, nats.
        """
        before = [len(work.tokens) for work, _ in runs]
        going, tau, depth = list(runs), 0.0, 0
        while going:
            tau += draw([(work, logits[depth]) for work, logits in going])
            going = [(work, logits) for work, logits in going if self._holds(work, depth)]
            for work, _ in going:
                work.ledger.extend(1)
            depth += 1
        for (work, _), start in zip(runs, before, strict=True):
            self._learn(work, work.tokens[start:])
        return tau

    def _holds(self, work: Work, depth: int) -> bool:
        """Whether the token drawn last is the draft's, and the logits after it are to be believed.

        A run ends where the cache would be pruned: what follows is to be computed from what is left.
        """
        if work.reason is not None or depth >= len(work.draft):
            return False
        if work.tokens[-1] != work.draft[depth]:
            return False
        try:
            return not is_due(work, self._pruning)
        except ControllerFault as fault:
            work.fault = failure(work, fault)
            return False

    def _learn(self, work: Work, drawn: list[int]) -> None:
        compared = min(len(drawn), len(work.guess))
        # Drawing ends with the first that differs, so that only the last can be wrong.
        right = int(np.sum(work.guess[:compared] == np.array(drawn[:compared])))
        hook = self._speculation.learn
        try:
            learnt = hooks.ask(hook, work.speculation, right, right < compared)
            work.speculation = hooks.alike(hook, learnt, work.speculation)
        except ControllerFault as fault:
            work.fault = failure(work, fault)

    def take_back(self, works: Iterable[Work]) -> list[tuple[Work, Exception]]:
        """Have the engine forget the drafts that did not hold; returns where it refused."""
        refused: list[tuple[Work, Exception]] = []
        for work in works:
            if work.draft and work.slot is not None:
                try:
                    self._forget_after(work.slot, work.ledger.length)
                except Exception as error:  # noqa: BLE001 - of anybody's code
                    refused.append((work, error))
            work.draft = []
        return refused

    def _forget_after(self, slot: int, length: int) -> None:
        if self._backend.length(slot) > length:
            self._backend.rollback(slot, length)
