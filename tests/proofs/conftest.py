from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropic_control.controllers import PITemperature

RUN = Path(__file__).parent / "data" / "run"
"""Four requests to SmolLM2-135M-Instruct on llama.cpp under kp 0.1, ki 0.02: the real thing."""
TUNED = RUN.with_name("tuned")
"""The same requests under the gains that `design` found for that run."""
TUNED_GAINS = {"kp": 0.502, "ki": 0.126, "start": 0.706, "v_start": 1.83}


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
    from entropic_control.controllers.signals import reading

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


def write(directory: Path, columns: dict[str, Any]) -> Path:
    """A run directory with the columns as its trace."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = zip(*columns.values(), strict=True)
    with (directory / "trace.jsonl").open("w") as file:
        for row in rows:
            named = dict(
                zip(columns, (getattr(v, "item", lambda v=v: v)() for v in row), strict=True)
            )
            file.write(json.dumps(named) + "\n")
    return directory
