"""From logits to a reading and a token: the one place where both are made, so that they agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from entropic_control.controllers.base import Array, Rows
from entropic_control.controllers.estimators import Estimator, FullEntropy
from entropic_control.controllers.signals import Distribution, Reading, whole_row_reading
from entropic_control.controllers.softmax import (
    GREEDY,
    Moments,
    compiled_for,
    draw,
    extremes,
    invalid,
    moments,
    raw_and_tempered,
    surprisal,
    working_precision,
)
from entropic_control.controllers.temperature.base import Command, Law
from entropic_control.controllers.truncation import NoTruncation, Truncation, within_surprisal


class Support(NamedTuple):
    """What the token of one row is drawn from."""

    logits: Array
    """Of the tokens that may be drawn, shape (n,)."""
    tokens: Array | None
    """Which tokens those are, rising; None for the whole vocabulary."""
    moments: Moments

    def draw(self, uniform: float) -> int:
        """The token at quantile `uniform`."""
        at = draw(self.logits, self.moments, uniform)
        return at if self.tokens is None else int(self.tokens[at])

    def surprisal(self, token: int) -> float:
        """-ln p of a token, nats; inf for one that was cut off."""
        at = token
        if self.tokens is not None:
            at = int(np.searchsorted(self.tokens, token))
            if at == len(self.tokens) or self.tokens[at] != token:
                return float("inf")
        return surprisal(self.logits, self.moments, at)

    def cut(self, keep: Array, temperature: float) -> Support:
        """Without the tokens that the mask `keep`, shape (n,), leaves out."""
        left = np.flatnonzero(keep)
        if len(left) == len(keep):
            return self
        # A copy of the few that stay: a masked row as long as the vocabulary costs a fresh page of
        # memory for every thousand tokens and another pass over all of them.
        logits = self.logits[left]
        tokens = left if self.tokens is None else self.tokens[left]
        return Support(logits, tokens, moments(logits, temperature))


class Measured(NamedTuple):
    """The readings of one step and the distributions its tokens are drawn from."""

    reading: Reading
    """Its surprisals are NaN until the tokens are known: see `completed`."""
    supports: list[Support | None]
    """By row; None where the row is invalid."""
    raw: list[Support | None]
    """The model's own distributions at T = 1."""

    def draw(self, row: int, uniform: float) -> int:
        """The token at quantile `uniform` in [0, 1) of the given row's distribution.

        Raises
        ------
        ValueError
            If the row is invalid; `reading.valid` says so beforehand.
        """
        support = self.supports[row]
        if support is None:
            raise ValueError(f"row {row} is no distribution: all masked, or with NaN or +inf")
        return support.draw(uniform)

    def completed(self, tokens: Sequence[int] | Array) -> Reading:
        """The reading with each row's surprisals; tokens of invalid rows are ignored."""
        return self.reading._replace(
            surprisal=_surprisals(self.supports, tokens),
            raw_surprisal=_surprisals(self.raw, tokens),
        )


def _surprisals(supports: Sequence[Support | None], tokens: Sequence[int] | Array) -> Array:
    column = [
        np.nan if support is None else support.surprisal(int(token))
        for support, token in zip(supports, tokens, strict=True)
    ]
    return np.array(column, np.float64)


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
        Of what the tokens are drawn from: after the temperature, and after the truncation in either
        place. Only the command's `max_surprisal`, which such a controller regulates itself, comes
        behind the measuring point and shows in `realized_entropy` alone. `live` counts the tokens at
        the measuring point. Invalid rows hold NaN.
    """
    place = None if isinstance(truncation, NoTruncation) else truncation.place
    count = len(logits)
    columns: list[tuple[float, ...]] = []
    live: list[int] = []
    supports: list[Support | None] = []
    own: list[Support | None] = []
    temperatures = command.temperature.tolist()
    if len(temperatures) != count:
        raise ValueError(f"{count} rows of logits and {len(temperatures)} temperatures")
    for index, temperature in enumerate(temperatures):
        row = working_precision(logits[index])
        both = _measured(row, temperature, truncation if place == "before" else None)
        if both is None:
            supports.append(None)
            own.append(None)
            columns.append(_UNKNOWN)
            live.append(0)
            continue
        raw, support = both
        own.append(raw)
        if place == "after":
            support = support.cut(truncation.keep(row, support.moments), temperature)
        at = support.moments
        estimate = estimator.estimate(support.logits, at)
        if command.max_surprisal is not None:
            limit = float(command.max_surprisal[index])
            keep = within_surprisal(support.logits, support.moments, limit)
            support = support.cut(keep, temperature)
        columns.append(
            (
                *estimate,
                at.varentropy,
                estimator.decision_entropy(row, raw.moments),
                support.moments.entropy,
                np.nan,
            )
        )
        live.append(at.live)
        supports.append(support)
    table = np.array(columns, np.float64).reshape(count, len(_UNKNOWN)).T.copy()
    entropy, lower, upper, tail_mass, varentropy, raw_entropy, realized, unknown = table
    reading = Reading(
        entropy=entropy,
        varentropy=varentropy,
        raw_entropy=raw_entropy,
        lower=lower,
        upper=upper,
        tail_mass=tail_mass,
        live=np.array(live, np.int64),
        realized_entropy=realized,
        surprisal=unknown,
        raw_surprisal=unknown,
        temperature=command.temperature.astype(np.float64, copy=False),
        valid=np.array([support is not None for support in supports], np.bool_),
        distribution=Distribution.TEMPERED if place is None else Distribution.TRUNCATED,
    )
    return Measured(reading, supports, own)


_UNKNOWN = (np.nan,) * 8
"""What an invalid row has in every column."""


def _measured(
    row: Array, temperature: float, before: Truncation | None
) -> tuple[Support, Support] | None:
    """The model's own distribution and the one at the measuring point; None if the row is neither."""
    if before is None:
        both = raw_and_tempered(row, temperature)
        return both and (Support(row, None, both[0]), Support(row, None, both[1]))
    ends = extremes(row)
    if not ends.valid:
        return None
    raw = Support(row, None, moments(row, 1.0, ends, spread=temperature == 1.0))
    support = raw.cut(before.keep(row, raw.moments), temperature)
    if support is raw and temperature != 1.0:
        support = Support(row, None, moments(row, temperature, ends))
    return raw, support


