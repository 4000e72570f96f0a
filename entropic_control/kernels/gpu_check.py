"""Every kernel on a real GPU: compiled against its oracle, then timed against torch.

``python -m entropic_control.bench.gpu_check`` runs this, and whole decode steps after it.

All data is synthetic. Times are of captured graphs whose calls go round inputs that together exceed
the L2 cache, so that neither launches nor caches flatter anyone; what is compared runs the same way.
Bandwidth is that of the bytes a kernel cannot avoid, as a share of a large copy's in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

from entropic_control.kernels import _triton
from entropic_control.kernels._torch import TorchMissing

LIMIT_SECONDS = 140.0
"""Timings that would start later are left out and listed; the rest of four minutes is for the models."""

_ROUND_BYTES = 512 << 20


class Check(NamedTuple):
    """One comparison of a kernel with its oracle."""

    name: str
    error: float
    """The largest deviation, absolute and relative to magnitudes above one; for tokens, their
    share that differs."""
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


class Timing(NamedTuple):
    """One kernel on one shape; times in microseconds, None where it was not measured."""

    name: str
    bytes: int
    kernel: float
    eager: float | None = None
    compiled: float | None = None
    sdpa: float | None = None
    flex: float | None = None


def checks(device: Any, mode: Any, *, large: bool = True) -> Iterator[Check]:
    """Compare every kernel with its oracle in float64."""
    from entropic_control.kernels._torch import torch

    generator = torch.Generator(device).manual_seed(0)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    shapes = ((1, 262_144), (16, 131_072), (5, 5_000)) if large else ((3, 700),)
    for dtype in dtypes:
        for rows, vocab in shapes:
            z = torch.randn(rows, vocab, device=device, generator=generator) * 3
            yield from _row_checks(z.to(dtype), mode)
    yield from _token_checks(device, mode, *((4_000, 3_000) if large else (6, 500)))
    contexts = ((8, 4_000), (1, 30_000)) if large else ((2, 70),)
    heads = ((32, 8, 128), (9, 3, 64), (4, 1, 256)) if large else ((6, 2, 32),)
    for dtype in dtypes:
        for rows, context in contexts:
            for shape in heads:
                yield from _attention_checks(device, mode, dtype, rows, context, *shape)
        yield from _cache_checks(device, mode, dtype)


def _error(actual: Any, expected: Any) -> float:
    """The largest deviation; infinite where one is not finite and the other differs."""
    a, b = actual.double(), expected.double()
    agree = (a == b) | (a.isnan() & b.isnan())
    deviation = ((a - b).abs() / b.abs().clamp(min=1.0)).nan_to_num(float("inf"), float("inf"))
    return float(deviation.masked_fill(agree, 0.0).max()) if a.numel() else 0.0


def _row_checks(z: Any, mode: Any) -> Iterator[Check]:
    from entropic_control.kernels._torch import torch
    from entropic_control.kernels.entropy import entropy
    from entropic_control.kernels.rows import moments_reference
    from entropic_control.kernels.top_k import top_k_entropy, top_k_reference

    rows, vocab = z.shape
    name = f"{str(z.dtype)[6:]} {rows}x{vocab}"
    t = torch.linspace(0.5, 1.5, rows, device=z.device)
    if rows > 2:
        z[0, vocab // 3 :] = -float("inf")
        z[1, 5] = float("nan")
        t[2] = 0.0
    error = max(map(_error, entropy(z, t, mode=mode), moments_reference(z, t)))
    yield Check(f"entropy {name}", error, 2e-5)
    error = max(map(_error, top_k_entropy(z, t, mode=mode), top_k_reference(z, t, 64)))
    yield Check(f"top_k {name}", error, 2e-5)


def _token_checks(device: Any, mode: Any, rows: int, vocab: int) -> Iterator[Check]:
    """Tokens, readings and states after several steps, with and without truncation."""
    from entropic_control.kernels._torch import torch
    from entropic_control.kernels.control_sample import (
        PIGains,
        control_sample,
        control_sample_reference,
    )
    from entropic_control.kernels.truncation import truncation

    gains = PIGains(0.1, 0.02, 0.1, (0.1, 2.0), "varentropy", 0.5)
    generator = torch.Generator(device).manual_seed(1)
    uncut = {"truncation": None, "place": "before"}
    cuts = truncation(rows, device, top_k=[k % 90 for k in range(rows)], top_p=0.95, min_p=0.001)
    for name, cut in {
        "": uncut,
        " truncated before": {"truncation": cuts, "place": "before"},
        " truncated after": {"truncation": cuts, "place": "after"},
    }.items():
        state = torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0], device=device)[:, None].repeat(1, rows)
        steps = torch.arange(rows, device=device)
        readings, wrong = 0.0, 0
        for seed in range(3):
            z = torch.randn(rows, vocab, device=device, generator=generator) * 3
            seeds = torch.full_like(steps, seed)
            common = {"gains": gains, "state": state.contiguous(), **cut}
            actual = control_sample(z, seeds, steps, mode=mode, **common)
            expected = control_sample_reference(z, seeds, steps, temperature=None, **common)
            same = actual.token == expected.token
            wrong += int((~same).sum())
            for field in ("entropy", "varentropy", "raw_entropy", "realized_entropy", "state"):
                error = _error(getattr(actual, field), getattr(expected, field))
                readings = max(readings, error)
            state = actual.state
        yield Check(f"control_sample readings{name}", readings, 5e-5)
        # The two round differently: a draw or a limit at the border of two tokens may fall either way.
        yield Check(f"control_sample tokens{name}", wrong / (3 * rows), 2e-4)


def _attention_checks(
    device: Any,
    mode: Any,
    dtype: Any,
    rows: int,
    context: int,
    heads: int,
    kv_heads: int,
    size: int,
) -> Iterator[Check]:
    from entropic_control.kernels._torch import torch
    from entropic_control.kernels.paged_attention import paged_attention, paged_attention_reference
    from entropic_control.kernels.paged_prefill import paged_prefill, paged_prefill_reference

    name = f"{str(dtype)[6:]} {rows}x{context} {heads}/{kv_heads}x{size}"
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3}.get(dtype, 3e-2)
    pool = Pool(device, dtype, rows, context, kv_heads, size, keep=0.5)
    q = torch.randn(rows, heads, size, device=device).to(dtype)
    for window in (None, context // 3):
        scale = size**-0.5
        actual = paged_attention(q, *pool.arguments, starts=pool.starts, window=window, mode=mode)
        expected = paged_attention_reference(
            q, *pool.arguments, starts=pool.starts, window=window, scale=scale
        )
        worst = _error(actual.output, expected.output) / tolerance
        worst = max(worst, _error(actual.masses, expected.masses) / 1e-4)
        worst = max(worst, _error(actual.log_norm, expected.log_norm) / 1e-3)
        yield Check(f"paged_attention {name} window {window}", worst * tolerance, tolerance)
    chunk = min(40, context)
    q = torch.randn(rows * chunk, heads, size, device=device).to(dtype)
    offsets = torch.arange(rows + 1, dtype=torch.int32, device=device) * chunk
    few = Pool(device, dtype, rows, min(context, 600), kv_heads, size, keep=1.0)
    output = paged_prefill(*(q, *few.arguments, offsets, chunk), mode=mode)
    expected = paged_prefill_reference(*(q, *few.arguments, offsets), scale=size**-0.5)
    yield Check(f"paged_prefill {name}", _error(output, expected), tolerance)


def _cache_checks(device: Any, mode: Any, dtype: Any) -> Iterator[Check]:
    from entropic_control.kernels._torch import torch
    from entropic_control.kernels.kv_cache import (
        copy_blocks,
        copy_blocks_reference,
        write_kv,
        write_kv_reference,
    )

    k, v = torch.randn(2, 64, 16, 8, 128, device=device).to(dtype)
    other_k, other_v = k.clone(), v.clone()
    new = torch.randn(2, 300, 8, 128, device=device).to(dtype)
    slots = torch.randperm(64 * 16, device=device)[:300]
    slots[7] = -1
    write_kv(new[0], new[1], k, v, slots, mode=mode)
    write_kv_reference(new[0], new[1], other_k, other_v, slots)
    sources, targets = [3, 9, 9], [0, 1, 60]
    copy_blocks([k, v], sources, targets, mode=mode)
    for pool in (other_k, other_v):
        copy_blocks_reference(pool, *torch.tensor([sources, targets], device=device))
    error = max(_error(k, other_k), _error(v, other_v))
    yield Check(f"kv_cache {str(dtype)[6:]}", error, 0.0)


class Pool:
    """A paged cache of random blocks, of which each row keeps an evenly spread share."""

    def __init__(
        self,
        device: Any,
        dtype: Any,
        rows: int,
        context: int,
        kv_heads: int,
        size: int,
        keep: float,
    ) -> None:
        from entropic_control.kernels._torch import torch

        block = 16
        width = -(-context // block)
        kept = max(1, round(width * keep))
        blocks = rows * width
        shape = (blocks, block, kv_heads, size)
        self.keys, self.values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        table = torch.randperm(blocks, device=device).view(rows, width).int()
        # The last block is always among them: it holds the newest token.
        held = torch.linspace(width - 1, 0, kept, device=device).round().long().flip(0)
        self.table = table[:, held].contiguous()
        self.starts = (held * block).int().expand(rows, kept).contiguous()
        self.counts = torch.full((rows,), kept, dtype=torch.int32, device=device)
        self.lengths = torch.full((rows,), context, dtype=torch.int32, device=device)
        self.bytes = 2 * rows * kept * block * kv_heads * size * self.keys.element_size()

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.keys, self.values, self.table, self.counts, self.lengths

    def part(self, rows: slice) -> tuple[Any, ...]:
        """The arguments for some of the rows."""
        return self.keys, self.values, self.table[rows], self.counts[rows], self.lengths[rows]


def eager_entropy(z: Any, temperature: Any) -> tuple[Any, Any, Any]:
    """What one writes in torch for entropy, varentropy and raw entropy."""
    raw = z.float().log_softmax(-1)
    logs = (z.float() / temperature[:, None]).log_softmax(-1)
    p = logs.exp()
    h = -(p * logs).sum(-1)
    return h, (p * logs**2).sum(-1) - h**2, -(raw.exp() * raw).sum(-1)


def eager_control_sample(gains: Any, z: Any, state: Any) -> tuple[Any, Any]:
    """The same followed by the PI update and a draw by the exponential race."""
    from entropic_control.kernels._torch import torch
    from entropic_control.kernels.control_sample import update_reference

    temperature = state[0].exp()
    h, v, _ = eager_entropy(z, temperature)
    p = (z.float() / temperature[:, None]).softmax(-1)
    token = (p / torch.empty_like(p).exponential_()).argmax(-1)
    live = z.isfinite().sum(-1)
    return token, update_reference(gains, state, h, v, live > 0)


def timings(device: Any, begun: float) -> Iterator[Timing | str]:
    """Time every kernel; names alone are those left out for want of time or memory."""
    for name, measure in _timed(device):
        if time.monotonic() - begun > LIMIT_SECONDS:
            yield f"{name}: left out, the time is up"
            continue
        try:
            yield measure(name)
        except _out_of_memory():
            yield f"{name}: left out, too little memory"


def _out_of_memory() -> type[Exception]:
    from entropic_control.kernels._torch import torch

    error: type[Exception] = torch.cuda.OutOfMemoryError
    return error


def _timed(device: Any) -> Iterator[tuple[str, Callable[[str], Timing]]]:
    from entropic_control.kernels._torch import torch

    for dtype in (torch.float32, torch.bfloat16):
        for rows, vocab in ((1, 131_072), (16, 131_072), (64, 131_072), (64, 262_144)):
            name = f"{str(dtype)[6:]} {rows}x{vocab}"
            against = (rows, vocab) == (64, 131_072)
            shape = (device, dtype, rows, vocab, against)
            yield f"entropy {name}", partial(_time_entropy, *shape)
            yield f"control_sample {name}", partial(_time_control_sample, *shape)
    yield (
        "control_sample top-p float32 16x131072",
        partial(_time_control_sample, device, torch.float32, 16, 131_072, False, top_p=0.95),
    )
    for context in (8_192, 32_768):
        for rows in (1, 16, 64):
            for keep in (1.0, 0.5, 0.25):
                name = f"paged_attention {rows}x{context} keep {keep:.0%}"
                yield name, partial(_time_attention, device, rows, context, keep)


def _time_entropy(
    device: Any, dtype: Any, rows: int, vocab: int, against: bool, name: str
) -> Timing:
    from entropic_control.kernels._torch import torch
    from entropic_control.kernels.entropy import entropy
    from entropic_control.kernels.rows import workspace

    t = torch.full((rows,), 0.8, device=device)
    space = workspace(rows, vocab, device)
    inputs = _inputs(device, dtype, rows, vocab)
    run = partial(entropy, temperature=t, mode="compiled", workspace=space)
    return Timing(
        name,
        inputs[0].numel() * inputs[0].element_size(),
        _microseconds([partial(run, z) for z in inputs]),
        *_torch_times(lambda z: eager_entropy(z, t), inputs, against),
    )


def _time_control_sample(
    device: Any,
    dtype: Any,
    rows: int,
    vocab: int,
    against: bool,
    name: str,
    top_p: float | None = None,
) -> Timing:
    from entropic_control.kernels._torch import torch
    from entropic_control.kernels.control_sample import PIGains, control_sample
    from entropic_control.kernels.rows import workspace
    from entropic_control.kernels.truncation import truncation

    gains = PIGains(0.1, 0.02, 0.1, (0.1, 2.0), "varentropy", 0.5)
    state = torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0], device=device)[:, None].repeat(1, rows)
    seeds = torch.arange(rows, device=device)
    inputs = _inputs(device, dtype, rows, vocab)
    run = partial(
        control_sample,
        seeds=seeds,
        steps=seeds,
        gains=gains,
        state=state,
        next_state=torch.empty_like(state),
        truncation=None if top_p is None else truncation(rows, device, top_p=top_p),
        mode="compiled",
        workspace=workspace(rows, vocab, device),
    )
    return Timing(
        name,
        inputs[0].numel() * inputs[0].element_size(),
        _microseconds([partial(run, z) for z in inputs]),
        *_torch_times(lambda z: eager_control_sample(gains, z, state), inputs, against),
    )


def _time_attention(device: Any, rows: int, context: int, keep: float, name: str) -> Timing:
    """One layer of an 8B Llama in bfloat16: 32 heads, 8 KV heads, head size 128."""
    from entropic_control.kernels._torch import torch
    from entropic_control.kernels.paged_attention import paged_attention

    per_row = 2 * context * 8 * 128 * 2 * keep
    rounds = max(1, int(_ROUND_BYTES / (per_row * rows)))
    pool = Pool(device, torch.bfloat16, rows * rounds, context, 8, 128, keep)
    q = torch.randn(rows, 32, 128, device=device, dtype=torch.bfloat16)
    parts = [slice(rows * turn, rows * (turn + 1)) for turn in range(rounds)]
    starts = [None if keep == 1.0 else pool.starts[part] for part in parts]
    kernel = _microseconds(
        [
            partial(paged_attention, q, *pool.part(part), starts=start, mode="compiled")
            for part, start in zip(parts, starts, strict=True)
        ]
    )
    if keep < 1.0:
        return Timing(name, pool.bytes // rounds, kernel)
    k, v = (
        x.view(rows * rounds, context, 8, 128).transpose(1, 2) for x in (pool.keys, pool.values)
    )
    attend = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    sdpa = _microseconds([partial(attend, q[:, :, None], k[part], v[part]) for part in parts])
    flex = None
    if rows == 16:  # it is compiled anew for every shape, which takes seconds
        fused = torch.compile(flexible, dynamic=False)
        flex = _microseconds(
            [partial(fused, q[:, :, None], k[part], v[part]) for part in parts[:8]]
        )
    return Timing(name, pool.bytes // rounds, kernel, sdpa=sdpa, flex=flex)


def flexible(query: Any, keys: Any, values: Any) -> Any:
    """FlexAttention of newest tokens over everything, shapes (rows, heads, tokens, size)."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(query, keys, values, enable_gqa=True)


