"""The plant from a trace: how the entropy answers to ln T, how sure that is, and what noise rides on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import chdtrc, ndtri

from entropic_control.controllers import Linear
from entropic_control.controllers.base import Array
from entropic_control.errors import TraceError
from entropic_control.proofs.claim import finite
from entropic_control.proofs.noise import Disturbance, disturbance_of
from entropic_control.proofs.signals import Signals, signals

ORDERS = (1, 2, 3, 5, 8, 12)
"""Autoregressive orders that are tried; the Bayesian information criterion picks one."""
EXCITATION = 1e-3
"""Standard deviation of ln T below which a trace says nothing about its effect."""


class Estimate(NamedTuple):
    """A number with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Plant:
    """H[t] = constant + sum a_i H[t-i] + b u[t] + e[t], u = ln T, and the varentropy beside it.

    Attributes
    ----------
    varentropy : Estimate
        Mean measured slope dH/du of the softmax alone, nats; exact token by token.
    gain : Estimate
        b, nats.
    dc_gain : Estimate
        b / (1 - sum a_i): the lasting effect of a lasting change of u, the text's reaction included.
    coefficients : array, shape (order,)
        a_i.
    noise : Disturbance
        The text's own noise with the softmax slope taken out.
    whiteness : float
        p-value of the Ljung-Box test of the residuals: below 0.05 they are not white, and the intervals
        of `gain` and `dc_gain` are too narrow.
    entropy, log_temperature : float
        Means over the trace: the operating point.
    tokens : int
    """

    varentropy: Estimate
    gain: Estimate
    dc_gain: Estimate
    coefficients: Array
    residual_std: float
    noise: Disturbance
    whiteness: float
    entropy: float
    log_temperature: float
    tokens: int

    @property
    def range(self) -> tuple[float, float]:
        """Slopes a design must bear: from half the measured varentropy to whichever estimate is highest."""
        v = self.varentropy
        return 0.5 * v.value, max(v.high, self.gain.high, self.dc_gain.high)

    @property
    def notes(self) -> list[str]:
        """What to be careful about, in words."""
        notes = []
        if self.whiteness < 0.05:
            notes.append("the residuals are not white: the regression's intervals are too narrow")
        if self.dc_gain.high < self.varentropy.low:
            notes.append(
                "the regression's gain lies below the measured varentropy: in a closed loop without "
                "outside excitation u follows the very noise it is fitted to, which biases it low; "
                "trust the varentropy, or vary the target while tracing"
            )
        if self.dc_gain.low > self.varentropy.high:
            notes.append(
                "the text amplifies changes of temperature: the lasting gain exceeds the softmax's"
            )
        return notes

    def linear(self) -> Linear:
        """The regression as a state-space model from ln T to the entropy."""
        a, p = self.coefficients, len(self.coefficients)
        A = np.vstack([a, np.eye(p - 1, p)])
        b = self.gain.value
        return Linear(
            A=A,
            B=np.eye(p, 1) * b,
            C=a[None, :],
            D=np.array([[b]]),
            inputs=("ln temperature",),
            outputs=("entropy [nats]",),
        )

    def __str__(self) -> str:
        white = "white" if self.whiteness >= 0.05 else "not white"
        lines = [
            f"plant from {self.tokens} tokens, at H = {self.entropy:.3g} nats and T = "
            f"{np.exp(self.log_temperature):.3g}",
            f"  measured varentropy  {self.varentropy} nats per unit of ln T",
            f"  regression b         {self.gain}, order {len(self.coefficients)}",
            f"  lasting gain         {self.dc_gain}",
            f"  residuals            std {self.residual_std:.3g} nats, {white} (p = {self.whiteness:.3g})",
        ]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def to_dict(self) -> dict[str, object]:
        """As JSON holds it."""
        return {
            "tokens": self.tokens,
            "entropy": self.entropy,
            "temperature": float(np.exp(self.log_temperature)),
            **{
                name: finite(getattr(self, name)._asdict())
                for name in ("varentropy", "gain", "dc_gain")
            },
            "coefficients": self.coefficients.tolist(),
            "residual_std": self.residual_std,
            "whiteness": self.whiteness,
            "notes": self.notes,
        }


