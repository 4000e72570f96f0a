"""Controllers: pure, frozen, backend-agnostic; numpy and pydantic only."""

import sys

from entropic_control.controllers.base import Controller, Linear
from entropic_control.controllers.calibration import (
    CalibratedEntropy,
    Calibration,
    expected_calibration_error,
    fit_temperature,
)
from entropic_control.controllers.estimators import Estimator, FullEntropy, TopKEntropy
from entropic_control.controllers.measurement import measure
from entropic_control.controllers.priority import (
    EntropicPriority,
    FirstCome,
    Priority,
    RoundRobin,
    ShortestRemaining,
)
from entropic_control.controllers.pruning import (
    AttentionPruning,
    EntropicPruning,
    EntropicSelection,
    NoPruning,
    Pruning,
    RandomPruning,
    SlidingWindow,
)
from entropic_control.controllers.signals import Distribution, Reading
from entropic_control.controllers.speculation import (
    NgramSpeculation,
    NoSpeculation,
    Speculation,
)
from entropic_control.controllers.temperature import (
    DynamicTemperature,
    EDTTemperature,
    ExactTemperature,
    FixedTemperature,
    Mirostat,
    PITemperature,
    SlewLimit,
    TemperatureController,
)
from entropic_control.controllers.truncation import (
    MinP,
    NoTruncation,
    TopK,
    TopP,
    Truncation,
    Typical,
)

__all__ = [
    "AttentionPruning",
    "CalibratedEntropy",
    "Calibration",
    "Controller",
    "Distribution",
    "DynamicTemperature",
    "EDTTemperature",
    "EntropicPriority",
    "EntropicPruning",
    "EntropicSelection",
    "Estimator",
    "ExactTemperature",
    "FirstCome",
    "FixedTemperature",
    "FullEntropy",
    "Linear",
    "MinP",
    "Mirostat",
    "NgramSpeculation",
    "NoPruning",
    "NoSpeculation",
    "NoTruncation",
    "PITemperature",
    "Priority",
    "Pruning",
    "RandomPruning",
    "Reading",
    "RoundRobin",
    "ShortestRemaining",
    "SlewLimit",
    "SlidingWindow",
    "Speculation",
    "TemperatureController",
    "TopK",
    "TopKEntropy",
    "TopP",
    "Truncation",
    "Typical",
    "expected_calibration_error",
    "fit_temperature",
    "measure",
]

# The module's name before it was that of its function; importing from it still works.
sys.modules[f"{__name__}.measure"] = sys.modules[f"{__name__}.measurement"]
