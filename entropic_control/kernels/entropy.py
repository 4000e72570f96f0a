# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Entropy, varentropy and normaliser of rows of logits at a temperature of each row's own.

With w = exp(y), y = (z - peak) / T and s = sum w: H = ln s - E[y], V = E[y^2] - E[y]^2. The logits are
read once; entropy at T = 1 comes from the same pass at one more exponential a token.
"""

from __future__ import annotations

from typing import Any

from entropic_control.kernels._torch import torch
from entropic_control.kernels._triton import tl, triton
from entropic_control.kernels.dispatch import Mode, on, resolve
from entropic_control.kernels.rows import (
    RowMoments,
    Workspace,
    check_logits,
    fitting,
    inverse_temperature,
    last_to_finish,
    moments_reference,
    or_nan,
    row_stage,
    stats_of,
    temperatures,
    tile_stage,
)

OPTIONS = {"num_warps": 4}


def entropy(
    logits: Any,
    temperature: Any = 1.0,
    *,
    raw: bool = True,
    mode: Mode = "auto",
    workspace: Workspace | None = None,
) -> RowMoments:
    """Moments of softmax(logits / T) for each row.

    Parameters
    ----------
    logits : torch.Tensor, shape (rows, vocab)
        float32, float16 or bfloat16; -inf marks a masked token. The last axis must be contiguous.
    temperature : float or torch.Tensor, shape (rows,), float32
        T; at or below 1e-6 the limit T -> 0, whose entropy is 0.
    raw : bool
        Whether the entropy at T = 1 is wanted too.
    mode : str
        Which implementation; see `dispatch.Mode`.
    workspace : Workspace, optional
        Scratch to reuse.

    Returns
    -------
    RowMoments
        float32 tensors (rows,); NaN in rows that hold NaN, +inf or nothing finite.

    Raises
    ------
    KernelInputError
        For tensors of wrong shape, type or device.
    CapabilityError
        For a mode that cannot be had.
    """
    rows, vocab = check_logits(logits)
    temperature = temperatures(temperature, logits)
    if resolve(mode, logits.device) == "reference":
        moments = moments_reference(logits, temperature, torch.float32)
        nan = torch.full_like(moments.entropy, float("nan"))
        return moments if raw else moments._replace(raw_entropy=nan)
    space = fitting(workspace, logits)
    out = torch.empty(5, rows, dtype=torch.float32, device=logits.device)
    live = torch.empty(rows, dtype=torch.int32, device=logits.device)
    valid = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        with on(logits.device):
            entropy_kernel[(rows * space.tiling.tiles,)](
                logits, temperature, out, live, valid, space.stats, space.tickets,
                vocab, logits.stride(0), rows,
                TILES=space.tiling.tiles, RUNS=space.tiling.runs, NT=space.tiling.padded_tiles,
                RAW=raw, **OPTIONS,
            )  # fmt: skip
    return RowMoments(*(*out, live, valid))


@triton.jit
def entropy_kernel(
    logits, temperature_of, out, live_out, valid_out, stats, tickets, vocab, stride, rows,
    TILES: tl.constexpr, RUNS: tl.constexpr, NT: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    temperature = tl.load(temperature_of + row)
    inverse = inverse_temperature(temperature)
    row_logits = logits + row.to(tl.int64) * stride
    row_stats = stats_of(stats, row, TILES)
    tile_stage(
        row_logits, row_stats, row_stats, tile, vocab, inverse,
        TILES=TILES, RUNS=RUNS, RAW=RAW, KEEP_RUNS=False,
    )  # fmt: skip
    if last_to_finish(tickets + row, TILES):
        valid, live, peak, _, log_norm, h, v, _, raw_h = row_stage(
            row_stats, temperature, inverse, TILES=TILES, NT=NT, RAW=RAW
        )
        tl.store(out + row, or_nan(valid, h))
        tl.store(out + rows + row, or_nan(valid, v))
        tl.store(out + 2 * rows + row, or_nan(valid, raw_h))
        tl.store(out + 3 * rows + row, or_nan(valid, log_norm))
        tl.store(out + 4 * rows + row, or_nan(valid, peak))
        tl.store(live_out + row, live)
        tl.store(valid_out + row, valid)
