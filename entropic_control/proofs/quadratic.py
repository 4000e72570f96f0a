"""A common quadratic Lyapunov function of several linear systems, found or shown not to exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from entropic_control.controllers.base import Array

TOLERANCE = 1e-9
"""Decrease per step that counts as strict, relative to trace(P) = 1."""


def common_quadratic(matrices: Sequence[Array]) -> Array | None:
    """P > 0 with A' P A < P for every matrix, or None where there is none.

    Minimises the largest eigenvalue t of A' P A - P over P >= 0 of trace one by the barrier method
    (Boyd, El Ghaoui, Feron and Balakrishnan, Linear Matrix Inequalities in System and Control Theory,
    SIAM 1994, section 5.1; Boyd and Vandenberghe, Convex Optimization, 2004, section 11.3). It ends
    with a P, or when the duality gap shows that t stays above zero.

    Because the condition is convex in A, a P for the vertices of a multi-affine family serves every
    member, and every sequence of members.
    """
    stack = np.array(matrices)
    n = stack.shape[1]
    if n == 0:
        return np.zeros((0, 0))
    basis = _traceless(n)
    # Slacks S = constant + sum y_j direction_j: P itself, then t I - (A' P A - P) for every A.
    directions = np.concatenate([np.zeros((1, n, n)), basis])[None].repeat(len(stack) + 1, axis=0)
    directions[1:, 1:] -= np.swapaxes(stack, 1, 2)[:, None] @ basis @ stack[:, None]
    directions[1:, 0] = np.eye(n)
    start = np.eye(n) / n
    constant = np.concatenate([start[None], start - np.swapaxes(stack, 1, 2) @ start @ stack])
    y = np.zeros(len(basis) + 1)
    y[0] = 1.0 - float(np.linalg.eigvalsh(constant[1:])[:, 0].min())
    weight, slack_count = 1.0, n * (len(stack) + 1)
    while weight < 1e13:
        y = _centre(y, weight, constant, directions)
        if y[0] < -TOLERANCE:
            return np.asarray(start + np.tensordot(y[1:], basis, 1))
        if y[0] - 2 * slack_count / weight > -TOLERANCE:
            return None
        weight *= 8.0
    return None


def _centre(y: Array, weight: float, constant: Array, directions: Array) -> Array:
    """Newton's method on weight t - sum log det S; stops early at a t that is low enough."""

    def value(y: Array) -> float:
        eigenvalues = np.linalg.eigvalsh(constant + np.tensordot(directions, y, ((1,), (0,))))
        if eigenvalues.min() <= 0:
            return np.inf
        return float(weight * y[0] - np.log(eigenvalues).sum())

    here = value(y)
    for _ in range(60):
        inverse = np.linalg.inv(constant + np.tensordot(directions, y, ((1,), (0,))))
        scaled = inverse[:, None] @ directions
        gradient = -np.einsum("kiaa->i", scaled)
        gradient[0] += weight
        flat = np.swapaxes(scaled, 0, 1).reshape(len(y), -1)
        turned = np.swapaxes(np.swapaxes(scaled, 2, 3), 0, 1).reshape(len(y), -1)
        hessian = flat @ turned.T
        try:
            step = -np.linalg.solve(hessian, gradient)
        except np.linalg.LinAlgError:
            break
        decrement = float(-gradient @ step)
        if decrement < 1e-8:
            break
        size = 1.0 if decrement < 0.06 else 1.0 / (1.0 + np.sqrt(decrement))
        while not (there := value(y + size * step)) < here and size > 1e-9:
            size *= 0.5
        if size <= 1e-9:
            break
        y, here = y + size * step, there
        if y[0] < -TOLERANCE:
            break
    return y


def fastest(matrices: Sequence[Array]) -> Array | None:
    """The P with the fastest common decrease, by bisection on A' P A < rate^2 P; None where none is."""
    P = common_quadratic(matrices)
    if P is None or not P.size:
        return P
    slow, quick = 1.0, max(float(np.abs(np.linalg.eigvals(A)).max()) for A in matrices)
    for _ in range(12):
        rate = 0.5 * (slow + quick)
        better = common_quadratic([A / rate for A in matrices]) if rate > 0 else None
        slow, quick, P = (slow, rate, P) if better is None else (rate, quick, better)
    return P


def _traceless(n: int) -> Array:
    """An orthonormal basis of the symmetric n by n matrices of trace zero, shape (m, n, n)."""
    basis = []
    for i in range(n):
        for j in range(i):
            off = np.zeros((n, n))
            off[i, j] = off[j, i] = np.sqrt(0.5)
            basis.append(off)
        if i:
            diagonal = np.diag([1.0] * i + [-float(i)] + [0.0] * (n - i - 1))
            basis.append(diagonal / np.sqrt(i * (i + 1)))
    return np.array(basis).reshape(len(basis), n, n)


def quadratic_form(P: Array, x: Array) -> Array:
    """x' P x of every row of x, shape (rows,)."""
    return np.asarray(np.einsum("ri,ij,rj->r", x, P, x))


def growth(P: Array, matrices: Sequence[Array] | Array) -> Array:
    """The factor by which each matrix can stretch the norm sqrt(x' P x), shape (matrices,)."""
    root = np.linalg.cholesky(P).T
    moved = root @ np.asarray(matrices) @ np.linalg.inv(root)
    return np.asarray(np.linalg.norm(moved, 2, axis=(1, 2)))


def least_feasible(
    holds: Callable[[float], bool], low: float, high: float, rel: float = 1e-3
) -> float:
    """The edge between failing at `low` and holding at `high`, by bisection on the logarithm."""
    if holds(low):
        return low
    while high / low > 1 + rel:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
