# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Decode attention over a paged KV cache: one query token a row, over the blocks that row retains.

The retained blocks of a row are split among programs, whose partial softmaxes are then combined
(Dao, Haziza, Massa and Sizov, "Flash-Decoding", 2023; online softmax: Milakov and Gimelshein,
arXiv 1805.02867). Query heads that share a KV head are taken together, so that K and V are read once.
The attention mass of each block falls out of the same pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from entropic_control.errors import CapabilityError
from entropic_control.kernels._torch import torch
from entropic_control.kernels._triton import tl, triton
from entropic_control.kernels.dispatch import (
    FLOATS,
    KernelInputError,
    Mode,
    check,
    on,
    power_of_two,
    resolve,
)

WARPS = 4
MAX_HEAD = 256

_INF = tl.constexpr(float("inf"))
_LOWEST = tl.constexpr(-1e30)


class PagedAttention(NamedTuple):
    """What one decode step of one layer attended to."""

    output: Any
    """Shape (rows, heads, head size), in the type of the queries."""
    log_norm: Any
    """ln sum exp(scores), shape (rows, heads), float32; -inf where nothing is visible."""
    masses: Any
    """Share of the attention on each retained block, shape (rows, heads, table width), float32; 0
    past the row's count; None if not asked for."""


def paged_attention(
    queries: Any,
    keys: Any,
    values: Any,
    table: Any,
    counts: Any,
    lengths: Any,
    *,
    starts: Any = None,
    scale: float | None = None,
    window: int | None = None,
    masses: bool = True,
    splits: int | None = None,
    mode: Mode = "auto",
) -> PagedAttention:
    """Attention of each row's newest token over its retained blocks.

    Parameters
    ----------
    queries : torch.Tensor, shape (rows, heads, head size)
        float32, float16 or bfloat16.
    keys, values : torch.Tensor, shape (blocks, block size, KV heads, head size)
        The pool, in the queries' type; any strides with a contiguous last axis. The block size is a
        power of two from 8 to 128, heads a multiple of KV heads, the head size at most 256.
    table : torch.Tensor, int32, shape (rows, width) or (rows, KV heads, width)
        Pool indices of the retained blocks, in any order.
    counts : torch.Tensor, int32, shape (rows,) or (rows, KV heads) as the table
        How many entries of the table count; the others are not read.
    lengths : torch.Tensor, shape (rows,), int32
        Tokens of each row's sequence, the queried one included, pruned ones too. Tokens at or past it
        are not seen, so that a last block may be part full.
    starts : torch.Tensor, int32, shape of the table, optional
        Position in the sequence of each retained block's first token. By default entry i starts at i
        times the block size: nothing was pruned.
    scale : float, optional
        Factor of the scores; 1 / sqrt(head size) by default.
    window : int, optional
        See only the last `window` positions, the queried token included.
    masses : bool
        Whether the blocks' masses are wanted.
    splits : int, optional
        Programs that share a row and KV head; by default enough to fill the device.
    mode : str
        Which implementation; see `dispatch.Mode`.

    Returns
    -------
    PagedAttention
        A row that sees no token has output 0 and masses 0.

    Raises
    ------
    KernelInputError
        For tensors of wrong shape, type or device.
    CapabilityError
        For an unsupported head or block size, or a mode that cannot be had.
    """
    check_paged(queries, keys, values, table, counts, lengths, starts, len(queries))
    if window is not None and window < 1:
        raise KernelInputError(f"window must be at least 1, not {window}")
    if splits is not None and splits < 1:
        raise KernelInputError(f"splits must be at least 1, not {splits}")
    rows, heads, size = queries.shape
    scale = size**-0.5 if scale is None else scale
    chosen = resolve(mode, queries.device)
    if chosen == "reference":
        return paged_attention_reference(
            queries, keys, values, table, counts, lengths, starts=starts, scale=scale,
            window=window, masses=masses, precision=torch.float32,
        )  # fmt: skip
    block, kv_heads = keys.shape[1:3]
    width = table.shape[-1]
    together = max(64 if size <= 128 else 32, block) // block
    splits, each = _split(rows * kv_heads, width, together, splits, queries.device)
    new = {"dtype": torch.float32, "device": queries.device}
    parts = torch.empty(rows, heads, splits, size, **new)
    part_stats = torch.empty(rows, heads, splits, 2, **new)
    output = torch.empty(rows, heads, size, dtype=queries.dtype, device=queries.device)
    log_norm = torch.empty(rows, heads, **new)
    mass = torch.empty(rows, heads, width, **new) if masses else None
    shared = table.ndim == 2
    if rows:
        with on(queries.device):
            attend_kernel[(rows, kv_heads, splits)](
                queries, keys, values, table, counts, lengths, starts, parts, part_stats, mass,
                scale, 0 if window is None else window, width, each,
                queries.stride(0), queries.stride(1), *keys.stride()[:3], *values.stride()[:3],
                table.stride(0), 0 if shared else width, counts.stride(0), 0 if shared else 1,
                HEADS=heads, GROUP=heads // kv_heads, GROUP_PAD=max(16, power_of_two(heads // kv_heads)),
                SIZE=size, SIZE_PAD=max(16, power_of_two(size)), BLOCK=block, TOGETHER=together,
                WINDOW=window is not None,
                UPCAST=chosen == "interpreter" and queries.dtype == torch.bfloat16, num_warps=WARPS,
            )  # fmt: skip
            combine_kernel[(rows, heads)](
                parts, part_stats, counts, mass, output, log_norm, width, splits,
                counts.stride(0), 0 if shared else 1,
                HEADS=heads, GROUP=heads // kv_heads, SIZE=size, SIZE_PAD=power_of_two(size),
                SPLITS_PAD=power_of_two(splits), WIDTH_STEP=min(1024, power_of_two(width)),
                num_warps=WARPS,
            )  # fmt: skip
    return PagedAttention(output, log_norm, mass)


