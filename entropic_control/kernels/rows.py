# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What the kernels over rows of logits share: tiles, their statistics, and a row's moments from them.

One program takes one tile of one row, so that even a single row fills the device, and leaves a few
numbers; the last program of a row to finish puts them together. A second launch in place of "the last
to finish" would cost its latency at each token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from entropic_control.kernels._torch import torch
from entropic_control.kernels._triton import tl, triton
from entropic_control.kernels.dispatch import FLOATS, KernelInputError, check, power_of_two

GREEDY = 1e-6
"""Temperatures at or below this are the limit T -> 0."""

HOTTEST = 1e27
"""Higher temperatures are taken for this one, the limit T -> inf, at which a masked token still weighs
exactly nothing."""

RUN = 256
"""Tokens in a run, the unit whose probability mass is kept for sampling."""

STATS = 7

_RUN = tl.constexpr(RUN)
_GREEDY = tl.constexpr(GREEDY)
_HOTTEST = tl.constexpr(HOTTEST)
_INF = tl.constexpr(float("inf"))
_FAR = tl.constexpr(-1e30)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_STATS = tl.constexpr(STATS)


class RowMoments(NamedTuple):
    """Tensors of shape (rows,); NaN where `valid` is false."""

    entropy: Any
    """H at the row's temperature, nats."""
    varentropy: Any
    """Var(ln p) at the row's temperature, nats^2."""
    raw_entropy: Any
    """H at T = 1, nats; NaN if it was not asked for."""
    log_norm: Any
    """ln sum exp((z - peak) / T)."""
    peak: Any
    """The largest logit."""
    live: Any
    """Tokens with a finite logit, int32; 0 where `valid` is false."""
    valid: Any
    """False where the row held NaN, +inf or no finite logit, or its temperature is NaN, infinite or
    negative."""


class Tiling(NamedTuple):
    """How a row is cut."""

    runs: int
    """Runs in a tile, a power of two."""
    tiles: int
    """Tiles in a row."""

    @property
    def padded_tiles(self) -> int:
        return power_of_two(self.tiles)

    @property
    def padded_runs(self) -> int:
        return power_of_two(self.tiles * self.runs)


class Workspace(NamedTuple):
    """Scratch of the row kernels for one batch shape; reuse it to allocate nothing in a step.

    A workspace serves one kernel at a time: launches that share it must be on one stream.
    """

    tiling: Tiling
    stats: Any
    """Shape (rows, 7, tiles), float32."""
    runs: Any
    """Mass of each run, shape (rows, runs of a row), float32."""
    tickets: Any
    """Tiles of each row that are done, shape (rows,), int32; zero between launches."""


