"""What control costs: the engine with all loops on against a bare decode and argmax loop."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from entropic_control.backends.base import Backend, Chunk
from entropic_control.bench.pairs import paired
from entropic_control.bench.prompts import SHORT
from entropic_control.config import Config
from entropic_control.engine import Engine
from entropic_control.request import Request


def bare(backend: Backend, prompts: list[Any], tokens: int) -> float:
    """Tokens per second of the least a decode loop can be: forward, argmax."""
    rows = [backend.encode(prompt) for prompt in prompts]
    firsts = [Chunk(slot, 0, row, True) for slot, row in enumerate(rows)]
    next_tokens = [int(backend.forward([chunk]).logits[0].argmax()) for chunk in firsts]
    lengths = [len(row) for row in rows]
    began = time.perf_counter()
    for _ in range(tokens):
        chunks = [
            Chunk(slot, lengths[slot], np.array([token], np.int32), True)
            for slot, token in enumerate(next_tokens)
        ]
        next_tokens = [int(row.argmax()) for row in backend.forward(chunks).logits]
        lengths = [length + 1 for length in lengths]
    seconds = time.perf_counter() - began
    for slot in range(len(rows)):
        backend.release(slot)
    return tokens * len(rows) / seconds


def controlled(config: Config, backend: Backend, prompts: list[Any], tokens: int) -> float:
    """Tokens per second of the engine on the same work, over the steps that decode every row.

    Like the bare loop it goes on past the end token. To mask that token instead, by `min_tokens`,
    costs a tenth of a millisecond a row, which is not the price of the loops.
    """
    engine = Engine(config, backend)
    works = [
        Request(prompt=prompt, max_tokens=tokens + 1, ignore_eos=True, seed=n)
        for n, prompt in enumerate(prompts)
    ]
    engine.submit_all(works)
    seconds = []
    while not engine.idle:
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    steps = engine.trace.steps
    full = (steps["rows"] == len(prompts)) & (steps["prompt_tokens"] == 0)
    done = steps["rows"] + steps["accepted"]
    return float(done[full].sum() / np.array(seconds)[full].sum())


def run_overhead(
    config: Config, *, batches: tuple[int, ...] = (1, 8), tokens: int = 400, repeats: int = 3
) -> dict[str, Any]:
    """The ratio of the two, by batch size, over contexts of 40 to 440 tokens; the arms alternate."""
    backend = config.backend.open()
    results: dict[str, Any] = {}
    try:
        filler = " ".join(SHORT) + " "
        prompts = [filler * 2 + SHORT[n % len(SHORT)] for n in range(backend.capabilities.slots)]
        for batch in batches:
            results[str(batch)] = paired(
                "bare",
                partial(bare, backend, prompts[:batch], tokens),
                partial(controlled, config, backend, prompts[:batch], tokens),
                repeats,
            )
    finally:
        backend.close()
    return results
