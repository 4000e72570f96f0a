"""Claim: how far the filtered entropy and ln T wander, from the spectrum of the text's own noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from scipy.linalg import solve_discrete_lyapunov

from entropic_control.controllers import PITemperature
from entropic_control.controllers.base import Array
from entropic_control.errors import TraceError
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.loop import closed_loop
from entropic_control.proofs.rollout import replay, rollout
from entropic_control.proofs.signals import Signals

ORDER = 20
"""Terms of the autoregression fitted to a trace; the text's slow drift needs that many."""
WARM_UP = 100
"""Tokens of each request that are left out of a measured spread."""
TOLERANCE = 0.25
"""How far, as a share, a measured standard deviation may be from the predicted one."""


class Disturbance(NamedTuple):
    """n[t] = sum coefficients[i] n[t-1-i] + std w[t], w white of variance one: what the text adds."""

    coefficients: Array
    std: float
    """Nats."""

    def companion(self) -> Array:
        p = len(self.coefficients)
        return np.vstack([self.coefficients, np.eye(p - 1, p)]) if p else np.zeros((0, 0))


OBSERVED = [0, 2]
"""Where `driven` has F[H] and the newest command: the controller's states are F[H] and its integral."""

WHITE = Disturbance(np.zeros(1), 1.0)


class Spread(NamedTuple):
    """Standard deviations."""

    entropy: float
    """Of the filtered entropy, nats."""
    log_temperature: float
    """Of ln T."""


@dataclass(frozen=True)
class NoiseResponse(Claim):
    """Numbers: the predicted spread, and the measured one where there is a trace."""

    name: ClassVar[str] = "spread"
    statement: ClassVar[str] = (
        "the standard deviations of the filtered entropy and of ln T are those of the linear loop driven "
        "by the text's noise"
    )
    source: ClassVar[str] = (
        "stationary covariance: Astrom, Introduction to Stochastic Control Theory, 1970, chapter 3"
    )

    controller: PITemperature
    delay: int
    gain: float
    disturbance: Disturbance
    predicted: Spread
    measured: Spread | None = None
    trace: tuple[Signals, ...] = ()

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        verdict = None
        if self.measured is not None:
            verdict = max(self.errors) <= TOLERANCE
        return (
            Assumption(
                f"the plant is linear enough: prediction within {TOLERANCE:.0%} of the trace",
                verdict,
            ),
        )

    @property
    def errors(self) -> tuple[float, float]:
        """Predicted over measured minus one, as magnitudes."""
        if self.measured is None:
            return 0.0, 0.0
        pairs = zip(self.predicted, self.measured, strict=True)
        first, second = (abs(p / max(m, 1e-12) - 1) for p, m in pairs)
        return first, second

    @property
    def figures(self) -> dict[str, float]:
        figures = {
            "std of F[H], predicted [nats]": self.predicted.entropy,
            "std of ln T, predicted": self.predicted.log_temperature,
        }
        if self.measured is not None:
            figures["std of F[H], measured [nats]"] = self.measured.entropy
            figures["std of ln T, measured"] = self.measured.log_temperature
        return figures

    def check(self) -> list[str]:
        """The covariance equation against the sum of squares of the impulse response."""
        A, b = driven(self.controller, self.gain, self.disturbance, self.delay)
        radius = float(np.abs(np.linalg.eigvals(A)).max())
        if radius >= 1:
            return [
                f"there is no stationary spread: the loop with its noise has |pole| {radius:.4g}"
            ]
        x, total = b * self.disturbance.std, np.zeros(2)
        for _ in range(int(np.ceil(12 / (1 - radius)))):
            total += x[OBSERVED] ** 2
            x = A @ x
        faults = []
        for name, value, sum_of_squares in zip(Spread._fields, self.predicted, total, strict=True):
            if not abs(value - np.sqrt(sum_of_squares)) <= 1e-3 * value + 1e-9:
                faults.append(
                    f"the predicted std of {name} is {value:.6g}, its impulse response sums to "
                    f"{np.sqrt(sum_of_squares):.6g}"
                )
        return faults

    def again(self) -> NoiseResponse:
        return noise_response(self.controller, self.delay, list(self.trace) or None)

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Real loops with random gains and random noise; their squares over the predicted variance."""
        rng = np.random.default_rng(seed)
        c = self.controller.replace(bounds=(1e-9, 1e9))
        gain = np.exp(rng.uniform(0, np.log(10), trials))
        memory, std = rng.uniform(-0.5, 0.9, trials), np.exp(rng.uniform(-7, -5, trials))
        variance = self._variances(c, gain, memory, std)
        loops = rollout(c, trials, self.delay)
        loops = loops._replace(state=loops.state._replace(varentropy=gain))
        centre, noise = loops.in_force, np.zeros(trials)
        for _ in range(800):
            noise = memory * noise + std * rng.normal(size=trials)
            loops = loops.step(c.target + gain * (loops.in_force - centre) + noise, gain)
        squares = (
            np.column_stack([loops.state.entropy - c.target, loops.state.log_temperature - centre])
            ** 2
        )
        ratio = squares / variance
        groups = np.array_split(ratio[np.argsort(gain)], 5)
        for group in groups:
            mean, doubt = group.mean(axis=0), 5 * np.sqrt(2 / len(group))
            if np.any(np.abs(mean - 1) > doubt):
                return f"measured over predicted variance is {mean.max():.3g} for some gains"
        return None

    def _variances(self, c: PITemperature, gain: Array, memory: Array, std: Array) -> Array:
        """Predicted variances of F[H] and u of every row, shape (rows, 2)."""
        systems = [
            driven(c, float(g), Disturbance(np.array([m]), 1.0), self.delay)
            for g, m in zip(gain, memory, strict=True)
        ]
        A, b = np.array([s[0] for s in systems]), np.array([s[1] for s in systems])
        P = b[:, :, None] * b[:, None, :] * std[:, None, None] ** 2
        for _ in range(12):  # doubling: after k rounds P sums 2^k terms A^i b b' A'^i
            P = P + A @ P @ np.swapaxes(A, 1, 2)
            A = A @ A
        return np.diagonal(P, axis1=1, axis2=2)[:, OBSERVED]


def driven(
    controller: PITemperature, gain: float, disturbance: Disturbance, delay: int = 1
) -> tuple[Array, Array]:
    """The closed loop with its noise model: x' = A x + b w; F[H] and u are the states `OBSERVED`."""
    model = controller.linearize(gain)
    loop = closed_loop(model, gain, delay)
    n, p = loop.shape[0], len(disturbance.coefficients)
    A, b = np.zeros((n + p, n + p)), np.zeros(n + p)
    # What is measured enters the controller's states and the command that it leads to.
    entry = np.concatenate([model.B[:, 0], model.D[0], np.zeros(delay - 1)])
    A[:n, :n] = loop
    A[:n, n:] = np.outer(entry, disturbance.coefficients)
    A[n:, n:] = disturbance.companion()
    b[:n] = entry
    b[n : n + 1] = 1.0
    return A, b


