"""Parts that are wrong in one way each, and sound ones that must not be taken for wrong.

The classes have no default kind, so that they stay out of the registry.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from entropic_control.controllers import (
    FixedTemperature,
    FullEntropy,
    Linear,
    PITemperature,
    SlewLimit,
    TemperatureController,
    TopKEntropy,
)
from entropic_control.controllers.state import choose
from entropic_control.controllers.temperature import Command
from entropic_control.controllers.truncation import MinP, NoTruncation, TopK, TopP

# mypy: disable-error-code="no-untyped-def, override"


class Heat(FixedTemperature):
    """Hotter at every token."""

    kind: str

    def update(self, state, reading):
        state = state._replace(temperature=state.temperature * 1.5)
        return state.temperature, state


class Drift(FixedTemperature):
    """Hotter by a hair at every token."""

    kind: str

    def update(self, state, reading):
        state = choose(reading.valid, state._replace(temperature=state.temperature * 1.0001), state)
        return state.temperature, state


class Inverse(PITemperature):
    """Samples under the inverse of what it returns."""

    kind: str

    def command(self, state, logits=None):
        return Command(1 / super().command(state, logits).temperature)


class Doubled(PITemperature):
    """Samples under twice what it returns."""

    kind: str

    def command(self, state, logits=None):
        return Command(np.clip(2 * super().command(state, logits).temperature, *self.bounds))


class FlippedSign(PITemperature):
    """Heats when the entropy is too high."""

    kind: str

    def update(self, state, reading):
        wrong = reading._replace(entropy=2 * state.target - reading.entropy)
        return super().update(state, wrong)


class Twofold(PITemperature):
    """Errors count twice."""

    kind: str

    def update(self, state, reading):
        wrong = reading._replace(entropy=2 * reading.entropy - state.target)
        return super().update(state, wrong)


class Unfiltered(PITemperature):
    """Its filter is off."""

    kind: str

    def update(self, state, reading):
        return PITemperature.update(self.replace(filter=1.0), state, reading)


class Offset(PITemperature):
    """Aims a little too high."""

    kind: str

    def update(self, state, reading):
        return super().update(state, reading._replace(entropy=reading.entropy - 0.01))


class NoClip(PITemperature):
    """Forgets its bounds."""

    kind: str

    def update(self, state, reading):
        return PITemperature.update(self.replace(bounds=(1e-9, 1e9)), state, reading)


class FarSighted(PITemperature):
    """Right near the target, the other way round far from it."""

    kind: str

    def update(self, state, reading):
        far = np.abs(reading.entropy - state.target) > 0.5
        mirrored = 2 * state.target - reading.entropy
        entropy = np.where(far, mirrored, reading.entropy)
        return super().update(state, reading._replace(entropy=entropy))


class Late(PITemperature):
    """Acts on the reading before the last."""

    kind: str

    def update(self, state, reading):
        before = state.entropy  # of the last reading, with a filter of 1
        _, new = super().update(state, reading._replace(entropy=before))
        new = new._replace(entropy=np.where(reading.valid, reading.entropy, state.entropy))
        return np.exp(new.log_temperature), new


class WritesState(PITemperature):
    """Writes into the state it is given."""

    kind: str

    def update(self, state, reading):
        state.varentropy[:] = np.where(reading.valid, reading.varentropy, state.varentropy)
        return super().update(state, reading)


class RowsTogether(PITemperature):
    """Every row gets the mean of all."""

    kind: str

    def update(self, state, reading):
        mean = np.full_like(reading.entropy, np.nanmean(reading.entropy))
        return super().update(state, reading._replace(entropy=mean))


class TargetIgnored(PITemperature):
    """A request's own target does nothing."""

    kind: str

    def update(self, state, reading):
        own = state.target
        default = np.full_like(own, self.target)
        temperature, new = super().update(state._replace(target=default), reading)
        return temperature, new._replace(target=own)


class TargetFlipped(PITemperature):
    """A request's own target acts the other way."""

    kind: str

    def update(self, state, reading):
        own = state.target
        temperature, new = super().update(state._replace(target=2 * self.target - own), reading)
        return temperature, new._replace(target=own)


class TemperatureIgnored(FixedTemperature):
    """A request's own temperature does nothing."""

    kind: str

    def init(self, rows=1, *, dtype=np.float64, **overrides):
        self.check_overrides(overrides)
        return super().init(rows, dtype=dtype)


