"""The figures of a mean-square claim a second time: by iteration, from the other end, or enclosed."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from entropic_control.controllers import PITemperature
from entropic_control.controllers.base import Array
from entropic_control.proofs.noise import WARM_UP, Disturbance
from entropic_control.proofs.signals import Signals
from entropic_control.proofs.tokenlaw import Outputs, TokenLaw, deviations, long_enough, residues


def tokens_again(
    controller: PITemperature, delay: int, trace: tuple[Signals, ...]
) -> tuple[Array, Array]:
    """g and q with the filter written out."""
    shares = []
    for one in trace:
        v = controller.v_start
        for measured in one.varentropy:
            after = v + controller.filter * (measured - v)
            shares.append(v if delay == 1 else after)
            v = after
    least, most = controller.divisor_bounds
    return (
        np.concatenate([one.varentropy for one in trace]),
        controller.kp / np.clip(shares, least, most),
    )


def measured_again(
    controller: PITemperature, trace: tuple[Signals, ...]
) -> tuple[list[Array], Outputs]:
    """The noise, and the spread with its filter written out."""
    noise, away = residues(controller, list(trace))
    columns: tuple[list[float], ...] = ([], [], [])
    for one, u in zip(trace, away, strict=True):
        aim = controller.target if one.target is None else one.target
        h, start = aim, min(WARM_UP, len(u) // 2)
        for at, measured in enumerate(one.entropy):
            h += controller.filter * (measured - h)
            if at >= start:
                for column, value in zip(columns, (measured - aim, h - aim, u[at]), strict=True):
                    column.append(float(value))
    return noise, Outputs(*(float(np.sqrt(np.var(column))) for column in columns))


def enclosed(matrices: Array) -> tuple[float, float]:
    """Bounds on rho(E[A kron A]) over the matrices: Collatz and Wielandt's, on the cone of P >= 0.

    For any P > 0 it lies between the extreme eigenvalues of E[A P A'] relative to P.
    """
    n = matrices.shape[1]
    P = np.eye(n)
    for _ in range(2000):
        moved = np.einsum("tab,bc,tdc->ad", matrices, P, matrices, optimize=True) / len(matrices)
        half = np.linalg.inv(np.linalg.cholesky(P + 1e-14 * np.trace(P) * np.eye(n)))
        ends = np.linalg.eigvalsh(half @ moved @ half.T)
        if ends[-1] - ends[0] <= 1e-9 * ends[-1]:
            break
        P = moved / np.trace(moved)
    return float(ends[0]), float(ends[-1])


def peaks_again(law: TokenLaw, decay: float) -> Array:
    """The same sums from the other end: each output's square carried back through the adjoint."""
    entering, total = law.entering(), np.zeros(3)
    backward = np.swapaxes(law.factors(), 1, 2)[:, None]
    W = np.array([np.einsum("ij,ia,jb->ab", law.moments, out, out) for out in law.outputs])
    for _ in range(long_enough(decay)):
        total += np.sqrt(np.maximum(np.sum(W * entering, axis=(1, 2)), 0))
        W = np.sum(backward @ W @ np.swapaxes(backward, 2, 3), axis=0)
    return total


def predicted_again(law: TokenLaw, colour: Disturbance) -> Outputs:
    """The stationary mean square by iteration instead of a linear solve."""
    wide = law.coloured(colour)
    factors, entering, P = wide.factors(), wide.entering(), np.zeros_like(wide.parts[0])
    while True:
        after = moved(factors, P) + entering
        if np.abs(after - P).max() <= 1e-11 * np.abs(after).max():
            return deviations(wide, after, colour)
        P = after


def moved(factors: Array, P: Array) -> Array:
    """E[A P A']."""
    return np.asarray(np.sum(factors @ P @ np.swapaxes(factors, 1, 2), axis=0))


def squares(S: Array) -> list[tuple[Fraction, Array]]:
    """S = sum d_k l_k l_k' of a semidefinite matrix of fractions, d_k >= 0."""
    rest, terms = S.copy(), []
    for k in range(len(S)):
        pivot = rest[k, k]
        if pivot > 0:
            row = rest[k] / pivot
            terms.append((pivot, row))
            rest = rest - pivot * np.multiply.outer(row, row)
    return terms