def identify(source: str | Path | Mapping[str, ArrayLike]) -> Plant:
    """Fit the plant to a run by least squares over all its requests.

    Parameters
    ----------
    source : path or mapping
        A run directory, or columns (see `signals`).

    Raises
    ------
    TraceError
        If the trace is empty, holds NaN, is too short, or does not move: without excitation there is no
        telling what the temperature does.

    Notes
    -----
    Ljung, System Identification, 1999, chapter 7 (ARX, confidence from the information matrix),
    chapter 13 (closed-loop data) and section 16.6 (residual tests); Ljung and Box, Biometrika 65, 1978.
    """
    trace = signals(source)
    _require_excitation(trace)
    usable = [one for one in trace if len(one.entropy) > 3 * max(ORDERS)]
    if not usable:
        raise TraceError(
            f"no request has more than {3 * max(ORDERS)} tokens: too few to tell noise from response"
        )
    fits = [_fit(usable, order) for order in ORDERS]
    best = min(fits, key=lambda fit: fit.criterion)
    h, u = _pool(usable)
    order = len(best.theta) - 2
    a, b = best.theta[1:-1], float(best.theta[-1])
    rest = 1 - float(a.sum())
    slope = np.concatenate([[0.0], np.full(order, b / rest**2), [1 / rest]])
    return Plant(
        varentropy=_mean_estimate([one.varentropy for one in usable]),
        gain=_interval(b, float(np.sqrt(best.covariance[-1, -1]))),
        dc_gain=_interval(b / rest, float(np.sqrt(slope @ best.covariance @ slope))),
        coefficients=a,
        residual_std=float(best.residuals.std()),
        noise=disturbance_of(usable),
        whiteness=ljung_box(best.residuals, order),
        entropy=float(h.mean()),
        log_temperature=float(u.mean()),
        tokens=len(h),
    )


def _pool(trace: list[Signals]) -> tuple[Array, Array]:
    """Entropy and ln T of all requests, end to end."""
    return (
        np.concatenate([one.entropy for one in trace]),
        np.concatenate([one.log_temperature for one in trace]),
    )


def _require_excitation(trace: list[Signals]) -> None:
    h, u = _pool(trace)
    if h.std() < 1e-9:
        raise TraceError("the entropy is constant over the trace: there is nothing to identify")
    if u.std() < EXCITATION:
        raise TraceError(
            f"the temperature hardly moves (std of ln T {u.std():.2g}): without excitation its effect "
            "cannot be told; trace a run with the loop on, or with several temperatures"
        )


class _Fit(NamedTuple):
    theta: Array
    """Constant, a_1 .. a_order, b."""
    covariance: Array
    residuals: Array
    criterion: float


def _fit(trace: list[Signals], order: int) -> _Fit:
    """Least squares; every order leaves out the same first tokens, so that criteria compare."""
    skip = max(ORDERS)
    rows, now = [], []
    for one in trace:
        past = np.lib.stride_tricks.sliding_window_view(one.entropy[:-1], skip)[:, ::-1][:, :order]
        u = one.log_temperature[skip:]
        rows.append(np.column_stack([np.ones(len(u)), past, u]))
        now.append(one.entropy[skip:])
    X, y = np.concatenate(rows), np.concatenate(now)
    theta, _, rank, _ = np.linalg.lstsq(X, y, rcond=None)
    if rank < X.shape[1]:
        raise TraceError(
            "past entropies and temperatures move in lockstep: nothing tells them apart"
        )
    residuals = y - X @ theta
    n, k = X.shape
    variance = float(residuals @ residuals) / (n - k)
    return _Fit(
        theta, variance * np.linalg.inv(X.T @ X), residuals, n * np.log(variance) + k * np.log(n)
    )


def ljung_box(residuals: Array, fitted: int, lags: int = 24) -> float:
    """p-value of the Ljung-Box test that the residuals are white."""
    r, n = residuals - residuals.mean(), len(residuals)
    power = float(r @ r)
    rho = np.array([float(r[lag:] @ r[:-lag]) / power for lag in range(1, lags + 1)])
    statistic = n * (n + 2) * float((rho**2 / (n - np.arange(1, lags + 1))).sum())
    return float(chdtrc(lags - fitted, statistic))


def _interval(value: float, deviation: float) -> Estimate:
    reach = float(ndtri(0.975)) * deviation
    return Estimate(value, value - reach, value + reach)


def _mean_estimate(columns: list[Array], batch: int = 50) -> Estimate:
    """A mean with its interval by batch means, because neighbouring tokens are alike."""
    values = np.concatenate(columns)
    means = np.array([part.mean() for part in np.array_split(values, max(len(values) // batch, 2))])
    return _interval(float(values.mean()), float(means.std(ddof=1) / np.sqrt(len(means))))
