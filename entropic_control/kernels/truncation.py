# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Truncation of a row's distribution: which tokens may be sampled at all.

Every rule becomes one limit, the smallest logit that is kept, and a last token for those that tie
with it. Rules are of one distribution, the model's own (place "before" the temperature) or the
tempered one ("after"), each by itself; a token stays if all keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from entropic_control.kernels._torch import torch
from entropic_control.kernels._triton import tl, triton
from entropic_control.kernels.dispatch import KernelInputError
from entropic_control.kernels.rows import RUN, load_tile, tokens_of

Place = Literal["before", "after"]

ROUNDING = 1e-7
"""Relative; the sum of a float32 row must not cost the nucleus one token more."""

_RUN = tl.constexpr(RUN)
_INF = tl.constexpr(float("inf"))
_MANY = tl.constexpr(3.0e38)
_SLACK = tl.constexpr(1 - ROUNDING)


def truncation(
    rows: int, device: Any, *, top_k: Any = None, top_p: Any = None, min_p: Any = None
) -> Any:
    """The truncation settings of a batch as one float32 tensor of shape (3, rows).

    Each setting is a number or one number a row. Of equally probable tokens at a rank or mass limit
    those of lower index stay; the most probable token always stays.

    Parameters
    ----------
    rows : int
        Rows of the batch.
    device : torch.device
        Where the logits live.
    top_k : optional
        Keep the k most probable; 0 keeps all.
    top_p : optional
        Keep the smallest set of most probable tokens with at least this mass, in (0, 1].
    min_p : optional
        Keep tokens with at least this share of the largest probability, in [0, 1].

    Raises
    ------
    KernelInputError
        For a setting outside its domain.
    """
    settings: dict[str, tuple[Any, float, Callable[[Any], Any]]] = {
        "top_k": (top_k, 0.0, lambda v: (v >= 0) & (v == v.round())),
        "top_p": (top_p, 1.0, lambda v: (v > 0) & (v <= 1)),
        "min_p": (min_p, 0.0, lambda v: (v >= 0) & (v <= 1)),
    }
    out = torch.empty(3, rows, dtype=torch.float32)
    for line, (name, (value, off, domain)) in zip(out, settings.items(), strict=True):
        column = torch.as_tensor(off if value is None else value, dtype=torch.float32)
        if column.ndim > 1 or column.numel() not in (1, rows):
            raise KernelInputError(f"{name} must be a number or one for each of {rows} rows")
        if not bool(domain(column).all()):
            raise KernelInputError(f"{name} is outside its domain: {column.tolist()}")
        line[:] = column
    return out.to(device)


def keep_reference(z: Any, temperature: Any, settings: Any) -> Any:
    """Which tokens of valid rows `z` stay, shape (rows, vocab), in plain torch: sort and count."""
    top_k, top_p, min_p = (column[:, None] for column in settings.to(z.dtype))
    ordered, order = z.sort(dim=-1, descending=True, stable=True)
    y = (ordered - ordered[:, :1]) / temperature.to(z.dtype)[:, None]
    mass = y.exp().to(torch.float64)
    before = mass.cumsum(-1) - mass
    rank = torch.arange(z.shape[1], device=z.device)
    stays = (top_k == 0) | (rank < top_k)
    stays &= (top_p == 1) | (before < top_p * mass.sum(-1, keepdim=True) * (1 - ROUNDING))
    stays &= y >= min_p.log()
    stays[:, 0] = True
    return torch.zeros_like(stays).scatter(-1, order, stays) & z.isfinite()


@triton.jit
def kept(z, token, limit, last):
    """Whether tokens stay: above the limit, or equal to it and not past the last such token."""
    return (z > limit) | ((z == limit) & (z > -_INF) & (token <= last))


