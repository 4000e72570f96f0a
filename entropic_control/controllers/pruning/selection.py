"""Selection: attend to few blocks while the model is certain, to all when it is not, and lose none."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from entropic_control.controllers.base import Array, Linear
from entropic_control.controllers.pruning.attention import attention_score
from entropic_control.controllers.pruning.base import Blocks, Pruning
from entropic_control.controllers.pruning.filtered import GateState, filter_linear, filter_update
from entropic_control.controllers.signals import Reading


class EntropicSelection(Pruning):
    """The share of blocks that a step attends to follows the filtered entropy; nothing is evicted.

    At `low` nats and below the budget is what is attended to, at `high` and above everything, in
    between a straight line. What was left out at one step can be back at the next, so a wrong choice
    costs a token and not a fact; in return memory is not freed (compare Quest, Tang et al., ICML 2024,
    which selects by the query at a constant budget).

    Parameters
    ----------
    low, high : float
        Filtered raw entropies, nats, between which the share rises from the budget to all.
    by : {"surprisal", "attention", "product"}
        What a block is worth: its largest surprisal, the attention it gets, or both multiplied.
    filter : float
        EMA coefficient of the entropy.
    entropy_floor : float
        Entropies are not believed below this, nats.
    """

    prunes: ClassVar[bool] = False
    selects: ClassVar[bool] = True
    kind: Literal["selection"] = "selection"
    low: float = Field(0.5, ge=0)
    high: float = Field(3.0, gt=0)
    by: Literal["surprisal", "attention", "product"] = "surprisal"
    filter: float = Field(0.2, gt=0, le=1)
    entropy_floor: float = Field(0.02, gt=0)

    @model_validator(mode="after")
    def _check_span(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        return self

    @property
    def needs_surprisal(self) -> bool:  # type: ignore[override]
        return self.by != "attention"

    @property
    def needs_attention(self) -> bool:  # type: ignore[override]
        return self.by != "surprisal"

    def init(self, rows: int = 1, *, dtype: Any = np.float64) -> GateState:
        # Unsure until something was measured: everything is attended to.
        return GateState(np.full(rows, self.high, dtype))

    def update(self, state: GateState, reading: Reading) -> tuple[Array, GateState]:
        state = filter_update(state, reading, self.filter, self.entropy_floor)
        return np.zeros(state.entropy.shape, np.bool_), state

    def linearize(self, varentropy: float = 1.0) -> Linear:
        return filter_linear(self.filter)

    def share(self, state: GateState) -> Array:
        """How far each row's choice is from the budget (0) towards everything (1), shape (rows,)."""
        return np.clip((state.entropy - self.low) / (self.high - self.low), 0.0, 1.0)

    def select(self, state: GateState, blocks: Blocks) -> Array | None:
        held, least = len(blocks.number), self.budget_blocks(blocks.length, blocks.size)
        count = least + float(self.share(state)[0]) * (held - least)
        if count >= held or blocks.length < self.min_tokens:
            return None
        return self.best(blocks, int(np.ceil(count)))

    def score(self, blocks: Blocks) -> Array:
        if self.by == "surprisal":
            return blocks.largest_surprisal
        return attention_score(blocks, float(self.by == "product"))
