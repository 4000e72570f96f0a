"""The loop whose tokens are drawn from a law: its mean square, exactly, from second moments.

A token's matrix is A = sum_k w_k A_k with w = (1, g, q, g q): g the slope of the entropy, q the
proportional gain in force. So E[A P A'] = sum_ij E[w_i w_j] A_i P A_j' for any law of (g, q), and the mean
square of x obeys a linear equation: P <- E[A P A'] + Q. It dies out exactly when rho(E[A kron A]) < 1
(Costa, Fragoso and Marques, Discrete-Time Markov Jump Linear Systems, 2005, chapter 3).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from entropic_control.controllers import PITemperature
from entropic_control.controllers.base import Array
from entropic_control.proofs.noise import Disturbance
from entropic_control.proofs.rollout import replay
from entropic_control.proofs.scheduled import token_matrix
from entropic_control.proofs.signals import Signals

UNITS = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0))


class Outputs(NamedTuple):
    """One number for each of what is looked at."""

    entropy: float
    """H - H*, nats."""
    filtered: float
    """F[H] - H*, nats."""
    log_temperature: float
    """ln T - u*."""


class TokenLaw(NamedTuple):
    """x' = A x + b n and what is read off it, each a row of parts that w weighs."""

    parts: Array
    """A, shape (4, n, n)."""
    inputs: Array
    """b, shape (4, n)."""
    outputs: Array
    """H - H* (without its own noise), F[H] - H*, ln T - u*: shape (3, 4, n)."""
    moments: Array
    """E[w w'], shape (4, 4)."""

    def factors(self) -> Array:
        """F_k with E[A P A'] = sum_k F_k P F_k', shape (4, n, n)."""
        size, turn = np.linalg.eigh(self.moments)
        return np.asarray(np.tensordot((turn * np.sqrt(np.maximum(size, 0))).T, self.parts, 1))

    def kronecker(self) -> Array:
        """E[A kron A], shape (n^2, n^2)."""
        n = self.parts.shape[1]
        product = np.einsum("ij,iac,jbd->abcd", self.moments, self.parts, self.parts, optimize=True)
        return np.asarray(product.reshape(n * n, n * n))

    def radius(self) -> float:
        """rho(E[A kron A]): the factor on the mean square of x per token."""
        return float(np.abs(np.linalg.eigvals(self.kronecker())).max())

    def entering(self) -> Array:
        """E[b b']."""
        return np.asarray(np.einsum("ij,ia,jb->ab", self.moments, self.inputs, self.inputs))

    def read(self, P: Array) -> Array:
        """The mean squares of the outputs where that of x is P, shape (3,)."""
        return np.asarray(
            np.einsum(
                "ij,oia,ojb,ab->o", self.moments, self.outputs, self.outputs, P, optimize=True
            )
        )

    def stationary(self) -> Array:
        """P = E[A P A'] + E[b b'], for white noise of variance one."""
        n = self.parts.shape[1]
        entering = self.entering().ravel()
        return np.linalg.solve(np.eye(n * n) - self.kronecker(), entering).reshape(n, n)

    def coloured(self, noise: Disturbance) -> TokenLaw:
        """With the noise's own past among the states, driven by what is white of it."""
        n, p = self.parts.shape[1], len(noise.coefficients)
        parts, inputs = np.zeros((4, n + p, n + p)), np.zeros((4, n + p))
        parts[:, :n, :n] = self.parts
        parts[:, :n, n:] = np.multiply.outer(self.inputs, noise.coefficients)
        parts[0, n:, n:] = noise.companion()
        inputs[:, :n] = noise.std * self.inputs
        inputs[0, n] = noise.std
        outputs = np.concatenate([self.outputs, np.zeros((3, 4, p))], axis=2)
        outputs[0, 0, n:] = noise.coefficients  # H holds the noise itself, its newest part aside
        return TokenLaw(parts, inputs, outputs, self.moments)


def token_law(controller: PITemperature, delay: int, slope: Array, q: Array) -> TokenLaw:
    """Tokens (g, q) drawn with equal chances from the pairs given, each of shape (tokens,)."""
    rest, one, share, both = (token_matrix(controller, delay, *unit) for unit in UNITS)
    parts = np.array([rest, one - rest, share - rest, both - one - share + rest])
    n = parts.shape[1]
    inputs, outputs = np.zeros((4, n)), np.zeros((3, 4, n))
    inputs[0, :2] = controller.filter, -controller.ki
    outputs[1, 0, 0] = 1.0
    if delay == 1:  # the command in force is made of x: I - q F[H]
        outputs[2, 0, 1], outputs[2, 2, 0] = 1.0, -1.0
    else:
        inputs[0, 2], inputs[2, 2] = -controller.ki, -controller.filter
        outputs[2, 0, -1] = 1.0
    outputs[0, 1], outputs[0, 3] = outputs[2, 0], outputs[2, 2]
    w = np.array([np.ones_like(slope), slope, q, slope * q])
    return TokenLaw(parts, inputs, outputs, w @ w.T / len(slope))


def recorded_tokens(
    controller: PITemperature, delay: int, trace: list[Signals]
) -> tuple[Array, Array]:
    """g (the varentropy) and q of every token, from what the real controller's filter makes of a trace."""
    slope = np.concatenate([one.varentropy for one in trace])
    acting = 0 if delay == 1 else 1
    filtered = [
        pair[acting].state.varentropy[0] for one in trace for pair in replay(controller, one)
    ]
    return slope, controller.kp / controller.divisor(np.array(filtered))


def residues(controller: PITemperature, trace: list[Signals]) -> tuple[list[Array], list[Array]]:
    """The noise n = H - H* - V (u - u*) of every request, nats, and u - u*.

    u* is the ln T about which the noise has no mean, over all requests of the same target.
    """
    aims = [controller.target if one.target is None else one.target for one in trace]
    noise, away = [], []
    for one, aim in zip(trace, aims, strict=True):
        alike = [other for other, its in zip(trace, aims, strict=True) if its == aim]
        H, V, u = (np.concatenate([other[k] for other in alike]) for k in range(3))
        centre = (V @ u - (H - aim).sum()) / max(V.sum(), 1e-12)
        away.append(one.log_temperature - centre)
        noise.append(one.entropy - aim - one.varentropy * away[-1])
    return noise, away


def bare(noise: Array) -> Signals:
    """Noise as a trace of nothing else."""
    return Signals(noise, np.zeros_like(noise), np.zeros_like(noise))


def deviations(law: TokenLaw, P: Array, colour: Disturbance) -> Outputs:
    entropy, filtered, command = law.read(P)
    return Outputs(
        float(np.sqrt(entropy + colour.std**2)), float(np.sqrt(filtered)), float(np.sqrt(command))
    )


def long_enough(decay: float) -> int:
    """Tokens after which nothing is left to add."""
    return int(np.ceil(40 / (1 - decay)))
