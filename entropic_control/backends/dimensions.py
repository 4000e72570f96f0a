"""The size of a model, and what its steps cost in floating-point operations and in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from entropic_control.controllers.base import Array


class Dimensions(NamedTuple):
    """What the arithmetic of a transformer depends on.

    The counts are those of Kaplan et al. (arXiv 2001.08361, section 2.1): two operations a weight and
    token, and 4 layers x width for each cell that a token attends to (queries with keys, weights with
    values). A step of decoding rows attends to rows x the longest row's cells, which is what an engine
    with padded streams computes.
    """

    weights: int
    """Weights that every token passes through, the output layer left aside."""
    output_weights: int
    """Weights of the output layer, which only the tokens whose logits are wanted pass through."""
    layers: int
    width: int
    """Query heads x their size."""
    cell_bytes: int
    """Keys and values of one token, all layers."""
    weight_bytes: int
    """Size of all weights as they are stored."""

    def flops(self, steps: Mapping[str, Array]) -> Array:
        """Floating-point operations of each step, from the step columns of a trace."""
        tokens = steps["rows"] + steps["prompt_tokens"]
        with_logits = steps["rows"] + steps["measured"]
        attended = 4 * self.layers * self.width * self._reads(steps)
        passed = 2.0 * (self.weights * tokens + self.output_weights * with_logits)
        return np.asarray(passed + attended)

    def traffic(self, steps: Mapping[str, Array]) -> Array:
        """Bytes each step moves: the weights once, the cells read by each row, the cells written.

        A prompt chunk reads the cells before it once, not once a token.
        """
        chunk = steps["prompt_tokens"].clip(min=1)
        cells = steps["rows"] * steps["longest"] + steps["prompt_reads"] / chunk
        written = steps["rows"] + steps["prompt_tokens"]
        return np.asarray(float(self.weight_bytes) + self.cell_bytes * (cells + written))

    @staticmethod
    def _reads(steps: Mapping[str, Array]) -> Array:
        return np.asarray(steps["rows"].astype(float) * steps["longest"] + steps["prompt_reads"])


SMOLLM2 = Dimensions(
    weights=106_203_456,
    output_weights=28_311_552,
    layers=30,
    width=576,
    cell_bytes=23_040,
    weight_bytes=98_000_000,
)
"""SmolLM2-135M (arXiv 2502.02737) at 4 bits; its costs are also those of the simulated plant."""
