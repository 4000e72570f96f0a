from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import RUN

from entropic_control.controllers import PITemperature
from entropic_control.controllers.signals import reading


@pytest.fixture
def run() -> Path:
    return RUN


def simulate(
    controller: PITemperature | None = None,
    *,
    tokens: int = 600,
    requests: int = 4,
    gain: float = 2.0,
    memory: float = 0.3,
    dither: float = 0.2,
    seed: int = 0,
) -> dict[str, Any]:
    """Columns of a synthetic trace: H = a H' + b u + noise, with the loop on and a dither on ln T."""
    controller = controller or PITemperature()
    rng = np.random.default_rng(seed)
    state, columns = controller.init(requests), []
    h = np.full(requests, controller.target)
    for token in range(tokens):
        u = np.log(controller.command(state).temperature) + dither * rng.normal(size=requests)
        base = controller.target - gain * np.log(controller.start) / (1 - memory)
        h = base * (1 - memory) + memory * h + gain * u + 0.3 * rng.normal(size=requests)
        _, state = controller.update(state, reading(h, gain))
        columns += [(r, token, h[r], np.exp(u[r]), gain) for r in range(requests)]
    request, index, entropy, temperature, varentropy = map(np.array, zip(*columns, strict=True))
    return {
        "request": request,
        "token": index,
        "entropy": entropy,
        "temperature": temperature,
        "varentropy": varentropy,
    }


@pytest.fixture
def synthetic() -> Any:
    return simulate
