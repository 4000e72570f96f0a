# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Counter-based uniform numbers: bit for bit those of ``numpy.random.Philox(key=seed, counter=step)``.

Philox 4x64-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11).
numpy puts the key in the first key word and the counter, *incremented before the first block*, in the
low counter words, and hands out the block's first word first.
"""

from __future__ import annotations

from collections.abc import Iterable

from entropic_control.kernels._triton import tl, triton

_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


@triton.jit
def uniform(seed, step):
    """The number in [0, 1), float64, of int64 scalars `seed` (bits of a uint64) and `step`."""
    k0 = seed.to(tl.uint64, bitcast=True)
    c0 = step.to(tl.uint64, bitcast=True) + 1
    zero = c0 ^ c0
    # The step after 2**64 - 1 carries into the second counter word.
    c1 = (c0 == 0).to(tl.uint64)
    word, _, _, _ = tl.philox_impl(c0, c1, zero, zero, k0, zero)
    # 53 bits in two halves: a uint64 does not convert to float64 exactly in every backend.
    high = (word >> 37).to(tl.int32).to(tl.float64)
    low = ((word >> 11) & 0x3FFFFFF).to(tl.int32).to(tl.float64)
    return high * 7.450580596923828e-09 + low * 1.1102230246251565e-16


def uniforms_reference(seeds: Iterable[int], steps: Iterable[int]) -> list[float]:
    """The same in plain integers, one number for each pair."""
    return [
        (_first_word(int(seed) & _MASK, int(step) & _MASK) >> 11) * 2.0**-53
        for seed, step in zip(seeds, steps, strict=True)
    ]


def _first_word(seed: int, step: int) -> int:
    counter = [(step + 1) & _MASK, (step + 1) >> 64, 0, 0]
    key = [seed, 0]
    for _ in range(10):
        first, second = _MULTIPLIERS[0] * counter[0], _MULTIPLIERS[1] * counter[2]
        counter = [
            (second >> 64) ^ counter[1] ^ key[0],
            second & _MASK,
            (first >> 64) ^ counter[3] ^ key[1],
            first & _MASK,
        ]
        key = [(k + weyl) & _MASK for k, weyl in zip(key, _WEYL, strict=True)]
    return counter[0]
