"""From logits to a reading and a token: the one place where both are made, so that they agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from entropic_control.controllers.base import Array, Rows
from entropic_control.controllers.estimators import Estimator
from entropic_control.controllers.signals import Distribution, Reading
from entropic_control.controllers.softmax import (
    Moments,
    draw,
    invalid,
    moments,
    surprisal,
    working_precision,
)
from entropic_control.controllers.temperature.base import Command
from entropic_control.controllers.truncation import NoTruncation, Truncation, within_surprisal


class Measured(NamedTuple):
    """The readings of one step and the distributions its tokens are drawn from."""

    reading: Reading
    """Its surprisals are NaN until the tokens are known: see `completed`."""
    rows: list[Array]
    """The logits as sampled, by row: -inf where truncation cut a token off."""
    moments: list[Moments | None]
    """The moments of those, by row; None where the row is invalid."""

    def draw(self, row: int, uniform: float) -> int:
        """The token at quantile `uniform` in [0, 1) of the given row's distribution.

        Raises
        ------
        ValueError
            If the row is invalid; `reading.valid` says so beforehand.
        """
        return draw(self.rows[row], self._of(row), uniform)

    def completed(self, tokens: Sequence[int] | Array) -> Reading:
        """The reading with each row's surprisal; tokens of invalid rows are ignored."""
        column = np.full(len(self.rows), np.nan)
        for row, (logits, of, token) in enumerate(
            zip(self.rows, self.moments, tokens, strict=True)
        ):
            if of is not None:
                column[row] = surprisal(logits, of, int(token))
        return self.reading._replace(surprisal=column)

    def _of(self, row: int) -> Moments:
        of = self.moments[row]
        if of is None:
            raise ValueError(f"row {row} is no distribution: all masked, or with NaN or +inf")
        return of


def measure(
    logits: Rows, command: Command, estimator: Estimator, truncation: Truncation
) -> Measured:
    """Measure a step's distributions under a command.

    Parameters
    ----------
    logits : array, shape (rows, vocab), or a sequence of arrays of shape (vocab,)
        The model's logits, half, single or double precision; -inf masks a token. They are kept as
        they are where nothing is cut, so they must not change until the tokens are drawn.
    command : Command
        Temperatures and cuts, arrays of shape (rows,).
    estimator : Estimator
        How the entropy is estimated.
    truncation : Truncation
        What is cut off, before the temperature or after.

    Returns
    -------
    Measured
        The measuring point is after the temperature, and after a truncation with place "before";
        truncation with place "after" and the command's `max_surprisal` come behind it and show in
        `realized_entropy` alone. `live` counts the tokens at the measuring point. Invalid rows hold
        NaN.
    """
    early = truncation.place == "before" and not isinstance(truncation, NoTruncation)
    late = truncation.place == "after" and not isinstance(truncation, NoTruncation)
    count = len(logits)
    columns = np.full((7, count), np.nan)
    live = np.zeros(count, np.int64)
    valid = np.zeros(count, np.bool_)
    rows: list[Array] = []
    sampled: list[Moments | None] = []
    temperatures = np.broadcast_to(command.temperature, (count,)).tolist()
    for index, temperature in enumerate(temperatures):
        row = working_precision(logits[index])
        if invalid(row):
            rows.append(row)
            sampled.append(None)
            continue
        raw = moments(row, 1.0)
        raw_entropy = estimator.decision_entropy(row, raw)
        if early:
            row = _masked(row, truncation.keep(row, raw))
        at = raw if temperature == 1.0 and not early else moments(row, temperature)
        estimate = estimator.estimate(row, at)
        live[index] = at.live
        if late:
            row = _masked(row, truncation.keep(row, at))
            of = moments(row, temperature)
        else:
            of = at
        if command.max_surprisal is not None:
            row = _masked(row, within_surprisal(row, of, float(command.max_surprisal[index])))
            of = moments(row, temperature)
        columns[:, index] = (
            estimate.entropy,
            at.varentropy,
            raw_entropy,
            estimate.lower,
            estimate.upper,
            estimate.tail_mass,
            of.entropy,
        )
        valid[index] = True
        rows.append(row)
        sampled.append(of)
    entropy, varentropy, raw_entropies, lower, upper, tail_mass, realized = columns
    reading = Reading(
        entropy=entropy,
        varentropy=varentropy,
        raw_entropy=raw_entropies,
        lower=lower,
        upper=upper,
        tail_mass=tail_mass,
        live=live,
        realized_entropy=realized,
        surprisal=np.full(count, np.nan),
        temperature=np.array(temperatures, np.float64),
        valid=valid,
        distribution=Distribution.TRUNCATED if early else Distribution.TEMPERED,
    )
    return Measured(reading, rows, sampled)


def truncated_before(logits: Rows, truncation: Truncation) -> Rows:
    """The logits at the measuring point: what a temperature controller that reads logits must see.

    The rows as they are, but for the tokens that a truncation with place "before" cuts off.
    """
    if truncation.place == "after" or isinstance(truncation, NoTruncation):
        return logits
    rows = (working_precision(row) for row in logits)
    return [
        row if invalid(row) else _masked(row, truncation.keep(row, moments(row, 1.0)))
        for row in rows
    ]


def _masked(row: Array, keep: Array) -> Array:
    return np.where(keep, row, row.dtype.type(-np.inf))
