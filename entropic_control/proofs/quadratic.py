"""A common quadratic Lyapunov function of several linear systems, found or shown not to exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from entropic_control.controllers.base import Array

TOLERANCE = 1e-9
"""Decrease per step that counts as strict, relative to trace(P) = 1."""


def common_quadratic(matrices: Sequence[Array], iterations: int = 20_000) -> Array | None:
    """P > 0 with A' P A < P for every matrix, or None where there is none.

    The ellipsoid method on the convex function max eigenvalue of A' P A - P over symmetric P of trace
    one, with deep cuts (Boyd, El Ghaoui, Feron and Balakrishnan, Linear Matrix Inequalities in System
    and Control Theory, SIAM 1994, section 1.4.1 and chapter 5). It ends with a P, or when the cut
    passes the whole ellipsoid: then no P does it by more than the tolerance.

    Because the condition is convex in the products of A's parameters, a P for the vertices of a
    multi-affine family serves every member, and every sequence of members.
    """
    stack = np.array(matrices)
    n = stack.shape[1]
    if n == 0:
        return np.zeros((0, 0))
    basis = _traceless(n)
    x, size = np.zeros(len(basis)), np.eye(len(basis))
    identity = np.eye(n) / n
    for _ in range(iterations):
        P: Array = identity + np.tensordot(x, basis, 1)
        cut, excess = _violation(P, stack)
        if cut is None:
            return P
        gradient = np.tensordot(basis, cut, ((1, 2), (0, 1)))
        reach = float(np.sqrt(max(gradient @ size @ gradient, 0.0)))
        if excess >= reach:
            return None
        x, size = _cut(x, size, gradient / reach, excess / reach)
    return None


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


def _violation(P: Array, stack: Array) -> tuple[Array | None, float]:
    """The worst violated inequality at P: its gradient in P and by how much it is violated."""
    values, vectors = np.linalg.eigh(P)
    if values[0] < TOLERANCE:
        v = vectors[:, 0]
        return -np.outer(v, v), float(TOLERANCE - values[0])
    values, vectors = np.linalg.eigh(np.swapaxes(stack, 1, 2) @ P @ stack - P)
    worst = int(np.argmax(values[:, -1]))
    if values[worst, -1] <= -TOLERANCE:
        return None, 0.0
    v = vectors[worst][:, -1]
    moved = stack[worst] @ v
    return np.outer(moved, moved) - np.outer(v, v), float(values[worst, -1] + TOLERANCE)


def _cut(x: Array, size: Array, gradient: Array, depth: float) -> tuple[Array, Array]:
    """The smallest ellipsoid around the part of this one that a cut leaves; `gradient` normalised."""
    n = len(x)
    step = size @ gradient
    if n == 1:
        left = (1 - depth) / 2
        return x - (1 + depth) / 2 * step, size * left**2
    shrink = n * n / (n * n - 1) * (1 - depth**2)
    squeeze = 2 * (1 + n * depth) / ((n + 1) * (1 + depth))
    return x - (1 + n * depth) / (n + 1) * step, shrink * (size - squeeze * np.outer(step, step))


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