def check_paged(
    queries: Any,
    keys: Any,
    values: Any,
    table: Any,
    counts: Any,
    lengths: Any,
    starts: Any,
    rows: int,
) -> None:
    """Check the arguments that decode and prefill share, see `paged_attention`."""
    check("queries", queries, (None, None, None), FLOATS, packed=False)
    _, heads, size = queries.shape
    check("keys", keys, (None, None, None, size), (queries.dtype,), queries, packed=False)
    check("values", values, tuple(keys.shape), (queries.dtype,), queries, packed=False)
    block, kv_heads = keys.shape[1:3]
    if not 1 <= size <= MAX_HEAD:
        raise CapabilityError(f"head size {size} is not supported: at most {MAX_HEAD}")
    if block not in (8, 16, 32, 64, 128):
        raise CapabilityError(f"block size {block} is not supported: 8, 16, 32, 64 or 128 tokens")
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise KernelInputError(f"{heads} heads are no multiple of {kv_heads} KV heads")
    lists = (rows, kv_heads) if getattr(table, "ndim", 2) == 3 else (rows,)
    check("table", table, (*lists, None), (torch.int32,), queries)
    check("counts", counts, lists, (torch.int32,), queries)
    check("lengths", lengths, (rows,), (torch.int32,), queries)
    if starts is not None:
        check("starts", starts, tuple(table.shape), (torch.int32,), queries)
    if table.shape[-1] < 1:
        raise KernelInputError("table must have room for at least one block")