def sample(
    logits: Rows,
    command: Command,
    estimator: Estimator,
    truncation: Truncation,
    uniforms: Sequence[float],
    forced: Sequence[int],
    law: Law | None = None,
) -> tuple[list[int], Reading, Any]:
    """`measure` a step's distributions, and draw its tokens.

    Parameters
    ----------
    uniforms : sequence of float
        The quantile in [0, 1) at which each row's token is drawn.
    forced : sequence of int
        The token that each row gets instead; negative for none.
    law : Law, optional
        Of the temperature controller, to update it in the same pass if that can be.

    Returns
    -------
    tokens : list of int
        -1 where the row is no distribution.
    reading : Reading
        With the tokens' surprisals.
    state
        After the `law`; None if it is still to be updated.
    """
    if type(truncation) is NoTruncation and type(estimator) is FullEntropy:
        drawn = _whole_rows(logits, command, uniforms, forced, law)
        if drawn is not None:
            return drawn
    measured = measure(logits, command, estimator, truncation)
    valid = measured.reading.valid.tolist()
    tokens = [-1] * len(valid)
    for row, (uniform, token) in enumerate(zip(uniforms, forced, strict=True)):
        if valid[row]:
            tokens[row] = token if token >= 0 else measured.draw(row, uniform)
    return tokens, measured.completed(tokens), None


def _whole_rows(
    logits: Rows,
    command: Command,
    uniforms: Sequence[float],
    forced: Sequence[int],
    law: Law | None,
) -> tuple[list[int], Reading, Any] | None:
    """`sample` where nothing is cut or estimated, compiled; None if that cannot be."""
    temperatures = command.temperature.tolist()
    if command.max_surprisal is not None or min(temperatures, default=1.0) <= GREEDY:
        return None
    count = len(logits)
    counts, valid = np.empty((2, count), np.int64), np.empty(count, np.bool_)
    table = np.empty((6 if law is None else 11, count))
    how = () if law is None else (tuple(law[0]), law[1])
    rows = zip(logits, temperatures, uniforms, forced, strict=True)
    for at, (row, temperature, uniform, given) in enumerate(rows):
        fast = compiled_for(row)
        if fast is None:
            return None
        row = fast.whole_blocks(row)
        run = fast.control if how else fast.sample
        run(row, temperature, uniform, given, counts, valid, table, at, *how)
    tokens, live = counts
    entropy, varentropy, raw, surprisal, raw_surprisal, tail_mass, *state = table
    reading = whole_row_reading(
        entropy,
        varentropy,
        raw,
        live,
        command.temperature,
        valid,
        surprisal=surprisal,
        raw_surprisal=raw_surprisal,
        tail_mass=tail_mass,
    )
    return tokens.tolist(), reading, type(law[0])(*state) if law else None


def truncated_before(logits: Rows, truncation: Truncation) -> Rows:
    """The logits at the measuring point: what a temperature controller that reads logits must see.

    The rows as they are, but for the tokens that a truncation with place "before" cuts off.
    """
    if truncation.place == "after" or isinstance(truncation, NoTruncation):
        return logits
    rows = (working_precision(row) for row in logits)
    masked = np.float32(-np.inf)
    return [
        row if invalid(row) else np.where(truncation.keep(row, moments(row, 1.0)), row, masked)
        for row in rows
    ]
