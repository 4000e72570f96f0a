"""Pruning controllers."""

from entropic_control.controllers.pruning.base import BLOCK, Blocks, Pruning
from entropic_control.controllers.pruning.entropic import EntropicPruning, GateState
from entropic_control.controllers.pruning.rivals import NoPruning, RandomPruning, SlidingWindow

__all__ = [
    "BLOCK",
    "Blocks",
    "EntropicPruning",
    "GateState",
    "NoPruning",
    "Pruning",
    "RandomPruning",
    "SlidingWindow",
]
