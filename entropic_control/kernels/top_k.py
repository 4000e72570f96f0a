# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Entropy as seen from the k most probable tokens, with exact tail mass and bounds on the tail.

The kernel knows the normaliser of the whole row, so the mass outside the k tokens is exact. The bounds
are those of the estimator `TopKEntropy`: the tail is flattest when spread evenly over the unseen live
tokens, and most concentrated on as few tokens as the k-th probability allows; entropy is
Schur-concave, so no tail lies outside (Marshall, Olkin and Arnold, "Inequalities", 2011, ch. 3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from entropic_control.kernels._torch import torch
from entropic_control.kernels._triton import tl, triton
from entropic_control.kernels.dispatch import KernelInputError, Mode, on, resolve
from entropic_control.kernels.rows import (
    GREEDY,
    Workspace,
    check_logits,
    fitting,
    inverse_temperature,
    last_to_finish,
    load_tile,
    moments_reference,
    or_nan,
    row_stage,
    stats_of,
    temperatures,
    tile_stage,
)
from entropic_control.kernels.truncation import bisect

_GREEDY = tl.constexpr(GREEDY)
_INF = tl.constexpr(float("inf"))


OPTIONS = {"num_warps": 4, "maxnreg": 168}
"""Without a limit of its own the assembler saves registers for more occupancy, and spills."""


class TopK(NamedTuple):
    """Tensors of shape (rows,), float32 unless said; NaN where `valid` is false."""

    entropy: Any
    """H of the whole row, nats."""
    lower: Any
    """Entropy with the most concentrated tail, nats."""
    upper: Any
    """Entropy with the flattest tail, the conservative estimate, nats."""
    tail_mass: Any
    """Probability outside the k tokens."""
    live: Any
    """Tokens with a finite logit, int32."""
    valid: Any
    """False where the row held NaN, +inf or no finite logit."""


def top_k_entropy(
    logits: Any,
    temperature: Any = 1.0,
    *,
    k: int = 64,
    mode: Mode = "auto",
    workspace: Workspace | None = None,
) -> TopK:
    """Bounds of the entropy of softmax(logits / T) from its k largest probabilities.

    Parameters
    ----------
    logits : torch.Tensor, shape (rows, vocab)
        float32, float16 or bfloat16; -inf marks a masked token.
    temperature : float or torch.Tensor, shape (rows,), float32
        T; at or below 1e-6 the limit T -> 0.
    k : int
        Tokens that are seen. At or above the live tokens the entropy is exact and the tail 0.
    mode, workspace
        As in `entropy`.

    Raises
    ------
    KernelInputError
        For tensors of wrong shape, type or device, or k < 1.
    CapabilityError
        For a mode that cannot be had.
    """
    if k < 1:
        raise KernelInputError(f"k must be at least 1, not {k}")
    rows, vocab = check_logits(logits)
    temperature = temperatures(temperature, logits)
    if resolve(mode, logits.device) == "reference":
        return top_k_reference(logits, temperature, k, torch.float32)
    space = fitting(workspace, logits)
    out = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    live = torch.empty(rows, dtype=torch.int32, device=logits.device)
    valid = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        with on(logits.device):
            top_k_kernel[(rows * space.tiling.tiles,)](
                logits, temperature, out, live, valid, space.stats, space.tickets,
                vocab, logits.stride(0), rows, min(k, vocab),
                TILES=space.tiling.tiles, RUNS=space.tiling.runs, NT=space.tiling.padded_tiles,
                **OPTIONS,
            )  # fmt: skip
    return TopK(*(*out, live, valid))


def top_k_reference(logits: Any, temperature: Any, k: int, precision: Any = torch.float64) -> TopK:
    """The same in plain torch, by sorting."""
    moments = moments_reference(logits, temperature, precision)
    entropy, live, valid = moments.entropy, moments.live, moments.valid
    k = min(k, logits.shape[1])
    z = torch.where(valid[:, None], logits.to(precision), 0.0)
    greedy = temperature <= GREEDY
    inverse = torch.where(greedy, 1.0, 1.0 / temperature.to(precision))
    y = (z.topk(k, -1).values - z.amax(-1, keepdim=True)) * inverse[:, None]
    p = (y - moments.log_norm[:, None]).exp()
    unseen = live - k
    tail = (1.0 - p.sum(-1)).clamp(min=0.0)
    seen = _minus_p_log_p(p).sum(-1)
    ceiling = p[:, -1]
    whole = torch.minimum((tail / ceiling).nan_to_num(0.0, 0.0).floor(), unseen)
    rest = (tail - whole * ceiling).clamp(min=0.0)
    lower = seen + whole * _minus_p_log_p(ceiling) + _minus_p_log_p(rest)
    upper = seen + _minus_p_log_p(tail) + tail * unseen.clamp(min=1).to(precision).log()
    # Rounding must not put the truth outside its own bounds.
    exact = (unseen <= 0) | greedy
    lower = torch.where(exact, entropy, torch.minimum(lower, entropy))
    upper = torch.where(exact, entropy, torch.maximum(upper, entropy))
    tail = torch.where(valid, torch.where(exact, 0.0, tail), float("nan"))
    return TopK(entropy, lower, upper, tail, live, valid)


def _minus_p_log_p(p: Any) -> Any:
    return torch.where(p > 0, -p * p.log(), 0.0)


@triton.jit
def top_k_kernel(
    logits, temperature_of, out, live_out, valid_out, stats, tickets, vocab, stride, rows, k,
    TILES: tl.constexpr, RUNS: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    temperature = tl.load(temperature_of + row)
    inverse = inverse_temperature(temperature)
    row_logits = logits + row.to(tl.int64) * stride
    row_stats = stats_of(stats, row, TILES)
    tile_stage(
        row_logits, row_stats, row_stats, tile, vocab, inverse,
        TILES=TILES, RUNS=RUNS, RAW=False, KEEP_RUNS=False,
    )  # fmt: skip
    if last_to_finish(tickets + row, TILES):
        valid, live, peak, norm, log_norm, h, _, _, _ = row_stage(
            row_stats, temperature, inverse, TILES=TILES, NT=NT, RAW=False
        )
        exact = (live <= k) | (temperature <= _GREEDY)
        # k = 1 is a constant to the compiler, which has no `to`.
        wanted = (live * 0 + k).to(tl.float32)
        limit, _, _, _ = bisect(
            row_logits, row_stats, vocab, peak - _INF, tl.where(exact | (valid == 0), -_INF, peak),
            wanted, norm * 0.0 + _INF, peak, inverse, TILES=TILES, RUNS=RUNS,
        )  # fmt: skip
        count, smallest, mass, first = seen(
            row_logits, row_stats, vocab, limit, peak, inverse, TILES=TILES, RUNS=RUNS
        )
        # More than k tokens reach the limit only if they tie with the k-th: all weigh the same.
        surplus = (count - k).to(tl.float64)
        y = ((smallest - peak) * inverse).to(tl.float64)
        w = tl.exp(y)
        mass -= surplus * w
        first -= tl.where(w > 0, surplus * w * y, 0.0)
        seen_h = (log_norm * mass - first) / norm
        tail = tl.maximum(1.0 - mass / norm, 0.0)
        ceiling = w / norm
        unseen = (live - k).to(tl.float64)
        whole = tl.where(ceiling > 0, tl.minimum(tl.floor(tail / ceiling), unseen), 0.0)
        rest = tl.maximum(tail - whole * ceiling, 0.0)
        lower = seen_h + whole * minus_p_log_p(ceiling) + minus_p_log_p(rest)
        upper = seen_h + minus_p_log_p(tail) + tail * tl.log(tl.maximum(unseen, 1.0))
        tl.store(out + row, or_nan(valid, h))
        tl.store(out + rows + row, or_nan(valid, tl.where(exact, h, tl.minimum(lower, h))))
        tl.store(out + 2 * rows + row, or_nan(valid, tl.where(exact, h, tl.maximum(upper, h))))
        tl.store(out + 3 * rows + row, or_nan(valid, tl.where(exact, 0.0, tail)))
        tl.store(live_out + row, live)
        tl.store(valid_out + row, valid)


@triton.jit
def seen(
    row_logits, row_stats, vocab, limit, peak, inverse, TILES: tl.constexpr, RUNS: tl.constexpr
):
    """Of the tokens at or above a limit: number, smallest logit, weight and weighted y."""
    count = vocab * 0
    smallest = peak
    mass = peak.to(tl.float64) * 0.0
    first = mass
    for tile in range(TILES):
        if tl.load(row_stats + tile, cache_modifier=".cg") >= limit:
            z = load_tile(row_logits, tile, vocab, RUNS)
            keep = (z >= limit) & (z > -_INF)
            count += tl.sum(keep.to(tl.int32))
            smallest = tl.minimum(smallest, tl.min(tl.where(keep, z, peak)))
            y = tl.where(keep, (z - peak) * inverse, 0.0)
            w = tl.where(keep, tl.exp(y), 0.0)
            mass += tl.sum(w).to(tl.float64)
            first += tl.sum(tl.where(w > 0, w * y, 0.0)).to(tl.float64)
    return count, smallest, mass, first


@triton.jit
def minus_p_log_p(p):
    return tl.where(p > 0, -p * tl.log(tl.where(p > 0, p, 1.0)), 0.0)
