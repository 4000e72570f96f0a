"""Many loops at once around the real controller, in lockstep as the engine drives it.

A step samples under what `command` says of the state, and `update` takes in what was measured there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from entropic_control.controllers import TemperatureController
from entropic_control.controllers.base import Array
from entropic_control.controllers.signals import reading
from entropic_control.controllers.softmax import GREEDY
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

    def step(self, entropy: Array, varentropy: Array | float = 1.0, **others: Any) -> Rollout:
        """One token: the controller reads what was measured, and what it commands joins the queue."""
        measured = reading(entropy, varentropy, temperature=np.exp(self.in_force), **others)
        _, state = self.controller.update(self.state, measured)
        return Rollout(
            self.controller, state, (*self.queue[1:], _commanded(self.controller, state))
        )

    def at(self, log_temperature: Array) -> Rollout:
        """The same loops with this ln T in force, the controller being told by `track`."""
        state = self.controller.track(self.state, np.exp(log_temperature))
        first = _commanded(self.controller, state)
        return Rollout(self.controller, state, (first,) * len(self.queue))


def rollout(
    controller: TemperatureController, rows: int, delay: int = 1, **overrides: float
) -> Rollout:
    """`rows` fresh loops, with per-request settings as in `init`."""
    state = controller.init(rows, **overrides)
    return Rollout(controller, state, (_commanded(controller, state),) * delay)


def _commanded(controller: TemperatureController, state: Any) -> Array:
    """ln T that the engine samples under in this state; a greedy 0 is as cold as it is taken for."""
    return np.asarray(np.log(np.maximum(controller.command(state).temperature, GREEDY)))


def settled(
    controller: TemperatureController, varentropy: Array, delay: int = 1, tokens: int = 6000
) -> tuple[Rollout, NDArray[np.bool_]]:
    """Loops at rest: the entropy stays at the target and the varentropy at a value, one for each row.

    Returns
    -------
    loops : Rollout
    rest : array of bool, shape (rows,)
        Whether a row came to rest within `tokens`.
    """
    rows = len(varentropy)
    loops = rollout(controller, rows, delay)
    low, high = bounds_of(controller)
    middle = 0.5 * (np.log(low) + np.log(high))
    near = np.minimum(loops.in_force - np.log(low), np.log(high) - loops.in_force)
    if np.any(near < 0.01 * (np.log(high) - np.log(low))):
        loops = loops.at(np.full(rows, middle))
    entropy = np.full(rows, target_of(controller))
    rest = np.zeros(rows, np.bool_)
    for token in range(tokens):
        after = loops.step(entropy, varentropy)
        if token % 50 == 49:
            rest = _still(loops, after)
            if rest.all() or not np.isfinite(after.in_force).all():
                break
        loops = after
    return after, rest


def _still(before: Rollout, after: Rollout) -> NDArray[np.bool_]:
    """Which rows a token left as they were, but for rounding."""
    same = np.isfinite(after.in_force)
    for old, new in zip(leaves(before.state), leaves(after.state), strict=True):
        same &= np.abs(new - old) <= 1e-11 * (1 + np.abs(new))
    return np.asarray(same & (np.abs(after.in_force - before.in_force) <= 1e-11))


def leaves(state: Any) -> list[Array]:
    """The arrays of a state, in order."""
    return [a for part in state for a in (leaves(part) if isinstance(part, tuple) else [part])]


def unbounded(controller: TemperatureController) -> TemperatureController:
    """The controller, and what it wraps, with bounds so wide that they never cut."""
    inner = getattr(controller, "inner", None)
    if isinstance(inner, TemperatureController):
        return controller.replace(inner=unbounded(inner))
    return (
        controller.replace(bounds=(1e-9, 1e9))
        if "bounds" in type(controller).model_fields
        else controller
    )


def innermost(controller: TemperatureController) -> TemperatureController:
    """What is at work behind all wrappers."""
    inner = getattr(controller, "inner", None)
    return innermost(inner) if isinstance(inner, TemperatureController) else controller


def moves_temperature(controller: TemperatureController | None) -> bool:
    """Whether the controller commands ln T from what was measured before."""
    return (
        controller is not None
        and not controller.reads_logits
        and controller.linearize().outputs == ("ln temperature",)
    )


def stands_still(controller: TemperatureController | None) -> bool:
    """Whether no reading moves the command, by its linear model, so that no slope matters."""
    if controller is None:
        return True
    model = controller.linearize()
    return not model.A.size and not np.any(model.D)


def bounds_of(controller: TemperatureController) -> tuple[float, float]:
    """Temperature limits, declared by the controller or by what it wraps; wide where there are none."""
    low, high = getattr(innermost(controller), "bounds", (1e-9, 1e9))
    return float(low), float(high)


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
    low, high = getattr(innermost(controller), "bounds", (0.1, 2.0))
    return np.clip(
        rng.uniform(np.log(low) - 0.3, np.log(high) + 0.3, rows), np.log(low), np.log(high)
    )


def target_of(controller: TemperatureController) -> float:
    """H* the controller aims at, nats; 1 for kinds without one."""
    return float(getattr(innermost(controller), "target", 1.0))
