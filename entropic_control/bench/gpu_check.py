"""The GPU check: every kernel against its oracle, and against the clock; then whole decode steps.

``python -m entropic_control.bench.gpu_check [--json FILE]`` prints one table and writes it as JSON. Exit
code 0: all agree; 1: something disagrees with its oracle; 2: no CUDA GPU can be reached. It ends
within four minutes; what does not fit into them is listed. Nothing is downloaded: the models are Llamas
of 1B and 8B parameters with random weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from entropic_control.backends.base import Chunk, Draw
from entropic_control.backends.paged.pool import BLOCK
from entropic_control.backends.triton import Triton, TritonConfig
from entropic_control.controllers import FirstCome, NoPruning, PITemperature
from entropic_control.errors import EntropicError
from entropic_control.kernels.gpu_check import (
    Check,
    Timing,
    checks,
    copy_bandwidth,
    render,
    timings,
    unreachable,
)

LIMIT_SECONDS = 215.0
"""Decode steps that would start later are left out and listed."""


class Shape(NamedTuple):
    """The shape of a Llama."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    size: int
    vocab: int = 128_256

    def model(self, device: Any, dtype: Any) -> Any:
        """One with random weights."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.size,
            max_position_embeddings=131_072,
            eos_token_id=None,
            dtype=dtype,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)


SHAPES = (
    Shape("1B", 2048, 8192, 16, 32, 8, 64),
    Shape("8B", 4096, 14_336, 32, 32, 8, 128),
)
TINY = Shape("tiny", 64, 128, 2, 4, 2, 16, vocab=512)


class Decode(NamedTuple):
    """Whole decode steps of a model, sampling included."""

    model: str
    context: int
    rows: int
    keep: float
    """Share of the blocks that were not evicted."""
    tokens_per_second: float
    control: float
    """Seconds of a step with measuring, PI control and sampling over one with argmax, minus one."""


def model_checks(device: Any, mode: Any) -> Iterator[Check]:
    """The same greedy and sampled tokens, captured or not, as plain torch gives on the CPU."""
    import torch

    from entropic_control.config import Config
    from entropic_control.controllers import FixedTemperature
    from entropic_control.engine import Engine
    from entropic_control.request import Request

    torch.manual_seed(0)
    model = TINY.model("cpu", torch.float32)
    prompts = [np.random.default_rng(n).integers(3, 500, 20 + 30 * n).tolist() for n in range(3)]

    def tokens(temperature: Any, **settings: Any) -> list[int]:
        config = TritonConfig(slots=4, context=512, **settings)
        target = torch.device("cpu") if settings["kernels"] == "reference" else device
        backend = Triton(config, model.to(target))
        parts: dict[str, Any] = {"priority": FirstCome(), "pruning": NoPruning()}
        engine = Engine(Config(temperature=temperature, **parts), backend)
        report = engine.run([Request(prompt=p, max_tokens=32, seed=1) for p in prompts])
        return [token for done in report.completions for token in done.tokens]

    for name, temperature in {
        "greedy": FixedTemperature(temperature=0.0),
        "controlled": PITemperature(target=3.0),
    }.items():
        expected = tokens(temperature, kernels="reference", sampling="host")
        for graphs in (False, True):
            found = tokens(
                temperature, kernels=mode, attention="kernels", sampling="device", graphs=graphs
            )
            wrong = float(np.mean(np.array(found) != np.array(expected)))
            if len(found) != len(expected):
                wrong = 1.0
            captured = "captured" if graphs else "uncaptured"
            yield Check(f"decode {name} tokens {captured}", wrong, 0.0)


def decodes(
    shape: Shape,
    device: Any,
    dtype: Any,
    plan: list[tuple[int, int, float]],
    begun: float,
    mode: Any,
) -> Iterator[Decode | str]:
    """Time the decode steps of one model; texts are those left out for want of time or memory."""
    import torch

    names = {
        entry: f"{shape.name} context {entry[0]} rows {entry[1]} kept {entry[2]:.0%}"
        for entry in plan
    }
    if time.monotonic() - begun > LIMIT_SECONDS:
        yield from (f"{name}: left out, the time is up" for name in names.values())
        return
    torch.manual_seed(0)
    try:
        model = shape.model(device, dtype)
    except RuntimeError as error:
        yield f"{shape.name}: left out, the weights do not fit: {error}"
        return
    for entry in plan:
        if time.monotonic() - begun > LIMIT_SECONDS:
            yield f"{names[entry]}: left out, the time is up"
            continue
        try:
            yield _time_decode(shape, model, *entry, mode)
        except (EntropicError, RuntimeError) as error:
            yield f"{names[entry]}: left out: {error}"
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _time_decode(
    shape: Shape, model: Any, context: int, rows: int, keep: float, mode: Any, repeats: int = 8
) -> Decode:
    width = context // BLOCK
    kept = max(int(width * keep), 1)
    config = TritonConfig(
        slots=rows,
        context=context + BLOCK * 8,
        cells=rows * (kept + 8) * BLOCK,
        attention="kernels",
        kernels=mode,
        sampling="device",
    )
    backend = Triton(config, model)
    # The newest block and an even spread of the others, as after pruning.
    numbers = np.linspace(0, width - 1, kept).round().astype(int).tolist()
    numbers[-1] = width - 1
    for slot in range(rows):
        backend.occupy(slot, numbers, context)
    loop = PITemperature(target=2.0)
    draw = Draw(
        seeds=list(range(rows)),
        steps=[0] * rows,
        temperature=np.ones(rows),
        gains=loop,
        state=np.stack(loop.init(rows)),
    )

    def step(*, controlled: bool) -> float:
        chunks = [
            Chunk(slot, backend.length(slot), np.ones(1, np.int32), True) for slot in range(rows)
        ]
        began = time.perf_counter()
        logits = backend.forward(chunks, resident=True).logits
        if controlled:
            backend.draw(logits, draw)
        else:
            backend.greedy(logits)
        return time.perf_counter() - began

    for _ in range(3):
        step(controlled=True)
        step(controlled=False)
    pairs = [(step(controlled=True), step(controlled=False)) for _ in range(repeats)]
    seconds = median(with_control for with_control, _ in pairs)
    control = seconds / median(plain for _, plain in pairs) - 1
    backend.close()
    return Decode(shape.name, context, rows, keep, rows / seconds, control)


PLAN = [
    (context, rows, keep)
    for context in (8_192, 32_768)
    for rows in (1, 16, 64)
    for keep in (1.0, 0.5, 0.25)
]


def decode_table(found: list[Decode | str]) -> str:
    """Tokens per second, dense and kept."""
    lines = [
        "",
        f"{'decode':30} {'tokens/s':>9} {'step ms':>9} {'of dense time':>14} {'control':>8}",
    ]
    dense = {
        (d.model, d.context, d.rows): d for d in found if isinstance(d, Decode) and d.keep == 1
    }
    for entry in found:
        if isinstance(entry, str):
            lines.append(entry)
            continue
        name = f"{entry.model} {entry.rows}x{entry.context} keep {entry.keep:.0%}"
        base = dense.get((entry.model, entry.context, entry.rows))
        ratio = "" if base is None else f"{base.tokens_per_second / entry.tokens_per_second:.2f}"
        lines.append(
            f"{name:30} {entry.tokens_per_second:9.1f} {1e3 * entry.rows / entry.tokens_per_second:9.2f} "
            f"{ratio:>14} {entry.control:8.1%}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run everything; see the module's description for the exit code."""
    parser = argparse.ArgumentParser(
        prog="entropic_control.bench.gpu_check", description="Check and time the GPU kernels."
    )
    parser.add_argument(
        "--json", type=Path, default=Path("runs/gpu-check.json"), help="result file"
    )
    options = parser.parse_args(arguments)
    if reason := unreachable():
        print(
            f"no CUDA GPU can be reached: {reason}. Nothing was checked or timed.", file=sys.stderr
        )
        return 2
    import torch
    import transformers
    import triton

    begun = time.monotonic()
    device = torch.device("cuda")
    checked = [*checks(device, "compiled"), *model_checks(device, "compiled")]
    bandwidth = copy_bandwidth(device)
    timed = list(timings(device, begun))
    torch.cuda.empty_cache()
    decoded = [
        entry
        for shape in SHAPES
        for entry in decodes(shape, device, torch.bfloat16, PLAN, begun, "compiled")
    ]
    print(render(checked, timed, bandwidth))
    print(decode_table(decoded))
    record = {
        "gpu": torch.cuda.get_device_name(device),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "copy_gb_per_s": bandwidth,
        "seconds": time.monotonic() - begun,
        "checks": [{**check._asdict(), "passed": check.passed} for check in checked],
        "timings": [t._asdict() for t in timed if isinstance(t, Timing)],
        "decodes": [d._asdict() for d in decoded if isinstance(d, Decode)],
        "left_out": [t for t in (*timed, *decoded) if isinstance(t, str)],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=1))
    return int(not all(check.passed for check in checked))


if __name__ == "__main__":
    sys.exit(main())
