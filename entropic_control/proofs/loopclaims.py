"""Which claims about a loop with a varying gain are made of which temperature controller."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from entropic_control.controllers import PITemperature, TemperatureController
from entropic_control.proofs.bounded import bounded
from entropic_control.proofs.claim import Claim
from entropic_control.proofs.convergence import convergence
from entropic_control.proofs.coupled import coupled
from entropic_control.proofs.fastgain import fast_gain
from entropic_control.proofs.measuredslope import measured_slope
from entropic_control.proofs.noise import noise_response
from entropic_control.proofs.rollout import innermost, moves_temperature, stands_still
from entropic_control.proofs.scheduled import scheduled_gain
from entropic_control.proofs.subject import Subject
from entropic_control.proofs.table import claim


@claim("temperature")
def varying_gain(subject: Subject) -> Iterable[Claim | str]:
    """The loop under a gain that changes from token to token."""
    outer = subject.temperature
    if outer is None or not moves_temperature(outer):
        return
    controller = innermost(outer)
    if controller is not outer:
        yield (
            f"'{outer.kind}' is certified where it does not act, as its inner '{controller.kind}'; its "
            "own commands by 'conformance' and 'linear loop'"
        )
    if isinstance(controller, PITemperature):
        found: Claim = scheduled_gain(controller, subject.delay, subject.support)
    elif same_everywhere(controller):
        found = fast_gain(controller, *subject.gain, subject.delay)
    else:
        yield f"'{controller.kind}' schedules its gains: no claim covers a gain that varies fast"
        return
    if stands_still(controller):
        yield found
        return
    slope = measured_slope(subject.truncation, subject.estimator, subject.vocab)
    yield replace(found, broken=tuple(slope.check()))


@claim("temperature")
def pi_loop(subject: Subject) -> Iterable[Claim | str]:
    """What is claimed of the PI loop alone, wrapped or not."""
    if subject.temperature is None:
        return
    controller = innermost(subject.temperature)
    if isinstance(controller, PITemperature):
        trace = subject.trace_list()
        yield bounded(controller, subject.support)
        yield noise_response(controller, subject.delay, trace)
        yield convergence(controller, subject.support, subject.delay, trace)
        still = subject.pruning is not None and subject.pruning.kind == "none"
        moved = {"moved_mass": 0.0} if still else {}
        yield coupled(controller, subject.delay, subject.vocab, trace=trace, **moved)


def same_everywhere(controller: TemperatureController) -> bool:
    """Whether the controller is the same linear system at any varentropy."""
    calm, lively = controller.linearize(0.1), controller.linearize(10.0)
    return all(np.array_equal(a, b) for a, b in zip(calm[:4], lively[:4], strict=True))
