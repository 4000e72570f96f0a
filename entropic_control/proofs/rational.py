"""Lyapunov certificates judged in rational arithmetic: no rounding between certificate and verdict.

Every float is a rational number. P and the parameters of a controller are taken as the numbers they are,
the matrices of a token come out of the controller's own `law` run on fractions, and a quadratic form is
positive when the pivots of its LDL' factorisation are (Golub and Van Loan, Matrix Computations, 2013,
section 4.1), which fractions give exactly.

A decrease at the corners is a decrease everywhere between them: x' A' P A x is convex in A, so it is
largest at a corner of any family whose matrices lie in the convex hull of the corners, each token's on its
own. That makes a finite, exact check one of a whole range of gains, not of a grid in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from entropic_control.controllers import PITemperature
from entropic_control.controllers.base import Array
from entropic_control.controllers.temperature.pi import law

Exact: TypeAlias = Any
"""An array of fractions (numpy's dtype is `object`)."""
Law: TypeAlias = Sequence[tuple[Fraction, Exact]]
"""What a token's matrix may be: probabilities, and a matrix each."""

_fractions = np.vectorize(Fraction, otypes=[object])


def exact(values: Any) -> Exact:
    """The same numbers as fractions; arrays of fractions stay as they are.

    Raises
    ------
    ValueError or OverflowError
        For NaN and infinities, which are no numbers.
    """
    values = np.asarray(values)
    return _fractions(values) if values.size else values.astype(object)


def exact_decrease(P: Array, vertices: Iterable[Array | Exact], strict: bool = True) -> list[str]:
    """What is wrong with P as a Lyapunov function of all the vertices and of all between them.

    Parameters
    ----------
    P : Array, shape (n, n)
        The certificate; only its symmetric part matters to x' P x.
    vertices : iterable of (n, n)
        Floats, taken as the rationals they are, or fractions.
    strict : bool
        Whether x' P x must fall; else it must not grow.
    """
    return exact_mean_decrease(P, [[(Fraction(1), A)] for A in vertices], strict)


def exact_mean_decrease(P: Array, laws: Iterable[Law], strict: bool = True) -> list[str]:
    """The same of the mean of x' P x over random matrices: E[A' P A] against P, for every law."""
    if not np.all(np.isfinite(np.asarray(P, float))):
        return ["P is not finite"]
    form = exact(P)
    if form.ndim != 2 or len({form.shape, form.shape[::-1]}) != 1:
        return [f"P has the shape {form.shape} and is not square"]
    form = (form + form.T) / 2
    if not positive(form):
        return ["P is not positive definite, in exact arithmetic"]
    for at, law_ in enumerate(laws):
        if any(np.shape(A) != form.shape for _, A in law_):
            return [f"P has the shape {form.shape}, which is not that of the loop's matrices"]
        moved = sum((p * _squeezed(form, exact(A)) for p, A in law_), 0 * form)
        if not positive(form - moved, strict):
            word = "does not fall" if strict else "can grow"
            return [f"x' P x {word} at corner {at}, in exact arithmetic"]
    return []


def _squeezed(P: Exact, A: Exact) -> Exact:
    """A' P A."""
    return A.T.dot(P).dot(A)


def positive(S: Exact, strict: bool = True) -> bool:
    """Whether the symmetric matrix of fractions is positive definite, or semidefinite if not `strict`."""
    rest = S.copy()
    for k in range(len(rest)):
        pivot = rest[k, k]
        if pivot < 0 or (strict and pivot == 0):
            return False
        column = rest[k + 1 :, k]
        if pivot == 0:
            # A zero on the diagonal of a semidefinite matrix has zeros beside it.
            if any(column):
                return False
            continue
        rest[k + 1 :, k + 1 :] = rest[k + 1 :, k + 1 :] - np.multiply.outer(column, column) / pivot
    return True


def exact_token(
    controller: PITemperature, delay: int, slope: Fraction | float, q: Fraction | float
) -> Exact:
    """A token's matrix, as `token_matrix` has it, from `law` on fractions and no other formula.

    Parameters
    ----------
    slope : number
        g, nats.
    q : number
        kp over the divisor, from 0 up, 1/nats: of the command in force at a delay of one, else of the next.
    """
    g, share = Fraction(slope), Fraction(q)
    a, kp, ki = (Fraction(v) for v in (controller.filter, controller.kp, controller.ki))
    n = 2 if delay == 1 else 2 + delay
    columns = []
    for at in range(n):
        h, i, *chain = (Fraction(int(at == k)) for k in range(n))
        in_force = chain[-1] if chain else i - share * h
        # Away from the bounds and about H* = u* = 0; a divisor of its own choice, whatever was measured.
        v = kp / share if kp and share else Fraction(1)
        gains: Any = (a, kp if share else Fraction(0), ki, -np.inf, np.inf, -np.inf, np.inf)
        u, h, _, i = law(h, v, i, Fraction(0), g * in_force, v, *gains)
        columns.append([h, i, u, *chain[:-1]][:n])
    return np.array(columns, dtype=object).T


def exact_corners(
    controller: PITemperature, delay: int, low: Fraction | float, high: Fraction | float
) -> list[Exact]:
    """A at the corners of all slopes in [low, high] nats and all divisors that the controller may use.

    A is affine in the slope and in the proportional gain each, so these hold the whole range.
    """
    least, most = controller.divisor_bounds
    kp = Fraction(controller.kp)
    ends = (kp / Fraction(most) if np.isfinite(most) else Fraction(0), kp / Fraction(least))
    return [exact_token(controller, delay, g, q) for g in (low, high) for q in dict.fromkeys(ends)]


def simplest(P: Array, vertices: Sequence[Exact], strict: bool = True) -> Array:
    """P with as few binary digits as still make a certificate of the vertices; P itself where none do."""
    largest = float(np.abs(P).max())
    for digits in range(2, 60):
        # All numbers are multiples of one power of two, so that they are short.
        unit = Fraction(2) ** int(np.floor(np.log2(2**digits / largest)))
        short = np.array([[float(round(Fraction(v) * unit) / unit) for v in row] for row in P])
        if not exact_decrease(short, vertices, strict):
            return short
    return P
