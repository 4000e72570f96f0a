# ruff: noqa: E402 - imports that need torch follow the check that it is there
"""Decode and prefill attention over paged blocks against float64."""

from __future__ import annotations

import math

import pytest
from support import close

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from entropic_control.errors import CapabilityError
from entropic_control.kernels.dispatch import KernelInputError
from entropic_control.kernels.paged_attention import paged_attention, paged_attention_reference
from entropic_control.kernels.paged_prefill import paged_prefill, paged_prefill_reference

pytestmark = pytest.mark.kernels
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = tuple(TOLERANCES)
# heads, KV heads, head size, block size: grouped, plain, one KV head, odd sizes, wide
SHAPES = (
    (9, 3, 64, 16),
    (4, 4, 80, 8),
    (8, 1, 256, 32),
    (16, 2, 128, 16),
    (2, 2, 16, 128),
    (40, 2, 32, 16),
)


def pool(rows, heads, kv_heads, size, block, width, dtype):
    """Queries, keys, values and a table without repetition; unused memory holds NaN."""
    blocks = rows * width + 3
    q = torch.randn(rows, heads, size).to(dtype)
    k, v = (torch.full((blocks, block, kv_heads, size), float("nan")).to(dtype) for _ in range(2))
    table = torch.randperm(blocks)[: rows * width].view(rows, width).int()
    k[table.long()] = torch.randn(rows, width, block, kv_heads, size).to(dtype)
    v[table.long()] = torch.randn(rows, width, block, kv_heads, size).to(dtype)
    return q, k, v, table


def spoil_past_the_end(k, v, table, lengths):
    """NaN where a sequence has no token yet: memory that must not be looked at."""
    block = k.shape[1]
    for row, length in enumerate(lengths.tolist()):
        for entry, index in enumerate(table[row].tolist()):
            k[index, max(length - entry * block, 0) :] = float("nan")
            v[index, max(length - entry * block, 0) :] = float("nan")


def compare(actual, expected, dtype):
    close(actual.output, expected.output, TOLERANCES[dtype])
    assert actual.output.dtype == dtype
    close(actual.log_norm, expected.log_norm, 1e-5)
    close(actual.masses, expected.masses, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "block"), SHAPES)
