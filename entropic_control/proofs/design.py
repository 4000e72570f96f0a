"""Gains for a plant: the quietest loop that keeps the margins asked for."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import ValidationError

from entropic_control.controllers import PITemperature
from entropic_control.errors import ConfigError
from entropic_control.proofs.identify import Plant
from entropic_control.proofs.margins import Margins, margins, worst
from entropic_control.proofs.noise import Spread, predict
from entropic_control.proofs.scheduled import LEAST_GAIN, certified
from entropic_control.proofs.varentropy import largest

GAINS = np.geomspace(0.005, 2.0, 14)
"""Proportional and integral gains that are tried, for a loop gain of one."""


LEAST_MARGINS = 6.0, 30.0
"""Gain margin, dB, and phase margin, degrees, at every slope that the vocabulary allows."""


def design(
    plant: Plant,
    target: float = 1.0,
    gm: float = 6.0,
    pm: float = 60.0,
    *,
    wander: float = 0.2,
    filter: float = 0.1,
    schedule: Literal["varentropy", "none"] = "varentropy",
    bounds: tuple[float, float] = (0.1, 2.0),
    delay: int = 1,
    vocab: int = 49_152,
) -> PITemperature:
    """A PI controller with stated margins for a plant.

    Of all gains on a grid that keep the margins over the plant's whole range of slopes, have a Lyapunov
    certificate for a time-varying gain, and let ln T wander by no more than `wander`, those with the
    smallest predicted deviation of the filtered entropy.

    Parameters
    ----------
    plant : Plant
        From `identify`.
    target : float
        H*, nats.
    gm, pm : float
        Least gain margin, dB, and phase margin, degrees.
    wander : float
        Largest standard deviation of ln T under the trace's noise.
    filter, schedule, bounds
        As in `PITemperature`.
    delay : int
        Tokens from measurement to effect.
    vocab : int
        Tokens of the vocabulary, which bounds the targets there are.

    Raises
    ------
    ConfigError
        If no temperature within the bounds reaches the target, or no gains meet what is asked; the
        message says which is in the way.
    """
    if gm < 0 or not 0 <= pm < 180:
        raise ConfigError(
            f"margins must be gm >= 0 dB and 0 <= pm < 180 degrees, not {gm:g}, {pm:g}"
        )
    start = _start(plant, target, bounds, vocab)
    unit = plant.varentropy.value if schedule == "none" else 1.0
    try:
        base = PITemperature(
            target=target,
            filter=filter,
            schedule=schedule,
            bounds=bounds,
            start=start,
            v_start=plant.varentropy.value,
        )
    except ValidationError as error:
        raise ConfigError(f"the design cannot start: {error.errors()[0]['msg']}") from None
    best: tuple[float, PITemperature] | None = None
    nearest = "even the slowest loop tried lets ln T wander by more"
    for kp in np.concatenate([[0.0], GAINS]) / unit:
        for ki in GAINS / plant.varentropy.value:
            candidate = base.replace(kp=float(kp), ki=float(ki))
            spread = predict(candidate, plant.varentropy.value, plant.noise, delay)
            if spread.log_temperature > wander:
                nearest = f"ln T would wander by {spread.log_temperature:.3g}"
                break  # more integral gain only wanders more
            if best is not None and spread.entropy >= best[0]:
                continue
            found = _margins(candidate, plant, delay)
            if not _meets(found, gm, pm):
                nearest = f"the gains that wander less have {found}"
                break  # and only loses margin
            if _certified(candidate, vocab, delay):
                best = spread.entropy, candidate
            else:
                nearest = "the gains with these margins have no certificate for a time-varying gain"
    if best is None:
        raise ConfigError(
            f"no gains give {gm:g} dB, {pm:g} degrees and a wander of {wander:g} on this plant: {nearest}"
        )
    return best[1]


def expected(controller: PITemperature, plant: Plant, delay: int = 1) -> tuple[Margins, Spread]:
    """What a design promises: worst margins over the plant's slopes, and the spread under its noise."""
    spread = predict(controller, plant.varentropy.value, plant.noise, delay)
    return _margins(controller, plant, delay), spread


def _margins(controller: PITemperature, plant: Plant, delay: int) -> Margins:
    v = plant.varentropy.value
    return worst([margins(controller, g, delay, varentropy=v) for g in (*plant.range, v)])


def _meets(found: Margins, gm: float, pm: float) -> bool:
    return found.stable and found.gain_margin_db >= gm and found.phase_margin >= pm


def _certified(controller: PITemperature, vocab: int, delay: int) -> bool:
    """Whether it has what `certify` asks of any controller, for every slope that the vocabulary allows."""
    most = largest(vocab).bound
    low = 0.0 if delay == 1 else LEAST_GAIN
    if certified(controller, delay, low, most) is None:
        return False
    return _meets(margins(controller, (LEAST_GAIN, most), delay), *LEAST_MARGINS)


def _start(plant: Plant, target: float, bounds: tuple[float, float], vocab: int) -> float:
    """The temperature at which the trace's slope reaches the target."""
    if not 0 < target < np.log(vocab):
        raise ConfigError(
            f"a target of {target:g} nats is out of reach: {vocab} tokens have between 0 and "
            f"{np.log(vocab):.4g} nats"
        )
    u = plant.log_temperature + (target - plant.entropy) / plant.varentropy.value
    low, high = np.log(bounds)
    if not low <= u <= high:
        raise ConfigError(
            f"a target of {target:g} nats needs a temperature near {np.exp(u):.3g} on this plant (it had "
            f"{plant.entropy:.3g} nats at {np.exp(plant.log_temperature):.3g}), outside the bounds "
            f"{bounds[0]:g}, {bounds[1]:g}"
        )
    return float(np.exp(u))
