"""The passes of `softmax` over one float32 row, compiled; imported only where numba is installed.

numpy walks a row five times a temperature and writes it down three times between. A compiled loop keeps
256 tokens in registers and walks it once: 0.02 ms against 0.05 at 49,152 tokens, and nothing but the
row itself has to come back into the cache after the model has emptied it. The formulas are those of
`softmax`, whose numpy pass is the reference and runs wherever this cannot.

NUMBA_DISABLE_JIT=1 leaves every row to numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numba.extending import register_jitable

from entropic_control.controllers import softmax
from entropic_control.controllers.base import Array
from entropic_control.controllers.softmax import BLOCK
from entropic_control.controllers.temperature import pi

F = TypeVar("F", bound=Callable[..., Any])

if numba.config.DISABLE_JIT:
    raise ImportError("numba is told not to compile")

_LN2 = math.log(2)
_RAW = np.float32(1 / _LN2)

_ROW = types.Array(types.float32, 1, "C", readonly=True)
_SINGLE, _DOUBLE = types.float32, types.float64
_MASSES = types.Array(_SINGLE, 1, "C")
_SUM, _SUM_OF_SQUARES = (types.Tuple([_DOUBLE] * n + [_MASSES]) for n in (2, 3))
_WALK = _SUM_OF_SQUARES(_ROW, _SINGLE, _DOUBLE)
_WALK_BOTH = types.Tuple([types.UniTuple(_SINGLE, 2), _SUM, _SUM_OF_SQUARES])(_ROW, _DOUBLE)
_COUNTS, _TABLE = (types.Array(t, 2, "C") for t in (types.int64, _DOUBLE))
_FLAGS = types.Array(types.boolean, 1, "C")
_SAMPLE = types.void(_ROW, _DOUBLE, _DOUBLE, types.int64, _COUNTS, _FLAGS, _TABLE, types.int64)
_STATE = types.UniTuple(types.Array(_DOUBLE, 1, "A", readonly=True), 5)
_CONTROL = types.void(*_SAMPLE.args, _STATE, types.UniTuple(_DOUBLE, 7))
_QUANTILE = types.int64(_ROW, _ROW, _DOUBLE, _DOUBLE, _DOUBLE)

_ZERO = np.float32(0)
_ONE = np.float32(1)
_LEAST = np.float32(-127)
"""2^-127 is what `_power` makes an exact zero of, as a masked token needs."""

_ROUND = np.float32(1.5 * 2**23)
"""Added to a small number it leaves the nearest integer in the lowest bits."""

_SUMS: dict[str, Any] = {
    "fastmath": {"contract", "reassoc", "nsz"},
    "error_model": "numpy",  # a division by zero is no error
}

# 2^r = 1 + c1 r + ... + c5 r^5 on [-1/2, 1/2], fitted to the least relative error, 9e-8.
_C1 = np.float32(0.6931469775965886)
_C2 = np.float32(0.24022242081843168)
_C3 = np.float32(0.05550733745645823)
_C4 = np.float32(0.009671512862184694)
_C5 = np.float32(0.0013264727080109962)


def _compiled(*signature: Any, **options: Any) -> Callable[[F], F]:
    """`numba.njit`, with the machine code kept beside the module or in the user's cache, if it can be."""

    def decorate(function: F) -> F:
        try:
            kept: F = numba.njit(*signature, cache=True, **options)(function)
        except RuntimeError:  # neither can be written to
            kept = numba.njit(*signature, **options)(function)
        return kept

    return decorate


