"""The signals that controllers read. All entropies are in nats, all arrays have one row a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from entropic_control.controllers.base import Array


class Distribution(StrEnum):
    """Which distribution a reading was taken of."""

    RAW = "raw"
    """The model's own, at temperature 1."""
    TEMPERED = "tempered"
    """At the temperature in force, nothing cut off."""
    TRUNCATED = "truncated"
    """At the temperature in force, over the tokens that truncation left: what is sampled."""


class Reading(NamedTuple):
    """What was measured of one step, arrays of shape (rows,).

    Rows with `valid` false carry no information: no controller may move its state on them.
    """

    entropy: Array
    """H of `distribution`, nats."""
    varentropy: Array
    """V = Var(ln p) of `distribution`, nats^2; it is dH/d(ln T)."""
    raw_entropy: Array
    """H of the model's own distribution at T = 1, nats."""
    lower: Array
    """Lower bound of the entropy where the estimator sees only part of the row, nats."""
    upper: Array
    """Upper bound, nats; equal to `lower` for a full measurement."""
    tail_mass: Array
    """Probability outside the part that the estimator saw."""
    live: Array
    """Tokens with a finite logit, an integer."""
    realized_entropy: Array
    """H of what was sampled from, after truncation, nats."""
    surprisal: Array
    """-ln p of the sampled token under what was sampled from, nats."""
    raw_surprisal: Array
    """-ln p of the sampled token under the model at T = 1, nats: how surprising the text is."""
    temperature: Array
    """The temperature in force."""
    valid: Array
    """False where the row held NaN, +inf or no live token."""
    distribution: Distribution = Distribution.TEMPERED


def rows_of(reading: Reading, rows: Any) -> Reading:
    """The reading of some of its rows: numbers, a mask or a slice of them."""
    columns = {
        name: getattr(reading, name)[rows] for name in Reading._fields if name != "distribution"
    }
    return reading._replace(**columns)


def joined(readings: Sequence[Reading]) -> Reading:
    """Readings of the same distribution as one, in order."""
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(reading, name) for reading in readings])
        for name in Reading._fields
        if name != "distribution"
    }
    return readings[0]._replace(**columns)


def unread(rows: int = 1, distribution: Distribution = Distribution.TEMPERED) -> Reading:
    """The reading of rows of which nothing could be measured: none is valid."""
    unknown = np.full(rows, np.nan)
    return whole_row_reading(
        unknown,
        unknown,
        unknown,
        np.zeros(rows, np.int64),
        unknown,
        np.zeros(rows, np.bool_),
        distribution=distribution,
    )


def whole_row_reading(
    entropy: Array,
    varentropy: Array,
    raw_entropy: Array,
    live: Array,
    temperature: Array,
    valid: Array,
    *,
    realized_entropy: Array | None = None,
    surprisal: Array | None = None,
    raw_surprisal: Array | None = None,
    tail_mass: Array | None = None,
    distribution: Distribution = Distribution.TEMPERED,
) -> Reading:
    """A `Reading` by an estimator that saw whole rows, arrays of shape (rows,): no tail, tight bounds.

    Without truncation what is sampled is what was measured; surprisals are NaN until tokens are known.
    """
    if surprisal is None:
        surprisal = np.full(len(entropy), np.nan)
    if raw_surprisal is None:
        raw_surprisal = np.full(len(entropy), np.nan)
    return Reading(
        entropy=entropy,
        varentropy=varentropy,
        raw_entropy=raw_entropy,
        lower=entropy,
        upper=entropy,
        tail_mass=np.where(valid, 0.0, np.nan) if tail_mass is None else tail_mass,
        live=np.asarray(live, np.int64),
        realized_entropy=entropy if realized_entropy is None else realized_entropy,
        surprisal=surprisal,
        raw_surprisal=raw_surprisal,
        temperature=np.asarray(temperature, np.float64),
        valid=valid,
        distribution=distribution,
    )


def reading(
    entropy: Array | float,
    varentropy: Array | float = 1.0,
    *,
    rows: int | None = None,
    dtype: type[np.floating] = np.float64,
    **others: Array | float | bool,
) -> Reading:
    """A `Reading` from the few signals that matter to a test or an analysis; the rest is derived."""
    h = np.atleast_1d(np.asarray(entropy, dtype))
    shape = (rows,) if rows is not None else h.shape
    defaults: dict[str, Array | float | bool | int] = {
        "entropy": h,
        "varentropy": varentropy,
        "raw_entropy": h,
        "lower": h,
        "upper": h,
        "tail_mass": 0.0,
        "live": 1 << 20,
        "realized_entropy": h,
        "surprisal": h,
        "raw_surprisal": h,
        "temperature": 1.0,
        "valid": True,
    }
    defaults.update(others)
    kinds = {"live": np.int64, "valid": np.bool_}
    columns: dict[str, Any] = {
        name: np.broadcast_to(np.asarray(value, kinds.get(name, dtype)), shape)
        for name, value in defaults.items()
    }
    return Reading(**columns)
