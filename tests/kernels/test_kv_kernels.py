# ruff: noqa: E402 - imports that need torch follow the check that it is there
"""Writing into a paged pool, copying its blocks, compacting it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from entropic_control.kernels.dispatch import KernelInputError
from entropic_control.kernels.kv_cache import compaction, copy_blocks, write_kv

pytestmark = pytest.mark.kernels
MODES = ("interpreter", "reference")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "size", "block"), [(1, 64, 16), (3, 80, 8), (2, 16, 32)])
def test_write_puts_tokens_in_their_slots_and_nothing_else(heads, size, block, dtype, mode):
    blocks, tokens = 6, 20
    pools = [torch.randn(blocks, block, heads, size).to(dtype) for _ in range(2)]
    new = [torch.randn(tokens, heads, size).to(dtype) for _ in range(2)]
    slots = torch.randperm(blocks * block)[:tokens]
    # Padding, and slots that lie outside the pool, must be skipped.
    slots[3], slots[7], slots[11] = -1, blocks * block, 2**40
    expected = [pool.clone() for pool in pools]
    for pool, values in zip(expected, new, strict=True):
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < blocks * block:
                pool[slot // block, slot % block] = values[token]
    write_kv(*new, *pools, slots, mode=mode)
    assert all(torch.equal(a, b) for a, b in zip(pools, expected, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_write_into_strided_memory(mode):
    both = torch.zeros(5, 2, 16, 2, 8)
    new = torch.randn(4, 2, 2, 8)
    write_kv(new[:, 0], new[:, 1], both[:, 0], both[:, 1], torch.tensor([0, 17, 34, 79]), mode=mode)
    assert torch.equal(both[1, 0, 1], new[1, 0])
    assert torch.equal(both[4, 1, 15], new[3, 1])
    assert both.count_nonzero() == 4 * 2 * 2 * 8


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(16, 2, 64), (8, 3, 5), (1,), (16, 9, 80)])
def test_copy(shape, dtype, mode):
    pools = [torch.randn(9, *shape).to(dtype) for _ in range(2)]
    before = [pool.clone() for pool in pools]
    copy_blocks(pools, [3, 3, 8], [0, 7, 1], mode=mode)
    for pool, old in zip(pools, before, strict=True):
        for block, origin in enumerate([3, 8, 2, 3, 4, 5, 6, 3, 8]):
            assert torch.equal(pool[block], old[origin])


@pytest.mark.parametrize("mode", MODES)
def test_refused_copies_change_nothing(mode):
    pools = [torch.randn(4, 16), torch.randn(3, 16)]
    before = [pool.clone() for pool in pools]
    for sources, targets in (
        ([0, 1], [2, 2]),
        ([0, 1], [1, 2]),
        ([0], [4]),
        ([0], [3]),
        ([-1], [2]),
        ([0], []),
    ):
        with pytest.raises(KernelInputError):
            copy_blocks(pools, sources, targets, mode=mode)
    with pytest.raises(KernelInputError, match="contiguous"):
        copy_blocks([torch.randn(4, 8, 8).transpose(1, 2)], [0], [1], mode=mode)
    assert all(torch.equal(a, b) for a, b in zip(pools, before, strict=True))
    copy_blocks(pools, [], [], mode=mode)


@given(st.sets(st.integers(0, 60)))
def test_compaction_fills_the_prefix_with_the_fewest_moves(held):
    sources, targets = compaction(sorted(held, reverse=True))
    after = (held - set(sources)) | set(targets)
    assert after == set(range(len(held)))
    assert len(sources) == len(targets) == sum(block >= len(held) for block in held)


def test_bad_arguments_are_named():
    pool, new, slots = torch.zeros(4, 16, 2, 8), torch.zeros(3, 2, 8), torch.zeros(3).long()
    for match, arguments in {
        "keys must have": (new[:, :1], new, pool, pool, slots),
        "values must be": (new, new.half(), pool, pool, slots),
        "value_pool must have": (new, new, pool, pool[:2], slots),
        "slots must be torch.int64": (new, new, pool, pool, slots.int()),
        "slots must have": (new, new, pool, pool, slots[:2]),
        "key_pool must be": (new, new, pool.long(), pool, slots),
    }.items():
        with pytest.raises(KernelInputError, match=match):
            write_kv(*arguments)
