"""Priority controllers."""

from entropic_control.controllers.priority.base import (
    Candidates,
    Cost,
    Forced,
    Limits,
    Plan,
    Priority,
)
from entropic_control.controllers.priority.entropic import EntropicPriority
from entropic_control.controllers.priority.flow import FlowState, fall, fallen
from entropic_control.controllers.priority.rivals import (
    FirstCome,
    RoundRobin,
    ShortestRemaining,
)

__all__ = [
    "Candidates",
    "Cost",
    "EntropicPriority",
    "FirstCome",
    "FlowState",
    "Forced",
    "Limits",
    "Plan",
    "Priority",
    "RoundRobin",
    "ShortestRemaining",
    "fall",
    "fallen",
]
