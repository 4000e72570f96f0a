"""Temperature controllers."""

from entropic_control.controllers.temperature.base import Command, TemperatureController
from entropic_control.controllers.temperature.fixed import FixedState, FixedTemperature
from entropic_control.controllers.temperature.pi import PIState, PITemperature

__all__ = [
    "Command",
    "FixedState",
    "FixedTemperature",
    "PIState",
    "PITemperature",
    "TemperatureController",
]
