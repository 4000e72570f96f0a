"""Claim: with noise, and over every token of a text, calm ones included, the loop is mean-square stable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from entropic_control.controllers import PITemperature
from entropic_control.controllers.base import Array
from entropic_control.errors import TraceError
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.noise import WARM_UP, Disturbance, disturbance_of, measure_path
from entropic_control.proofs.rational import exact, exact_mean_decrease, exact_token
from entropic_control.proofs.rollout import rollout
from entropic_control.proofs.scheduled import token_matrix
from entropic_control.proofs.secondway import (
    enclosed,
    measured_again,
    moved,
    peaks_again,
    predicted_again,
    squares,
    tokens_again,
)
from entropic_control.proofs.signals import Signals
from entropic_control.proofs.tokenlaw import (
    UNITS,
    Outputs,
    TokenLaw,
    bare,
    deviations,
    long_enough,
    recorded_tokens,
    residues,
    token_law,
)

BLOCK = 32
"""Tokens in recorded order that are taken together, to see whether their order matters."""
TOLERANCE = 0.25
"""How far, as a share, a measured standard deviation may be from the predicted one."""


@dataclass(frozen=True)
class MeanSquare(Claim):
    """Numbers: the decay of the mean square, its certificate, and the spread under the text's noise."""

    name: ClassVar[str] = "mean square"
    statement: ClassVar[str] = (
        "with each token's gain drawn from all those recorded, calm ones included, the mean square of "
        "(F[H] - H*, I - u*) dies out, and under noise of any colour the rms of H - H* ends at or below "
        "1 + peak times that of the noise"
    )
    source: ClassVar[str] = (
        "rho(E[A kron A]) < 1: Costa, Fragoso and Marques, Discrete-Time Markov Jump Linear Systems, 2005, "
        "chapter 3; input-to-state stability: Sontag, Systems and Control Letters 24, 1995"
    )

    controller: PITemperature
    delay: int
    trace: tuple[Signals, ...]
    decay: float
    """rho(E[A kron A]) over all recorded tokens."""
    ordered: float
    """The same over blocks of BLOCK tokens in the order they came, per token."""
    P: Array
    """E[A' P A] < P, shape (n, n)."""
    peak: Outputs
    """Largest rms per rms of noise, whatever the noise's colour; of the entropy without the noise's own."""
    sigma: float
    """Rms of the trace's own noise, nats."""
    predicted: Outputs
    """Standard deviations in the long run, by the law of the gains and the noise's spectrum."""
    measured: Outputs
    """Standard deviations on the trace, each request's start left out."""

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        return (
            Assumption(
                f"a token's gain does not depend on those before it (over {BLOCK} tokens in recorded order "
                "the mean square dies out as well)",
                self.ordered < 1,
            ),
            Assumption(
                f"slopes are the varentropies measured: predicted spread within {TOLERANCE:.0%} of the "
                "trace",
                max(self.errors) <= TOLERANCE,
            ),
            Assumption("the temperature bounds do not cut"),
        )

    @property
    def errors(self) -> Outputs:
        """Predicted over measured, minus one, as magnitudes."""
        pairs = zip(self.predicted, self.measured, strict=True)
        return Outputs(*(abs(p / max(m, 1e-12) - 1) for p, m in pairs))

    @property
    def bound(self) -> float:
        """What the rms of H - H* ends below, under any noise as large as the trace's, nats."""
        return (1 + self.peak.entropy) * self.sigma

    @property
    def figures(self) -> dict[str, float]:
        figures = {
            "decay of the mean square per token": self.decay,
            "decay in recorded order": self.ordered,
            "rms of the noise [nats]": self.sigma,
            "peak of H - H* per noise": self.peak.entropy,
            "rms of H - H* at most, any colour [nats]": self.bound,
        }
        for name, label in _LABELS.items():
            figures[f"std of {label}, predicted"] = getattr(self.predicted, name)
            figures[f"std of {label}, measured"] = getattr(self.measured, name)
        return figures

    def check(self) -> list[str]:
        """Fractions, an enclosure of the decay, and every mean square again by iteration over tokens."""
        slope, q = tokens_again(self.controller, self.delay, self.trace)
        matrices = _matrices(self.controller, self.delay, slope, q)
        faults = []
        low, high = enclosed(matrices)
        if not low * (1 - 1e-6) <= self.decay <= high * (1 + 1e-6):
            faults.append(f"the decay lies within [{low:.8g}, {high:.8g}], not at {self.decay:.8g}")
        low, high = (v ** (1 / BLOCK) for v in enclosed(_blocks(matrices, self.trace)))
        if not low * (1 - 1e-6) <= self.ordered <= high * (1 + 1e-6):
            faults.append(
                f"in recorded order it lies within [{low:.8g}, {high:.8g}], not at {self.ordered:.8g}"
            )
        if self.decay >= 1:
            return [
                f"the mean square grows by {self.decay:.4g} a token over the recorded gains: lower ki or kp"
            ]
        faults += self._exact(slope, q)
        if faults:
            return faults
        rest = (
            np.mean(np.swapaxes(matrices, 1, 2) @ self.P @ matrices, axis=0)
            - self.P
            + np.eye(len(self.P))
        )
        if np.abs(rest).max() > 1e-6:
            faults.append("P does not solve E[A' P A] - P = -1")
        law = token_law(self.controller, self.delay, slope, q)
        noise, spread = measured_again(self.controller, self.trace)
        again: dict[str, Iterable[float]] = {
            "peak": peaks_again(law, self.decay),
            "predicted": predicted_again(law, disturbance_of([bare(n) for n in noise])),
            "measured": spread,
        }
        for what, values in again.items():
            for name, claimed, value in zip(
                Outputs._fields, getattr(self, what), values, strict=True
            ):
                if not abs(claimed - value) <= 1e-5 * abs(value) + 1e-9:
                    faults.append(f"{what} {name} is {value:.8g}, not {claimed:.8g}")
        sigma = float(np.sqrt(np.mean(np.concatenate(noise) ** 2)))
        if not abs(sigma - self.sigma) <= 1e-6 * sigma:
            faults.append(f"the rms of the noise is {sigma:.8g} nats, not {self.sigma:.8g}")
        return faults

    def _exact(self, slope: Array, q: Array) -> list[str]:
        """E[A' P A] < P over all recorded tokens, in fractions."""
        w = exact(np.column_stack([np.ones_like(slope), slope, q]))
        w = np.column_stack([w, w[:, 1] * w[:, 2]])
        rest, one, share, both = (exact_token(self.controller, self.delay, *unit) for unit in UNITS)
        parts = [rest, one - rest, share - rest, both - one - share + rest]
        moments = w.T.dot(w) / Fraction(len(slope))
        # E[w w'] as a sum of squares turns the law into as many matrices as there are parts.
        laws = [
            (weight, sum(c * A for c, A in zip(row, parts, strict=True)))
            for weight, row in squares(moments)
        ]
        return exact_mean_decrease(self.P, [laws])

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Real loops through random recorded gains: without noise, and under the text's own."""
        rng = np.random.default_rng(seed)
        c = self.controller.replace(bounds=(1e-9, 1e9))
        slope, q = recorded_tokens(self.controller, self.delay, list(self.trace))
        law = token_law(c, self.delay, slope, q)
        noise, _ = residues(self.controller, list(self.trace))
        colour = disturbance_of([bare(n) for n in noise])
        # Without noise, from one start: the mean square must follow P <- E[A P A'].
        start = np.zeros(law.parts.shape[1])
        start[1:] = 0.02
        quiet = _drive(c, self.delay, slope, q, trials, 25, rng, None)
        P, factors = np.outer(start, start), law.factors()
        for _ in range(25):
            P = moved(factors, P)
        expected = law.read(P)[1:]
        ended = np.array([np.mean(x**2) for x in quiet])
        # The mean of a product of random gains has a long tail: judge from above.
        if np.any(ended > expected * (1.2 + 40 / np.sqrt(trials)) + 1e-15):
            return f"mean squares {ended} where {expected} were predicted"
        driven = _drive(c, self.delay, slope, q, trials, 500, rng, colour)
        wide = law.coloured(colour)
        expected = wide.read(wide.stationary())[1:]
        ratio = np.array([np.mean(x**2) for x in driven]) / expected
        if np.any(np.abs(ratio - 1) > 8 / np.sqrt(trials) + 0.02):
            return f"measured over predicted variance is {ratio[0]:.3g} for F[H], {ratio[1]:.3g} for ln T"
        if np.any(np.sqrt(ratio * expected) > np.array(self.peak[1:]) * self.sigma * 1.05):
            return "noise moved the loop further than the bound for any colour"
        return None


