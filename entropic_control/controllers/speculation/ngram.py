"""Prompt lookup: what followed the last tokens when they stood in the text before may follow again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from entropic_control.controllers.base import Array, Linear
from entropic_control.controllers.priority.base import Cost
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.speculation.base import Speculation


class NgramState(NamedTuple):
    """Arrays of shape (rows,)."""

    entropy: Array
    """Filtered raw entropy, nats; NaN before the first reading."""
    right: Array
    """How probable it is that a copied token is right, where those before it are."""


class NgramSpeculation(Speculation):
    """Copies what followed the last tokens where they stood in prompt or text before.

    Prompt lookup decoding (Saxena, 2023; Yang et al., "Inference with Reference", arXiv:2304.04487):
    no draft model. The longest match counts, and of equally long ones the latest; a match that
    overlaps its own copy goes on as a loop.

    How often a copied token is right is learnt online, at every token, whether the guess was tried or
    not: so it is never out of date, and a draft is tried where it is expected to pay. (Learning it for
    each length of the match apart was tried and gained nothing.)

    Parameters
    ----------
    shortest, longest : int
        Tokens that must match before anything is copied; tokens up to which a match is followed back.
    draft : int
        Tokens to draft at most.
    entropy : float or None
        Drafts shorten as the filtered raw entropy rises, from `draft` tokens at 0 nats to none here;
        None leaves the entropy out of it.
    filter : float
        EMA coefficient of that entropy; 1 takes the last reading alone.
    prior : float
        How probable it is that a copied token is right, before anything was learnt.
    rate : float
        EMA coefficient of what is learnt.
    when : {"pays", "always"}
        Whether a draft is tried only where it is expected to save time by the backend's cost model.
        "always" depends on the text alone, and so is the same in every run.
    """

    kind: Literal["ngram"] = "ngram"
    shortest: int = Field(2, ge=1)
    longest: int = Field(8, ge=1)
    draft: int = Field(8, ge=1)
    entropy: float | None = Field(None, gt=0)
    filter: float = Field(0.2, gt=0, le=1)
    prior: float = Field(0.5, ge=0, le=1)
    rate: float = Field(0.1, ge=0, le=1)
    when: Literal["pays", "always"] = "pays"

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(
                f"the shortest match, {self.shortest}, is longer than the longest, {self.longest}"
            )
        return self

    def init(self, rows: int = 1, *, dtype: Any = np.float64) -> NgramState:
        return NgramState(np.full(rows, np.nan, dtype), np.full(rows, self.prior, dtype))

    def update(self, state: NgramState, reading: Reading) -> tuple[Array, NgramState]:
        before, now = state.entropy, reading.raw_entropy
        entropy = np.where(np.isnan(before), now, before + self.filter * (now - before))
        entropy = np.where(reading.valid, entropy, before).astype(before.dtype, copy=False)
        state = state._replace(entropy=entropy)
        return self.reach(state), state

    def linearize(self, varentropy: float = 1.0) -> Linear:
        a = self.filter
        slope = 0.0 if self.entropy is None else -self.draft / self.entropy
        return Linear(
            A=np.array([[1 - a]]),
            B=np.array([[a]]),
            C=np.array([[slope * (1 - a)]]),
            D=np.array([[slope * a]]),
            inputs=("entropy [nats]",),
            outputs=("draft [tokens]",),
        )

    def reach(self, state: NgramState) -> Array:
        """Tokens to draft at most in this state, shape (rows,)."""
        if self.entropy is None:
            return np.full(state.entropy.shape, self.draft)
        share = 1 - np.nan_to_num(state.entropy) / self.entropy
        return np.asarray(np.floor(self.draft * np.maximum(share, 0.0)).astype(np.intp))

    def guess(self, state: NgramState, tokens: Array) -> Array:
        start, match = lookup(tokens, self.longest)
        if match < self.shortest:
            return tokens[:0]
        reach = np.arange(self.reach(state)[0])
        return np.asarray(tokens[start + reach % (len(tokens) - start)])

    def chances(self, state: NgramState, guess: Array) -> Array:
        return np.asarray(state.right[0] ** np.arange(1, len(guess) + 1))

    def learn(self, state: NgramState, right: int, wrong: bool) -> NgramState:
        keep = 1 - self.rate
        learnt = 1 - keep**right * (1 - state.right)
        if wrong:
            learnt = keep * learnt
        return state._replace(right=learnt.astype(state.right.dtype, copy=False))

    def plan(
        self, chances: Sequence[Array], rows: int, longest: int, cost: Cost, room: int
    ) -> Array:
        if self.when == "pays":
            return super().plan(chances, rows, longest, cost, room)
        wanted = np.array([len(own) for own in chances], np.intp)
        return np.clip(room - (wanted.cumsum() - wanted), 0, wanted)


def lookup(tokens: Array, longest: int) -> tuple[int, int]:
    """Where the last tokens stood before.

    Parameters
    ----------
    tokens : array, shape (n,)
        Token ids.
    longest : int
        Tokens up to which a match is followed back.

    Returns
    -------
    start, length : int
        The latest of the longest matches has `length` tokens and ends before `start`; 0, 0 without
        one.
    """
    if len(tokens) < 2:
        return 0, 0
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    length = 0
    longer = ends
    while longer.size and length < longest:
        ends, length = longer, length + 1
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[last - length]]
    return (int(ends[-1]) + 1, length) if length else (0, 0)
