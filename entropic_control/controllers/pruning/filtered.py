"""The filtered entropy of a sequence, which gates pruning and sets how much a step attends to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from entropic_control.controllers.base import Array, Linear
from entropic_control.controllers.estimators import floored
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.state import choose


class GateState(NamedTuple):
    entropy: Array
    """Filtered raw entropy with the floor applied, nats, shape (rows,)."""


def filter_update(state: GateState, reading: Reading, filter: float, floor: float) -> GateState:
    """The filtered entropy after a reading; rows whose reading is invalid keep theirs."""
    measured = floored(reading.raw_entropy, floor)
    new = state.entropy + filter * (measured - state.entropy)
    return choose(reading.valid, GateState(new.astype(state.entropy.dtype, copy=False)), state)


def filter_linear(filter: float) -> Linear:
    """`filter_update` above the floor."""
    return Linear(
        A=np.array([[1 - filter]]),
        B=np.array([[filter]]),
        C=np.array([[1 - filter]]),
        D=np.array([[filter]]),
        inputs=("entropy [nats]",),
        outputs=("gate entropy [nats]",),
    )
