"""Margins by algebra: roots of polynomials on the unit circle, where `margins` searches over frequencies.

On the circle |p(z)|^2 is z^-n times a polynomial, so that |p| = level |q| is an equation between
polynomials, and the frequencies where it holds are its roots of modulus one.
"""

from __future__ import annotations

import numpy as np

from entropic_control.controllers.base import Array
from entropic_control.proofs.loop import Loop

ON_CIRCLE = 1e-5
"""How far from one a modulus may be for a root to be tried as one on the circle."""


def crossovers(loop: Loop) -> Array:
    """Frequencies in (0, pi] where |L| = 1, radians per token."""
    return _equal_moduli(loop.num, loop.den, 1.0)


def phase_and_delay(loop: Loop) -> tuple[float, float]:
    """Phase margin in degrees and delay margin in tokens of a stable loop; inf without a crossover."""
    at = crossovers(loop)
    if not at.size:
        return np.inf, np.inf
    lag = np.angle(-loop.at(at)) % (2 * np.pi)
    phase = np.minimum(lag, 2 * np.pi - lag)
    return float(np.degrees(phase.min())), float((lag / at).min())


def reaches(p: Array, q: Array, level: float) -> bool:
    """Whether |p| comes down to `level` |q| anywhere on the unit circle.

    Where it never equals it, one point settles which of them is above.
    """
    if _equal_moduli(p, q, level).size:
        return True
    z = np.exp(1j)
    return bool(abs(np.polyval(p, z)) < level * abs(np.polyval(q, z)))


def sensitivity(loop: Loop) -> tuple[Array, Array]:
    """p, q with min |p| / |q| = min |1 + L|, the inverse of the sensitivity peak."""
    return loop.characteristic(), np.concatenate([loop.den, np.zeros(loop.delay)])


def disk(loop: Loop) -> tuple[Array, Array]:
    """p, q with min |p| / |q| = min 2 |1 + L| / |1 - L|, the disk margin."""
    return 2 * loop.characteristic(), loop.characteristic(-1.0)


def _equal_moduli(p: Array, q: Array, level: float) -> Array:
    """Frequencies in (0, pi] where |p| = level |q| on the circle."""
    gap = np.polysub(_square(p), level**2 * _square(q))
    scale = np.abs(_square(p)).max() + level**2 * np.abs(_square(q)).max()
    gap = np.where(np.abs(gap) < 1e-15 * scale, 0.0, gap)
    if not np.any(gap):
        return np.array([np.pi])
    roots = np.roots(gap)
    near = roots[(np.abs(np.abs(roots) - 1) < ON_CIRCLE) & (roots.imag >= -1e-12)]
    omega = np.angle(near)
    omega = np.unique(omega[omega > 1e-9])
    z = np.exp(1j * omega)
    a, b = np.abs(np.polyval(p, z)), level * np.abs(np.polyval(q, z))
    return np.asarray(omega[np.abs(a - b) <= 1e-6 * (a + b)])


def _square(p: Array) -> Array:
    """|p(z)|^2 z^n on the circle, as a polynomial."""
    return np.convolve(p, p[::-1])
