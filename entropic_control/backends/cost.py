"""The cost model of an engine: seconds of a step, fitted online."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from entropic_control.controllers.base import Array


class Shape(NamedTuple):
    """What a step did."""

    rows: int
    """Sequences that decoded one token."""
    longest: int
    """Cells of the longest of them."""
    prompt_tokens: int
    prompt_reads: int
    """Sum over prompt tokens of the cells each attended to."""
    measured: int
    """Prompt tokens whose logits were computed for their surprisal."""
    drafted: int = 0
    """Tokens that were guessed, and decoded along with the rows' own."""
    passes: int = 1
    """Times that rows went through the model: those with drafts of one length go together, where the
    engine needs it of neighbouring slots only."""

    def seconds(self, weights: Array) -> float:
        """Of the step, as `weights`, shape (features,), predict it."""
        return float(np.dot(features(*self), weights))


def features(
    rows: Array | int,
    longest: Array | int,
    prompt_tokens: Array | int,
    prompt_reads: Array | int,
    measured: Array | int,
    drafted: Array | int = 0,
    passes: Array | int = 1,
) -> tuple[Any, ...]:
    """The regressors of the seconds of one step, or of many if given arrays."""
    decoded = rows + drafted
    return (
        (rows > 0) * passes,
        decoded,
        decoded * longest,
        prompt_tokens,
        prompt_reads,
        measured,
    )


class Weights(NamedTuple):
    """Seconds per unit of each feature of `Shape`."""

    step: float
    row: float
    row_cell: float
    prompt_token: float
    prompt_read: float
    measured: float


class CostModel:
    """seconds ~ step s + row n + row_cell n L + prompt_token P + prompt_read R + measured m.

    n rows, drafted tokens among them, go through the model in s passes and pad their attention to the
    longest, L. The fit is a non-negative least squares on relative
    errors with exponential forgetting, tied to the prior, so that features a workload never excites
    keep their prior instead of drifting.

    Parameters
    ----------
    prior : Weights
        Where to start, seconds.
    memory : int
        Steps after which an observation has faded to 1/e.
    fixed : bool
        Stay at the prior, whatever is observed.
    """

    _SWAP_CELL = 1.5e-5
    _REFIT = 64
    _SETTLED = 16
    _TIE = 0.04
    _OUTLIER = 4.0
    _LEAST = 0.05

    def __init__(self, prior: Weights, memory: int = 500, fixed: bool = False) -> None:
        self.prior = np.array(prior, float)
        self.fixed = fixed
        self.weights = self.prior.copy()
        """Replaced at a fit, and never written to."""
        self.observed = 0
        self._keep = 1.0 - 1.0 / memory
        self._gram = np.zeros((len(prior), len(prior)))
        self._moment = np.zeros(len(prior))
        self._unlearnt: list[tuple[Shape, float]] = []
        self._swap_cell = self._SWAP_CELL

    @cached_property
    def assumed(self) -> CostModel:
        """The same costs before anything was measured, for ever: for what must not depend on a clock."""
        return self if self.fixed else CostModel(Weights(*self.prior.tolist()), fixed=True)

    def predict(self, shape: Shape) -> float:
        """Seconds of a step."""
        return shape.seconds(self.weights)

    def decode(self, rows: Array, longest: Array) -> Array:
        """Seconds to decode one token for each of `rows` sequences, the longest with `longest` cells."""
        step, row, row_cell = self.weights[:3].tolist()
        return np.asarray(step + row * rows + row_cell * rows * longest)

    def prefill(self, tokens: Array, cells: Array, measured: bool = False) -> Array:
        """Seconds to prefill `tokens` prompt tokens after `cells` cells."""
        _, _, _, token, read, logits = self.weights
        each = token + logits * measured + read * (cells + tokens / 2)
        return np.asarray(tokens * each)

    def swap(self, cells: int) -> float:
        """Seconds to take `cells` KV cells out of the engine and put them back."""
        return self._swap_cell * cells

    def observe_swap(self, cells: int, seconds: float) -> None:
        """Learn from a swap of `cells` cells; a clock that stood still measured nothing."""
        if cells > 0 and seconds > 0 and not self.fixed:
            self._swap_cell += 0.3 * (seconds / cells - self._swap_cell)

    def observe(self, shape: Shape, seconds: float) -> None:
        """Learn from a step that took `seconds`, when the next fit is made.

        A step far slower than predicted is another process on the cores rather than news about the
        engine: it counts as four times the prediction at most. One that took next to no time was no
        step, and would outweigh all others in a fit of relative errors.
        """
        if self.fixed or seconds <= 0 or not math.isfinite(seconds):
            return
        self._unlearnt.append((shape, seconds))
        self.observed += 1
        doubled = self.observed & (self.observed - 1) == 0
        if doubled or self.observed % self._REFIT == 0:
            self._learn()
            self._fit()

    def _learn(self) -> None:
        shapes, times = zip(*self._unlearnt, strict=True)
        self._unlearnt = []
        regressors = np.stack(features(*np.array(shapes, float).T), axis=1)
        predicted, seconds = regressors @ self.weights, np.array(times)
        if self.observed > self._SETTLED:
            seconds = np.minimum(seconds, self._OUTLIER * predicted)
        seconds = np.maximum(seconds, self._LEAST * predicted)
        some = predicted > 0
        scaled = regressors[some] / seconds[some, None]
        faded = self._keep ** np.arange(len(scaled) - 1, -1, -1)[:, None] * scaled
        kept = self._keep ** len(scaled)
        self._gram = kept * self._gram + faded.T @ scaled
        self._moment = kept * self._moment + faded.sum(axis=0)

    def _fit(self) -> None:
        unit = self.prior
        gram = unit[:, None] * self._gram * unit[None, :] + self._TIE * np.eye(len(unit))
        moment = unit * self._moment + self._TIE
        factor = np.linalg.cholesky(gram)
        ratio, _ = nnls(factor.T, np.linalg.solve(factor, moment))
        self.weights = unit * np.maximum(ratio, 0.02)
