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

_DECODED = 64
"""Decode steps of a calibration, about: four kinds of sets in turn."""


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


def calibrated(backend: Backend) -> Weights:
    """Seconds of a step's parts on this machine: the backend's cost model, fitted to some real steps.

    One row is as long as the context allows, because a cell costs more in a long row than in a short
    one: fitted to rows of up to 1,536 tokens, a dense run with one of 6,000 was planned a fifth too fast,
    and an eighth if fitted to 4,096.
    """
    able, cost = backend.capabilities, CostModel(Weights(*backend.cost.weights))

    def step(chunks: list[Chunk]) -> None:
        seconds = backend.forward(chunks).seconds
        cost.observe(step_shape(backend, chunks), seconds)

    def read(slot: int, start: int, stop: int) -> None:
        step([Chunk(slot, start, np.ones(stop - start, np.int32), True)])

    short, token = min(64, able.step_tokens), np.ones(1, np.int32)
    lengths = np.array([able.context - _DECODED, *[short] * (able.slots - 1)])
    for slot, length in enumerate(lengths):
        for start in range(0, length, able.step_tokens):
            read(slot, start, min(start + able.step_tokens, length))
    everyone = range(able.slots)
    for _ in range(_DECODED // 4):
        for slots in (everyone[:1], everyone, everyone[1:] or everyone, everyone[-1:]):
            step([Chunk(slot, int(lengths[slot]), token, True) for slot in slots])
            lengths[list(slots)] += 1
    for slot in everyone:
        backend.release(slot)
    return Weights(*cost.weights.tolist())


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
