"""Estimators: how much of a row of logits is looked at to know its entropy.

`full` reads the whole row. `top_k` uses the k largest probabilities and what can be said of the rest,
which is all that some engines hand out; its bounds always hold the full entropy.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from entropic_control.controllers.base import Array, Controller
from entropic_control.controllers.softmax import Moments, weights


class Estimate(NamedTuple):
    """An entropy with its bounds, nats, and the probability mass outside what was seen."""

    entropy: float
    lower: float
    upper: float
    tail_mass: float


class Estimator(Controller):
    """Base of the estimators; they hold no state."""

    family: ClassVar[str] = "estimator"

    @abstractmethod
    def estimate(self, row: Array, of: Moments) -> Estimate:
        """The entropy of softmax(row / T) as this estimator sees it; `of` are the row's moments."""

    def decision_entropy(self, row: Array, raw: Moments) -> float:
        """The entropy that pruning and scheduling see, nats; `raw` are the moments at T = 1."""
        return raw.entropy


class FullEntropy(Estimator):
    """The entropy of the whole row, exactly."""

    kind: Literal["full"] = "full"

    def estimate(self, row: Array, of: Moments) -> Estimate:
        return Estimate(of.entropy, of.entropy, of.entropy, 0.0)


class TopKEntropy(Estimator):
    """Entropy from the k most probable tokens and bounds on the tail.

    Parameters
    ----------
    k : int
        Tokens that are seen. With k at or above the live tokens this is the full entropy.
    tail : {"conservative", "lower", "exact"}
        What is reported: the upper bound (flattest tail), the lower bound (most concentrated tail),
        or the tail's true entropy, which costs a full pass and is there to check the other two.
    log_sum_exp : bool
        Whether the normaliser of the whole row is known. Without it the tail mass itself is bounded,
        by the k-th probability on each unseen token.
    """

    kind: Literal["top_k"] = "top_k"
    k: int = Field(64, ge=1)
    tail: Literal["conservative", "lower", "exact"] = "conservative"
    log_sum_exp: bool = True

    def estimate(self, row: Array, of: Moments) -> Estimate:
        if self.k >= of.live or of.temperature == 0.0:
            return Estimate(of.entropy, of.entropy, of.entropy, 0.0)
        largest = np.partition(row, row.size - self.k)[row.size - self.k :]
        top = np.sort(weights(largest, of))[::-1]
        unseen = of.live - self.k
        if self.log_sum_exp:
            lower, upper, mass = tail_bounds(top / np.exp(of.log_norm), unseen)
        else:
            lower, upper, mass = tail_bounds_unnormalised(top, unseen)
        # Rounding of the float32 pass must not put the truth outside its own bounds.
        lower, upper = min(lower, of.entropy), max(upper, of.entropy)
        entropy = {"conservative": upper, "lower": lower, "exact": of.entropy}[self.tail]
        return Estimate(entropy, lower, upper, mass)


def tail_bounds(top: Array, unseen: int) -> tuple[float, float, float]:
    """Bounds of the entropy given the largest probabilities and how many tokens are unseen.

    Parameters
    ----------
    top : array, shape (k,)
        The k largest probabilities, in falling order; their sum may be below 1.
    unseen : int
        Live tokens that are not among them.

    Returns
    -------
    lower, upper, mass : float
        With m = 1 - sum(top): the lower bound puts the tail on as few tokens as the k-th probability
        allows, floor(m / p_k) of them and a remainder; the upper one spreads it evenly,
        m ln(unseen / m). Entropy is Schur-concave, so no tail lies outside.
    """
    seen = float(-np.sum(_p_log_p(top)))
    mass = max(1.0 - float(top.sum()), 0.0)
    if mass == 0.0 or unseen <= 0:
        return seen, seen, mass
    ceiling = float(top[-1])
    whole = min(np.floor(mass / ceiling), unseen) if ceiling > 0 else 0.0
    rest = max(mass - whole * ceiling, 0.0)
    lower = seen - whole * float(_p_log_p(np.array(ceiling))) - float(_p_log_p(np.array(rest)))
    upper = seen + mass * float(np.log(unseen / mass))
    return lower, max(upper, lower), mass


def tail_bounds_unnormalised(weights: Array, unseen: int) -> tuple[float, float, float]:
    """The same where the normaliser is unknown: every unseen token weighs between 0 and the k-th.

    A token lighter than all others raises the entropy as it grows (its probability is below e^-H), so
    the bounds are at the two ends; the mass returned is the largest possible.
    """
    seen = float(weights.sum())
    lower = float(-np.sum(_p_log_p(weights / seen)))
    total = seen + unseen * float(weights[-1])
    each = float(weights[-1]) / total
    upper = float(-np.sum(_p_log_p(weights / total)) - unseen * _p_log_p(np.array(each)))
    return lower, upper, 1.0 - seen / total


def floored(entropy: Array, floor: float) -> Array:
    """Entropy as decisions should see it: an over-confident model is not believed below `floor`."""
    return np.maximum(entropy, floor)


def _p_log_p(p: Array) -> Array:
    return np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0)
