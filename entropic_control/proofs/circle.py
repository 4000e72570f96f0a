"""The discrete circle criterion: how fast-varying a gain the loop is proven to bear."""

from __future__ import annotations

import numpy as np

from entropic_control.controllers.base import Array
from entropic_control.proofs.loop import Loop
from entropic_control.proofs.margins import frequencies


def circle_gain(loop: Loop, low: float) -> float:
    """The largest g such that L, taken at unit gain, is stable for any gain varying in [low, g].

    Tsypkin's criterion (Tsypkin, Automation and Remote Control 25, 1964; Khalil, Nonlinear Systems,
    2002, section 7.1): the loop must be stable at `low`, and
    Re[(1 + g L)(1 + low L)*] = 1 + low Re L + g (Re L + low |L|^2) > 0 on the unit circle.
    """
    if loop.radius(low) >= 1:
        return 0.0
    omega = frequencies(loop)
    for _ in range(3):
        allowed = _allowed(loop, omega, low)
        best = int(np.argmin(allowed))
        left, right = omega[max(best - 1, 0)], omega[min(best + 1, len(omega) - 1)]
        omega = np.linspace(left, right, 41)
    return float(_allowed(loop, omega, low).min())


def _allowed(loop: Loop, omega: Array, low: float) -> Array:
    value = loop.at(omega)
    constant = 1 + low * value.real
    slope = value.real + low * np.abs(value) ** 2
    return np.where(slope < 0, constant / -np.minimum(slope, -1e-300), np.inf)