class MovesOnInvalid(PITemperature):
    """Takes in readings that are none."""

    kind: str

    def update(self, state, reading):
        entropy = np.where(np.isnan(reading.entropy), 0.0, reading.entropy)
        varentropy = np.where(np.isnan(reading.varentropy), 0.0, reading.varentropy)
        clean = reading._replace(
            entropy=entropy, varentropy=varentropy, valid=np.ones_like(reading.valid)
        )
        return super().update(state, clean)


class FlippedInSingle(PITemperature):
    """Wrong in single precision alone."""

    kind: str

    def update(self, state, reading):
        if state.entropy.dtype == np.float32:
            reading = reading._replace(entropy=2 * state.target - reading.entropy)
        return super().update(state, reading)


class LosesSingle(PITemperature):
    """Its state turns double."""

    kind: str

    def update(self, state, reading):
        temperature, new = super().update(state, reading)
        return temperature, new._replace(varentropy=new.varentropy.astype(np.float64))


class FlippedForFew(PITemperature):
    """Wrong below 100,000 live tokens alone."""

    kind: str

    def update(self, state, reading):
        mirrored = 2 * state.target - reading.entropy
        entropy = np.where(reading.live < 100_000, mirrored, reading.entropy)
        return super().update(state, reading._replace(entropy=entropy))


class EndsInNan(PITemperature):
    """Not a number once the text has been certain for long."""

    kind: str

    def update(self, state, reading):
        _, new = super().update(state, reading)
        bad = np.where(new.entropy < 1e-6, np.nan, new.log_temperature)
        return np.exp(bad), new._replace(log_temperature=bad)


class WrongLinear(PITemperature):
    """Right as it runs, wrong as it says it does."""

    kind: str

    def linearize(self, varentropy=1.0):
        right = super().linearize(varentropy)
        return right._replace(B=-right.B, D=-right.D)


class Jumps(SlewLimit):
    """A limit that lets go on the way down."""

    kind: str

    def command(self, state, logits=None):
        command = super().command(state, logits)
        return command._replace(
            temperature=np.where(command.temperature < 0.5, 0.1, command.temperature)
        )


class Runaway(TemperatureController):
    """An integrator without bounds."""

    kind: str

    def init(self, rows=1, *, dtype=np.float64, **overrides):
        self.check_overrides(overrides)
        return _Level(np.zeros(rows, dtype))

    def command(self, state, logits=None):
        return Command(np.exp(state.level))

    def update(self, state, reading):
        moved = state.level - 0.02 * (reading.entropy - 1.0)
        state = choose(reading.valid, _Level(moved.astype(state.level.dtype)), state)
        return np.exp(state.level), state

    def linearize(self, varentropy=1.0):
        step = np.array([[-0.02]])
        return Linear(np.eye(1), step, np.eye(1), step, ("entropy [nats]",), ("ln temperature",))


class _Level(NamedTuple):
    level: Any


class Smooth(Runaway):
    """A sound integrator, bounded."""

    kind: str
    bounds: tuple[float, float] = (0.2, 2.0)

    def update(self, state, reading):
        moved = np.clip(state.level - 0.02 * (reading.entropy - 1.0), *np.log(self.bounds))
        state = choose(reading.valid, _Level(moved.astype(state.level.dtype)), state)
        return np.exp(state.level), state


WRONG_LOOPS: list[TemperatureController] = [
    Heat(kind="heat"),
    Drift(kind="drift"),
    Inverse(kind="inverse"),
    Inverse(kind="inverse_from_1", start=1.0, bounds=(0.5, 2.0)),
    Doubled(kind="doubled"),
    FlippedSign(kind="flipped"),
    FlippedSign(kind="flipped_plain", schedule="none"),
    Twofold(kind="twofold"),
    Unfiltered(kind="unfiltered"),
    Offset(kind="offset"),
    NoClip(kind="no_clip"),
    FarSighted(kind="far_sighted"),
    Late(kind="late", filter=1.0, kp=0.02, ki=0.01),
    WritesState(kind="writes_state"),
    RowsTogether(kind="rows_together"),
    TargetIgnored(kind="target_ignored"),
    TargetFlipped(kind="target_flipped"),
    TemperatureIgnored(kind="temperature_ignored"),
    MovesOnInvalid(kind="moves_on_invalid"),
    FlippedInSingle(kind="flipped_in_single"),
    LosesSingle(kind="loses_single"),
    FlippedForFew(kind="flipped_for_few"),
    EndsInNan(kind="ends_in_nan"),
    WrongLinear(kind="wrong_linear"),
    Jumps(kind="jumps", inner=PITemperature()),
    Runaway(kind="runaway"),
    SlewLimit(inner=FlippedSign(kind="flipped_inside")),
    SlewLimit(inner=TargetIgnored(kind="target_ignored_inside")),
]
"""Loops whose certificate must not hold, without a falsifier's help."""

