"""What a run needs of the machine, said before it starts: memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from entropic_control.backends.base import Backend, Chunk, step_shape
from entropic_control.backends.cost import CostModel, Weights
from entropic_control.backends.dimensions import Dimensions
from entropic_control.backends.simulated import SimulatedConfig
from entropic_control.bench.arms import dense
from entropic_control.bench.workloads import Task
from entropic_control.config import Config
from entropic_control.engine import Engine

_FIXED = 400 << 20
"""Bytes for Python, scratch buffers and the trace."""


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kibibytes = {line.split(":")[0]: line.split()[1] for line in lines}
    system = 1024 * int(kibibytes["MemAvailable"])
    limits = [_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current")]
    limit, used = limits
    return system if limit is None or used is None else min(system, limit - used)


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def needed_bytes(
    dimensions: Dimensions, slots: int, context: int, step_tokens: int, vocab: int
) -> int:
    """Memory of an engine: weights (twice, as llama.cpp repacks them), KV cells, logits, scores."""
    cells = slots * context * dimensions.cell_bytes
    logits = 2 * 4 * step_tokens * vocab
    scores = 4 * step_tokens * context * max(dimensions.width // 64, 1)
    return 2 * dimensions.weight_bytes + cells + logits + scores + _FIXED


def machine_speed(backend: Backend) -> float:
    """Seconds of a step on this machine over what the backend's cost model expects before it ran."""
    cost, rows = backend.cost, min(backend.capabilities.slots, 4)
    ratios = []

    def step(chunks: list[Chunk]) -> None:
        seconds = backend.forward(chunks).seconds
        ratios.append(seconds / cost.predict(step_shape(backend, chunks)))

    size = min(64, backend.capabilities.step_tokens)
    for slot in range(rows):
        step([Chunk(slot, 0, np.ones(size, np.int32), True)])
    for place in range(12):
        token = np.ones(1, np.int32)
        step([Chunk(slot, size + place, token, True) for slot in range(rows)])
    for slot in range(rows):
        backend.release(slot)
    return float(np.median(ratios))


def slowed(weights: Weights, speed: float) -> CostModel:
    """The cost model of a machine that takes `speed` times as long."""
    return CostModel(Weights(*(speed * weight for weight in weights)))


def expected_seconds(tasks: Sequence[Task], cost: CostModel, slots: int) -> float:
    """A rough guess at the seconds of a dense run: prompts, then full sets of the longest length."""
    lengths = np.array([len(_prompt(task)) for task in tasks])
    tokens = sum(task.request.max_tokens or 0 for task in tasks)
    rows = min(slots, len(tasks))
    prefill = float(cost.prefill(lengths, np.zeros(len(lengths))).sum())
    return prefill + tokens / rows * float(cost.decode(np.array(rows), lengths.max()))


def dense_seconds(tasks: Sequence[Task], config: Config, cost: CostModel, slots: int) -> float:
    """Seconds the dense baseline takes for all of the tasks together, by its cost model.

    The requests run on a plant with a virtual clock that goes by that model.
    """
    step, row, cell, token, read, measured = cost.weights.tolist()
    plant = SimulatedConfig(
        vocab=8,
        slots=slots,
        drift=0.0,
        seconds_per_step=step,
        seconds_per_row=row,
        seconds_per_row_cell=cell,
        seconds_per_prompt_token=token,
        seconds_per_prompt_read=read,
        seconds_per_measured=measured,
    )
    requests = [
        task.request.replace(prompt=[1] * len(_prompt(task)), forced=(), arrive=0.0, deadline=None)
        for task in tasks
    ]
    with Engine(dense(config).replace(backend=plant)) as engine:
        return float(engine.run(requests).summary["total_time"])


def _prompt(task: Task) -> list[int]:
    """The prompt's ids; a chat's words stand for its tokens."""
    prompt = task.request.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return [token for token in prompt if isinstance(token, int)]
    words = prompt if isinstance(prompt, str) else " ".join(t["content"] for t in prompt)  # type: ignore[index]
    return [1] * len(words.split())
