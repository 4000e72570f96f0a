"""What a deadline still lets a request have, and which requests lose some of it by waiting."""

from __future__ import annotations

import numpy as np

from entropic_control.controllers.base import Array
from entropic_control.controllers.priority.base import Candidates

_MARGIN = 1.25
"""Predicted seconds are trusted to this factor; company on the way makes steps longer."""


def tokens_in_time(candidates: Candidates, prefill: Array, alone: Array) -> Array:
    """Tokens that each request can have before its deadline if it is served alone, shape (n,).

    Parameters
    ----------
    prefill : array, shape (n,)
        Seconds to read the rest of each prompt.
    alone : array, shape (n,)
        Seconds of a step that decodes one token of that request only.
    """
    tokens = np.floor((candidates.slack - prefill) / alone)
    return np.clip(tokens, 0, candidates.decode_left)


def pressing(
    candidates: Candidates, prefill: Array, alone: Array, company: Array, wait: float
) -> Array:
    """Which requests lose tokens to their deadline if they wait `wait` seconds, a mask (n,).

    One that can have none in time has none to lose.

    Parameters
    ----------
    prefill, alone : array, shape (n,)
        As above.
    company : array, shape (n,)
        Seconds of a step that decodes one token of the request and of its company.
    wait : float
        Seconds that a step may take which goes to others.
    """
    needed = _MARGIN * (prefill + candidates.decode_left * company)
    late = candidates.slack < needed + wait
    return np.asarray(late & (tokens_in_time(candidates, prefill, alone) > 0))