def test_dense_decode(heads, kv_heads, size, block, dtype):
    width = 9 if block < 128 else 3
    lengths = torch.tensor([1, block * (width - 1) + 3, block * width], dtype=torch.int32)
    q, k, v, table = pool(3, heads, kv_heads, size, block, width, dtype)
    spoil_past_the_end(k, v, table, lengths)
    counts = (lengths + block - 1) // block
    expected = paged_attention_reference(q, k, v, table, counts, lengths, scale=size**-0.5)
    for splits in (1, 3):
        actual = paged_attention(q, k, v, table, counts, lengths, splits=splits, mode="interpreter")
        compare(actual, expected, dtype)
    close(actual.masses.sum(-1), torch.ones(3, heads), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("per_head", [False, True])
def test_retained_blocks(per_head, window, dtype):
    """Any subset of the blocks, in any order, by row or by KV head, some rows with none."""
    rows, heads, kv_heads, size, block, width = 4, 6, 2, 32, 16, 21
    q, k, v, _ = pool(rows, heads, kv_heads, size, block, width, dtype)
    k, v = k.nan_to_num(0.5), v.nan_to_num(0.5)
    shape = (rows, kv_heads) if per_head else (rows,)
    table = torch.randint(0, len(k), (*shape, width), dtype=torch.int32)
    order = torch.stack([torch.randperm(40)[:width] for _ in range(math.prod(shape))])
    starts = (order.view(*shape, width) * block).int()
    counts = torch.tensor([0, 1, 13, width], dtype=torch.int32)
    counts = counts[:, None].repeat(1, kv_heads) if per_head else counts
    if per_head:
        counts[2, 1] = 5
    lengths = torch.tensor([100, 40 * block, 30 * block + 5, 17], dtype=torch.int32)
    arguments = (q, k, v, table, counts, lengths)
    expected = paged_attention_reference(*arguments, starts=starts, scale=0.3, window=window)
    actual = paged_attention(
        *arguments, starts=starts, scale=0.3, window=window, splits=4, mode="interpreter"
    )
    compare(actual, expected, dtype)
    assert not actual.output[0].any()
    assert not actual.masses[0].any()
    assert actual.log_norm[0].isneginf().all()
    without = paged_attention(
        *arguments, starts=starts, scale=0.3, window=window, masses=False, mode="interpreter"
    )
    assert without.masses is None
    close(without.output, expected.output, TOLERANCES[dtype])


@pytest.mark.parametrize("mode", ["interpreter", "reference"])
def test_one_list_for_all_heads_equals_the_same_list_for_each(mode):
    q, k, v, table = pool(2, 4, 2, 16, 16, 5, torch.float32)
    counts, lengths = torch.tensor([5, 3]).int(), torch.tensor([80, 40]).int()
    once = paged_attention(q, k, v, table, counts, lengths, mode=mode)
    each = paged_attention(
        q, k, v, table[:, None].repeat(1, 2, 1), counts[:, None].repeat(1, 2), lengths, mode=mode
    )
    assert all(torch.equal(a, b) for a, b in zip(once, each, strict=True))


def test_reference_is_softmax_attention():
    q, k, v, table = pool(2, 4, 2, 16, 8, 4, torch.float32)
    lengths, counts = torch.tensor([29, 11]).int(), torch.tensor([4, 2]).int()
    actual = paged_attention_reference(q, k, v, table, counts, lengths, scale=0.25)
    for row, length in enumerate(lengths.tolist()):
        keys, values = (x[table[row].long()].flatten(0, 1)[:length].double() for x in (k, v))
        for head in range(4):
            shares = torch.softmax(keys[:, head // 2] @ q[row, head].double() * 0.25, 0)
            close(actual.output[row, head], shares @ values[:, head // 2], 1e-12)
            padded = torch.nn.functional.pad(shares, (0, 32 - length)).view(4, 8).sum(-1)
            close(actual.masses[row, head], padded, 1e-12)


def test_extreme_scores_stay_finite():
    """fp16 keys at the edge of their range, in blocks far apart: one token takes everything."""
    q, k, v, table = pool(1, 2, 1, 16, 16, 8, torch.float16)
    q, k = q.abs() * 100, k.fill_(-65504.0)
    k[table[0, 6].long(), 3] = 65504.0
    counts, lengths = torch.tensor([8]).int(), torch.tensor([128]).int()
    for mode in ("interpreter", "reference"):
        actual = paged_attention(q, k, v, table, counts, lengths, splits=2, mode=mode)
        assert torch.equal(actual.output[0, 0], v[table[0, 6].long(), 3, 0])
        assert actual.masses[0, 0].tolist() == [0, 0, 0, 0, 0, 0, 1, 0]


def test_equal_keys_share_evenly():
    q, k, v, table = pool(1, 2, 2, 16, 16, 6, torch.float32)
    k.fill_(0.5)
    counts, lengths = torch.tensor([6]).int(), torch.tensor([90]).int()
    actual = paged_attention(q, k, v, table, counts, lengths, mode="interpreter")
    close(actual.masses[0, 0], torch.tensor([16.0] * 5 + [10.0]) / 90, 1e-6)


@pytest.mark.parametrize("layout", ["blocks first", "heads first"])
def test_pools_may_be_strided(layout):
    q, k, v, table = pool(2, 4, 2, 16, 16, 4, torch.float32)
    counts, lengths = torch.tensor([4, 3]).int(), torch.tensor([64, 40]).int()
    expected = paged_attention_reference(q, k, v, table, counts, lengths, scale=0.25)
    if layout == "heads first":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    else:
        both = torch.stack([k, v], 1)
        k, v = both[:, 0], both[:, 1]
    actual = paged_attention(q, k, v, table, counts, lengths, mode="interpreter")
    compare(actual, expected, torch.float32)


@pytest.mark.parametrize(
    ("window", "dtype"), [(None, torch.float32), (20, torch.bfloat16), (20, torch.float16)], ids=str
)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "block"), SHAPES)
def test_prefill(heads, kv_heads, size, block, window, dtype):
    """Chunks of many lengths, one of them a decode step and one empty."""
    width = 7 if block < 128 else 2
    lengths = torch.tensor([block + 3, min(70, width * block), 5, 50], dtype=torch.int32)
    chunks = torch.tensor([1, int(lengths[1]), 0, 23])
    _, k, v, table = pool(4, heads, kv_heads, size, block, width, dtype)
    spoil_past_the_end(k, v, table, lengths)
    q = torch.randn(int(chunks.sum()), heads, size).to(dtype)
    offsets = torch.nn.functional.pad(chunks.cumsum(0), (1, 0)).int()
    counts = ((lengths + block - 1) // block).int()
    arguments = (q, k, v, table, counts, lengths, offsets)
    expected = paged_prefill_reference(*arguments, scale=size**-0.5, window=window)
    for starts in (None, (torch.arange(width) * block).int().expand(4, width).contiguous()):
        actual = paged_prefill(*arguments, 70, starts=starts, window=window, mode="interpreter")
        close(actual, expected, TOLERANCES[dtype])
        if dtype != torch.float32 or heads != 9:
            break


def test_prefill_of_pruned_rows():
    q, k, v, table = pool(1, 4, 2, 32, 16, 6, torch.float32)
    q = torch.randn(20, 4, 32)
    starts = torch.tensor([[0, 32, 48, 160, 176, 192]], dtype=torch.int32)
    arguments = (
        q,
        k,
        v,
        table,
        torch.tensor([6]).int(),
        torch.tensor([200]).int(),
        torch.tensor([0, 20]).int(),
    )
    expected = paged_prefill_reference(*arguments, starts=starts, scale=0.2)
    actual = paged_prefill(*arguments, 20, starts=starts, scale=0.2, mode="interpreter")
    close(actual, expected, 2e-6)


def test_a_chunk_of_one_token_is_a_decode_step():
    q, k, v, table = pool(2, 4, 2, 32, 16, 4, torch.float32)
    counts, lengths = torch.tensor([4, 2]).int(), torch.tensor([64, 20]).int()
    for mode in ("interpreter", "reference"):
        chunked = paged_prefill(
            q, k, v, table, counts, lengths, torch.tensor([0, 1, 2]).int(), 1, mode=mode
        )
        decoded = paged_attention(q, k, v, table, counts, lengths, mode=mode)
        close(chunked, decoded.output, 1e-6)


def test_bad_arguments_are_named():
    q, k, v, table = pool(2, 4, 2, 32, 16, 4, torch.float32)
    counts, lengths = torch.tensor([4, 2]).int(), torch.tensor([64, 20]).int()
    good = {
        "queries": q,
        "keys": k,
        "values": v,
        "table": table,
        "counts": counts,
        "lengths": lengths,
    }
    for match, error, changes in (
        (
            "head size 320",
            CapabilityError,
            {
                "queries": torch.zeros(2, 4, 320),
                "keys": torch.zeros(3, 16, 2, 320),
                "values": torch.zeros(3, 16, 2, 320),
            },
        ),
        ("block size 12", CapabilityError, {"keys": k[:, :12], "values": v[:, :12]}),
        ("no multiple", KernelInputError, {"queries": q[:, :3]}),
        ("keys must be", KernelInputError, {"keys": k.half()}),
        ("values must have", KernelInputError, {"values": v[:, :, :1]}),
        ("queries must be", KernelInputError, {"queries": q.double()}),
        ("table must be torch.int32", KernelInputError, {"table": table.long()}),
        ("counts must have", KernelInputError, {"counts": counts[:1]}),
        ("lengths must have", KernelInputError, {"lengths": lengths[:, None]}),
        ("starts must have", KernelInputError, {"starts": table[:, :2]}),
        ("window", KernelInputError, {"window": 0}),
        ("splits", KernelInputError, {"splits": 0}),
        ("keys must be a torch tensor", KernelInputError, {"keys": [1]}),
        (
            "contiguous",
            KernelInputError,
            {"queries": q.transpose(1, 2).contiguous().transpose(1, 2)},
        ),
    ):
        with pytest.raises(error, match=match):
            paged_attention(**{**good, **changes})
    with pytest.raises(KernelInputError, match="offsets must have"):
        paged_prefill(**good, offsets=counts, longest=1)