def _split(
    lists: int, width: int, together: int, splits: int | None, device: Any
) -> tuple[int, int]:
    """How many programs share a list of blocks, and how many blocks each takes.

    It depends on the table's width, not on the lengths: those would have to come to the host, and a
    captured graph could not follow them.
    """
    steps = -(-width // together)
    if splits is None:
        wanted = 1
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            wanted = -(-4 * processors // max(lists, 1))
        # Below four steps a program spends more on its start than on its work.
        splits = max(1, min(wanted, -(-steps // 4), 128))
    each = -(-steps // min(splits, steps)) * together
    return -(-width // each), each


def paged_attention_reference(
    queries: Any,
    keys: Any,
    values: Any,
    table: Any,
    counts: Any,
    lengths: Any,
    *,
    starts: Any = None,
    scale: float,
    window: int | None = None,
    masses: bool = True,
    precision: Any = torch.float64,
) -> PagedAttention:
    """The same in plain torch: gather, mask, softmax."""
    rows, heads, size = queries.shape
    block, kv_heads = keys.shape[1:3]
    width = table.shape[-1]
    group = heads // kv_heads
    table, counts = (
        x if table.ndim == 3 else x[:, None].expand(rows, kv_heads, *x.shape[1:])
        for x in (table, counts)
    )
    entry = torch.arange(width, device=table.device)
    if starts is None:
        starts = (entry * block).expand_as(table)
    elif starts.ndim == 2:
        starts = starts[:, None].expand_as(table)
    position = starts[..., None] + torch.arange(block, device=table.device)
    length = lengths[:, None, None, None]
    seen = (entry < counts[..., None])[..., None] & (position < length)
    if window is not None:
        seen = seen & (position >= length - window)
    index = torch.where(entry < counts[..., None], table, 0).long()
    head = torch.arange(kv_heads, device=table.device)[None, :, None]
    # (rows, KV heads, width, block, size)
    k, v = (x[index, :, head].to(precision) for x in (keys, values))
    v = torch.where(seen[..., None], v, 0.0)
    q = queries.to(precision).view(rows, kv_heads, group, size)
    scores = torch.einsum("rhgd,rhwbd->rhgwb", q, k) * scale
    scores = scores.masked_fill(~seen[:, :, None], -float("inf")).flatten(-2)
    log_norm = scores.logsumexp(-1)
    shares = (scores - torch.where(log_norm.isfinite(), log_norm, 0.0)[..., None]).exp()
    output = torch.einsum("rhgt,rhtd->rhgd", shares, v.flatten(2, 3))
    mass = shares.view(rows, heads, width, block).sum(-1)
    wide = torch.promote_types(torch.float32, precision)
    return PagedAttention(
        output.reshape(rows, heads, size).to(
            queries.dtype if precision != torch.float64 else precision
        ),
        log_norm.reshape(rows, heads).to(wide),
        mass.to(wide) if masses else None,
    )


@triton.jit
def attend_kernel(
    queries, keys, values, table, counts, lengths, starts, parts, part_stats, masses,
    scale, window, width, each,
    query_row, query_head, key_block, key_token, key_head, value_block, value_token, value_head,
    table_row, table_head, count_row, count_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
    WINDOW: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    TOKENS: tl.constexpr = TOGETHER * BLOCK
    length = tl.load(lengths + row)
    count = tl.minimum(tl.load(counts + row * count_row + kv_head * count_head), width)
    row_table = row.to(tl.int64) * table_row + kv_head * table_head

    member = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + member
    real = member < GROUP
    column = tl.arange(0, SIZE_PAD)
    inside = column < SIZE
    token = tl.arange(0, TOKENS)
    entry_of = tl.arange(0, TOGETHER)
    q = tl.load(
        queries + row.to(tl.int64) * query_row + head[:, None] * query_head + column[None, :],
        mask=real[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    if UPCAST:
        q = q.to(tl.float32)
    peak = tl.full([GROUP_PAD], _LOWEST, tl.float32)
    norm = tl.zeros([GROUP_PAD], tl.float32)
    out = tl.zeros([GROUP_PAD, SIZE_PAD], tl.float32)

    first = split * each
    last = tl.minimum(first + each, count)
    for begin in range(first, last, TOGETHER):
        entry = begin + token // BLOCK
        held = entry < last
        block = tl.load(table + row_table + entry, mask=held, other=0).to(tl.int64)
        if starts is None:
            position = entry * BLOCK + token % BLOCK
        else:
            position = tl.load(starts + row_table + entry, mask=held, other=0) + token % BLOCK
        seen = held & (position < length)
        if WINDOW:
            seen = seen & (position >= length - window)
        at = block * key_block + (token % BLOCK) * key_token + kv_head * key_head
        k = tl.load(
            keys + at[:, None] + column[None, :], mask=seen[:, None] & inside[None, :], other=0.0
        )
        if UPCAST:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -_INF)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp(peak - new_peak)
        w = tl.exp(scores - new_peak[:, None])
        at = block * value_block + (token % BLOCK) * value_token + kv_head * value_head
        v = tl.load(
            values + at[:, None] + column[None, :], mask=seen[:, None] & inside[None, :], other=0.0
        )
        if UPCAST:
            v = v.to(tl.float32)
        out = out * shrink[:, None] + tl.dot(w.to(v.dtype), v, input_precision="ieee")
        norm = norm * shrink + tl.sum(w, 1)
        peak = new_peak
        if masses is not None:
            block_mass = tl.sum(tl.reshape(w, [GROUP_PAD, TOGETHER, BLOCK]), 2)
            # The peak still moves, so masses are kept as logarithms until the norm is known.
            log_mass = tl.log(block_mass) + new_peak[:, None]
            to = (row.to(tl.int64) * HEADS + head[:, None]) * width + begin + entry_of[None, :]
            tl.store(masses + to, log_mass, mask=real[:, None] & (begin + entry_of[None, :] < last))

    part = (row.to(tl.int64) * HEADS + head) * splits + split
    tl.store(part_stats + part * 2, peak, mask=real)
    tl.store(part_stats + part * 2 + 1, norm, mask=real)
    tl.store(
        parts + part[:, None] * SIZE + column[None, :], out, mask=real[:, None] & inside[None, :]
    )


@triton.jit
def combine_kernel(
    parts, part_stats, counts, masses, output, log_norms, width, splits, count_row, count_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr, WIDTH_STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    index = row.to(tl.int64) * HEADS + head
    split = tl.arange(0, SPLITS_PAD)
    column = tl.arange(0, SIZE_PAD)
    held = split < splits
    part = index * splits + split
    peaks = tl.load(part_stats + part * 2, mask=held, other=_LOWEST)
    norms = tl.load(part_stats + part * 2 + 1, mask=held, other=0.0)
    peak = tl.max(peaks, 0)
    shrink = tl.exp(peaks - peak)
    norm = tl.sum(norms * shrink, 0)
    out = tl.load(
        parts + part[:, None] * SIZE + column[None, :],
        mask=held[:, None] & (column < SIZE)[None, :], other=0.0,
    )  # fmt: skip
    out = tl.sum(out * shrink[:, None], 0) / tl.where(norm > 0, norm, 1.0)
    tl.store(output + index * SIZE + column, out.to(output.dtype.element_ty), mask=column < SIZE)
    log_norm = tl.where(norm > 0, peak + tl.log(norm), -_INF)
    tl.store(log_norms + index, log_norm)
    if masses is not None:
        count = tl.load(counts + row * count_row + (head // GROUP) * count_head)
        # The norm of this row as the shift, and a row without one has no mass anywhere.
        shift = tl.where(norm > 0, log_norm, _INF)
        for begin in range(0, width, WIDTH_STEP):
            entry = begin + tl.arange(0, WIDTH_STEP)
            at = masses + index * width + entry
            log_mass = tl.load(at, mask=entry < count, other=-_INF)
            tl.store(at, tl.exp(log_mass - shift), mask=entry < width)
