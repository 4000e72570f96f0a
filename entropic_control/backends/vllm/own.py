"""What a single request sets for itself, through vLLM's `extra_args` or `vllm_xargs`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from entropic_control.controllers.kinds import kinds_of
from entropic_control.controllers.temperature.base import TemperatureController
from entropic_control.errors import ConfigError

NUMBERS = ("target", "kp", "ki")
NAMES = ("enabled", *NUMBERS)

GAINS = {"kp": (0.0, 0.06), "ki": (0.001, 0.03)}
"""The gains a request may set for itself, least and most: of a PI loop with a v_min of 1 nat^2 or more all
of them are stable for every text and model of up to 262,144 tokens, and `entropic certify` proves it for
the one that is configured. vLLM's front end, which refuses others, does not know the configuration."""

_SWITCH = {True: True, False: False, "true": True, "false": False}
_TYPO = 0.75
"""How alike a foreign name must be to one of ours to be taken for a slip; 1 is equal."""


class Own(NamedTuple):
    """A request's own settings; None leaves one as configured."""

    enabled: bool | None = None
    target: float | None = None
    kp: float | None = None
    ki: float | None = None

    @classmethod
    def read(cls, extra_args: Mapping[str, Any] | None) -> Own:
        """The settings in a request's `extra_args`; names of other plug-ins are left alone.

        vLLM's front end reads them before it knows the configuration, so numbers are checked in the
        domain they have in the PI controller, gains in the certified range `GAINS`.

        Raises
        ------
        ConfigError
            For a value that is out of its domain, and for a name that is almost one of these.
        """
        own = extra_args or {}
        for name in own:
            near = difflib.get_close_matches(str(name), NAMES, n=1, cutoff=_TYPO)
            if name not in NAMES and near:
                raise ConfigError(f"unknown setting {name!r}; did you mean {near[0]!r}?")
        numbers = {name: _number(name, own[name]) for name in NUMBERS if name in own}
        return cls(enabled=_switch(own["enabled"]) if "enabled" in own else None, **numbers)

    def controller(self, default: TemperatureController) -> TemperatureController:
        """The controller with the request's own gains, where it has such gains."""
        gains = {"kp": self.kp, "ki": self.ki}
        return _with(default, {name: gain for name, gain in gains.items() if gain is not None})

    def overrides(self, controller: TemperatureController) -> dict[str, float]:
        """What the request's state starts with."""
        if self.target is None or "target" not in controller.overridable:
            return {}
        return {"target": self.target}


def _with(controller: TemperatureController, gains: dict[str, float]) -> TemperatureController:
    if not gains:
        return controller
    inner = getattr(controller, "inner", None)
    if isinstance(inner, TemperatureController):
        return controller.replace(inner=_with(inner, gains))
    known = {name: gain for name, gain in gains.items() if name in type(controller).model_fields}
    return controller.replace(**known) if known else controller


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(f"{name} must be a number, not {value!r}") from None
    if not math.isfinite(number):
        raise ConfigError(f"{name} must be finite, not {value!r}")
    try:
        default_controller().replace(**{name: number})
    except ValidationError as error:
        why = "; ".join(fault["msg"] for fault in error.errors())
        raise ConfigError(f"{name} cannot be {value!r}: {why}") from None
    low, high = GAINS.get(name, (number, number))
    if not low <= number <= high:
        raise ConfigError(
            f"{name} cannot be {value!r}: a request may set {low:g} to {high:g}, the range that is "
            "certified to be stable; other gains go into the configuration"
        )
    return number


def _switch(value: Any) -> bool:
    key = value.lower() if isinstance(value, str) else value
    if isinstance(key, list | dict) or key not in _SWITCH:
        raise ConfigError(f"enabled must be true or false, not {value!r}")
    return _SWITCH[key]


def default_controller() -> TemperatureController:
    """The controller of a request that asks for control where nothing is configured."""
    pi: Any = kinds_of("temperature")["pi"]
    return pi()  # type: ignore[no-any-return]
