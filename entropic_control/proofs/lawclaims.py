"""Which claims about noise, and about exact arithmetic, are made of which temperature controller."""

from __future__ import annotations

from collections.abc import Iterable

from entropic_control.controllers import PITemperature
from entropic_control.proofs.anylaw import any_law
from entropic_control.proofs.claim import Claim
from entropic_control.proofs.exactgain import exact_gain
from entropic_control.proofs.meansquare import mean_square
from entropic_control.proofs.rollout import innermost
from entropic_control.proofs.subject import Subject
from entropic_control.proofs.table import claim


@claim("temperature")
def laws_of_gains(subject: Subject) -> Iterable[Claim | str]:
    """The PI loop in fractions, under every law of its gains, and under those of a trace."""
    if subject.temperature is None:
        return
    controller, trace = innermost(subject.temperature), subject.trace_list()
    if not isinstance(controller, PITemperature):
        return
    yield exact_gain(controller, subject.support, subject.delay)
    if subject.delay == 1:
        yield any_law(controller, subject.support, trace=trace)
    else:
        yield f"no claim covers every law of gains at a delay of {subject.delay} tokens"
    if trace is not None:
        yield mean_square(controller, trace, subject.delay)
