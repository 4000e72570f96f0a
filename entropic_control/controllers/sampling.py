"""Counter-based random numbers: what a request samples depends on its seed and step alone."""

from __future__ import annotations

from array import array
from functools import lru_cache

import numpy as np

_TO_UNIT = 2.0**-53
_RUN = 256


def uniform(seed: int, step: int) -> float:
    """The number in [0, 1) for token `step` of a request with `seed`.

    Philox 4x64-10 (Salmon et al., SC'11) keyed by the seed, with the step as counter: no state is
    carried, so neighbours, preemption, replay and speculation cannot shift a request's sequence.
    """
    return _run(seed & 0xFFFFFFFFFFFFFFFF, step // _RUN)[step % _RUN]


@lru_cache(maxsize=4096)
def _run(key: int, run: int) -> array[float]:
    """The numbers of 256 steps in a row: making the generator costs more than drawing from it.

    Each counter gives a block of four words, of which the first is used.
    """
    words = np.random.Philox(key=key, counter=run * _RUN).random_raw(4 * _RUN)[::4]
    return array("d", ((words >> np.uint64(11)) * _TO_UNIT).tobytes())
