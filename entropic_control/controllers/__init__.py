"""Controllers: pure, frozen, backend-agnostic; numpy and pydantic only."""

from entropic_control.controllers.base import Controller, Linear
from entropic_control.controllers.estimators import Estimator, FullEntropy, TopKEntropy
from entropic_control.controllers.priority import (
    EntropicPriority,
    FirstCome,
    Priority,
    RoundRobin,
    ShortestRemaining,
)
from entropic_control.controllers.pruning import (
    EntropicPruning,
    NoPruning,
    Pruning,
    RandomPruning,
    SlidingWindow,
)
from entropic_control.controllers.signals import Distribution, Reading
from entropic_control.controllers.temperature import (
    FixedTemperature,
    PITemperature,
    TemperatureController,
)

__all__ = [
    "Controller",
    "Distribution",
    "EntropicPriority",
    "EntropicPruning",
    "Estimator",
    "FirstCome",
    "FixedTemperature",
    "FullEntropy",
    "Linear",
    "NoPruning",
    "PITemperature",
    "Priority",
    "Pruning",
    "RandomPruning",
    "Reading",
    "RoundRobin",
    "ShortestRemaining",
    "SlidingWindow",
    "TemperatureController",
    "TopKEntropy",
]
