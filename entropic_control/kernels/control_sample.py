# mypy: allow-untyped-defs, allow-untyped-decorators
"""Measure, control and sample in one launch: entropy, the PI temperature update, and the next token.

A token is drawn by inverse transform over two levels, runs of 256 tokens and then one run, from one
uniform number keyed (seed, step): what the controllers' numpy sampler does, so that the tokens are
the same. The masses of the runs are float32 sums in either, rounded differently: where the uniform
falls within that rounding of the border between two tokens (about one draw in a million) the two may
differ by one cell.

Measuring point: `entropy` and `varentropy`, which drive the update, are of the tempered distribution
before truncation; `realized_entropy` is of what was sampled from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from entropic_control.kernels._triton import tl, triton
from entropic_control.kernels.dispatch import KernelInputError, Mode, check, on, resolve
from entropic_control.kernels.philox import uniform, uniforms_reference
from entropic_control.kernels.rows import (
    GREEDY,
    RUN,
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

WARPS = 8

_RUN = tl.constexpr(RUN)
_GREEDY = tl.constexpr(GREEDY)
_INF = tl.constexpr(float("inf"))


class PIGains(NamedTuple):
    """The parameters of a PI temperature loop, by the names of `PITemperature`."""

    kp: float
    ki: float
    filter: float
    bounds: tuple[float, float]
    schedule: str
    v_min: float

    @classmethod
    def of(cls, controller: Any) -> PIGains:
        """The gains of a `PITemperature`."""
        return cls(*(getattr(controller, name) for name in cls._fields))


class Sampled(NamedTuple):
    """What one step measured and drew, tensors of shape (rows,).

    Rows with `valid` false have token -1, NaN readings and an unmoved state.
    """

    token: Any
    """The sampled token, int32."""
    entropy: Any
    """H of the tempered distribution, nats."""
    varentropy: Any
    """Var(ln p) of the tempered distribution, nats^2."""
    raw_entropy: Any
    """H at T = 1, nats."""
    log_norm: Any
    """ln sum exp((z - peak) / T)."""
    peak: Any
    """The largest logit."""
    realized_entropy: Any
    """H of what was sampled from, after truncation, nats."""
    surprisal: Any
    """-ln p of the token under what was sampled from, nats."""
    temperature: Any
    """T in force."""
    live: Any
    """Tokens with a finite logit, int32."""
    valid: Any
    """False where the row held NaN, +inf or no finite logit."""
    state: Any
    """The PI state after the step, shape (5, rows), float32; None without a controller."""


STATE_ROWS = ("log_temperature", "entropy", "varentropy", "error", "target")
"""Rows of the state tensor: the fields of `PIState` in order."""


def truncation(
    rows: int,
    device: Any,
    *,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    max_surprisal: Any = None,
) -> Any:
    """The truncation settings of a batch as one float32 tensor of shape (4, rows).

    Each setting is a number or one number a row, and is taken of the tempered distribution by itself;
    a token stays if all of them keep it. Ties at a limit stay together; the most probable token
    always stays.

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
        Keep tokens with at least this share of the largest probability, in [0, 1).
    max_surprisal : optional
        Keep tokens with -ln p at most this, nats.

    Raises
    ------
    KernelInputError
        For a setting outside its domain.
    """
    domains = {
        "top_k": (top_k, 0.0, lambda v: (v >= 0) & (v == v.round())),
        "top_p": (top_p, 1.0, lambda v: (v > 0) & (v <= 1)),
        "min_p": (min_p, 0.0, lambda v: (v >= 0) & (v < 1)),
        "max_surprisal": (max_surprisal, float("inf"), lambda v: v >= 0),
    }
    out = torch.empty(4, rows, dtype=torch.float32)
    for line, (name, (value, off, domain)) in zip(out, domains.items(), strict=True):
        column = torch.as_tensor(off if value is None else value, dtype=torch.float32)
        if column.ndim > 1 or column.numel() not in (1, rows):
            raise KernelInputError(f"{name} must be a number or one for each of {rows} rows")
        if not bool(domain(column).all()):
            raise KernelInputError(f"{name} is outside its domain: {column.tolist()}")
        line[:] = column
    return out.to(device)


def control_sample(
    logits: Any,
    seeds: Any,
    steps: Any,
    *,
    temperature: Any = None,
    gains: PIGains | None = None,
    state: Any = None,
    next_state: Any = None,
    truncation: Any = None,
    raw: bool = True,
    mode: Mode = "auto",
    workspace: Workspace | None = None,
) -> Sampled:
    """Measure each row, draw its next token, and move its temperature loop.

    Parameters
    ----------
    logits : torch.Tensor, shape (rows, vocab)
        float32, float16 or bfloat16; -inf marks a masked token.
    seeds, steps : torch.Tensor, shape (rows,), int64
        Key and counter of the row's random number; a seed holds the bits of a uint64.
    temperature : float or torch.Tensor (rows,), float32, optional
        T in force, where no controller sets it.
    gains : PIGains, optional
        The loop; needs `state`, and excludes `temperature`.
    state : torch.Tensor, shape (5, rows), float32, optional
        `PIState` before the step, see `STATE_ROWS`. Left alone unless it is `next_state` too.
    next_state : torch.Tensor, shape (5, rows), float32, optional
        Where the state after the step goes; may be `state` itself. By default a new tensor.
    truncation : torch.Tensor, shape (4, rows), float32, optional
        See `truncation`.
    raw : bool
        Whether the entropy at T = 1 is wanted.
    mode : str
        Which implementation; see `dispatch.Mode`.
    workspace : Workspace, optional
        Scratch to reuse.

    Raises
    ------
    KernelInputError
        For tensors of wrong shape, type or device, or both or neither of temperature and gains.
    CapabilityError
        For a mode that cannot be had.
    """
    if (gains is None) == (temperature is None) or (gains is None) != (state is None):
        raise KernelInputError("give either a temperature, or gains with their state")
    if gains is None and next_state is not None:
        raise KernelInputError("next_state was given without gains")
    rows, vocab = check_logits(logits)
    if gains is not None:
        check("state", state, (5, rows), (torch.float32,), like=logits)
        next_state = torch.empty_like(state) if next_state is None else next_state
        check("next_state", next_state, (5, rows), (torch.float32,), like=logits)
    temperature = temperatures(state[0] if temperature is None else temperature, logits)
    check("seeds", seeds, (rows,), (torch.int64,), like=logits)
    check("steps", steps, (rows,), (torch.int64,), like=logits)
    if truncation is not None:
        check("truncation", truncation, (4, rows), (torch.float32,), like=logits)
    if resolve(mode, logits.device) == "reference":
        return control_sample_reference(
            logits, seeds, steps, temperature=temperature, gains=gains, state=state,
            next_state=next_state, truncation=truncation, precision=torch.float32,
        )  # fmt: skip
    space = fitting(workspace, logits)
    tiling = space.tiling
    out = torch.empty(8, rows, dtype=torch.float32, device=logits.device)
    token, live = torch.empty(2, rows, dtype=torch.int32, device=logits.device)
    valid = torch.empty(rows, dtype=torch.bool, device=logits.device)
    loop = gains or PIGains(0.0, 0.0, 0.0, (1.0, 1.0), "none", 1.0)
    if rows:
        with on(logits.device):
            control_sample_kernel[(rows * tiling.tiles,)](
                logits, temperature, state, next_state, seeds, steps, truncation,
                out, token, live, valid, space.stats, space.runs, space.tickets,
                vocab, logits.stride(0), rows, loop.kp, loop.ki, loop.filter, *loop.bounds,
                loop.v_min, TILES=tiling.tiles, RUNS=tiling.runs, NT=tiling.padded_tiles,
                NR=tiling.padded_runs, CONTROL=gains is not None,
                SCHEDULE=loop.schedule == "varentropy", TRUNCATE=truncation is not None, RAW=raw,
                num_warps=WARPS,
            )  # fmt: skip
    return Sampled(token, *out, live, valid, next_state)


def control_sample_reference(
    logits: Any,
    seeds: Any,
    steps: Any,
    *,
    temperature: Any,
    gains: PIGains | None = None,
    state: Any = None,
    next_state: Any = None,
    truncation: Any = None,
    precision: Any = torch.float64,
) -> Sampled:
    """The same in plain torch; `temperature` is ln T where there are gains."""
    if gains is not None:
        temperature = state[0].exp()
    moments = moments_reference(logits, temperature, precision)
    valid, live = moments.valid, moments.live
    peak = torch.where(valid, moments.peak, 0.0)
    inverse = torch.where(temperature <= GREEDY, 1.0, 1.0 / temperature.to(precision))
    z = torch.where(valid[:, None], logits.to(precision), 0.0)
    y = (z - peak[:, None]) * inverse[:, None]
    limit = _limits_reference(z, y, peak, temperature, moments.log_norm, truncation)
    weights = torch.where(z >= limit[:, None], y.exp(), 0.0)
    greedy = temperature <= GREEDY
    # The first of equal peaks: argmax in torch may return any of them.
    first = (z == peak[:, None]).to(torch.uint8).argmax(-1)
    kept = weights.sum(-1)
    realized = kept.log() - torch.where(weights > 0, weights * y, 0.0).sum(-1) / kept
    u = torch.tensor(
        uniforms_reference(seeds.tolist(), steps.tolist()), dtype=torch.float64, device=z.device
    )
    token = torch.where(greedy, first, _draw_reference(weights, u))
    surprisal = kept.log() - y.gather(-1, token[:, None])[:, 0]
    nan = float("nan")
    columns = (
        moments.entropy,
        moments.varentropy,
        moments.raw_entropy,
        moments.log_norm,
        moments.peak,
        torch.where(greedy, 0.0, realized.clamp(min=0.0)),
        torch.where(greedy, 0.0, surprisal),
    )
    readings = (torch.where(valid, c, nan).to(precision) for c in columns)
    if gains is not None:
        new = update_reference(gains, state, moments.entropy, moments.varentropy, live, valid)
        next_state = new if next_state is None else next_state.copy_(new)
    token = torch.where(valid, token, -1).to(torch.int32)
    return Sampled(token, *readings, temperature.to(precision), live, valid, next_state)


def update_reference(
    gains: PIGains, state: Any, entropy: Any, varentropy: Any, live: Any, valid: Any
) -> Any:
    """`PITemperature.update` on a state tensor of shape (5, rows)."""
    u, h, v, last, target = state
    h = h + gains.filter * (entropy - h)
    v = v + gains.filter * (varentropy - v)
    divisor = v.clamp(min=gains.v_min) if gains.schedule == "varentropy" else torch.ones_like(v)
    error = (target - h) / divisor
    low, high = torch.tensor(gains.bounds, dtype=torch.float64).log().tolist()
    u = (u + gains.kp * (error - last) + gains.ki * error).clamp(low, high)
    moved = torch.stack([u, h, v, error, target.to(u.dtype)]).to(state.dtype)
    informative = valid & (target < live.clamp(min=1).to(torch.float64).log())
    return torch.where(informative, moved, state)


def _limits_reference(
    z: Any, y: Any, peak: Any, temperature: Any, log_norm: Any, truncation: Any
) -> Any:
    """The smallest logit that each row keeps."""
    limit = torch.full_like(peak, -float("inf"))
    if truncation is None:
        return limit
    top_k, top_p, min_p, max_surprisal = truncation.to(z.dtype)
    ordered, order = z.sort(-1, descending=True)
    mass = y.exp().gather(-1, order).to(torch.float64).cumsum(-1)
    k = torch.where(top_k > 0, top_k, z.shape[1]).clamp(max=z.shape[1]).long()
    enough = mass >= (top_p * mass[:, -1])[:, None]
    nucleus = torch.where(enough.any(-1), enough.to(torch.uint8).argmax(-1), z.shape[1] - 1)
    nucleus = torch.where(top_p < 1, nucleus, z.shape[1] - 1)
    for rank in (k - 1, nucleus):
        limit = torch.maximum(limit, ordered.gather(-1, rank[:, None])[:, 0])
    for floor in (min_p.log(), log_norm.nan_to_num() - max_surprisal):
        limit = torch.maximum(limit, peak + temperature.to(z.dtype) * floor)
    return torch.minimum(limit, peak)


def _draw_reference(weights: Any, u: Any) -> Any:
    """The token at quantile u of each row of weights, by inverse transform over two levels."""
    rows, vocab = weights.shape
    runs = -(-vocab // RUN)
    padded = torch.nn.functional.pad(weights, (0, runs * RUN - vocab)).view(rows, runs, RUN)
    mass = padded.sum(-1)
    total = mass.to(torch.float64).cumsum(-1)
    point = u * total[:, -1]
    run = _cell(total, mass, point)
    below = torch.where(run > 0, total.gather(-1, (run - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inner = padded[torch.arange(rows, device=weights.device), run].to(torch.float64)
    return run * RUN + _cell(inner.cumsum(-1), inner, point - below)


def _cell(cumulative: Any, mass: Any, point: Any) -> Any:
    """The first cell whose cumulative mass passes the point, at most the last one with any mass."""
    cell = (cumulative <= point[:, None]).sum(-1)
    index = torch.arange(mass.shape[1], device=mass.device)
    filled = torch.where((mass > 0) & (index <= cell[:, None]), index, -1).amax(-1)
    return torch.where(filled < 0, (mass > 0).to(torch.uint8).argmax(-1), filled)


@triton.jit
def control_sample_kernel(
    logits, temperature_of, state, next_state, seeds, steps, truncation,
    out, token_out, live_out, valid_out, stats, runs, tickets,
    vocab, stride, rows, kp, ki, smoothing, low, high, v_min,
    TILES: tl.constexpr, RUNS: tl.constexpr, NT: tl.constexpr, NR: tl.constexpr,
    CONTROL: tl.constexpr, SCHEDULE: tl.constexpr, TRUNCATE: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    # With a controller the tensor of temperatures is the first row of its state, ln T.
    temperature = tl.load(temperature_of + row)
    if CONTROL:
        temperature = tl.exp(temperature)
    inverse = inverse_temperature(temperature)
    row_logits = logits + row.to(tl.int64) * stride
    row_stats = stats_of(stats, row, TILES)
    row_runs = runs + row * TILES * RUNS
    tile_stage(
        row_logits, row_stats, row_runs, tile, vocab, inverse,
        TILES=TILES, RUNS=RUNS, RAW=RAW, KEEP_RUNS=True,
    )  # fmt: skip
    if last_to_finish(tickets + row, TILES):
        valid, live, peak, norm, log_norm, h, v, raw_h = row_stage(
            row_stats, temperature, inverse, TILES=TILES, NT=NT, RAW=RAW
        )
        kept_norm = norm
        realized = h
        if TRUNCATE:
            limit = truncation_limit(
                row_logits, row_stats, truncation + row, rows, vocab, peak, norm, log_norm,
                temperature, inverse, TILES=TILES, RUNS=RUNS,
            )  # fmt: skip
            kept_norm, realized = truncate(
                row_logits, row_stats, row_runs, vocab, peak, limit, inverse, TILES=TILES, RUNS=RUNS
            )
        else:
            limit = peak * 0.0 - _INF
        cold = temperature <= _GREEDY
        token, surprisal = draw(
            row_logits, row_stats, row_runs, vocab, peak, limit, kept_norm,
            tl.maximum(temperature, _GREEDY), inverse, tl.load(seeds + row), tl.load(steps + row),
            TILES=TILES, RUNS=RUNS, NR=NR, TRUNCATE=TRUNCATE,
        )  # fmt: skip
        if cold:
            token = first_peak(row_logits, row_stats, vocab, peak, TILES=TILES, RUNS=RUNS, NT=NT)
        tl.store(token_out + row, tl.where(valid, token, -1))
        tl.store(out + row, or_nan(valid, h))
        tl.store(out + rows + row, or_nan(valid, v))
        tl.store(out + 2 * rows + row, or_nan(valid, raw_h))
        tl.store(out + 3 * rows + row, or_nan(valid, log_norm))
        tl.store(out + 4 * rows + row, or_nan(valid, peak))
        tl.store(out + 5 * rows + row, or_nan(valid, tl.where(cold, 0.0, realized)))
        tl.store(out + 6 * rows + row, or_nan(valid, tl.where(cold, 0.0, surprisal)))
        tl.store(out + 7 * rows + row, temperature)
        tl.store(live_out + row, live)
        tl.store(valid_out + row, valid)
        if CONTROL:
            update(
                state + row, next_state + row, rows, h.to(tl.float32), v.to(tl.float32), live, valid,
                kp, ki, smoothing, low, high, v_min, SCHEDULE=SCHEDULE,
            )  # fmt: skip


@triton.jit
def update(
    state, next_state, rows, entropy, varentropy, live, valid,
    kp, ki, smoothing, low, high, v_min, SCHEDULE: tl.constexpr,
):  # fmt: skip
    """`PITemperature.update` of one row."""
    u = tl.load(state)
    h = tl.load(state + rows)
    v = tl.load(state + 2 * rows)
    last = tl.load(state + 3 * rows)
    target = tl.load(state + 4 * rows)
    new_h = h + smoothing * (entropy - h)
    new_v = v + smoothing * (varentropy - v)
    error = target - new_h
    if SCHEDULE:
        error = error / tl.maximum(new_v, v_min)
    new_u = u + kp * (error - last) + ki * error
    new_u = tl.minimum(tl.maximum(new_u, tl.log(low * 1.0)), tl.log(high * 1.0))
    feasible = target < tl.log(tl.maximum(live, 1).to(tl.float32))
    moves = valid & feasible
    tl.store(next_state, tl.where(moves, new_u, u))
    tl.store(next_state + rows, tl.where(moves, new_h, h))
    tl.store(next_state + 2 * rows, tl.where(moves, new_v, v))
    tl.store(next_state + 3 * rows, tl.where(moves, error, last))
    tl.store(next_state + 4 * rows, target)


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
            count += tl.sum(tl.sum(keep.to(tl.int32), 1), 0)
            w = tl.where(keep, tl.exp((z - peak) * inverse), 0.0)
            mass += tl.sum(tl.sum(w, 1), 0).to(tl.float64)
    return count, mass


@triton.jit
def truncation_limit(
    row_logits, row_stats, settings, rows, vocab, peak, norm, log_norm, temperature, inverse,
    TILES: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """The smallest logit that is kept.

    Rank and mass limits are found together by bisection over the ordered bit patterns of float32,
    which is exact and reads only the tiles that reach the limit tried; a sort would move the row.
    """
    k = tl.load(settings)
    p = tl.load(settings + rows)
    min_p = tl.load(settings + 2 * rows)
    max_surprisal = tl.load(settings + 3 * rows)
    wanted = tl.where((k > 0) & (k < vocab), k, 3.0e38)
    needed = tl.where(p < 1.0, p.to(tl.float64) * norm, float("inf"))
    floor = tl.maximum(tl.log(min_p), log_norm.to(tl.float32) - max_surprisal)
    base = tl.minimum(peak + temperature * floor, peak)
    search = (peak > -_INF) & ((wanted < 3.0e38) | (p < 1.0))
    low = ordered(base).to(tl.int64)
    high = tl.where(search, ordered(peak).to(tl.int64) + 1, low)
    n_low = vocab + 1
    n_high = vocab * 0
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
    return tl.minimum(unordered(low.to(tl.int32)), peak)


@triton.jit
def truncate(
    row_logits, row_stats, row_runs, vocab, peak, limit, inverse,
    TILES: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Replace the masses of the runs by those of the kept tokens; their norm and entropy."""
    norm = peak.to(tl.float64) * 0.0
    first = norm
    for tile in range(TILES):
        mass = tl.zeros([RUNS], tl.float32)
        if tl.load(row_stats + tile, cache_modifier=".cg") >= limit:
            z = load_tile(row_logits, tile, vocab, RUNS)
            y = (z - peak) * inverse
            w = tl.where(z >= limit, tl.exp(y), 0.0)
            mass = tl.sum(w, 1)
            norm += tl.sum(mass, 0).to(tl.float64)
            first += tl.sum(tl.sum(tl.where(w > 0, w * y, 0.0), 1), 0).to(tl.float64)
        tl.store(row_runs + tile * RUNS + tl.arange(0, RUNS), mass)
    # The stores above are read by other threads of this program below.
    tl.debug_barrier()
    return norm, tl.maximum(tl.log(norm) - first / norm, 0.0)


