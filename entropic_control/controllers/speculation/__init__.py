"""Speculation controllers."""

from entropic_control.controllers.speculation.base import Speculation
from entropic_control.controllers.speculation.ngram import NgramSpeculation, NgramState
from entropic_control.controllers.speculation.none import NoSpeculation

__all__ = ["NgramSpeculation", "NgramState", "NoSpeculation", "Speculation"]
