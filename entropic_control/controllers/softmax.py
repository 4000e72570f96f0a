"""One row of logits as a distribution: its moments in one pass, and exact sampling from it.

The vocabulary is walked once per temperature with vector operations on a reused buffer: at 49,152
tokens a row is 192 KiB, and a fresh buffer of that size costs more in page faults than the exp. Rows
are taken one at a time because one row stays in the L2 cache and a batch of eight does not (1.0 ms
against 3.2 ms for eight rows). Where numba is installed the walk over a float32 row is compiled.
"""

from __future__ import annotations

import math
import threading
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from entropic_control.controllers.base import Array

GREEDY = 1e-6
"""Temperatures at or below this are the limit T -> 0: the largest logit, with probability one."""

HOTTEST = 1e27
"""Higher temperatures are taken for this one, the limit T -> inf: all live tokens are equally likely, and
a masked one, at `_VANISHING`, still weighs exactly nothing."""

BLOCK = 256
"""Tokens whose mass is summed up for sampling."""

_VANISHING = -1e30
"""exp of this is zero in either precision, at any temperature up to `HOTTEST`, and it times zero is no
NaN."""

_SINGLE = np.dtype(np.float32)
_PRECISIONS = (_SINGLE, np.dtype("f8"))


class Moments(NamedTuple):
    """One row at one temperature."""

    peak: float
    """The largest logit."""
    live: int
    """Tokens with a finite logit."""
    log_norm: float
    """ln sum exp((z - peak) / T)."""
    entropy: float
    """H, nats."""
    varentropy: float
    """Var(ln p), nats^2."""
    blocks: Array
    """Unnormalised probability mass of each run of 256 tokens, for sampling."""
    temperature: float


