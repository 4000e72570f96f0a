"""Claim: the three loops together are stable while pruning and scheduling react less than the loop bears.

Pruning and scheduling reach the temperature loop in two ways: they shift the entropy (a block that went
missing) and they delay (speculation, asynchronous steps; waiting costs seconds, not tokens). A shift is
a bounded disturbance d. The loop answers to it with at most its peak gain times the bound, and if the
shift itself reacts to ln T by k per unit, the small-gain theorem asks for k times the peak gain below 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from entropic_control.controllers import PITemperature
from entropic_control.controllers.base import Array
from entropic_control.proofs.attention import entropy_change
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.loop import open_loop
from entropic_control.proofs.margins import loop_margins
from entropic_control.proofs.noise import OBSERVED, WHITE, driven, mean_gain
from entropic_control.proofs.rollout import Rollout, replay, rollout
from entropic_control.proofs.signals import Signals


class PeakGain(NamedTuple):
    """Largest ratio of peaks, over all bounded disturbances of the entropy."""

    entropy: float
    """Of the filtered entropy, nats per nat."""
    log_temperature: float
    """Of ln T, per nat."""


@dataclass(frozen=True)
class Coupled(Claim):
    """Numbers: the peak gains, the shift, and the reaction of the other loops that is borne."""

    name: ClassVar[str] = "coupled loops"
    statement: ClassVar[str] = (
        "with pruning and scheduling shifting the entropy by at most the shift, the temperature loop "
        "deviates by at most peak gain times shift, and stays bounded while their reaction to ln T is "
        "below 1 / peak gain"
    )
    source: ClassVar[str] = (
        "small-gain theorem: Desoer and Vidyasagar, Feedback Systems, 1975, chapter 3; peak gain as the "
        "l1 norm: Dahleh and Diaz-Bobillo, Control of Uncertain Systems, 1995, chapter 2"
    )

    controller: PITemperature
    delay: int
    gain: float
    peak: PeakGain
    shift: float
    """Largest change of the entropy by pruning, nats."""
    reaction: float
    """How much that shift may react to ln T, nats per unit, as assumed."""
    product: float
    """Peak gain times reaction: the small-gain theorem asks for less than one."""
    delay_margin: float
    """Tokens of delay that the other loops may add."""
    vocab: int
    moved_mass: float
    """Share of the next-token distribution that pruning moves."""
    replayed: float | None = None
    """Share of the commands of a trace that the controller gives again at this delay."""
    trace: tuple[Signals, ...] = ()

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        same = None if self.replayed is None else self.replayed > 0.99
        return (
            Assumption(f"a command takes effect {self.delay} token(s) after its measurement", same),
            Assumption(f"pruning shifts the entropy by at most {self.shift:.3g} nats"),
            Assumption(
                f"pruning and scheduling react to ln T by at most {self.reaction:.3g} nats per unit, "
                "slowly or fast (a trace in closed loop cannot tell)"
            ),
            Assumption(
                "a request's tokens do not depend on its neighbours; waiting adds no token of delay"
            ),
        )

    @property
    def figures(self) -> dict[str, float]:
        figures = {
            "peak gain to F[H]": self.peak.entropy,
            "peak gain to ln T [1/nat]": self.peak.log_temperature,
            "largest deviation of F[H] [nats]": self.peak.entropy * self.shift,
            "small-gain product": self.product,
            "reaction borne [nats]": 1 / self.peak.log_temperature,
            "delay borne [tokens]": self.delay_margin,
        }
        if self.replayed is not None:
            figures["commands replayed"] = self.replayed
        return figures

    def check(self) -> list[str]:
        """The worst disturbance, played against the real controller, must attain the peak gains."""
        if not np.isfinite(self.peak.log_temperature):
            return ["the temperature loop is unstable by itself"]
        faults = []
        for at, (name, claimed) in enumerate(zip(PeakGain._fields, self.peak, strict=True)):
            attained = self._worst(at)
            if not abs(attained / claimed - 1) <= 0.01:
                faults.append(
                    f"the worst disturbance moves {name} by {attained:.5g}, not {claimed:.5g}"
                )
        if not self.product < 1:
            faults.append(
                f"a reaction of {self.reaction:.3g} nats is not below "
                f"{1 / self.peak.log_temperature:.3g}: the loops may feed one another"
            )
        if not self.delay_margin > 0:
            faults.append("no delay is left for the other loops")
        return faults

    def again(self) -> Coupled:
        about = self.controller, self.delay, self.vocab, self.moved_mass
        return coupled(*about, self.reaction, list(self.trace) or None)

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Random bounded shifts, reacting ones and bang-bang ones among them, against the peak bounds."""
        if self.product >= 1:
            return "the small-gain condition does not hold, so nothing bounds the loops"
        rng = np.random.default_rng(seed)
        loops, centre = self._start(trials)
        scale = 1e-6
        bound_u = self.peak.log_temperature * scale / (1 - self.product)
        bound_h = self.peak.entropy * (scale + self.reaction * bound_u)
        flip = rng.uniform(0.005, 0.5, trials)
        sign, reacts = rng.choice([-1.0, 1.0], trials), rng.random(trials) < 0.5
        for _ in range(400):
            sign = np.where(rng.random(trials) < flip, -sign, sign)
            deviation = loops.in_force - centre
            own = np.where(reacts, self.reaction * np.abs(deviation), 0.0)
            loops = self._token(loops, centre, sign * (scale + own))
            u = float(np.abs(loops.queue[-1] - centre).max())
            h = float(np.abs(loops.state.entropy - self.controller.target).max())
            if u > bound_u * (1 + 1e-6) or h > bound_h * (1 + 1e-6):
                return (
                    f"a bounded shift moved ln T by {u / bound_u:.4g} and F[H] by {h / bound_h:.4g} "
                    "of the bound"
                )
        return None

    def _worst(self, at: int) -> float:
        """What the real loop makes of the disturbance whose signs line up with its impulse response."""
        response = impulse(self.controller, self.gain, self.delay)[:, at]
        loops, centre = self._start(1)
        scale = 1e-6
        for sign in np.sign(response[::-1]):
            loops = self._token(loops, centre, np.array([sign * scale]))
        state = loops.state
        moved = (state.entropy - self.controller.target, state.log_temperature - centre)[at]
        return float(np.abs(moved[0])) / scale

    def _start(self, rows: int) -> tuple[Rollout, Array]:
        loops = rollout(self.controller.replace(bounds=(1e-9, 1e9)), rows, self.delay)
        state = loops.state._replace(varentropy=np.full(rows, self.gain))
        return loops._replace(state=state), loops.in_force

    def _token(self, loops: Rollout, centre: Array, shift: Array) -> Rollout:
        entropy = self.controller.target + self.gain * (loops.in_force - centre) + shift
        return loops.step(entropy, self.gain)