def _inputs(device: Any, dtype: Any, rows: int, vocab: int) -> list[Any]:
    """Enough logits that going round them leaves none in the cache."""
    from entropic_control.kernels._torch import torch

    one = torch.randn(rows, vocab, device=device).to(dtype) * 3
    count = max(2, min(64, -(-_ROUND_BYTES // (one.numel() * one.element_size()))))
    return [one.roll(shift, -1) for shift in range(count)]


def _torch_times(
    function: Callable[[Any], Any], inputs: Sequence[Any], wanted: bool
) -> tuple[float | None, float | None]:
    from entropic_control.kernels._torch import torch

    if not wanted:
        return None, None
    few = inputs[:8]
    fused = torch.compile(function, dynamic=False)
    return (
        _microseconds([partial(function, z) for z in few]),
        _microseconds([partial(fused, z) for z in few]),
    )


def _microseconds(calls: Sequence[Callable[[], Any]], repeats: int = 15) -> float:
    """Median time of one call, all of them captured in one graph."""
    from entropic_control.kernels._torch import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    spans: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(spans)


def copy_bandwidth(device: Any) -> float:
    """GB/s of a large device-to-device copy, bytes read plus bytes written."""
    from entropic_control.kernels._torch import torch

    source = torch.empty(_ROUND_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    span = _microseconds([partial(target.copy_, source)])
    return 2 * _ROUND_BYTES / span / 1e3


def render(checked: Sequence[Check], timed: Sequence[Timing | str], bandwidth: float) -> str:
    """The table."""
    lines = [f"{'check':58} {'error':>9} {'allowed':>9}"]
    for check in checked:
        verdict = "" if check.passed else "  FAILED"
        lines.append(f"{check.name:58} {check.error:9.1e} {check.tolerance:9.1e}{verdict}")
    lines += [
        "",
        f"copy bandwidth {bandwidth:.0f} GB/s; eager, compiled, sdpa, flex: times the kernel's",
        "",
    ]
    lines.append(
        f"{'timing':46} {'us':>9} {'GB/s':>6} {'of copy':>8} {'eager':>7} {'compiled':>8} {'sdpa':>6} "
        f"{'flex':>6}"
    )
    for timing in timed:
        if isinstance(timing, str):
            lines.append(timing)
            continue
        rate = timing.bytes / timing.kernel / 1e3
        others = (timing.eager, timing.compiled, timing.sdpa, timing.flex)
        ratios = ("" if other is None else f"{other / timing.kernel:.2f}x" for other in others)
        lines.append(
            "{:46} {:9.1f} {:6.0f} {:8.1%} {:>7} {:>8} {:>6} {:>6}".format(
                timing.name, timing.kernel, rate, rate / bandwidth, *ratios
            )
        )
    return "\n".join(lines)


def unreachable() -> str:
    """Why the check cannot run here; empty if it can."""
    try:
        from entropic_control.kernels._torch import torch
    except TorchMissing as error:
        return str(error)
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    if not _triton.AVAILABLE:
        return "triton is not installed"
    if find_spec("transformers") is None:
        return "transformers is not installed"
    if _triton.INTERPRETED:
        return "TRITON_INTERPRET is set; unset it"
    return ""
