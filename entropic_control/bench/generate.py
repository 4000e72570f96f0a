"""What the paged engine costs: all loops on, against transformers' own `generate` on the same model."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from rich.progress import Progress

from entropic_control.backends.triton import Triton
from entropic_control.bench.pairs import paired
from entropic_control.bench.prompts import SHORT, request
from entropic_control.config import Config
from entropic_control.engine import Engine
from entropic_control.errors import CapabilityError


def generated(backend: Triton, prompt: list[int], rows: int, tokens: int) -> float:
    """Tokens per second of greedy `generate` on a batch of equal prompts, which needs no padding."""
    import torch

    given = torch.tensor([prompt] * rows, device=backend.device)
    with backend.plain() as model:
        began = time.perf_counter()
        out = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        out.cpu()
        seconds = time.perf_counter() - began
    return rows * tokens / seconds


def controlled(config: Config, backend: Triton, prompt: list[int], rows: int, tokens: int) -> float:
    """Tokens per second of the engine on the same work, prompts included."""
    engine = Engine(config, backend)
    works = [
        request(str(n), "-", tokens, n).replace(prompt=prompt, min_tokens=tokens)
        for n in range(rows)
    ]
    began = time.perf_counter()
    report = engine.run(works)
    seconds = time.perf_counter() - began
    return sum(len(done.tokens) for done in report.completions) / seconds


def run_generate(
    config: Config,
    bar: Progress,
    *,
    batches: tuple[int, ...] = (1, 4, 8),
    tokens: int = 64,
    repeats: int = 5,
) -> dict[str, Any]:
    """The ratio of the two, by batch size; the arms alternate in one process.

    Raises
    ------
    CapabilityError
        If the backend is not the one over transformers.
    """
    backend = config.backend.open()
    try:
        if not isinstance(backend, Triton):
            raise CapabilityError(
                f"only the triton backend can be compared with transformers' generate, not "
                f"'{backend.capabilities.name}': add --backend triton"
            )
        prompt = backend.encode(SHORT[0]).tolist()
        results: dict[str, Any] = {}
        task = bar.add_task("paired runs", total=len(batches) * repeats)
        for rows in batches:
            generated(backend, prompt, rows, 8)  # warm
            results[str(rows)] = paired(
                "generate",
                partial(generated, backend, prompt, rows, tokens),
                partial(controlled, config, backend, prompt, rows, tokens),
                repeats,
                partial(bar.advance, task),
            )
    finally:
        backend.close()
    return results
