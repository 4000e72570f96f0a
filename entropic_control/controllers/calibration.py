"""Calibration: whether a model's confidence can be believed, and what to do where it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from entropic_control.controllers.base import Array
from entropic_control.controllers.estimators import Estimate, Estimator, FullEntropy
from entropic_control.controllers.kinds import KindOf
from entropic_control.controllers.softmax import (
    Moments,
    invalid,
    moments,
    surprisal,
    working_precision,
)


class Calibration(NamedTuple):
    """The temperature that makes a model's confidence honest, and what it changes."""

    temperature: float
    """Above 1 the model is over-confident."""
    nll_before: float
    """Mean negative log-likelihood at T = 1, nats."""
    nll: float
    """The same at `temperature`."""
    error_before: float
    """Expected calibration error at T = 1."""
    error: float
    """The same at `temperature`."""


class CalibratedEntropy(Estimator):
    """Lets pruning and scheduling decide by the entropy of the calibrated distribution.

    The temperature loop still sees what `inner` measures of the distribution that is sampled; only
    `raw_entropy` is taken at the calibration temperature instead of 1, at the price of one more pass.

    Parameters
    ----------
    inner : Estimator
        What measures the sampled distribution.
    temperature : float
        From `fit_temperature`.
    """

    kind: Literal["calibrated"] = "calibrated"
    inner: Annotated[Estimator, KindOf("estimator")] = FullEntropy()
    temperature: float = Field(gt=0)

    def estimate(self, row: Array, of: Moments) -> Estimate:
        return self.inner.estimate(row, of)

    def decision_entropy(self, row: Array, raw: Moments) -> float:
        return moments(row, self.temperature).entropy


def expected_calibration_error(confidences: ArrayLike, correct: ArrayLike, bins: int = 15) -> float:
    """Mean gap between confidence and accuracy over bins of equal width (Guo et al., ICML 2017).

    Parameters
    ----------
    confidences : array, shape (n,)
        Probabilities that were given to the predictions, in [0, 1].
    correct : array, shape (n,)
        Whether each prediction came true.
    bins : int
        Bins (b / bins, (b + 1) / bins]; each weighs as many samples as it holds.
    """
    p, hit = np.asarray(confidences, np.float64), np.asarray(correct, np.float64)
    if p.shape != hit.shape or p.ndim != 1 or not p.size:
        raise ValueError(
            f"confidences and outcomes must be as many, and some: got {p.shape} and {hit.shape}"
        )
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError("confidences must lie in [0, 1]")
    of = np.clip(np.ceil(p * bins).astype(np.intp) - 1, 0, bins - 1)
    gap = np.bincount(of, p - hit, bins)
    return float(np.abs(gap).sum() / p.size)


def fit_temperature(
    logits: Array | Sequence[Array],
    labels: ArrayLike,
    bounds: tuple[float, float] = (0.05, 20.0),
) -> Calibration:
    """Temperature scaling: the T with the least negative log-likelihood (Guo et al., ICML 2017).

    Parameters
    ----------
    logits : array, shape (n, vocab), or a sequence of arrays of shape (vocab,)
        Rows at T = 1.
    labels : array, shape (n,)
        The true next token of each row.
    bounds : (float, float)
        Where to look. The likelihood is convex in 1/T, so the optimum inside is the only one.

    Raises
    ------
    ValueError
        If a row is invalid, or masks its own label.
    """
    from scipy.optimize import minimize_scalar

    rows = [working_precision(row) for row in logits]
    tokens = [int(label) for label in np.asarray(labels)]
    if len(rows) != len(tokens) or not rows:
        raise ValueError(f"one label a row is needed: got {len(rows)} rows, {len(tokens)} labels")
    for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        if invalid(row) or not np.isfinite(row[token]):
            raise ValueError(f"row {index} is invalid, or its label {token} is masked")

    def likelihood(log_temperature: float) -> float:
        return _scores(rows, tokens, float(np.exp(log_temperature)))[0]

    best = minimize_scalar(
        likelihood, bounds=tuple(np.log(bounds)), method="bounded", options={"xatol": 1e-4}
    )
    temperature = float(np.exp(best.x))
    nll_before, error_before = _scores(rows, tokens, 1.0)
    nll, error = _scores(rows, tokens, temperature)
    return Calibration(temperature, nll_before, nll, error_before, error)


def _scores(rows: list[Array], tokens: list[int], temperature: float) -> tuple[float, float]:
    """Mean negative log-likelihood, nats, and calibration error."""
    measured = [moments(row, temperature) for row in rows]
    nll = [surprisal(r, of, t) for r, of, t in zip(rows, measured, tokens, strict=True)]
    confidences = np.minimum(np.exp([-of.log_norm for of in measured]), 1.0)
    correct = [int(row.argmax()) == token for row, token in zip(rows, tokens, strict=True)]
    return float(np.mean(nll)), expected_calibration_error(confidences, correct)
