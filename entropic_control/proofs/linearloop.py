"""Claim: the linear loop is stable with stated margins over a range of gains, at the engine's delay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_control.controllers import TemperatureController
from entropic_control.controllers.base import Array
from entropic_control.proofs.claim import TRIALS, Assumption, Claim
from entropic_control.proofs.crossings import disk, phase_and_delay, reaches, sensitivity
from entropic_control.proofs.loop import closed_loop, open_loop
from entropic_control.proofs.margins import Margins, gains, margins
from entropic_control.proofs.rollout import Rollout, settled, target_of, unbounded
from entropic_control.proofs.subject import Subject
from entropic_control.proofs.table import claim

DELAYS = range(65)
"""Tokens of delay that are looked at beside the engine's own."""

SMALL = 1e-6
"""The deviation of ln T that loops start from."""
GROWN = 5.0
"""A deviation of ln T that leaves no doubt."""


@claim("temperature")
@dataclass(frozen=True)
class LinearLoop(Claim):
    """Numbers: the worst margins over the gains, and the longest delay that stays stable."""

    name: ClassVar[str] = "linear loop"
    statement: ClassVar[str] = (
        "for every fixed gain in the range, all closed-loop poles lie inside the unit circle, with the "
        "margins asked for"
    )
    source: ClassVar[str] = (
        "Astrom and Wittenmark, Computer-Controlled Systems, 1997, chapter 3; disk margins: Seiler, "
        "Packard and Gahinet, IEEE Control Systems 40, 2020"
    )

    controller: TemperatureController
    gain: tuple[float, float]
    delay: int
    least_gain_margin: float
    """dB asked for."""
    least_phase_margin: float
    """Degrees asked for."""
    margins: Margins
    longest_delay: int
    """Largest delay, up to 64 tokens, at and below which every gain is stable."""
    spare: tuple[float, float]
    """dB and degrees beyond what was asked for."""

    @classmethod
    def certify(cls, subject: Subject) -> Iterable[Claim | str]:
        loop = subject.temperature
        if loop is None:
            return
        if loop.linearize().outputs != ("ln temperature",):
            yield f"temperature '{loop.kind}' does not command ln T: no claim covers its loop"
        elif loop.reads_logits:
            yield (
                f"temperature '{loop.kind}' is computed from the logits of its own token: past readings "
                "move nothing, and no claim covers a loop"
            )
        else:
            asked = subject.gain_margin, subject.phase_margin
            yield linear_loop(loop, subject.gain, subject.delay, *asked)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        return (
            Assumption("small deviations about a point whose gain stays the same for many tokens"),
        )

    @property
    def figures(self) -> dict[str, float]:
        m = self.margins
        return {
            "gain margin": m.gain_margin,
            "gain margin [dB]": m.gain_margin_db,
            "phase margin [deg]": m.phase_margin,
            "delay margin [tokens]": m.delay_margin,
            "disk margin": m.disk_margin,
            "sensitivity peak": m.sensitivity_peak,
            "max |pole|": m.pole_radius,
            "longest stable delay, 0..64 [tokens]": float(self.longest_delay),
            "dB beyond those asked for": self.spare[0],
            "degrees beyond those asked for": self.spare[1],
        }

    def check(self) -> list[str]:
        """Eigenvalues of the state matrix, which no polynomial went into, at and around the margin; and
        for what is read off a frequency response, roots on the unit circle."""
        m = self.margins
        radii = [self._radius(g) for g in gains(self.gain)]
        if max(radii) >= 1:
            worst = gains(self.gain)[int(np.argmax(radii))]
            advice = (
                f"; stable once kp and ki are multiplied by less than {m.gain_margin:.3g}"
                if m.gain_margin > 0
                else ""
            )
            return [
                f"the loop is unstable: at dH/d(ln T) = {worst:.3g} nats a closed-loop pole lies at "
                f"|z| = {max(radii):.3g}{advice}"
            ]
        faults = []
        if not m.stable:
            faults.append(
                "the margins say unstable where every eigenvalue is inside the unit circle"
            )
        if not abs(max(radii) - m.pole_radius) <= 1e-6:
            faults.append(f"the largest |pole| is {max(radii):.6g}, not {m.pole_radius:.6g}")
        if np.isfinite(m.gain_margin):
            inside = max(self._radius(g, m.gain_margin * (1 - 1e-5)) for g in gains(self.gain))
            beyond = max(self._radius(g, m.gain_margin * (1 + 1e-5)) for g in gains(self.gain))
            if not inside < 1 < beyond:
                faults.append(
                    f"the gain margin {m.gain_margin:.6g} is not where the eigenvalues cross: {inside:.8g} "
                    f"below it, {beyond:.8g} above"
                )
        elif not m.gain_margin > 0 or max(self._radius(g, 1e6) for g in gains(self.gain)) >= 1:
            faults.append(
                "the gain margin is said to be infinite, and a millionfold gain is unstable"
            )
        faults += self._other_margins() + self._delays()
        spare = m.gain_margin_db - self.least_gain_margin, m.phase_margin - self.least_phase_margin
        if not np.allclose(spare, self.spare, rtol=1e-9, atol=1e-9):
            faults.append(f"{spare} dB and degrees are to spare, not {self.spare}")
        if not m.gain_margin_db >= self.least_gain_margin:
            faults.append(
                f"the gain margin is {m.gain_margin_db:.1f} dB, below the {self.least_gain_margin:g} dB "
                "asked for"
            )
        if not m.phase_margin >= self.least_phase_margin:
            faults.append(
                f"the phase margin is {m.phase_margin:.1f} degrees, below the "
                f"{self.least_phase_margin:g} asked for"
            )
        return faults

    def _other_margins(self) -> list[str]:
        """What of the frequency response the roots on the unit circle contradict."""
        m, faults = self.margins, []
        loops = [open_loop(self.controller, g, self.delay) for g in gains(self.gain)]
        phase, tokens = (min(column) for column in zip(*map(phase_and_delay, loops), strict=True))
        for name, found, said in (
            ("phase margin", phase, m.phase_margin),
            ("delay margin", tokens, m.delay_margin),
        ):
            if not (found == said or abs(found - said) <= 1e-3 * abs(found)):
                faults.append(f"the {name} is {found:.6g}, not {said:.6g}")
        for name, pairs, level in (
            ("disk margin", list(map(disk, loops)), m.disk_margin),
            ("sensitivity peak", list(map(sensitivity, loops)), 1 / m.sensitivity_peak),
        ):
            below = any(reaches(p, q, level * (1 - 1e-3)) for p, q in pairs)
            above = any(reaches(p, q, level * (1 + 1e-3)) for p, q in pairs)
            if not level > 0 or below or not above:
                faults.append(f"the {name} is not where the circle touches the response")
        low = m.low_gain_margin
        inside = [self._radius(g, f) for g in gains(self.gain) for f in (low * (1 + 1e-5), 1e-3)]
        if low and not (
            low > 0
            and max(inside[::2])
            < 1
            <= max(self._radius(g, low * (1 - 1e-5)) for g in gains(self.gain))
        ):
            faults.append(f"the low gain margin {low:.6g} is not where the eigenvalues cross")
        elif not low and max(inside[1::2]) >= 1 and self.gain[0] > 0:
            faults.append(
                "the low gain margin is said to be 0, and a thousandth of the gain is unstable"
            )
        return faults

    def _delays(self) -> list[str]:
        """Eigenvalues at some delays up to the longest, at it, and one token beyond."""
        some, longest = gains(self.gain)[::6], self.longest_delay

        def stable(delay: int) -> bool:
            models = [(self.controller.linearize(g), g) for g in some]
            matrices = [closed_loop(model, g, delay) for model, g in models]
            return all(np.abs(np.linalg.eigvals(A)).max(initial=0.0) < 1 for A in matrices)

        up_to = {d for d in (1, 2, 4, 8, 16, 32, longest) if 1 <= d <= longest}
        if longest not in DELAYS or not all(map(stable, up_to)):
            return [f"the loop is not stable at every delay up to {longest} tokens"]
        if longest + 1 in DELAYS and stable(longest + 1):
            return [
                f"the loop is stable at {longest + 1} tokens of delay, so {longest} is not the longest"
            ]
        return []

    def falsify(self, trials: int = TRIALS, seed: int = 0) -> str | None:
        """Real loops at random gains must decay, and at the worst gain flip at the gain margin."""
        rng = np.random.default_rng(seed)
        low, high = self.gain
        gain = np.exp(rng.uniform(np.log(max(low, 1e-6)), np.log(max(high, 1e-6)), trials))
        start, end = self._decay(gain, np.ones(trials), 400)
        if np.any(_grew(start, end)):
            at = int(np.argmax(_grew(start, end)))
            return f"the loop at gain {gain[at]:.4g} grew from {start[at]:.3g} to {end[at]:.3g}"
        limit = self.margins.gain_margin
        if np.isfinite(limit):
            few = np.repeat(gains(self.gain), 2)
            factor = np.tile([0.9 * limit, 1.1 * limit], len(few) // 2)
            start, end = self._decay(few, factor, 2000)
            grew = _grew(start, end)
            if np.any(grew[::2]):
                return "a loop inside the gain margin grew"
            # One that limits its own steps grows to a cycle of its limit's size.
            if not np.any(grew[1::2] | (end[1::2] > 10 * SMALL)):
                return "no loop beyond the gain margin grew"
        return None

    def _radius(self, gain: float, factor: float = 1.0) -> float:
        """The largest modulus of an eigenvalue of the loop whose plant is `factor` times `gain`."""
        if self.delay == 0:  # no state matrix without a delay: the one way left are the polynomials
            return open_loop(self.controller, gain, 0).radius(factor)
        A = closed_loop(self.controller.linearize(gain), gain * factor, self.delay)
        return float(np.abs(np.linalg.eigvals(A)).max(initial=0.0))

    def _decay(self, gain: Array, factor: Array, tokens: int) -> tuple[Array, Array]:
        """Size of the commands' deviation early and late in real loops, bounds taken away."""
        controller = unbounded(self.controller)
        loops, _ = settled(controller, gain, max(self.delay, 1))
        centre = loops.in_force - SMALL
        sizes = []
        target = target_of(controller)
        for _ in range(tokens):
            deviation = loops.in_force - centre
            sizes.append(np.abs(deviation))
            loops = _guard(loops.step(target + factor * gain * deviation, gain), centre)
        window = tokens // 8
        return np.max(sizes[window : 2 * window], axis=0), np.max(sizes[-window:], axis=0)


def _guard(loops: Rollout, centre: Array) -> Rollout:
    """Stop rows that have grown past all doubt, before they overflow."""
    queue = tuple(np.clip(u, centre - GROWN, centre + GROWN) for u in loops.queue)
    return loops._replace(queue=queue)


def _grew(start: Array, end: Array) -> Array:
    return (end > start * (1 + 1e-9)) | (end > 0.9 * GROWN)


def linear_loop(
    controller: TemperatureController,
    gain: tuple[float, float],
    delay: int = 1,
    least_gain_margin: float = 6.0,
    least_phase_margin: float = 30.0,
) -> LinearLoop:
    """The claim for gains in [low, high] nats at `delay` tokens."""
    found = margins(controller, gain, delay)
    some = gains(gain)[::6]
    stable = [all(open_loop(controller, g, d).radius() < 1 for g in some) for d in DELAYS]
    longest = (stable.index(False) if False in stable else len(stable)) - 1
    asked = least_gain_margin, least_phase_margin
    spare = found.gain_margin_db - asked[0], found.phase_margin - asked[1]
    return LinearLoop(controller, gain, delay, *asked, found, longest, spare)