@triton.jit
def draw(
    row_logits, row_stats, row_runs, vocab, peak, limit, norm, temperature, inverse, seed, step,
    TILES: tl.constexpr, RUNS: tl.constexpr, NR: tl.constexpr, TRUNCATE: tl.constexpr,
):  # fmt: skip
    """The token at the quantile of (seed, step), and its surprisal."""
    run = tl.arange(0, NR)
    inside = run < TILES * RUNS
    mass = tl.load(row_runs + run, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float64)
    if not TRUNCATE:
        tile_peak = tl.load(row_stats + run // RUNS, mask=inside, other=-_INF, cache_modifier=".cg")
        shift = (tile_peak.to(tl.float64) - peak.to(tl.float64)) * inverse.to(tl.float64)
        mass = tl.where(mass > 0, mass * tl.exp(shift), 0.0)
    cumulative = tl.cumsum(mass, 0)
    point = uniform(seed, step) * tl.max(cumulative, 0)
    chosen = tl.sum((cumulative <= point).to(tl.int32), 0)
    chosen = tl.max(tl.where((mass > 0) & (run <= chosen), run, 0), 0)
    below = tl.sum(tl.where(run == chosen - 1, cumulative, 0.0), 0)

    cell = tl.arange(0, _RUN)
    token = chosen * _RUN + cell
    z = tl.load(row_logits + token, mask=token < vocab, other=-_INF).to(tl.float32)
    y = (z.to(tl.float64) - peak.to(tl.float64)) / temperature.to(tl.float64)
    w = tl.where((z >= limit) & (z > -_INF), tl.exp(y), 0.0)
    passed = tl.sum((tl.cumsum(w, 0) <= point - below).to(tl.int32), 0)
    last = tl.max(tl.where(w > 0, cell, 0), 0)
    inner = tl.minimum(passed, last)
    return chosen * _RUN + inner, tl.log(norm) - tl.sum(tl.where(cell == inner, y, 0.0), 0)


@triton.jit
def first_peak(
    row_logits, row_stats, vocab, peak, TILES: tl.constexpr, RUNS: tl.constexpr, NT: tl.constexpr
):
    """The first token with the largest logit."""
    tile = tl.arange(0, NT)
    tile_peak = tl.load(row_stats + tile, mask=tile < TILES, other=-_INF, cache_modifier=".cg")
    first = tl.min(tl.where(tile_peak == peak, tile, TILES - 1), 0)
    z = load_tile(row_logits, first, vocab, RUNS)
    run = first * RUNS + tl.arange(0, RUNS)
    token = run[:, None] * _RUN + tl.arange(0, _RUN)[None, :]
    return tl.min(tl.where(z == peak, token, vocab - 1))
