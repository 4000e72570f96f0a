"""Many loops at once around the real controller: what falsifiers drive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from entropic_control.controllers import TemperatureController
from entropic_control.controllers.base import Array
from entropic_control.controllers.signals import reading
from entropic_control.proofs.signals import Signals


class Rollout(NamedTuple):
    """One loop a row: the controller's own state, and the commands on their way through the engine."""

    controller: TemperatureController
    state: Any
    queue: tuple[Array, ...]
    """ln T of the steps to come, the one in force first; as many as tokens of delay."""

    @property
    def in_force(self) -> Array:
        """u = ln T of this step, shape (rows,)."""
        return self.queue[0]

    def step(self, entropy: Array, varentropy: Array | float = 1.0) -> Rollout:
        """One token: the controller reads what was measured and its command joins the queue."""
        measured = reading(entropy, varentropy, temperature=np.exp(self.in_force))
        temperature, state = self.controller.update(self.state, measured)
        return Rollout(self.controller, state, (*self.queue[1:], np.log(temperature)))


def rollout(
    controller: TemperatureController, rows: int, delay: int = 1, **overrides: float
) -> Rollout:
    """`rows` fresh loops, with per-request settings as in `init`."""
    state = controller.init(rows, **overrides)
    first = np.log(controller.command(state).temperature)
    return Rollout(controller, state, (first,) * delay)


def replay(
    controller: TemperatureController, one: Signals, delay: int = 1
) -> Iterator[tuple[Rollout, Rollout]]:
    """The real controller over a recorded request: before and after every token."""
    aim = {"target": one.target} if one.target and "target" in controller.overridable else {}
    loops = rollout(controller, 1, delay, **aim)
    for h, v in zip(one.entropy, one.varentropy, strict=True):
        after = loops.step(np.array([h]), np.array([v]))
        yield loops, after
        loops = after


def centres(controller: TemperatureController, rows: int, rng: np.random.Generator) -> Array:
    """ln T at which each row's plant meets the target: anywhere inside the bounds, on them as well."""
    low, high = getattr(controller, "bounds", (0.1, 2.0))
    return np.clip(
        rng.uniform(np.log(low) - 0.3, np.log(high) + 0.3, rows), np.log(low), np.log(high)
    )


def target_of(controller: TemperatureController) -> float:
    """H* the controller aims at, nats; 1 for kinds without one."""
    return float(getattr(controller, "target", 1.0))
