"""The truncation family: which tokens may be sampled at all.

`place` says where the choice is made: "before" the temperature on the model's own distribution, so that
no temperature changes which tokens it leaves; "after" on the tempered one, so that it leaves more tokens
the hotter it is. The entropy that is measured and controlled is that of what is sampled, in either place.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from entropic_control.controllers.base import Array, Controller
from entropic_control.controllers.softmax import GREEDY, Moments, weights

_ROUNDING = 1e-7
"""Relative; the sum of a float32 row must not cost the nucleus one token more."""


class Truncation(Controller):
    """Base of the truncations; they hold no state.

    Parameters
    ----------
    place : {"before", "after"}
        Whether the tokens are chosen before the temperature is applied or after.
    """

    family: ClassVar[str] = "truncation"
    place: Literal["before", "after"] = "before"

    @abstractmethod
    def keep(self, row: Array, of: Moments) -> Array:
        """Which tokens may be sampled, a mask of shape (vocab,); never empty.

        Parameters
        ----------
        row : array, shape (vocab,)
            A valid row of logits; -inf tokens are never kept.
        of : Moments
            The row's moments at the temperature the choice is made at.
        """


class NoTruncation(Truncation):
    """Keeps every live token."""

    kind: Literal["none"] = "none"

    def keep(self, row: Array, of: Moments) -> Array:
        return _at_least(row, -np.inf)


class TopK(Truncation):
    """The k most probable tokens (Fan et al., ACL 2018); of equals, those of lower index.

    Parameters
    ----------
    k : int
        Tokens to keep.
    """

    kind: Literal["top_k"] = "top_k"
    k: int = Field(40, ge=1)

    def keep(self, row: Array, of: Moments) -> Array:
        if self.k >= of.live:
            return _at_least(row, -np.inf)
        threshold = np.partition(row, row.size - self.k)[row.size - self.k]
        return _largest(row, self.k, threshold)


class TopP(Truncation):
    """The smallest set of most probable tokens with probability p (Holtzman et al., ICLR 2020).

    Parameters
    ----------
    p : float
        Probability to keep; of equally probable tokens those of lower index go first.
    """

    kind: Literal["top_p"] = "top_p"
    p: float = Field(0.9, gt=0, le=1)

    def keep(self, row: Array, of: Moments) -> Array:
        if self.p == 1:
            return _at_least(row, -np.inf)
        wanted = self.p * float(of.blocks.sum(dtype=np.float64)) * (1 - _ROUNDING)
        # A nucleus is small as a rule: look at the largest few, and at more only where it is not.
        seen = min(256, row.size)
        while True:
            top = np.sort(np.partition(row, row.size - seen)[row.size - seen :])[::-1]
            mass = np.cumsum(weights(top, of))
            if mass[-1] >= wanted or seen == row.size:
                break
            seen = min(8 * seen, row.size)
        count = min(int(np.searchsorted(mass, wanted)) + 1, of.live)
        return _largest(row, count, top[count - 1])


class MinP(Truncation):
    """Tokens at least p times as probable as the most probable (Nguyen et al., arXiv:2407.01082).

    Parameters
    ----------
    p : float
        Share of the largest probability.
    """

    kind: Literal["min_p"] = "min_p"
    p: float = Field(0.05, gt=0, le=1)

    def keep(self, row: Array, of: Moments) -> Array:
        return _at_least(row, of.peak + of.temperature * float(np.log(self.p)))


class Typical(Truncation):
    """The tokens whose surprisal is nearest the entropy, with probability p (Meister et al., TACL 2023).

    Parameters
    ----------
    p : float
        Probability to keep; of equally typical tokens those of lower index go first.
    """

    kind: Literal["typical"] = "typical"
    p: float = Field(0.9, gt=0, le=1)

    def keep(self, row: Array, of: Moments) -> Array:
        if self.p == 1 or of.temperature <= GREEDY:
            return _at_least(row, -np.inf if self.p == 1 else of.peak)
        live = np.flatnonzero(_at_least(row, -np.inf))
        y = (row[live].astype(np.float64) - of.peak) / of.temperature
        # -ln p - H by token: rows are long, and what is kept is few, so only those are put in order.
        shift = np.abs(of.log_norm - y - of.entropy)
        wanted = self.p * float(of.blocks.sum(dtype=np.float64)) * (1 - _ROUNDING)
        seen = min(256, live.size)
        while True:
            near = np.argpartition(shift, seen - 1)[:seen]
            near = near[np.lexsort((near, shift[near]))]
            mass = np.cumsum(np.exp(y[near]))
            if mass[-1] >= wanted or seen == live.size:
                break
            seen = min(8 * seen, live.size)
        mask = np.zeros(row.size, np.bool_)
        mask[live[near[: int(np.searchsorted(mass, wanted)) + 1]]] = True
        return mask


def within_surprisal(row: Array, of: Moments, limit: float) -> Array:
    """The tokens with -ln p <= `limit` nats and the most probable one, a mask of shape (vocab,).

    The cut of Mirostat (Basu et al., ICLR 2021).
    """
    mask = _at_least(row, of.peak + of.temperature * (of.log_norm - limit))
    mask[int(row.argmax())] = True
    return mask


def _at_least(row: Array, threshold: float) -> Array:
    """Tokens with a logit of `threshold` or more; masked ones never."""
    return np.asarray(row >= max(threshold, float(np.finfo(row.dtype).min)))


def _largest(row: Array, count: int, threshold: float) -> Array:
    """The `count` largest logits, `threshold` being the smallest of them; ties go by index."""
    mask = np.asarray(row > threshold)
    tied = np.flatnonzero(row == threshold)
    mask[tied[: count - np.count_nonzero(mask)]] = True
    return mask
