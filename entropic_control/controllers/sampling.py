"""Counter-based random numbers: what a request samples depends on its seed and step alone."""

from __future__ import annotations

import numpy as np

_TO_UNIT = 2.0**-53


def uniform(seed: int, step: int) -> float:
    """The number in [0, 1) for token `step` of a request with `seed`.

    Philox 4x64-10 (Salmon et al., SC'11) keyed by the seed, with the step as counter: no state is
    carried, so neighbours, preemption, replay and speculation cannot shift a request's sequence.
    """
    bits = np.random.Philox(key=seed & 0xFFFFFFFFFFFFFFFF, counter=step).random_raw()
    return float((int(bits) >> 11) * _TO_UNIT)
