"""What drafts are worth: the tokens of a step that they add, against the seconds they cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from entropic_control.controllers.base import Array
from entropic_control.controllers.priority.base import Cost

_NO_TIME = 1e-300
"""Seconds; a step that costs nothing is divided by this."""


def paying(chances: Sequence[Array], rows: int, longest: int, cost: Cost, room: int) -> Array:
    """The drafts that give a step the most tokens per predicted second.

    One length for all rows that draft: an engine that batches rows of a length (llama.cpp's streams)
    takes them through in one pass more, or in none where every row drafts. A row whose first tokens
    hold with chances c_1, c_2, ... is expected to yield c_1 + ... + c_k tokens more (Leviathan et al.,
    ICML 2023, with measured chances instead of equal ones).

    Parameters
    ----------
    chances : sequence of arrays, shape (k,)
        For each row that has a guess: the probability that its first i + 1 tokens are all right.
    rows, longest : int
        Rows of the step, with a guess or without; cells of the longest.
    cost : Cost
        Predicts the seconds of a step.
    room : int
        Drafted tokens that the step can hold.

    Returns
    -------
    array, shape (len(chances),)
        Tokens to draft for each; all 0 if no draft pays.
    """
    lengths = np.zeros(len(chances), np.intp)
    most = min(max(map(len, chances), default=0), room)
    if most < 1:
        return lengths
    expected = np.full((most, len(chances)), -np.inf)
    for row, own in enumerate(chances):
        expected[: len(own), row] = np.cumsum(own[:most])
    order = np.argsort(-expected, axis=1, kind="stable")
    gained = np.take_along_axis(expected, order, axis=1).cumsum(axis=1)
    drafting = np.arange(1, len(chances) + 1)
    drafted = np.arange(1, most + 1)[:, None] * drafting
    reach = np.full_like(drafted, longest)
    plain = float(cost.decode(np.array(rows), np.array(longest)))
    together = cost.decode(rows + drafted, reach)
    seconds = np.where(drafting == rows, together, plain + cost.decode(drafted, reach))
    gained[drafted > room] = -np.inf
    rate = (rows + gained) / np.maximum(seconds, _NO_TIME)
    length, last = divmod(int(np.argmax(rate)), len(chances))  # of equals the shortest
    if rate[length, last] > rows / max(plain, _NO_TIME):
        lengths[order[length, : last + 1]] = length + 1
    return lengths