def impulse(controller: PITemperature, gain: float, delay: int) -> Array:
    """Responses of F[H] and ln T to one nat for one token, shape (tokens, 2), until they have died."""
    A, b = driven(controller, gain, WHITE, delay)
    radius = float(np.abs(np.linalg.eigvals(A)).max())
    if radius >= 1:
        return np.full((1, 2), np.inf)
    x, out = b, []
    for _ in range(int(np.ceil(14 / (1 - radius)))):
        out.append(x[OBSERVED])
        x = A @ x
    return np.array(out)


def coupled(
    controller: PITemperature,
    delay: int = 1,
    vocab: int = 49_152,
    moved_mass: float = 0.01,
    reaction: float | None = None,
    trace: list[Signals] | None = None,
) -> Coupled:
    """Peak gains at the operating point, for a pruning that moves `moved_mass` of the next distribution.

    By default half of the reaction that the loop bears is assumed.
    """
    gain = controller.v_start if trace is None else mean_gain(trace)
    peak = PeakGain(*np.abs(impulse(controller, gain, delay)).sum(axis=0))
    borne = float(0.5 / peak.log_temperature) if reaction is None else reaction
    spare = loop_margins(open_loop(controller, gain, delay)).delay_margin
    shift = entropy_change(moved_mass, vocab)
    replayed = None if trace is None else _replays(controller, delay, trace)
    product = borne * peak.log_temperature if np.isfinite(peak.log_temperature) else np.inf
    numbers = gain, peak, shift, borne, product, spare, vocab, moved_mass
    return Coupled(controller, delay, *numbers, replayed, tuple(trace or ()))


def _replays(controller: PITemperature, delay: int, trace: list[Signals]) -> float:
    """Share of a trace's commands that the real controller gives again at this delay."""
    same = [
        abs(float(before.in_force[0]) - u) < 1e-2
        for one in trace
        for u, (before, _) in zip(one.log_temperature, replay(controller, one, delay), strict=True)
    ]
    return float(np.mean(same))