def workspace(rows: int, vocab: int, device: Any, runs: int | None = None) -> Workspace:
    """A workspace for `rows` rows of `vocab` logits.

    Parameters
    ----------
    rows, vocab : int
        Shape of the logits.
    device : torch.device
        Where they live.
    runs : int, optional
        Runs in a tile, a power of two; by default 16 (4,096 tokens), or 4 where that leaves too few
        programs to fill the device.
    """
    if runs is None:
        few = rows * -(-vocab // (16 * RUN)) < 2 * _processors(device)
        runs = 4 if few else 16
    elif runs < 1 or runs != power_of_two(runs):
        raise KernelInputError(f"runs must be a power of two, not {runs}")
    tiling = Tiling(runs, -(-vocab // (runs * RUN)))
    return Workspace(
        tiling,
        torch.empty(rows, STATS, tiling.tiles, dtype=torch.float32, device=device),
        torch.empty(rows, tiling.tiles * runs, dtype=torch.float32, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )


def _processors(device: Any) -> int:
    if torch.device(device).type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def check_logits(logits: Any) -> tuple[int, int]:
    """Check logits of shape (rows, vocab); returns their shape."""
    check("logits", logits, (None, None), FLOATS, packed=False)
    rows, vocab = logits.shape
    if not 1 <= vocab < 1 << 24:
        raise KernelInputError(f"logits must have between 1 and 2**24 - 1 columns, not {vocab}")
    return rows, vocab


def temperatures(temperature: Any, logits: Any) -> Any:
    """The temperature of each row of the logits as a float32 tensor (rows,)."""
    rows = logits.shape[0]
    if not isinstance(temperature, torch.Tensor):
        return torch.full((rows,), float(temperature), dtype=torch.float32, device=logits.device)
    check("temperature", temperature, (rows,), (torch.float32,), like=logits)
    return temperature


def fitting(space: Workspace | None, logits: Any) -> Workspace:
    """`space` if it fits the logits, a new one if it is None."""
    rows, vocab = logits.shape
    if space is None:
        return workspace(rows, vocab, logits.device)
    tiling = space.tiling
    if space.stats.device != logits.device:
        raise KernelInputError(f"workspace is on {space.stats.device}, logits on {logits.device}")
    if len(space.tickets) < rows or tiling.tiles != -(-vocab // (tiling.runs * RUN)):
        raise KernelInputError(
            f"workspace is for {len(space.tickets)} rows of up to {tiling.tiles * tiling.runs * RUN} "
            f"logits, not {rows} rows of {vocab}"
        )
    return space


def moments_reference(logits: Any, temperature: Any, precision: Any = torch.float64) -> RowMoments:
    """The moments of each row in plain torch; see `RowMoments`."""
    z = logits.to(precision)
    top = z.amax(-1)
    valid = torch.isfinite(top) & usable(temperature)
    peak = torch.where(valid, top, 0.0)
    centred = torch.where(valid[:, None], z - peak[:, None], 0.0)
    greedy = temperature <= GREEDY
    inverse = 1.0 / within(temperature).to(precision)
    log_norm, entropy, varentropy = _moments(centred * inverse[:, None])
    raw_entropy = _moments(centred)[1]

    def column(values: Any, when_greedy: Any = 0.0) -> Any:
        values = torch.where(greedy, when_greedy, values)
        return torch.where(valid, values, float("nan")).to(precision)

    return RowMoments(
        column(entropy),
        column(varentropy),
        column(raw_entropy, raw_entropy),
        column(log_norm),
        column(peak, peak),
        torch.where(valid, torch.isfinite(z).sum(-1), 0).to(torch.int32),
        valid,
    )


def usable(temperature: Any) -> Any:
    """Whether rows can be drawn at their temperatures: 0 or more, and finite."""
    return (temperature >= 0) & (temperature < float("inf"))


def within(temperature: Any) -> Any:
    """The temperatures that weights are computed at: not greedy, not hotter than `HOTTEST`."""
    return temperature.clamp(min=GREEDY, max=HOTTEST)


def _moments(y: Any) -> tuple[Any, Any, Any]:
    w = y.exp()
    y = torch.where(w > 0, y, 0.0)
    norm = w.sum(-1)
    mean = (w * y).sum(-1) / norm
    spread = (w * (y - mean[:, None]) ** 2).sum(-1) / norm
    return norm.log(), (norm.log() - mean).clamp(min=0.0), spread


@triton.jit
def inverse_temperature(temperature):
    """1 / T, or 1 for greedy rows, whose weights at T are not used.

    NaN for a temperature that is none: then no mass is above 0, and the row is invalid. To look at the
    temperature again where the masses are summed up costs registers that there are not.
    """
    usable = tl.where(temperature >= 0.0, 1.0, float("nan"))
    inverse = tl.where(temperature > _GREEDY, 1.0 / within_limits(temperature), usable)
    return inverse + temperature * 0.0


@triton.jit
def within_limits(temperature):
    """The temperature that weights are computed at: not greedy, not hotter than `HOTTEST`."""
    return tl.minimum(tl.maximum(temperature, _GREEDY), _HOTTEST)


@triton.jit
def tokens_of(tile, RUNS: tl.constexpr):
    """The tokens of a tile, shape (RUNS, RUN)."""
    run = tile * RUNS + tl.arange(0, RUNS)
    return run[:, None] * _RUN + tl.arange(0, _RUN)[None, :]


@triton.jit
def load_tile(row_logits, tile, vocab, RUNS: tl.constexpr):
    """Logits of a tile as float32, shape (RUNS, RUN); -inf past the vocabulary."""
    token = tokens_of(tile, RUNS)
    return tl.load(row_logits + token, mask=token < vocab, other=-_INF).to(tl.float32)


@triton.jit
def tile_stage(
    row_logits, row_stats, row_runs, tile, vocab, inverse,
    TILES: tl.constexpr, RUNS: tl.constexpr, RAW: tl.constexpr, KEEP_RUNS: tl.constexpr,
):  # fmt: skip
    """Statistics of one tile, relative to the tile's own peak.

    Instructions count here as much as bytes. So nothing looks for NaN or +inf: either makes the sum of
    the weights NaN. And masked tokens are clamped to a finite y of no weight, which needs no selection
    to keep 0 * -inf out of the sums.
    """
    z = load_tile(row_logits, tile, vocab, RUNS)
    peak = tl.max(z)
    y = z - tl.where(peak == -_INF, 0.0, peak)
    y = tl.maximum(y, _FAR, propagate_nan=tl.PropagateNan.ALL)
    out = row_stats + tile
    tl.store(out, peak)
    tl.store(out + TILES, tl.sum((z > -_INF).to(tl.float32)))
    # A tile without live tokens weighs nothing, but its clamped peak would.
    some = tl.where(peak == -_INF, 0.0, 1.0)
    if RAW:
        w = tl.exp2(y * _LOG2E)
        tl.store(out + 2 * TILES, tl.sum(w) * some)
        tl.store(out + 3 * TILES, tl.sum(w * y) * some)
    y = y * (inverse * _LOG2E)
    w = tl.exp2(y)
    first = w * y
    mass = tl.sum(w, 1)
    tl.store(out + 4 * TILES, tl.sum(mass, 0) * some)
    tl.store(out + 5 * TILES, tl.sum(first) * some)
    tl.store(out + 6 * TILES, tl.sum(first * y) * some)
    if KEEP_RUNS:
        tl.store(row_runs + tile * RUNS + tl.arange(0, RUNS), mass * some)


@triton.jit
def last_to_finish(ticket, TILES: tl.constexpr):
    """Whether this program is the last of its row; only then may it read what the others stored."""
    tl.debug_barrier()
    done = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == TILES - 1
    tl.debug_barrier()
    if done:
        tl.store(ticket, 0)
    return done


@triton.jit
def row_stage(
    row_stats, temperature, inverse, TILES: tl.constexpr, NT: tl.constexpr, RAW: tl.constexpr
):
    """Moments of a row from its tiles, in float64: shifting the tiles to one peak cancels digits.

    With d the shift of a tile, w' = w e^d and y' = y + d, so that
    sum w'y' = e^d (S1 + d S0) and sum w'y'^2 = e^d (S2 + 2 d S1 + d^2 S0).
    """
    tile = tl.arange(0, NT)
    inside = tile < TILES
    at = row_stats + tile
    tile_peak = tl.load(at, mask=inside, other=-_INF, cache_modifier=".cg")
    live = tl.sum(tl.load(at + TILES, mask=inside, other=0.0, cache_modifier=".cg"), 0)
    peak = tl.max(tile_peak, 0)
    some = tile_peak != -_INF
    # The difference of two float32 extremes overflows float32.
    below = tile_peak.to(tl.float64) - tl.where(peak == -_INF, 0.0, peak).to(tl.float64)
    below = tl.where(some, below, 0.0)
    raw_norm = tl.sum(below, 0) * 0.0 + float("nan")
    raw_entropy = raw_norm
    if RAW:
        s0 = tl.load(at + 2 * TILES, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float64)
        s1 = tl.load(at + 3 * TILES, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float64)
        c = tl.exp(below)
        raw_norm = tl.sum(c * s0, 0)
        mean = tl.sum(c * (s1 + below * s0), 0) / raw_norm
        raw_entropy = tl.maximum(tl.log(raw_norm) - mean, 0.0)
    d = below * inverse.to(tl.float64)
    c = tl.exp(d)
    s0 = tl.load(at + 4 * TILES, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float64)
    s1 = tl.load(at + 5 * TILES, mask=inside, other=0.0, cache_modifier=".cg") * _LN2
    s2 = tl.load(at + 6 * TILES, mask=inside, other=0.0, cache_modifier=".cg") * (_LN2 * _LN2)
    s1 = s1.to(tl.float64)
    norm = tl.sum(c * s0, 0)
    mean = tl.sum(c * (s1 + d * s0), 0) / norm
    square = tl.sum(c * (s2.to(tl.float64) + 2.0 * d * s1 + d * d * s0), 0) / norm
    valid = norm > 0.0
    log_norm = tl.log(norm)
    entropy = tl.maximum(log_norm - mean, 0.0)
    varentropy = tl.maximum(square - mean * mean, 0.0)
    cold = temperature <= _GREEDY
    log_norm = tl.where(cold, 0.0, log_norm)
    entropy = tl.where(cold, 0.0, entropy)
    varentropy = tl.where(cold, 0.0, varentropy)
    live = tl.where(valid, live, 0.0).to(tl.int32)
    return valid, live, peak, norm, log_norm, entropy, varentropy, raw_norm, raw_entropy


@triton.jit
def stats_of(stats, row, TILES: tl.constexpr):
    """Where the statistics of a row begin."""
    return stats + row * _STATS * TILES


@triton.jit
def or_nan(valid, value):
    return tl.where(valid, value.to(tl.float32), float("nan"))
