# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention of chunks of new tokens over a paged KV cache: causal, many rows of any length at once.

A chunk is the end of its row's sequence and is already in the pool, so a decode step is a chunk of one
token and both kinds mix in a batch. Tiles and online softmax as in FlashAttention-2 (Dao, arXiv
2307.08691); the query heads of a KV head are rows of one tile.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from entropic_control.errors import CapabilityError
from entropic_control.kernels._torch import torch
from entropic_control.kernels._triton import tl, triton
from entropic_control.kernels.dispatch import (
    KernelInputError,
    Mode,
    check,
    on,
    power_of_two,
    resolve,
)
from entropic_control.kernels.paged_attention import check_paged

_INF = tl.constexpr(float("inf"))
_LOWEST = tl.constexpr(-1e30)


def warps(lines: int) -> int:
    """Warps for a tile of `lines` queries: as many as its registers need."""
    return 8 if lines >= 64 else 4


def paged_prefill(
    queries: Any,
    keys: Any,
    values: Any,
    table: Any,
    counts: Any,
    lengths: Any,
    offsets: Any,
    longest: int,
    *,
    starts: Any = None,
    scale: float | None = None,
    window: int | None = None,
    mode: Mode = "auto",
) -> Any:
    """Causal attention of the chunk of each row over its retained blocks.

    Parameters
    ----------
    queries : torch.Tensor, shape (tokens, heads, head size)
        The chunks of all rows, one after the other.
    keys, values, table, counts, lengths, starts, scale, window
        As in `paged_attention`; lengths include the chunk, whose keys and values are in the pool.
    offsets : torch.Tensor, shape (rows + 1,), int32
        Row r has the queries offsets[r] to offsets[r + 1]: the last tokens of its sequence.
    longest : int
        Tokens of the longest chunk, or more: known to the host, so that nothing waits for the device.
    mode : str
        Which implementation; see `dispatch.Mode`.

    Returns
    -------
    torch.Tensor, shape (tokens, heads, head size)
        0 where a query sees no token.

    Raises
    ------
    KernelInputError
        For tensors of wrong shape, type or device.
    CapabilityError
        For an unsupported head or block size, or a mode that cannot be had.
    """
    rows = len(lengths)
    check_paged(queries, keys, values, table, counts, lengths, starts, rows)
    check("offsets", offsets, (rows + 1,), (torch.int32,), queries)
    if window is not None and window < 1:
        raise KernelInputError(f"window must be at least 1, not {window}")
    tokens, heads, size = queries.shape
    block, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    scale = size**-0.5 if scale is None else scale
    chosen = resolve(mode, queries.device)
    if chosen == "reference":
        return paged_prefill_reference(
            queries, keys, values, table, counts, lengths, offsets, starts=starts, scale=scale,
            window=window, precision=torch.float32,
        )  # fmt: skip
    group_pad = power_of_two(group)
    if group_pad > 128:
        raise CapabilityError(f"{group} query heads for one KV head are not supported: at most 128")
    # float32 products run on the scalar units, whose operands would not fit the registers.
    small = size > 128 or queries.dtype == torch.float32
    at_once = max(16 if small else 64, group_pad) // group_pad
    together = max(32 if size > 128 else 64, block) // block
    output = torch.empty(tokens, heads, size, dtype=queries.dtype, device=queries.device)
    shared = table.ndim == 2
    width = table.shape[-1]
    if rows and tokens and longest > 0:
        with on(queries.device):
            prefill_kernel[(-(-longest // at_once), kv_heads, rows)](
                queries, keys, values, table, counts, lengths, offsets, starts, output,
                scale, 0 if window is None else window, width,
                queries.stride(0), queries.stride(1), *keys.stride()[:3], *values.stride()[:3],
                table.stride(0), 0 if shared else width, counts.stride(0), 0 if shared else 1,
                HEADS=heads, GROUP=group, GROUP_PAD=group_pad, AT_ONCE=at_once,
                SIZE=size, SIZE_PAD=max(16, power_of_two(size)), BLOCK=block, TOGETHER=together,
                WINDOW=window is not None,
                UPCAST=chosen == "interpreter" and queries.dtype == torch.bfloat16,
                num_warps=warps(at_once * group_pad),
            )  # fmt: skip
    return output


def paged_prefill_reference(
    queries: Any,
    keys: Any,
    values: Any,
    table: Any,
    counts: Any,
    lengths: Any,
    offsets: Any,
    *,
    starts: Any = None,
    scale: float,
    window: int | None = None,
    precision: Any = torch.float64,
) -> Any:
    """The same in plain torch, row by row: gather, mask, softmax."""
    block, kv_heads, size = keys.shape[1:]
    group = queries.shape[1] // kv_heads
    output = torch.zeros_like(queries, dtype=precision)
    bounds, ends = offsets.tolist(), lengths.tolist()
    within = torch.arange(block, device=table.device)
    head = torch.arange(kv_heads, device=table.device)[:, None]
    for row, (begin, end) in enumerate(pairwise(bounds)):
        count = counts[row].expand(kv_heads)
        entry = torch.arange(table.shape[-1], device=table.device)
        index = torch.where(entry < count[:, None], table[row].expand(kv_heads, -1), 0).long()
        start = entry * block if starts is None else starts[row]
        position = (start.expand(kv_heads, -1)[..., None] + within).flatten(1)
        held = (entry < count[:, None]).repeat_interleave(block, 1) & (position < ends[row])
        here = torch.arange(ends[row] - (end - begin), ends[row], device=table.device)[:, None]
        seen = held[:, None] & (position[:, None] <= here)
        if window is not None:
            seen &= position[:, None] > here - window
        # (KV heads, tokens, size); what is not held may be anything, NaN too.
        k, v = (x[index, :, head].flatten(1, 2).to(precision) for x in (keys, values))
        v = torch.where(held[..., None], v, 0.0)
        q = queries[begin:end].to(precision).view(end - begin, kv_heads, group, size)
        scores = torch.einsum("qhgd,htd->hgqt", q, k) * scale
        scores = scores.masked_fill(~seen[:, None], -float("inf"))
        # A query that sees nothing has no softmax.
        shares = scores.softmax(-1).nan_to_num(0.0)
        output[begin:end] = torch.einsum("hgqt,htd->qhgd", shares, v).reshape(
            end - begin, *queries.shape[1:]
        )
    return output if precision == torch.float64 else output.to(queries.dtype)


@triton.jit
def prefill_kernel(
    queries, keys, values, table, counts, lengths, offsets, starts, output,
    scale, window, width,
    query_token, query_head, key_block, key_token, key_head, value_block, value_token, value_head,
    table_row, table_head, count_row, count_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, AT_ONCE: tl.constexpr,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
    WINDOW: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    LINES: tl.constexpr = AT_ONCE * GROUP_PAD
    TOKENS: tl.constexpr = TOGETHER * BLOCK
    begin = tl.load(offsets + row)
    chunk = tl.load(offsets + row + 1) - begin
    first_query = tl.program_id(0) * AT_ONCE
    length = tl.load(lengths + row)
    count = tl.minimum(tl.load(counts + row * count_row + kv_head * count_head), width)
    row_table = row.to(tl.int64) * table_row + kv_head * table_head

    line = tl.arange(0, LINES)
    query = first_query + line // GROUP_PAD
    head = kv_head * GROUP + line % GROUP_PAD
    real = (query < chunk) & (line % GROUP_PAD < GROUP)
    column = tl.arange(0, SIZE_PAD)
    inside = column < SIZE
    token = tl.arange(0, TOKENS)
    at = (begin + query).to(tl.int64)
    q = tl.load(
        queries + at[:, None] * query_token + head[:, None] * query_head + column[None, :],
        mask=real[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    if UPCAST:
        q = q.to(tl.float32)
    here = length - chunk + query
    peak = tl.full([LINES], _LOWEST, tl.float32)
    norm = tl.zeros([LINES], tl.float32)
    out = tl.zeros([LINES, SIZE_PAD], tl.float32)

    first = tl.program_id(0) * 0
    last = tl.where(first_query < chunk, count, 0)
    if starts is None:
        # Blocks in order and none missing: those past the tile's last query are not seen.
        furthest = length - chunk + tl.minimum(first_query + AT_ONCE, chunk)
        last = tl.minimum(last, (furthest + BLOCK - 1) // BLOCK)
        if WINDOW:
            first = tl.maximum(length - chunk + first_query - window + 1, 0) // TOKENS * TOGETHER
    for start in range(first, last, TOGETHER):
        entry = start + token // BLOCK
        held = entry < last
        block = tl.load(table + row_table + entry, mask=held, other=0).to(tl.int64)
        if starts is None:
            position = entry * BLOCK + token % BLOCK
        else:
            position = tl.load(starts + row_table + entry, mask=held, other=0) + token % BLOCK
        held = held & (position < length)
        seen = held[None, :] & (position[None, :] <= here[:, None])
        if WINDOW:
            seen = seen & (position[None, :] > here[:, None] - window)
        to = block * key_block + (token % BLOCK) * key_token + kv_head * key_head
        k = tl.load(
            keys + to[:, None] + column[None, :], mask=held[:, None] & inside[None, :], other=0.0
        )
        if UPCAST:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen, scores, -_INF)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp(peak - new_peak)
        w = tl.exp(scores - new_peak[:, None])
        to = block * value_block + (token % BLOCK) * value_token + kv_head * value_head
        v = tl.load(
            values + to[:, None] + column[None, :], mask=held[:, None] & inside[None, :], other=0.0
        )
        if UPCAST:
            v = v.to(tl.float32)
        out = out * shrink[:, None] + tl.dot(w.to(v.dtype), v, input_precision="ieee")
        norm = norm * shrink + tl.sum(w, 1)
        peak = new_peak

    out = out / tl.where(norm > 0, norm, 1.0)[:, None]
    tl.store(
        output + (at[:, None] * HEADS + head[:, None]) * SIZE + column[None, :],
        out.to(output.dtype.element_ty), mask=real[:, None] & inside[None, :],
    )  # fmt: skip