def predict(
    controller: PITemperature, gain: float, disturbance: Disturbance, delay: int = 1
) -> Spread:
    """The stationary spread; infinite for an unstable loop."""
    A, b = driven(controller, gain, disturbance, delay)
    if np.abs(np.linalg.eigvals(A)).max() >= 1:
        return Spread(np.inf, np.inf)
    P = solve_discrete_lyapunov(A, np.outer(b, b) * disturbance.std**2)
    return Spread(*(float(np.sqrt(P[at, at])) for at in OBSERVED))


def disturbance_of(trace: list[Signals], order: int = ORDER) -> Disturbance:
    """The text's own noise n = H - V ln T as an autoregression, by least squares over all requests.

    Raises
    ------
    TraceError
        If no request is long enough, or the entropy never moves.
    """
    gain = mean_gain(trace)
    noise = [one.entropy - gain * one.log_temperature for one in trace]
    mean = np.concatenate(noise).mean()
    noise = [n - mean for n in noise if len(n) > 2 * order]
    if not noise:
        raise TraceError(f"no request has more than {2 * order} tokens: too few for a noise model")
    past = np.concatenate([np.lib.stride_tricks.sliding_window_view(n[:-1], order) for n in noise])
    now = np.concatenate([n[order:] for n in noise])
    if now.std() < 1e-9:
        raise TraceError("the entropy is constant over the trace: there is no noise to model")
    coefficients, *_ = np.linalg.lstsq(past[:, ::-1], now, rcond=None)
    std = float((now - past[:, ::-1] @ coefficients).std())
    return Disturbance(coefficients, std)


def mean_gain(trace: list[Signals]) -> float:
    """The mean varentropy: the average slope of H in ln T, nats."""
    return float(np.concatenate([one.varentropy for one in trace]).mean())


def measure(controller: PITemperature, trace: list[Signals]) -> Spread:
    """The spread of the filtered entropy and of ln T over a trace, each request's start left out."""
    filtered, commands = [], []
    for one in trace:
        start = min(WARM_UP, len(one.entropy) // 2)
        aim = controller.target if one.target is None else one.target
        filtered += (measure_path(controller, one) - aim)[start:].tolist()
        commands += one.log_temperature[start:].tolist()
    return Spread(float(np.std(filtered)), float(np.std(commands)))


def measure_path(controller: PITemperature, one: Signals) -> Array:
    """The filtered entropy of a recorded request as the controller's own filter has it, nats."""
    return np.array([after.state.entropy[0] for _, after in replay(controller, one)])


def noise_response(
    controller: PITemperature, delay: int = 1, trace: list[Signals] | None = None
) -> NoiseResponse:
    """Predict the spread: for white noise of one nat, or for a trace's noise beside its own spread."""
    if trace is None:
        gain, disturbance, measured = controller.v_start, WHITE, None
    else:
        gain, disturbance = mean_gain(trace), disturbance_of(trace)
        measured = measure(controller, trace)
    predicted = predict(controller, gain, disturbance, delay)
    seen = tuple(trace or ())
    return NoiseResponse(controller, delay, gain, disturbance, predicted, measured, seen)
