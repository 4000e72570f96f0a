"""Intervals of ratios and differences, by the bootstrap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from entropic_control.controllers.base import Array

_RESAMPLES = 2000
_SEED = 5


class Interval(NamedTuple):
    """95 % of the bootstrap's distribution, percentile method (Efron and Tibshirani, 1993)."""

    low: float
    high: float


class Segments(NamedTuple):
    """A run cut into pieces of neighbouring steps of one kind, arrays of shape (n,)."""

    tokens: Array
    """Tokens decoded in each piece."""
    seconds: Array
    work: Array
    """Seconds that a fixed cost model expects: how much there was to do."""
    tau: Array
    """Entropic time, nats."""


class Run(NamedTuple):
    """What a run's rates are resampled from: the machine's noise shows in the pieces."""

    decode: Segments
    """Steps that only decode."""
    prompt: Segments
    """Steps with prompt tokens."""
    idle: float
    """Seconds without a step."""


Rate = Callable[[Run, Run], Array]
"""A rate of a run, from its pieces as they were resampled, arrays of shape (..., n), and as they were.

What a run has to do is given; what the sample decides is how many seconds an expected second takes, and
how much entropic time passes in a token. So totals are scaled by resampled ratios.
"""


def end_to_end(drawn: Run, run: Run) -> Array:
    """Tokens a second of the whole run."""
    tokens = run.decode.tokens.sum() + run.prompt.tokens.sum()
    return np.asarray(tokens / (_busy(drawn, run) + run.idle))


def decoding(drawn: Run, run: Run) -> Array:
    """Tokens a second of the steps that only decode."""
    return np.asarray(run.decode.tokens.sum() / _seconds(drawn.decode, run.decode))


def tau_rate(drawn: Run, run: Run) -> Array:
    """Entropic time over engine time, nats a second."""
    tau = _tau(drawn.decode, run.decode) + _tau(drawn.prompt, run.prompt)
    return np.asarray(tau / _busy(drawn, run))


def _busy(drawn: Run, run: Run) -> Array:
    return _seconds(drawn.decode, run.decode) + _seconds(drawn.prompt, run.prompt)


def _seconds(drawn: Segments, whole: Segments) -> Array:
    return _scaled(whole.work.sum(), drawn.seconds, drawn.work)


def _tau(drawn: Segments, whole: Segments) -> Array:
    return _scaled(whole.tokens.sum(), drawn.tau, drawn.tokens)


def _scaled(total: float, part: Array, basis: Array) -> Array:
    below = basis.sum(-1)
    share = np.divide(part.sum(-1), below, out=np.zeros_like(below), where=below > 0)
    return np.asarray(total * share)


RATES: dict[str, Rate] = {
    "tokens_per_second": end_to_end,
    "decode_tokens_per_second": decoding,
    "tau_per_second": tau_rate,
}


def paired_interval(columns: Sequence[Array], statistic: Callable[..., Array]) -> Interval | None:
    """Of a statistic of several arms, resampling the requests they share.

    Parameters
    ----------
    columns : sequence of array, shape (n,)
        One figure a request, for each arm.
    statistic : function
        Takes arrays of shape (..., n), one an arm; reduces the last axis.

    Returns
    -------
    Interval or None
        None for fewer than three requests, which say nothing about their spread.
    """
    if len(columns[0]) < 3:
        return None
    rows = np.arange(len(columns[0]))

    def of(picked: Array, **_: int) -> Array:
        return statistic(*(np.asarray(column)[picked] for column in columns))

    return _bootstrap((rows,), of)


def rate_interval(
    runs: Sequence[Run], rate: Rate, statistic: Callable[..., Array]
) -> Interval | None:
    """Of a statistic of the rates of several arms, resampling the pieces of each run within its kind."""
    pieces = [segments for run in runs for segments in (run.decode, run.prompt)]
    if any(len(run.decode.seconds) < 3 for run in runs):
        return None
    # Of a single piece there is nothing to resample: it stays as it is.
    several = [n for n, segments in enumerate(pieces) if len(segments.seconds) > 1]

    def of(*picked: Array, **_: int) -> Array:
        drawn = list(pieces)
        for n, rows in zip(several, picked, strict=True):
            drawn[n] = Segments(*(column[rows] for column in pieces[n]))
        redrawn = zip(drawn[::2], drawn[1::2], runs, strict=True)
        return statistic(
            *(rate(Run(decode, prompt, run.idle), run) for decode, prompt, run in redrawn)
        )

    return _bootstrap([np.arange(len(pieces[n].seconds)) for n in several], of)


def _bootstrap(samples: Sequence[Array], statistic: Callable[..., Array]) -> Interval:
    from scipy.stats import bootstrap

    done = bootstrap(
        tuple(samples),
        statistic,
        n_resamples=_RESAMPLES,
        vectorized=True,
        method="percentile",
        random_state=np.random.default_rng(_SEED),
    )
    found = done.confidence_interval
    return Interval(float(found.low), float(found.high))


def ratio(one: Array, other: Array) -> Array:
    """One mean over another; of rates, which are one number a resample, their ratio."""
    return np.asarray(one / other)


def mean_ratio(one: Array, other: Array) -> Array:
    """The ratio of two means over the last axis."""
    return np.asarray(one.mean(-1) / other.mean(-1))


def mean_difference(one: Array, other: Array) -> Array:
    """The difference of two means over the last axis."""
    return np.asarray(one.mean(-1) - other.mean(-1))


def jain(values: Array) -> float:
    """Jain's fairness index, 1/n to 1 (Jain, Chiu and Hawe, DEC-TR-301, 1984)."""
    values = np.asarray(values, float)
    square = float((values**2).sum())
    return float(values.sum() ** 2 / (len(values) * square)) if square else 1.0
