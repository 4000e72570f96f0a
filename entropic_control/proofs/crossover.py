"""Where |L| = 1 on the unit circle: roots of a polynomial, isolated in rational arithmetic.

|num|^2 - |den|^2 at z = exp(j omega) is a cosine series whose coefficients are differences of
autocorrelations; a delay does not enter. In y = sin^2(omega / 2) it is a polynomial on [0, 1], so Sturm's
theorem counts its roots exactly and bisection encloses each, however sharp the resonance between two of
them. A grid of frequencies steps over such a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import numpy as np

from entropic_control.controllers.base import Array

BITS = 60
"""Binary digits to which a root is enclosed, relative to itself and to its distance from pi."""

Polynomial = tuple[Fraction, ...]
"""Coefficients, lowest power first, the last one not zero; empty for the polynomial 0."""


def crossovers(num: Array, den: Array) -> Array | None:
    """Every omega in [0, pi], radians per token, at which |num| = |den|; None where that is all of them.

    Frequencies at which both vanish to rounding are left out: the ratio there is no number.
    """
    length = max(len(num), len(den))
    padded = [np.concatenate([np.zeros(length - len(p)), p]) for p in (num, den)]
    excess = _excess(*(tuple(p.tolist()) for p in padded))
    if not excess:
        return None
    omega = np.unique([0.0, *(_angle(low, high) for low, high in roots(excess)), np.pi])
    sizes = np.array([np.abs(np.polyval(p, np.exp(1j * omega))) for p in padded])
    noise = 8 * length * np.finfo(float).eps * np.abs(padded).sum(axis=1)
    defined = np.any(sizes > noise[:, None], axis=0)
    # The ends count where they meet to rounding: L(-1) is 1 or -1 there, whatever the last digit says.
    inside = (omega > 0) & (omega < np.pi)
    return np.asarray(omega[defined & (inside | (np.abs(sizes[0] - sizes[1]) <= noise.max()))])


def _angle(low: Fraction, high: Fraction) -> float:
    y = (low + high) / 2
    return 2.0 * float(np.arctan2(np.sqrt(float(y)), np.sqrt(float(1 - y))))


@lru_cache(maxsize=4096)
def _excess(num: tuple[float, ...], den: tuple[float, ...]) -> Polynomial:
    """|num|^2 - |den|^2 as a polynomial in y = sin^2(omega / 2), exactly."""
    n = len(num)
    a, b = [Fraction(v) for v in num], [Fraction(v) for v in den]
    series = [
        sum((a[i] * a[i + k] - b[i] * b[i + k] for i in range(n - k)), Fraction(0))
        for k in range(n)
    ]
    # cos(k omega) = T_k(1 - 2 y), by T_{k+1} = 2 x T_k - T_{k-1}.
    x = (Fraction(1), Fraction(-2))
    before: Polynomial = (Fraction(1),)
    now: Polynomial = x
    total = _scale(before, series[0])
    for k in range(1, n):
        total = _add(total, _scale(now, 2 * series[k]))
        before, now = (
            now,
            _add(_scale(_multiply(x, now), Fraction(2)), _scale(before, Fraction(-1))),
        )
    return total


def roots(p: Polynomial) -> list[tuple[Fraction, Fraction]]:
    """An interval around every root of p in [0, 1], in rising order; a point where a root is hit."""
    zero, one = Fraction(0), Fraction(1)
    found = [(at, at) for at in (zero, one) if not _value(p, at)]
    chain = _sturm(p)
    waiting = [(zero, one)]
    while waiting:
        low, high = waiting.pop()
        count = _changes(chain, low) - _changes(chain, high) - (not _value(p, high))
        if count == 1:
            found.append(_narrow(chain, low, high))
        elif count > 1:
            middle = (low + high) / 2
            if not _value(p, middle):
                found.append((middle, middle))
            waiting += [(low, middle), (middle, high)]
    return sorted(found)


def _narrow(chain: list[Polynomial], low: Fraction, high: Fraction) -> tuple[Fraction, Fraction]:
    """The one root strictly inside (low, high), to BITS digits of it and of its distance from 1."""
    p = chain[0]
    tight = Fraction(1, 2**BITS)
    at_low, at_high = _sign(p, low), _sign(p, high)
    simple = at_low * at_high < 0
    left = _changes(chain, low)
    while high - low > tight * min(high, max(1 - low, tight)):
        middle = (low + high) / 2
        sign = _sign(p, middle)
        if sign == 0:
            return middle, middle
        beyond = sign == at_low if simple else _changes(chain, middle) == left
        low, high = (middle, high) if beyond else (low, middle)
    return low, high


def _sturm(p: Polynomial) -> list[Polynomial]:
    """Sturm's chain: its changes of sign at two points differ by the distinct roots of p between them."""
    chain = [p, _trim([k * c for k, c in enumerate(p)][1:])]
    while chain[-1]:
        chain.append(_scale(_remainder(chain[-2], chain[-1]), Fraction(-1)))
    return chain[:-1]


def _remainder(p: Polynomial, q: Polynomial) -> Polynomial:
    rest = list(p)
    while len(rest) >= len(q):
        factor = rest[-1] / q[-1]
        shift = len(rest) - len(q)
        for i, c in enumerate(q):
            rest[shift + i] -= factor * c
        rest = list(_trim(rest[:-1]))
    return _scale(tuple(rest), 1 / max(map(abs, rest))) if rest else ()


def _changes(chain: list[Polynomial], at: Fraction) -> int:
    signs = [s for s in (_sign(p, at) for p in chain) if s]
    return sum(a != b for a, b in pairwise(signs))


def _value(p: Polynomial, at: Fraction) -> Fraction:
    value = Fraction(0)
    for c in reversed(p):
        value = value * at + c
    return value


def _sign(p: Polynomial, at: Fraction) -> int:
    value = _value(p, at)
    return (value > 0) - (value < 0)


def _trim(p: Sequence[Fraction]) -> Polynomial:
    last = len(p)
    while last and not p[last - 1]:
        last -= 1
    return tuple(p[:last])


def _add(p: Polynomial, q: Polynomial) -> Polynomial:
    n = max(len(p), len(q))
    wide = [(*r, *(Fraction(0),) * (n - len(r))) for r in (p, q)]
    return _trim([a + b for a, b in zip(*wide, strict=True)])


def _scale(p: Polynomial, factor: Fraction) -> Polynomial:
    return _trim([factor * c for c in p])


def _multiply(p: Polynomial, q: Polynomial) -> Polynomial:
    product = [Fraction(0)] * (len(p) + len(q) - 1)
    for i, a in enumerate(p):
        for j, b in enumerate(q):
            product[i + j] += a * b
    return _trim(product)
