"""Temperature controllers."""

from entropic_control.controllers.temperature.base import Command, TemperatureController
from entropic_control.controllers.temperature.dynatemp import DynamicTemperature
from entropic_control.controllers.temperature.edt import EDTTemperature
from entropic_control.controllers.temperature.exact import ExactTemperature
from entropic_control.controllers.temperature.feedforward import FeedForward, FeedForwardState
from entropic_control.controllers.temperature.fixed import FixedState, FixedTemperature
from entropic_control.controllers.temperature.mirostat import Mirostat, MirostatState
from entropic_control.controllers.temperature.pi import PIState, PITemperature
from entropic_control.controllers.temperature.slew import SlewLimit, SlewState

__all__ = [
    "Command",
    "DynamicTemperature",
    "EDTTemperature",
    "ExactTemperature",
    "FeedForward",
    "FeedForwardState",
    "FixedState",
    "FixedTemperature",
    "Mirostat",
    "MirostatState",
    "PIState",
    "PITemperature",
    "SlewLimit",
    "SlewState",
    "TemperatureController",
]
