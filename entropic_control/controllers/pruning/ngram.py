"""The surprisal of a prompt's tokens without the model: what its own n-grams do not foresee."""

from __future__ import annotations

import numpy as np

from entropic_control.controllers.base import Array

ORDER = 4
"""Tokens of the longest n-gram that is counted."""
UNSEEN = 1 / 50_000
"""Probability of a token before anything was counted."""
NEW, TRUST = 300.0, 4.0
"""Tokens seen by which the counts of single tokens, and of what followed a context, weigh as much as
what they fall back to."""
RARE = 50.0
"""Tokens of which a class is taken to hold one, before anything was counted."""
BASE, SLOPE = 0.33, 0.31
"""A language model's surprisal where the n-grams' is x nats is BASE + SLOPE x on average, nats."""


def estimated_surprisal(tokens: Array) -> Array:
    """What a language model's -ln p of each token may be, nats, shape (n,), from the tokens alone.

    A token is foreseen by how often it followed the same one to three tokens earlier in this text.
    Contexts that were seen seldom fall back to shorter ones, single tokens to a uniform vocabulary. A
    token's value depends on itself and those before it alone, and on no tokenizer.

    Parameters
    ----------
    tokens : array, shape (n,)
        Token ids.

    Raises
    ------
    ValueError
        If the ids are not a row of whole numbers from 0 to 2^31 - 1.

    Notes
    -----
    The counts are smoothed by Dirichlet priors, order upon order (MacKay and Peto, 1995), of weights
    `NEW` and `TRUST`. `BASE` and `SLOPE` are least squares to the surprisals of SmolLM2-135M in ten
    texts. Sums over 8 tokens correlate with the model's by 0.70; letting digits, capitals, starts of
    words and ranks in the vocabulary have a say made it 0.71.
    """
    tokens = _checked(tokens)
    if not tokens.size:
        return np.zeros(0)
    probability = np.full(tokens.shape, UNSEEN)
    seen, weight = np.arange(tokens.size), NEW
    gram = np.zeros(tokens.shape, np.int64)  # which n-gram ends here: the empty one, everywhere
    for order in range(ORDER):
        context = np.r_[-order, gram[:-1]]  # the first token has none, which is like no other
        gram = np.unique((context << 32) + tokens, return_inverse=True)[1]
        again = _earlier(gram)
        probability = (again + weight * probability) / (seen + weight)
        seen, weight = np.r_[0, again[:-1]], TRUST
    return np.asarray(BASE - SLOPE * np.log(probability))


def rarity(members: Array) -> Array:
    """How surprising it is that a token is one of a class, nats, shape (n,): 0 for those that are not.

    As the class is met more often in a text, each of it is worth less: a number in prose is news, one
    in a table is not. As before, a token's value depends on itself and those before it alone.

    Parameters
    ----------
    members : array, shape (n,)
        Mask of the tokens of the class.
    """
    members = np.asarray(members, np.bool_)
    before = np.cumsum(members) - members
    nats = -np.log((before + 1) / (np.arange(len(members)) + RARE))
    return np.where(members, nats, 0.0)


def _earlier(values: Array) -> Array:
    """How often each value occurred before its place, shape (n,)."""
    order = np.argsort(values, kind="stable")
    starts = np.r_[True, np.diff(values[order]) != 0]
    places = np.arange(len(values))
    earlier = np.empty(len(values), np.int64)
    earlier[order] = places - np.maximum.accumulate(np.where(starts, places, 0))
    return earlier


def _checked(tokens: Array) -> Array:
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise ValueError("token ids must be a row of whole numbers")
    if tokens.size and (tokens.min() < 0 or tokens.max() >= 1 << 31):
        raise ValueError("token ids must lie between 0 and 2147483647")
    return tokens.astype(np.int64)