SOUND_LOOPS: list[TemperatureController] = [
    PITemperature(),
    PITemperature(target=3.0, filter=0.3, kp=0.02, ki=0.01),
    PITemperature(kp=0.0),
    PITemperature(bounds=(0.6, 0.8)),
    PITemperature(start=2.0),
    PITemperature(schedule="none", kp=0.01, ki=0.01),
    FixedTemperature(),
    FixedTemperature(temperature=0.0),
    SlewLimit(inner=PITemperature()),
    SlewLimit(inner=PITemperature(), rate=0.01),
    SlewLimit(inner=PITemperature(filter=0.3, kp=0.02, ki=0.01), rate=1.0),
    SlewLimit(inner=SlewLimit(inner=PITemperature(), rate=0.05), rate=0.2),
    SlewLimit(inner=FixedTemperature()),
    Smooth(kind="smooth"),
]
"""Loops whose certificate must hold, whatever a falsifier tries."""


class OneMore(TopK):
    kind: str

    def keep(self, row, of):
        return self.replace(k=self.k + 1).keep_as_top_k(row, of)

    def keep_as_top_k(self, row, of):
        return TopK.keep(self, row, of)


class DropsTheFirst(TopK):
    kind: str

    def keep(self, row, of):
        mask = super().keep(row, of)
        if mask.sum() > 1:
            mask[int(row.argmax())] = False
        return mask


class LessMass(TopP):
    kind: str

    def keep(self, row, of):
        return TopP.keep(TopP(p=self.p * 0.98), row, of)


class Harsher(MinP):
    kind: str

    def keep(self, row, of):
        return MinP.keep(MinP(p=min(self.p * 1.1, 1.0)), row, of)


class KeepsNothing(TopP):
    kind: str

    def keep(self, row, of):
        mask = super().keep(row, of)
        return mask if mask.sum() > 1 else np.zeros_like(mask)


class KeepsMasked(NoTruncation):
    kind: str

    def keep(self, row, of):
        return np.ones(row.shape, np.bool_)


WRONG_CUTS = [
    OneMore(kind="one_more", k=5),
    DropsTheFirst(kind="drops_the_first", k=5),
    LessMass(kind="less_mass", p=0.9),
    Harsher(kind="harsher", p=0.05),
    KeepsNothing(kind="keeps_nothing", p=0.5),
    KeepsMasked(kind="keeps_masked"),
]


class UpsideDown(TopKEntropy):
    kind: str

    def estimate(self, row, of):
        seen = super().estimate(row, of)
        return seen._replace(entropy=-seen.entropy)


class Swapped(TopKEntropy):
    kind: str

    def estimate(self, row, of):
        seen = super().estimate(row, of)
        return seen._replace(entropy=seen.lower)


class TooTight(TopKEntropy):
    kind: str

    def estimate(self, row, of):
        seen = super().estimate(row, of)
        return seen._replace(upper=0.99 * seen.upper, entropy=0.99 * seen.upper)


class ATenthOff(FullEntropy):
    kind: str

    def estimate(self, row, of):
        seen = super().estimate(row, of)
        return type(seen)(1.1 * seen.entropy, 0.0, 2 * seen.entropy, 0.0)


class NegativeDecision(FullEntropy):
    kind: str

    def decision_entropy(self, row, raw):
        return -raw.entropy


WRONG_ESTIMATORS = [
    UpsideDown(kind="upside_down"),
    Swapped(kind="swapped"),
    TooTight(kind="too_tight"),
    ATenthOff(kind="a_tenth_off"),
    NegativeDecision(kind="negative_decision"),
]
