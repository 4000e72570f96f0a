"""Pruning by the attention that blocks get, where the engine can measure it."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from entropic_control.controllers.base import Array
from entropic_control.controllers.pruning.base import Blocks
from entropic_control.controllers.pruning.rivals import Stateless


class AttentionPruning(Stateless):
    """Keeps the blocks that recent tokens attended to, as H2O does (Zhang et al., NeurIPS 2023).

    Parameters
    ----------
    surprisal : float
        Exponent of the block's largest surprisal, which multiplies its attention: 0 is attention
        alone, 1 the product of the two.
    """

    needs_attention = True
    kind: Literal["attention"] = "attention"
    surprisal: float = Field(0.0, ge=0)

    @property
    def needs_surprisal(self) -> bool:  # type: ignore[override]
        return self.surprisal > 0

    def score(self, blocks: Blocks) -> Array:
        return attention_score(blocks, self.surprisal)


def attention_score(blocks: Blocks, surprisal: float) -> Array:
    """Attention times surprisal to the given power, shape (n,); inf where no attention was measured."""
    if blocks.attention is None:
        return np.full(len(blocks.number), np.inf)
    score = blocks.attention * np.maximum(blocks.surprisal, 0.0) ** surprisal
    return np.where(np.isnan(score), np.inf, score)
