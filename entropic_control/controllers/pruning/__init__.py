"""Pruning controllers."""

from entropic_control.controllers.pruning.attention import AttentionPruning
from entropic_control.controllers.pruning.base import BLOCK, Blocks, Pruning, Survey
from entropic_control.controllers.pruning.entropic import EntropicPruning
from entropic_control.controllers.pruning.filtered import GateState
from entropic_control.controllers.pruning.rivals import NoPruning, RandomPruning, SlidingWindow
from entropic_control.controllers.pruning.selection import EntropicSelection

__all__ = [
    "BLOCK",
    "AttentionPruning",
    "Blocks",
    "EntropicPruning",
    "EntropicSelection",
    "GateState",
    "NoPruning",
    "Pruning",
    "RandomPruning",
    "SlidingWindow",
    "Survey",
]