# Not reassociated: that would take the rounding for adding nothing.
@_compiled(fastmath={"contract"})
def _power(x: Any) -> Any:
    """2^x for x in [-127, 0]."""
    shifted = x + _ROUND
    r = x - (shifted - _ROUND)
    power = ((((_C5 * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + _ONE
    exponent = np.float32(shifted).view(np.int32) << np.int32(23)
    return np.int32(np.float32(power).view(np.int32) + exponent).view(np.float32)


@_compiled(fastmath={"contract"})
def _terms(logit: Any, peak: Any, scale: Any) -> Any:
    """w, w y and w y^2 of a token, where w = 2^y and y = (z - peak) / (T ln 2)."""
    y = max((logit - peak) * scale, _LEAST)
    w = _power(y)
    return w, w * y, w * y * y


@_compiled(_WALK, **_SUMS)
def _walk(row: Any, peak: Any, temperature: Any) -> Any:
    """Sum of w, E[ln w] and E[(ln w)^2] over blocks of 256 tokens, and the sum of w of each block.

    Single precision within a block, double from block to block. The length of a block has to be known
    when this is compiled: otherwise it takes twice the time.
    """
    scale = np.float32(1 / (_LN2 * temperature))
    total: Any = 0.0
    first: Any = 0.0
    second: Any = 0.0
    masses = np.empty(row.size // BLOCK, np.float32)
    for block in range(masses.size):
        mass, once, twice = _ZERO, _ZERO, _ZERO
        for place in range(block * BLOCK, (block + 1) * BLOCK):
            w, wy, wyy = _terms(row[place], peak, scale)
            mass += w
            once += wy
            twice += wyy
        masses[block] = mass
        total, first, second = total + mass, first + once, second + twice
    return total, _LN2 * first / total, _LN2 * _LN2 * second / total, masses


@_compiled()
def _ordered(bits: Any) -> Any:
    """Of the bits of a float32 an integer of the same order, with NaN beyond the infinities; and back."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@_compiled()
def _extremes(row: Any) -> Any:
    """The largest and the smallest logit; one of them is NaN if any is."""
    bits = row.view(np.int32)
    peak = low = _ordered(bits[0])
    # Of integers: a loop over floats that minds NaN is not vectorised.
    for place in range(bits.size):
        key = _ordered(bits[place])
        peak, low = max(peak, key), min(low, key)
    return np.int32(_ordered(peak)).view(np.float32), np.int32(_ordered(low)).view(np.float32)


@_compiled(_WALK_BOTH, **_SUMS)
def _walk_both(row: Any, temperature: Any) -> Any:
    """The extremes, what `_walk` returns at T = 1, without the squares, and at another temperature."""
    scale = np.float32(1 / (_LN2 * temperature))
    raw: Any = 0.0
    raw_first: Any = 0.0
    total: Any = 0.0
    first: Any = 0.0
    second: Any = 0.0
    peak, low = _extremes(row)
    raw_masses = np.empty(row.size // BLOCK, np.float32)
    masses = np.empty(row.size // BLOCK, np.float32)
    for block in range(masses.size):
        raw_mass, raw_once, mass, once, twice = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
        for place in range(block * BLOCK, (block + 1) * BLOCK):
            logit = row[place]
            w, wy, _ = _terms(logit, peak, _RAW)
            raw_mass += w
            raw_once += wy
            w, wy, wyy = _terms(logit, peak, scale)
            mass += w
            once += wy
            twice += wyy
        raw_masses[block], masses[block] = raw_mass, mass
        raw, raw_first = raw + raw_mass, raw_first + raw_once
        total, first, second = total + mass, first + once, second + twice
    at_one = raw, _LN2 * raw_first / raw, raw_masses
    return (
        (peak, low),
        at_one,
        (total, _LN2 * first / total, _LN2 * _LN2 * second / total, masses),
    )


def walked(row: Array, peak: float, temperature: float) -> tuple[float, float, float, Array]:
    """Sum of w, E[y], E[y^2] and the blocks of w, where y = (z - peak) / T and w = exp(y).

    Parameters
    ----------
    row : array, shape (vocab,), float32
        Valid logits, contiguous and aligned; -inf marks a masked token.
    peak : float
        The largest of them.
    temperature : float
        Above `GREEDY`.
    """
    found: tuple[float, float, float, Array] = _walk(whole_blocks(row), peak, temperature)
    return found


def walked_both(
    row: Array, temperature: float
) -> tuple[tuple[float, float], tuple[float, float, Array], tuple[float, float, float, Array]]:
    """The extremes of any row; `walked` at T = 1, without E[y^2], and at `temperature`.

    One of the extremes is NaN if any logit is. Where the row is no distribution the rest means nothing.
    """
    found: tuple[Any, Any, Any] = _walk_both(whole_blocks(row), temperature)
    return found


def whole_blocks(row: Array) -> Array:
    """The row; masked tokens fill the last block of 256 up."""
    missing = -row.size % BLOCK
    return np.concatenate([row, np.full(missing, -np.inf, np.float32)]) if missing else row


for shared in (
    softmax.exponentials,
    softmax.quantile,
    softmax.entropy_of,
    softmax.varentropy_of,
    softmax.surprisal_of,
    pi.clipped,
    pi.law,
):
    register_jitable(shared)


@_compiled(_SAMPLE, error_model="numpy")
def sample(
    row: Any,
    temperature: Any,
    uniform: Any,
    forced: Any,
    counts: Any,
    valid: Any,
    table: Any,
    at: Any,
) -> None:
    """Measure a row, and take the token `forced`, or if that is negative the one at quantile `uniform`.

    The row is in `whole_blocks`, its temperature above `GREEDY`. Column `at` of `counts`, shape (2, rows),
    int64, gets the token (-1 if the row is no distribution) and the live tokens; of `valid`, shape
    (rows,), bool, whether it is; of `table`, shape (6, rows), float64: H and V, H at T = 1, -ln p of the
    token at the temperature and at 1, and the mass it did not see.
    """
    (highest, low), (raw, raw_mean, _), tempered = _walk_both(row, temperature)
    peak = np.float64(highest)
    total, mean, square, masses = tempered
    counts[:, at] = -1, 0
    table[:, at] = np.nan
    valid[at] = np.isfinite(peak) and not np.isnan(low)
    if not valid[at]:
        return
    token = forced
    if forced < 0:
        token = softmax.quantile(row, masses, peak, temperature, uniform)
    logit, log_norm, raw_log_norm = np.float64(row[token]), math.log(total), math.log(raw)
    counts[0, at] = token
    counts[1, at] = row.size if np.isfinite(low) else np.count_nonzero(row > -np.inf)
    table[0, at] = softmax.entropy_of(log_norm, mean)
    table[1, at] = softmax.varentropy_of(mean, square)
    table[2, at] = softmax.entropy_of(raw_log_norm, raw_mean)
    table[3, at] = softmax.surprisal_of(logit, peak, temperature, log_norm)
    table[4, at] = softmax.surprisal_of(logit, peak, 1.0, raw_log_norm)
    table[5, at] = 0


quantile = _compiled(_QUANTILE)(softmax.quantile)


@_compiled(_CONTROL, error_model="numpy")
def control(
    row: Any,
    temperature: Any,
    uniform: Any,
    forced: Any,
    counts: Any,
    valid: Any,
    table: Any,
    at: Any,
    state: Any,
    gains: Any,
) -> None:
    """`sample`, and `pi.law` on the row's state.

    Column `at` of `table`, shape (11, rows), gets the state after it besides; that of a row which is
    invalid stays as it is.
    """
    sample(row, temperature, uniform, forced, counts, valid, table, at)
    log_temperature, entropy, varentropy, integral, target = state
    now = log_temperature[at], entropy[at], varentropy[at], integral[at]
    if valid[at]:
        now = pi.law(*now[1:], target[at], table[0, at], table[1, at], *gains)
    table[6, at], table[7, at], table[8, at], table[9, at] = now
    table[10, at] = target[at]
