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
from entropic_control.controllers.base import Array
from entropic_control.errors import DecodeError
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

        Drafts take the room that the step leaves: no other sequence gives way for a guess.
        """
        decoding = [work for work, _ in shares if not work.prompt_left]
        taken = sum(tokens for _, tokens in shares)
        room = min(self._backend.capabilities.step_tokens, self._backend.room()) - taken
        guessing = []
        for work in decoding:
            work.draft = []
            guess = self._speculation.guess(work.speculation, work.so_far())
            work.guess = guess[: work.decode_left - 1]  # the last one of all is drawn and never fed
            if work.guess.size:
                guessing.append(work)
        if not guessing or room < 1:
            return
        lengths = self._speculation.plan(
            [self._speculation.chances(work.speculation, work.guess) for work in guessing],
            len(decoding),
            max(self._backend.extent(work.slot) for work in decoding if work.slot is not None),
            self._backend.cost,
            room,
        )
        for work, length in zip(guessing, lengths.tolist(), strict=True):
            work.draft = work.guess[:length].tolist()

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
        return work.tokens[-1] == work.draft[depth] and not is_due(work, self._pruning)

    def _learn(self, work: Work, drawn: list[int]) -> None:
        compared = min(len(drawn), len(work.guess))
        # Drawing ends with the first that differs, so that only the last can be wrong.
        right = int(np.sum(work.guess[:compared] == np.array(drawn[:compared])))
        work.speculation = self._speculation.learn(work.speculation, right, right < compared)

    def take_back(self, works: Iterable[Work]) -> list[tuple[Work, DecodeError]]:
        """Have the engine forget the drafts that did not hold; returns where it refused."""
        refused = []
        for work in works:
            if work.draft and work.slot is not None:
                try:
                    self._forget_after(work.slot, work.ledger.length)
                except DecodeError as error:
                    refused.append((work, error))
            work.draft = []
        return refused

    def _forget_after(self, slot: int, length: int) -> None:
        if self._backend.length(slot) > length:
            self._backend.rollback(slot, length)