_LABELS = {"entropy": "H [nats]", "filtered": "F[H] [nats]", "log_temperature": "ln T"}


def mean_square(controller: PITemperature, trace: list[Signals], delay: int = 1) -> MeanSquare:
    """The claim about the tokens of a trace.

    Raises
    ------
    TraceError
        If the trace is too short for a model of its noise.
    """
    slope, q = recorded_tokens(controller, delay, trace)
    law = token_law(controller, delay, slope, q)
    decay = law.radius()
    blocks = _blocks(_matrices(controller, delay, slope, q), trace)
    n = blocks.shape[1]
    kronecker = np.einsum("tac,tbd->abcd", blocks, blocks).reshape(n * n, n * n) / len(blocks)
    ordered = float(np.abs(np.linalg.eigvals(kronecker)).max()) ** (1 / BLOCK)
    noise, away = residues(controller, trace)
    sigma = float(np.sqrt(np.mean(np.concatenate(noise) ** 2)))
    colour = disturbance_of([bare(n) for n in noise])
    P: Array = np.eye(n)
    peak, predicted = Outputs(*[np.inf] * 3), Outputs(*[np.inf] * 3)
    if decay < 1:
        # The certificate is the answer to E[A' P A] - P = -1, by the adjoint of the same map.
        P = np.linalg.solve(np.eye(n * n) - law.kronecker().T, np.eye(n).ravel()).reshape(n, n)
        peak = _peaks(law, decay)
        wide = law.coloured(colour)
        predicted = deviations(wide, wide.stationary(), colour)
    late = [slice(min(WARM_UP, len(one.entropy) // 2), None) for one in trace]
    aims = [controller.target if one.target is None else one.target for one in trace]
    rows = zip(trace, aims, away, late, strict=True)
    seen = [
        (one.entropy[at] - aim, measure_path(controller, one)[at] - aim, u[at])
        for one, aim, u, at in rows
    ]
    measured = Outputs(
        *(float(np.std(np.concatenate(column))) for column in zip(*seen, strict=True))
    )
    return MeanSquare(
        controller, delay, tuple(trace), decay, ordered, P, peak, sigma, predicted, measured
    )


def _peaks(law: TokenLaw, decay: float) -> Outputs:
    """sum_k sqrt(E[(c A..A b)^2]): noise of unit rms, each token's as unlucky as the last."""
    step, P = law.kronecker(), law.entering().ravel()
    read = np.einsum("ij,oia,ojb->oab", law.moments, law.outputs, law.outputs).reshape(3, -1)
    total = np.zeros(3)
    for _ in range(long_enough(decay)):
        total += np.sqrt(np.maximum(read @ P, 0))
        P = step @ P
    return Outputs(*map(float, total))


def _matrices(controller: PITemperature, delay: int, slope: Array, q: Array) -> Array:
    """A of every token, shape (tokens, n, n)."""
    return np.array(
        [token_matrix(controller, delay, float(g), float(s)) for g, s in zip(slope, q, strict=True)]
    )


def _blocks(matrices: Array, trace: tuple[Signals, ...] | list[Signals]) -> Array:
    """Products of BLOCK tokens in recorded order, from every token that has so many after it.

    Raises
    ------
    TraceError
        If no request is that long.
    """
    lengths = [len(one.entropy) for one in trace]
    if max(lengths) < BLOCK:
        raise TraceError(
            f"no request has {BLOCK} tokens: too few to see whether their order matters"
        )
    ends = np.cumsum(lengths)
    starts = np.concatenate(
        [np.arange(e - n, e - BLOCK + 1) for n, e in zip(lengths, ends, strict=True) if n >= BLOCK]
    )
    product = matrices[starts]
    for k in range(1, BLOCK):
        product = matrices[starts + k] @ product
    return np.asarray(product)


def _drive(
    controller: PITemperature,
    delay: int,
    slope: Array,
    q: Array,
    rows: int,
    tokens: int,
    rng: np.random.Generator,
    colour: Disturbance | None,
) -> tuple[Array, Array]:
    """F[H] - H* and ln T - u* of real loops whose tokens are drawn from the recorded pairs."""
    c = controller
    loops = rollout(c, rows, delay)
    centre = loops.in_force if colour else loops.in_force - 0.02
    past = np.zeros((rows, len(colour.coefficients) if colour else 0))
    upcoming = rng.integers(len(slope), size=rows)
    for _ in range(tokens):
        at, upcoming = upcoming, rng.integers(len(slope), size=rows)
        noise = np.zeros(rows)
        if colour:
            noise = past @ colour.coefficients + colour.std * rng.normal(size=rows)
            past = np.column_stack([noise, past[:, :-1]])
        # The reading that leaves the filtered varentropy where the share of the command that it leads
        # to needs it: of the next token at a delay of one, else of this one.
        wanted = c.kp / q[upcoming if delay == 1 else at] if c.kp else np.ones(rows)
        reading = (wanted - (1 - c.filter) * loops.state.varentropy) / c.filter
        loops = loops.step(c.target + slope[at] * (loops.in_force - centre) + noise, reading)
    return loops.state.entropy - c.target, loops.in_force - centre
