# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Moving keys and values: into the blocks of a paged pool, and from block to block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
CHUNK = 2048


def write_kv(
    keys: Any, values: Any, key_pool: Any, value_pool: Any, slots: Any, *, mode: Mode = "auto"
) -> None:
    """Store new keys and values in their slots of the pool.

    Parameters
    ----------
    keys, values : torch.Tensor, shape (tokens, KV heads, head size)
        In the pool's type; the last axis contiguous.
    key_pool, value_pool : torch.Tensor, shape (blocks, block size, KV heads, head size)
        Written in place; the last axis contiguous.
    slots : torch.Tensor, shape (tokens,), int64
        Block times block size plus offset, each slot once. A slot outside the pool (-1 for padding)
        is skipped: a wrong one must not write into foreign memory.
    mode : str
        Which implementation; see `dispatch.Mode`.

    Raises
    ------
    KernelInputError
        For tensors of wrong shape, type or device.
    CapabilityError
        For a mode that cannot be had.
    """
    check("key_pool", key_pool, (None, None, None, None), FLOATS, packed=False)
    blocks, block, heads, size = key_pool.shape
    types = (key_pool.dtype,)
    check("value_pool", value_pool, tuple(key_pool.shape), types, key_pool, packed=False)
    check("keys", keys, (None, heads, size), types, key_pool, packed=False)
    check("values", values, tuple(keys.shape), types, key_pool, packed=False)
    check("slots", slots, (keys.shape[0],), (torch.int64,), key_pool)
    if resolve(mode, keys.device) == "reference":
        write_kv_reference(keys, values, key_pool, value_pool, slots)
        return
    if len(slots):
        with on(keys.device):
            write_kernel[(len(slots),)](
                keys, values, key_pool, value_pool, slots, blocks * block, block,
                *keys.stride()[:2], *values.stride()[:2],
                *key_pool.stride()[:3], *value_pool.stride()[:3],
                HEADS=heads, HEADS_PAD=power_of_two(heads),
                SIZE=size, SIZE_PAD=power_of_two(size), num_warps=WARPS,
            )  # fmt: skip


def write_kv_reference(keys: Any, values: Any, key_pool: Any, value_pool: Any, slots: Any) -> None:
    """The same in plain torch."""
    blocks, block = key_pool.shape[:2]
    kept = ((slots >= 0) & (slots < blocks * block)).nonzero()[:, 0]
    at = slots[kept]
    key_pool[at // block, at % block] = keys[kept]
    value_pool[at // block, at % block] = values[kept]


def copy_blocks(
    pools: Sequence[Any], sources: Sequence[int], targets: Sequence[int], *, mode: Mode = "auto"
) -> None:
    """Copy whole blocks within each pool: for copy-on-write, and to compact a pool.

    Parameters
    ----------
    pools : sequence of torch.Tensor, shape (blocks, ...)
        Keys and values of any layers; changed in place. Each block must be contiguous.
    sources, targets : sequence of int
        The content of block `sources[i]` goes to block `targets[i]`.
    mode : str
        Which implementation; see `dispatch.Mode`.

    Raises
    ------
    KernelInputError
        If a block is out of range, is a target twice, or is source and target: the copies run in no
        order. Nothing was changed then.
    CapabilityError
        For a mode that cannot be had.
    """
    if len(sources) != len(targets):
        raise KernelInputError(f"{len(sources)} sources for {len(targets)} targets")
    if len(set(targets)) < len(targets) or set(targets) & set(sources):
        raise KernelInputError("a block is a target twice, or both source and target")
    for pool in pools:
        check("pool", pool, (None,) * max(pool.ndim, 2), FLOATS, pools[0], packed=False)
        if not all(0 <= block < len(pool) for block in (*sources, *targets)):
            raise KernelInputError(f"a block lies outside the pool of {len(pool)} blocks")
        if not pool[:1].is_contiguous():
            raise KernelInputError("the blocks of a pool must be contiguous")
    if not sources:
        return
    for pool in pools:
        source, target = torch.tensor([list(sources), list(targets)], device=pool.device)
        if resolve(mode, pool.device) == "reference":
            copy_blocks_reference(pool, source, target)
            continue
        with on(pool.device):
            size = pool[0].numel()
            copy_kernel[(len(sources), -(-size // CHUNK))](
                pool, source, target, size, pool.stride(0), CHUNK=CHUNK, num_warps=WARPS
            )


def copy_blocks_reference(pool: Any, sources: Any, targets: Any) -> None:
    """The same in plain torch, for one pool."""
    pool[targets] = pool[sources]


def compaction(held: Sequence[int]) -> tuple[list[int], list[int]]:
    """Moves that bring the held blocks of a pool into its first `len(held)` blocks.

    Only blocks beyond that prefix move, each into a hole of it.

    Parameters
    ----------
    held : sequence of int
        Blocks in use, each once.

    Returns
    -------
    sources, targets : list of int
        For `copy_blocks`; tables that name a source must name its target afterwards.
    """
    holes = sorted(set(range(len(held))) - set(held))
    return sorted(block for block in held if block >= len(held)), holes


@triton.jit
def write_kernel(
    keys, values, key_pool, value_pool, slots, capacity, block,
    key_token, key_head, value_token, value_head,
    key_pool_block, key_pool_token, key_pool_head,
    value_pool_block, value_pool_token, value_pool_head,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head = tl.arange(0, HEADS_PAD)[:, None]
    column = tl.arange(0, SIZE_PAD)[None, :]
    inside = (head < HEADS) & (column < SIZE) & (slot >= 0) & (slot < capacity)
    k = tl.load(keys + token * key_token + head * key_head + column, mask=inside)
    v = tl.load(values + token * value_token + head * value_head + column, mask=inside)
    at = slot // block
    offset = slot % block
    to = at * key_pool_block + offset * key_pool_token + head * key_pool_head + column
    tl.store(key_pool + to, k, mask=inside)
    to = at * value_pool_block + offset * value_pool_token + head * value_pool_head + column
    tl.store(value_pool + to, v, mask=inside)


@triton.jit
def copy_kernel(pool, sources, targets, size, stride, CHUNK: tl.constexpr):
    pair = tl.program_id(0)
    element = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = element < size
    source = tl.load(sources + pair) * stride
    target = tl.load(targets + pair) * stride
    tl.store(pool + target + element, tl.load(pool + source + element, mask=inside), mask=inside)
