"""What control costs: the engine with all loops on against a bare decode and argmax loop."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from rich.progress import Progress

from entropic_control.backends.base import Backend, Chunk
from entropic_control.bench.pairs import compared
from entropic_control.bench.prompts import SHORT
from entropic_control.config import Config
from entropic_control.engine import Engine
from entropic_control.errors import CapabilityError
from entropic_control.request import Request
from entropic_control.sequence import Sequence as Work

_CONTEXT = 256
"""Tokens in the middle of a run."""

_TURN = 16
"""Steps that an arm takes before the other's turn."""


def bare(backend: Backend, works: list[Work]) -> tuple[int, float]:
    """Tokens and seconds of one turn of the least that a decode loop can be, forward and argmax.

    It goes on from where the sequences are, in their slots, and leaves them as they were: so both arms
    decode at the same place in the same memory.
    """
    places = [(work.slot, work.ledger.length) for work in works if work.slot is not None]
    tokens = [work.tokens[-1] for work in works]
    held = [(slot, backend.save(slot)) for slot, _ in places]
    began = time.perf_counter()
    for _ in range(_TURN):
        chunks = [
            Chunk(slot, length, np.array([token], np.int32), True)
            for (slot, length), token in zip(places, tokens, strict=True)
        ]
        tokens = [int(row.argmax()) for row in backend.forward(chunks).logits]
        places = [(slot, length + 1) for slot, length in places]
    seconds = time.perf_counter() - began
    for slot, data in held:
        backend.restore(slot, data)
    return _TURN * len(works), seconds


def controlled(engine: Engine) -> tuple[int, float]:
    """Tokens and seconds of one turn of the engine."""
    drawn = len(engine.trace.tokens)
    began = time.perf_counter()
    for _ in range(_TURN):
        engine.step()
    seconds = time.perf_counter() - began
    return len(engine.trace.tokens) - drawn, seconds


def run_overhead(
    config: Config,
    bar: Progress,
    *,
    batches: tuple[int, ...] = (1, 8),
    tokens: int = 128,
    repeats: int,
) -> dict[str, Any]:
    """The tokens per second of both and their ratio, by batch size, for those that have slots.

    Each repeat decodes `tokens` tokens a row about a context of 256, the arms taking turns of 16 steps,
    because the machine's own pace changes within seconds by more than what is measured. Turns of a
    single step would put the other arm's decode between any two of an arm's own, and its code further
    out of the processor's caches than it ever is in use.

    Raises
    ------
    CapabilityError
        If the backend cannot put a sequence back as it was.
    """
    backend = config.backend.open()
    able = backend.capabilities
    batches = tuple(batch for batch in batches if batch <= able.slots)
    results: dict[str, Any] = {}
    try:
        if not able.can_swap:
            raise CapabilityError(
                f"backend {able.name!r} cannot put a sequence back as it was, and both "
                "arms decode the same ones: choose another backend"
            )
        task = bar.add_task("decoding", total=2 * repeats * tokens * sum(batches))
        size = min(_CONTEXT, able.context // 2) - tokens // 2
        prompts = [
            backend.encode(" ".join([SHORT[n % len(SHORT)], *SHORT * 4]))[:size]
            for n in range(max(batches))
        ]
        for batch in batches:
            runs = []
            for first in range(repeats):
                runs.append(_run(Engine(config, backend), prompts[:batch], tokens, first))
                bar.advance(task, 2 * tokens * batch)
                bar.refresh()
            results[str(batch)] = compared("bare", runs)
    finally:
        backend.close()
    return results


def _run(engine: Engine, prompts: list[Any], tokens: int, first: int) -> tuple[float, float]:
    """Tokens per second of the bare loop and of the engine; who goes first takes turns.

    Like the bare loop the engine goes on past the end token. To mask that token instead, by `min_tokens`,
    costs a tenth of a millisecond a row, which is not the price of the loops.
    """
    engine.submit_all(
        Request(prompt=prompt, max_tokens=tokens + len(prompts) + 2, ignore_eos=True, seed=n)
        for n, prompt in enumerate(prompts)
    )
    while any(work.prompt_left for work in engine.unfinished):
        engine.step()
    backend = engine.backend
    turns = np.zeros((2, tokens // _TURN, 2))
    for turn in range(tokens // _TURN):
        for arm in (0, 1) if (first + turn) % 2 else (1, 0):
            turns[arm, turn] = controlled(engine) if arm else bare(backend, engine.unfinished)
    while not engine.idle:
        engine.step()
    (bare_tokens, bare_seconds), (tokens_drawn, seconds) = turns.sum(axis=1).tolist()
    return bare_tokens / bare_seconds, tokens_drawn / seconds