@triton.jit
def truncation_limit(
    row_logits, row_stats, settings, rows, vocab, peak, norm, temperature, inverse,
    TILES: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """The limit of a row and its last tied token, see `kept`."""
    k = tl.load(settings)
    p = tl.load(settings + rows)
    min_p = tl.load(settings + 2 * rows)
    wanted = tl.where((k > 0) & (k < vocab), k, _MANY)
    needed = tl.where(p < 1.0, p.to(tl.float64) * norm * _SLACK, _INF)
    base = peak + temperature * tl.log(min_p)
    # Without a rank or a mass to look for, the floor is the answer.
    search = (wanted < _MANY) | (p < 1.0)
    limit, n_above, mass_above, tied = bisect(
        row_logits, row_stats, vocab, base, tl.where(search, peak, base), wanted, needed, peak,
        inverse, TILES=TILES, RUNS=RUNS,
    )  # fmt: skip
    w = tl.exp((limit - peak) * inverse).to(tl.float64)
    fill = tl.where(w > 0, tl.ceil((needed - mass_above) / tl.where(w > 0, w, 1.0)), _INF)
    room = tl.minimum(wanted, tl.minimum(fill, _MANY).to(tl.float32) + n_above) - n_above
    last = vocab * 1
    if search & (tied > tl.maximum(room, 1.0)):
        last = last_tied(
            row_logits, row_stats, vocab, limit, tl.maximum(room, 1.0).to(tl.int32),
            TILES=TILES, RUNS=RUNS,
        )  # fmt: skip
    return limit, last


@triton.jit
def bisect(
    row_logits, row_stats, vocab, base, top, wanted, needed, peak, inverse,
    TILES: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """The largest limit in [base, top] that leaves `wanted` tokens or weight `needed`; else base.

    Bisection over the ordered bit patterns of float32: exact, at most 33 steps, each of which reads
    only the tiles that reach the limit tried. A sort would move the row. Also returns how many tokens
    lie above the limit, their weight, and an upper bound of how many lie on it.
    """
    low = ordered(base).to(tl.int64)
    high = tl.where(top > base, ordered(top).to(tl.int64) + 1, low + 1)
    n_low = vocab + 1
    n_high = vocab * 0
    mass_high = peak.to(tl.float64) * 0.0
    # Once a single token lies between the two, every limit between them keeps the same tokens.
    while (high - low > 1) & (n_low - n_high > 1):
        middle = (low + high) >> 1
        count, mass = at_least(
            row_logits, row_stats, vocab, unordered(middle.to(tl.int32)), peak, inverse,
            TILES=TILES, RUNS=RUNS,
        )  # fmt: skip
        enough = (count.to(tl.float32) >= wanted) | (mass >= needed)
        low = tl.where(enough, middle, low)
        n_low = tl.where(enough, count, n_low)
        high = tl.where(enough, high, middle)
        n_high = tl.where(enough, n_high, count)
        mass_high = tl.where(enough, mass_high, mass)
    return unordered(low.to(tl.int32)), n_high, mass_high, n_low - n_high


@triton.jit
def ordered(value):
    """int32 keys in the order of the float32 values."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def unordered(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def at_least(
    row_logits, row_stats, vocab, limit, peak, inverse, TILES: tl.constexpr, RUNS: tl.constexpr
):
    """How many tokens have logits at or above a limit, and their weight."""
    count = vocab * 0
    mass = peak.to(tl.float64) * 0.0
    for tile in range(TILES):
        if tl.load(row_stats + tile, cache_modifier=".cg") >= limit:
            z = load_tile(row_logits, tile, vocab, RUNS)
            keep = z >= limit
            count += tl.sum(keep.to(tl.int32))
            mass += tl.sum(tl.where(keep, tl.exp((z - peak) * inverse), 0.0)).to(tl.float64)
    return count, mass


@triton.jit
def last_tied(row_logits, row_stats, vocab, limit, room, TILES: tl.constexpr, RUNS: tl.constexpr):
    """The `room`-th token with a logit equal to the limit, by index."""
    before = vocab * 0
    last = vocab * 1
    for tile in range(TILES):
        if (before < room) & (tl.load(row_stats + tile, cache_modifier=".cg") >= limit):
            z = load_tile(row_logits, tile, vocab, RUNS)
            tied = tl.reshape((z == limit).to(tl.int32), [RUNS * _RUN])
            so_far = before + tl.cumsum(tied, 0)
            token = tile * RUNS * _RUN + tl.arange(0, RUNS * _RUN)
            last = tl.minimum(last, tl.min(tl.where(so_far >= room, token, vocab)))
            before += tl.sum(tied)
    return last


@triton.jit
def truncate(
    row_logits, row_stats, row_runs, vocab, peak, limit, last, inverse,
    TILES: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Replace the masses of the runs by those of the kept tokens, relative to the row's peak.

    Returns their number, norm, entropy and varentropy.
    """
    count = vocab * 0
    norm = peak.to(tl.float64) * 0.0
    first = norm
    second = norm
    for tile in range(TILES):
        mass = tl.zeros([RUNS], tl.float32)
        if tl.load(row_stats + tile, cache_modifier=".cg") >= limit:
            z = load_tile(row_logits, tile, vocab, RUNS)
            keep = kept(z, tokens_of(tile, RUNS), limit, last)
            y = tl.where(keep, (z - peak) * inverse, -1e30)
            w = tl.exp(y)
            mass = tl.sum(w, 1)
            count += tl.sum(keep.to(tl.int32))
            norm += tl.sum(mass, 0).to(tl.float64)
            first += tl.sum(w * y).to(tl.float64)
            second += tl.sum(w * y * y).to(tl.float64)
        tl.store(row_runs + tile * RUNS + tl.arange(0, RUNS), mass)
    # The stores above are read by other threads of this program later.
    tl.debug_barrier()
    mean = first / norm
    entropy = tl.maximum(tl.log(norm) - mean, 0.0)
    return count, norm, entropy, tl.maximum(second / norm - mean * mean, 0.0)