class _Scratch(threading.local):
    """Two buffers a dtype and thread, as long as the longest row so far."""

    def __init__(self) -> None:
        self.buffers: dict[str, tuple[Array, Array]] = {}

    def of(self, row: Array) -> tuple[Array, Array]:
        key, padded = row.dtype.str, -(-row.size // BLOCK) * BLOCK
        held = self.buffers.get(key)
        if held is None or held[0].size < padded:
            held = self.buffers[key] = (np.empty(padded, row.dtype), np.empty(padded, row.dtype))
        return held[0][:padded], held[1][:padded]


_scratch = _Scratch()
_ones = {dtype: np.ones(BLOCK, dtype) for dtype in _PRECISIONS}


def usable(temperature: Any) -> Any:
    """Whether a row can be drawn at a temperature: 0 or more, and finite. A number, or an array of them."""
    return (temperature >= 0) & (temperature < np.inf)


def working_precision(logits: Array) -> Array:
    """`logits` in float32, or float64 where they already are: half precision overflows on z - peak."""
    return logits if logits.dtype in _ones else logits.astype(np.float32)


class Extremes(NamedTuple):
    """The largest and the smallest logit of a row: they tell whether it is a distribution."""

    peak: float
    low: float
    live: int
    """Tokens with a finite logit."""

    @property
    def valid(self) -> bool:
        """False with NaN or +inf somewhere, or nothing finite."""
        return math.isfinite(self.peak) and not math.isnan(self.low)


def extremes(row: Array) -> Extremes:
    """The extremes of a row of logits, shape (vocab,); NaN anywhere makes both NaN."""
    return _ends(row, float(row.max(initial=-np.inf)), float(row.min(initial=np.inf)))


def _ends(row: Array, peak: float, low: float) -> Extremes:
    live = row.size if math.isfinite(low) else int(np.count_nonzero(row > -np.inf))
    return Extremes(peak, low, live)


def invalid(row: Array) -> bool:
    """Whether the row is no distribution: NaN or +inf somewhere, or nothing finite."""
    return not extremes(row).valid


def moments(
    row: Array, temperature: float, ends: Extremes | None = None, *, spread: bool = True
) -> Moments:
    """Entropy, varentropy and sampling weights of softmax(row / temperature).

    With w = exp(y), y = (z - peak) / T and s = sum w: H = ln s - E[y] and V = E[y^2] - E[y]^2.

    Parameters
    ----------
    row : array, shape (vocab,)
        Valid logits; -inf marks a masked token, which is not live and counts as 0 ln 0 = 0.
    temperature : float
        At or below `GREEDY` the distribution is the largest logit's alone.
    ends : Extremes, optional
        Of the row, where they are known already.
    spread : bool
        Whether the varentropy is wanted, a quarter of the work; it is NaN otherwise.
    """
    ends = ends or extremes(row)
    if temperature <= GREEDY:
        return _greedy(row, ends)
    temperature = min(temperature, HOTTEST)
    if (fast := compiled_for(row)) is not None:
        total, mean, square, blocks = fast.walked(row, ends.peak, temperature)
        return _moments(ends, temperature, total, mean, square if spread else math.nan, blocks)
    y = _centred(row, ends)
    if temperature != 1.0:
        np.multiply(y, y.dtype.type(1.0 / temperature), out=y)
    return _summed(y, ends, temperature, spread)


def raw_and_tempered(row: Array, temperature: float) -> tuple[Moments, Moments] | None:
    """`moments` at T = 1, without varentropy unless T is 1, and at T; None if the row is no distribution.

    Cheaper than two calls, and than asking for the extremes first.
    """
    temperature = min(temperature, HOTTEST)
    apart = temperature > GREEDY and temperature != 1.0
    if apart and (fast := compiled_for(row)) is not None:
        found, (raw_total, raw_mean, raw_blocks), tempered = fast.walked_both(row, temperature)
        ends = _ends(row, *found)
        if not ends.valid:
            return None
        raw = _moments(ends, 1.0, raw_total, raw_mean, math.nan, raw_blocks)
        return raw, _moments(ends, temperature, *tempered)
    ends = extremes(row)
    if not ends.valid:
        return None
    if not apart:
        raw = moments(row, 1.0, ends, spread=temperature == 1.0)
        return raw, raw if temperature == 1.0 else _greedy(row, ends)
    y = _centred(row, ends)
    raw = _summed(y, ends, 1.0, spread=False)
    np.multiply(y, y.dtype.type(1.0 / temperature), out=y)
    return raw, _summed(y, ends, temperature, spread=True)


def _centred(row: Array, ends: Extremes) -> Array:
    """z - peak, in the first scratch buffer; masked tokens at `_VANISHING`."""
    y = _scratch.of(row)[0][: row.size]
    if ends.peak - ends.low < -_VANISHING:
        np.subtract(row, row.dtype.type(ends.peak), out=y)
    else:
        with np.errstate(over="ignore"):  # of finite logits too low to matter
            np.subtract(row, row.dtype.type(ends.peak), out=y)
        np.maximum(y, _VANISHING, out=y)
    return y


def _summed(y: Array, ends: Extremes, temperature: float, spread: bool) -> Moments:
    """Moments of softmax(y), where y is (z - peak) / T."""
    w_buffer = _scratch.of(y)[1]
    w = w_buffer[: y.size]
    np.exp(y, out=w)
    w_buffer[y.size :] = 0
    blocks = w_buffer.reshape(-1, BLOCK) @ _ones[y.dtype]
    total = float(blocks.sum(dtype=np.float64))
    mean = float(np.dot(w, y)) / total
    square = math.nan
    if spread:
        np.multiply(w, y, out=w)
        square = float(np.dot(w, y)) / total
    return _moments(ends, temperature, total, mean, square, blocks)


def _moments(
    ends: Extremes, temperature: float, total: float, mean: float, square: float, blocks: Array
) -> Moments:
    """From the sum of w, E[y] and E[y^2], which is NaN where the varentropy is not wanted."""
    log_norm = math.log(total)
    return Moments(
        ends.peak,
        ends.live,
        log_norm,
        entropy_of(log_norm, mean),
        varentropy_of(mean, square),
        blocks,
        temperature,
    )


def entropy_of(log_norm: float, mean: float) -> float:
    """ln s - E[y], nats; not below zero, where rounding could put a certain row."""
    return max(log_norm - mean, 0.0)


def varentropy_of(mean: float, square: float) -> float:
    """E[y^2] - E[y]^2, nats^2; not below zero."""
    return max(square - mean * mean, 0.0)


_loaded: list[ModuleType | None] = []


def load_compiled() -> ModuleType | None:
    """The module of compiled passes, or None without numba.

    Loading it takes 0.6 s and 150 MB, and 5 s when the machine code is not in numba's cache yet; so it is
    called where a model is opened, and is not part of a step.
    """
    if not _loaded:
        try:
            _loaded.append(import_module("entropic_control.controllers.compiled"))
        except ImportError:
            _loaded.append(None)
    return _loaded[0]


def compiled_for(row: Array) -> ModuleType | None:
    """The compiled passes, if there are any and they take such a row."""
    flags = row.flags
    fits = row.dtype == _SINGLE and flags.c_contiguous and flags.aligned
    return load_compiled() if fits else None


def _greedy(row: Array, ends: Extremes) -> Moments:
    blocks = np.zeros(-(-row.size // BLOCK), row.dtype)
    blocks[int(row.argmax()) // BLOCK] = 1
    return Moments(ends.peak, ends.live, 0.0, 0.0, 0.0, blocks, 0.0)


def draw(row: Array, of: Moments, uniform: float) -> int:
    """The token at quantile `uniform` in [0, 1) of the distribution `of` describes.

    Inverse transform over two levels, the blocks and then one block, so that a token costs one random
    number and 256 exponentials. The Gumbel trick, which needs a random number for each token of the
    vocabulary, took 20 times as long.
    """
    if of.temperature <= GREEDY:
        return int(row.argmax())
    if (fast := compiled_for(row)) is not None:
        return int(fast.quantile(row, of.blocks, of.peak, of.temperature, uniform))
    with np.errstate(over="ignore"):
        return int(quantile(row, of.blocks, of.peak, of.temperature, uniform))


def quantile(row: Array, blocks: Array, peak: float, temperature: float, uniform: float) -> Any:
    """`draw` in terms that numba compiles too."""
    cumulative = blocks.astype(np.float64).cumsum()
    point = uniform * cumulative[-1]
    block = min(np.searchsorted(cumulative, point, side="right"), len(cumulative) - 1)
    while blocks[block] == 0:
        block -= 1
    start = block * BLOCK
    inside = exponentials(row[start : start + BLOCK], peak, temperature)
    below = cumulative[block - 1] if block else 0.0
    offset = np.searchsorted(inside.cumsum(), point - below, side="right")
    if offset == len(inside):  # by rounding; then it is the last token with any weight
        offset = inside.nonzero()[0][-1]
    return start + offset


def exponentials(logits: Array, peak: float, temperature: float) -> Array:
    """exp((z - peak) / T), float64; for `quantile` in terms that numba compiles too."""
    return np.exp((logits.astype(np.float64) - peak) / temperature)


def weights(logits: Array, of: Moments) -> Array:
    """Unnormalised probabilities of some of the row's logits, float64, in the unit of `of.blocks`."""
    if of.temperature <= GREEDY:
        return np.asarray(logits == of.peak, np.float64)
    with np.errstate(over="ignore"):
        return exponentials(logits, of.peak, of.temperature)


def surprisal(row: Array, of: Moments, token: int) -> float:
    """-ln p of a token, nats."""
    if of.temperature <= GREEDY:
        return 0.0 if token == int(row.argmax()) else float("inf")
    return surprisal_of(float(row[token]), of.peak, of.temperature, of.log_norm)


def surprisal_of(logit: float, peak: float, temperature: float, log_norm: float) -> float:
    """ln s - y, nats."""
    return log_norm - (logit - peak) / temperature


def surprisals(logits: Array, tokens: Array) -> Array:
    """-ln p at T = 1 of one token in each row, shape (rows,), nats; NaN where the row is invalid."""
    out = np.full(len(tokens), np.nan)
    logits = working_precision(logits)
    for index, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        ends = extremes(row)
        if ends.valid:
            out[index] = surprisal(row, moments(row, 1.0, ends, spread=False), int(token))
    return out
