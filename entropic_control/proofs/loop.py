"""The loop that is analysed: a controller's own `linearize()`, a plant and the engine's delay.

Everything is a ratio of polynomials in z, one step a token. L = gain num / (den z^delay) is the open
loop in the convention of negative feedback, so that 1 + L = 0 gives the closed-loop poles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from entropic_control.controllers import Linear, TemperatureController
from entropic_control.controllers.base import Array
from entropic_control.errors import ConfigError


class Loop(NamedTuple):
    """An open loop L(z) = num(z) / (den(z) z^delay)."""

    num: Array
    """Coefficients, highest power first."""
    den: Array
    delay: int

    def scaled(self, gain: float) -> Loop:
        return self._replace(num=gain * self.num)

    def at(self, omega: Array) -> Array:
        """L at z = exp(j omega), omega in radians per token."""
        z = np.exp(1j * omega)
        ratio = np.polyval(self.num, z) / np.polyval(self.den, z)
        return ratio * np.exp(-1j * omega * self.delay)

    def characteristic(self, gain: float = 1.0) -> Array:
        """den z^delay + gain num: its roots are the closed-loop poles."""
        shifted = np.concatenate([self.den, np.zeros(self.delay)])
        return np.polyadd(shifted, gain * self.num)

    def poles(self, gain: float = 1.0) -> Array:
        """Closed-loop poles."""
        return np.roots(self.characteristic(gain))

    def radius(self, gain: float = 1.0) -> float:
        """The largest modulus of a closed-loop pole; below 1 the loop is stable."""
        return float(np.abs(self.poles(gain)).max(initial=0.0))


def transfer(model: Linear) -> tuple[Array, Array]:
    """Numerator and denominator of a model with one input and one output, of equal length.

    C (zI - A)^-1 B + D = (det(zI - A + BC) - det(zI - A)) / det(zI - A) + D.
    """
    den = np.poly(model.A) if model.A.size else np.ones(1)
    moved = np.poly(model.A - model.B @ model.C) if model.A.size else np.ones(1)
    return moved + (float(model.D[0, 0]) - 1.0) * den, den


def open_loop(
    controller: TemperatureController,
    gain: float = 1.0,
    delay: int = 1,
    plant: Linear | None = None,
    varentropy: float | None = None,
) -> Loop:
    """The open temperature loop at an operating point.

    Parameters
    ----------
    controller : TemperatureController
        Linearised at `varentropy`.
    gain : float
        dH/d(ln T), nats; the plant, or a factor on `plant` where one is given.
    delay : int
        Tokens between a measurement and the first token drawn under the command it led to; 1 for a
        plain decode loop, more with speculation or asynchronous scheduling.
    plant : Linear, optional
        Dynamics from ln T to the entropy, as `identify` finds them.
    varentropy : float, optional
        The measured varentropy a schedule divides by; by default the plant's gain, which it is when
        the entropy depends on the temperature through the softmax alone.
    """
    if delay < 0:
        raise ConfigError(f"a delay is a number of tokens from 0 up, not {delay}")
    if not gain >= 0:
        raise ConfigError(f"dH/d(ln T) is a variance, so the gain cannot be {gain:g}")
    acts_on_temperature(controller)
    num, den = transfer(controller.linearize(gain if varentropy is None else varentropy))
    if plant is not None:
        plant_num, plant_den = transfer(plant)
        num, den = np.polymul(num, plant_num), np.polymul(den, plant_den)
    # The controller's output falls when the entropy rises; negative feedback takes that sign out.
    return Loop(-gain * num, den, delay)


def acts_on_temperature(controller: TemperatureController) -> None:
    """Refuse a controller whose command is not ln T: the plant here is H(ln T)."""
    outputs = controller.linearize().outputs
    if outputs != ("ln temperature",):
        raise ConfigError(
            f"temperature '{controller.kind}' commands {outputs[0]!r}, not ln T; these proofs are about "
            "loops that move the temperature"
        )


def closed_loop(controller: Linear, gain: float = 1.0, delay: int = 1, clip: float = 1.0) -> Array:
    """The closed loop as a state matrix, affine in `gain` and in `clip` each.

    The state is the controller's own, then the commands on their way through the engine, from new to old.

    Parameters
    ----------
    clip : float in [0, 1]
        What the bounds leave of the command's deviation: 1 inside them, less where they cut.
    """
    A, B, C, D = controller.A, controller.B, controller.C, controller.D
    n = A.shape[0]
    if delay < 1:
        raise ConfigError("a closed loop in state space needs a delay of one token or more")
    full = np.zeros((n + delay, n + delay))
    full[:n, :n] = A
    full[n, :n] = clip * C[0]
    full[:n, -1] = gain * B[:, 0]
    full[n, -1] = clip * gain * D[0, 0]
    for link in range(n + 1, n + delay):
        full[link, link - 1] = 1.0
    return full


def state_space(loop: Loop) -> Any:
    """`loop` as a python-control transfer function with one token as its time step."""
    import control

    den = np.concatenate([loop.den, np.zeros(loop.delay)])
    return control.TransferFunction(loop.num, den, dt=1)
