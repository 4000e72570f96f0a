"""The entropic flow of a sequence: the filtered fall of its raw entropy per token."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from entropic_control.controllers.base import Array, Linear
from entropic_control.controllers.estimators import floored
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.state import choose


class FlowState(NamedTuple):
    """Arrays of shape (rows,)."""

    entropy: Array
    """Raw entropy of the last step, nats; NaN before the first."""
    flow: Array
    """Filtered max(H[t-1] - H[t], 0), nats per token."""


def flow_init(rows: int, prior: float, dtype: Any = np.float64) -> FlowState:
    """Nothing measured yet: the flow is `prior` nats per token."""
    return FlowState(np.full(rows, np.nan, dtype), np.full(rows, prior, dtype))


def fall(before: Array, now: Array) -> Array:
    """Entropic time of one step, d(tau) = max(H[t-1] - H[t], 0), nats; 0 where either is unknown."""
    return np.asarray(np.fmax(before - now, 0.0))  # of NaN and 0 it takes 0


def fallen(before: float, now: float) -> float:
    """`fall` of one sequence."""
    return max(0.0, before - now)  # of 0 and NaN it takes 0


def flow_update(state: FlowState, reading: Reading, filter: float, floor: float) -> FlowState:
    """The flow after a reading; raw entropies, so that the temperature cannot inflate it."""
    entropy = floored(reading.raw_entropy, floor)
    drop = fall(state.entropy, entropy)
    flow = np.where(np.isnan(state.entropy), state.flow, state.flow + filter * (drop - state.flow))
    dtype = state.flow.dtype
    new = FlowState(entropy.astype(dtype, copy=False), flow.astype(dtype, copy=False))
    return choose(reading.valid, new, state)


def flow_linear(filter: float) -> Linear:
    """`flow_update` where every step falls."""
    return Linear(
        A=np.array([[1 - filter]]),
        B=np.array([[filter]]),
        C=np.array([[1 - filter]]),
        D=np.array([[filter]]),
        inputs=("entropy fall [nats]",),
        outputs=("flow [nats/token]",),
    )
