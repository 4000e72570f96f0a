"""The pruning family: which blocks of a sequence's KV cache stay.

A policy supplies a score; the base owns the mechanics: the sinks and the recent window stay, the best
blocks fill the budget. How long a block is, is the engine's affair: one token where single cells can be
freed, 16 where the cache is paged. Sinks and recent blocks are counted in blocks of 16 either way.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from entropic_control.controllers.base import Array, Controller, Linear
from entropic_control.controllers.signals import Reading

BLOCK = 16
"""Tokens in a block of a paged cache, and the unit of sinks and recent blocks."""


class Blocks(NamedTuple):
    """The blocks a sequence holds, in rising order of position."""

    number: Array
    """Block b covers positions [size b, size b + size), shape (n,)."""
    surprisal: Array
    """-ln p of the blocks' own tokens under the model at T = 1, nats, shape (n, size), with what their
    survey assumes and adds; 0 where nothing is known."""
    length: int
    """Tokens the sequence has seen, kept or not: the next token's position."""
    cells: int
    """Tokens whose keys and values are held."""
    size: int = BLOCK
    """Tokens in a block."""
    attention: Array | None = None
    """Mean share of recent tokens' attention on each block; NaN where unmeasured, None where the
    engine cannot measure it."""

    @property
    def largest_surprisal(self) -> Array:
        """Of each block's tokens, nats, shape (n,)."""
        return np.asarray(self.surprisal.max(axis=1))


class Survey(NamedTuple):
    """What pruning knows of a prompt before it is read, and wants to know; arrays of shape (n,)."""

    estimate: Array
    """-ln p that is assumed of each token until the model measures it, nats; NaN where nothing is."""
    measured: Array
    """Mask of the tokens that the model is to measure, which costs their logits."""
    extra: Array
    """What a token is worth above its surprisal; the estimate has it already, nats."""


class Pruning(Controller):
    """Base of the pruning controllers.

    Parameters
    ----------
    budget : float or int
        What to keep: a fraction of the tokens seen (a float up to 1), or a count of tokens (an int).
    sinks : int
        First blocks that always stay; models park attention there (Xiao et al., ICLR 2024).
    recent : int
        Last blocks that always stay.
    slack : float
        Share of the budget that may be exceeded before the next pruning, so that pruning is rare.
    min_tokens : int
        Sequences shorter than this are left alone.
    during_prefill : bool
        Prune between the chunks of a prompt too, so that later chunks attend to less.
    """

    family: ClassVar[str] = "pruning"
    prunes: ClassVar[bool] = True
    """Whether it ever evicts anything."""
    needs_surprisal: ClassVar[bool] = False
    """Whether it scores blocks by the surprisal of their tokens."""

    needs_attention: ClassVar[bool] = False
    """Whether it scores blocks by the attention they get."""
    selects: ClassVar[bool] = False
    """Whether it chooses, at each step, which blocks to attend to."""

    budget: float | int = Field(0.5, gt=0)
    sinks: int = Field(1, ge=0)
    recent: int = Field(8, ge=1)
    slack: float = Field(0.1, ge=0)
    min_tokens: int = Field(1024, ge=0)
    during_prefill: bool = False

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if isinstance(self.budget, float) and self.budget > 1:
            raise ValueError(
                f"budget {self.budget:g} is a fraction above 1; write a whole number for a count of tokens"
            )
        least = (self.sinks + self.recent) * BLOCK
        if isinstance(self.budget, int) and self.budget < least:
            raise ValueError(
                f"a budget of {self.budget} tokens cannot hold {self.sinks} sink and {self.recent} recent "
                f"blocks of {BLOCK}; give at least {least}, or fewer blocks"
            )
        return self

    @abstractmethod
    def init(self, rows: int = 1, *, dtype: Any = np.float64) -> Any:
        """The state of `rows` fresh sequences."""

    @abstractmethod
    def update(self, state: Any, reading: Reading) -> tuple[Array, Any]:
        """Take in a reading; returns whether each row may be pruned now, shape (rows,), and the state."""

    @abstractmethod
    def linearize(self, varentropy: float = 1.0) -> Linear:
        """From the entropy, nats, to the signal that opens and closes the gate."""

    def at(self, state: Any) -> Pruning:
        """The controller with the budget that one sequence's state calls for."""
        return self

    def leanest(self) -> Pruning:
        """The controller with the smallest budget that any state calls for."""
        return self

    @abstractmethod
    def score(self, blocks: Blocks) -> Array:
        """How much each block is worth keeping, shape (n,)."""

    def select(self, state: Any, blocks: Blocks) -> Array | None:
        """Which of a single sequence's blocks the next token attends to, a mask (n,); None for all."""
        return None

    def budget_blocks(self, length: int, size: int = BLOCK) -> int:
        """Blocks of `size` tokens to keep of a sequence of `length` tokens."""
        tokens = self.budget * length if isinstance(self.budget, float) else self.budget
        return max(int(tokens), (self.sinks + self.recent) * BLOCK) // size

    def measures(self, length: int) -> int:
        """The surprisals of positions below this matter in a sequence that will reach `length` tokens."""
        needed = self.needs_surprisal and self.due(-(-length // BLOCK), length)
        return length if needed else 0

    def survey(self, prompt: Array, length: int, numbers: Array) -> Survey:
        """What is assumed, and what measured, of the prompt of a sequence that will reach `length`.

        Parameters
        ----------
        prompt : array, shape (n,)
            Token ids.
        length : int
            Tokens of the prompt, and of what may be generated.
        numbers : array, shape (n,)
            Mask of the tokens that hold a digit.
        """
        size = len(prompt)
        place = np.arange(size)
        measured = (place > 0) & (place < self.measures(length))  # nothing foresees the first token
        return Survey(np.full(size, np.nan), measured, np.zeros(size))

    def due(self, blocks: int, length: int, size: int = BLOCK) -> bool:
        """Whether a sequence of `length` tokens that holds `blocks` blocks is worth pruning."""
        if length < self.min_tokens:
            return False
        return blocks > self.budget_blocks(length, size) * (1 + self.slack)

    def fixed(self, blocks: Blocks) -> Array:
        """The sinks and the recent window, which always stay: a mask of shape (n,)."""
        start = blocks.number * blocks.size
        window = (-(-blocks.length // BLOCK) - self.recent) * BLOCK
        return (start < self.sinks * BLOCK) | (start + blocks.size > window)

    def keep(self, blocks: Blocks) -> Array:
        """Which of the blocks stay, a mask of shape (n,)."""
        return self.best(blocks, self.budget_blocks(blocks.length, blocks.size))

    def best(self, blocks: Blocks, count: int) -> Array:
        """The sinks, the recent window and the best of the others, `count` in all, a mask (n,)."""
        fixed = self.fixed(blocks)
        free = count - int(fixed.sum())
        score = np.where(fixed, -np.inf, self.score(blocks))
        best = np.lexsort((-blocks.number, -score))[: max(free, 0)]
        kept = fixed.copy()
        kept[best] = True
        return kept
