# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Measure, control and sample in one launch: entropy, the PI temperature update, and the next token.

A token is drawn by inverse transform over two levels, runs of 256 tokens and then one run, from one
uniform number keyed (seed, step): what the controllers' numpy sampler does, so that the tokens are
the same. The masses of the runs are float32 sums in either, rounded differently: where the uniform
falls within that rounding of the border between two tokens (about one draw in a million) the two may
differ by one cell.

Measuring point: after the temperature, and after a truncation with place "before"; that is what drives
the update. A truncation with place "after" shows in `realized_entropy` alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from entropic_control.kernels._torch import torch
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
    tokens_of,
    usable,
    within,
    within_limits,
)
from entropic_control.kernels.truncation import (
    Place,
    keep_reference,
    kept,
    truncate,
    truncation_limit,
)

_RUN = tl.constexpr(RUN)
_GREEDY = tl.constexpr(GREEDY)
_INF = tl.constexpr(float("inf"))


def options(runs: int, truncate: bool) -> dict[str, int]:
    """Launch options for tiles of `runs` runs."""
    warps = {"num_warps": 8 if runs >= 16 else 4}
    # Without a limit of its own the assembler saves registers for more occupancy, and spills.
    return {**warps, "maxnreg": 128} if truncate else warps


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
    """H at the measuring point, nats."""
    varentropy: Any
    """Var(ln p) at the measuring point, nats^2."""
    raw_entropy: Any
    """H of the model's own distribution at T = 1, nats."""
    log_norm: Any
    """ln sum exp((z - peak) / T) at the measuring point."""
    peak: Any
    """The largest logit."""
    realized_entropy: Any
    """H of what was sampled from, after truncation, nats."""
    surprisal: Any
    """-ln p of the token under what was sampled from, nats."""
    raw_surprisal: Any
    """-ln p of the token under the model at T = 1, nats; NaN if `raw` was not asked for."""
    temperature: Any
    """T in force."""
    live: Any
    """Tokens at the measuring point, int32; 0 where `valid` is false."""
    valid: Any
    """False where the row held NaN, +inf or no finite logit, or its temperature is NaN, infinite or
    negative."""
    state: Any
    """The PI state after the step, shape (5, rows), float32; None without a controller."""


STATE_ROWS = ("log_temperature", "entropy", "varentropy", "integral", "target")
"""Rows of the state tensor: the fields of `PIState` in order."""


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
    place: Place = "before",
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
    truncation : torch.Tensor, shape (3, rows), float32, optional
        Settings made by `truncation.truncation`.
    place : {"before", "after"}
        Whether truncation is of the model's own distribution or of the tempered one.
    raw : bool
        Whether the entropy at T = 1 is wanted; truncation before the temperature needs it.
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
        check("truncation", truncation, (3, rows), (torch.float32,), like=logits)
    if place not in get_args(Place):
        raise KernelInputError(f"unknown place {place!r} (known: {', '.join(get_args(Place))})")
    early = truncation is not None and place == "before"
    if resolve(mode, logits.device) == "reference":
        return control_sample_reference(
            logits, seeds, steps, temperature=temperature, gains=gains, state=state,
            next_state=next_state, truncation=truncation, place=place, precision=torch.float32,
        )  # fmt: skip
    space = fitting(workspace, logits)
    tiling = space.tiling
    out = torch.empty(9, rows, dtype=torch.float32, device=logits.device)
    token, live = torch.empty(2, rows, dtype=torch.int32, device=logits.device)
    valid = torch.empty(rows, dtype=torch.bool, device=logits.device)
    loop = gains or PIGains(0.0, 0.0, 0.0, (1.0, 1.0), "none", 1.0)
    # As floats: Triton would make constants of integers that are 1.
    numbers = map(float, (loop.kp, loop.ki, loop.filter, *loop.bounds, loop.v_min))
    if rows:
        with on(logits.device):
            control_sample_kernel[(rows * tiling.tiles,)](
                logits, temperature, state, next_state, seeds, steps, truncation,
                out, token, live, valid, space.stats, space.runs, space.tickets,
                vocab, logits.stride(0), rows, *numbers,
                TILES=tiling.tiles, RUNS=tiling.runs, NT=tiling.padded_tiles, NR=tiling.padded_runs,
                CONTROL=gains is not None,
                SCHEDULE=loop.schedule == "varentropy", TRUNCATE=truncation is not None,
                BEFORE=early, RAW=raw or early,
                **options(tiling.runs, truncation is not None),
            )  # fmt: skip
    return Sampled(*(token, *out, live, valid, next_state))


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
    place: Place = "before",
    precision: Any = torch.float64,
) -> Sampled:
    """The same in plain torch; `temperature` is ln T where there are gains."""
    if gains is not None:
        temperature = state[0].exp()
    raw = moments_reference(logits, torch.ones_like(temperature), precision)
    valid = raw.valid & usable(temperature)
    z = logits.to(precision)
    # Rows that are no distribution go through as an even one and are overwritten in the end.
    z = torch.where(valid[:, None], z, 0.0)
    cut = z
    if truncation is not None and place == "before":
        cut = _cut(z, keep_reference(z, torch.ones_like(temperature), truncation))
    elif truncation is not None:
        cut = _cut(z, keep_reference(z, within(temperature), truncation))
    at = moments_reference(cut, temperature, precision)
    greedy = temperature <= GREEDY
    y = (cut - at.peak[:, None]) / within(temperature).to(precision)[:, None]
    u = torch.tensor(
        uniforms_reference(seeds.tolist(), steps.tolist()), dtype=torch.float64, device=z.device
    )
    # The first of equal peaks: argmax in torch may return any of them.
    first = (z == at.peak[:, None]).to(torch.uint8).argmax(-1)
    token = torch.where(greedy, first, _draw_reference(y.exp(), u))
    surprisal = torch.where(greedy, 0.0, at.log_norm - y.gather(-1, token[:, None])[:, 0])
    own = z.logsumexp(-1) - z.gather(-1, token[:, None])[:, 0]
    columns = (
        at.entropy,
        at.varentropy,
        raw.raw_entropy,
        at.log_norm,
        at.peak,
        at.entropy,
        surprisal,
        own,
    )
    readings = (torch.where(valid, column, float("nan")) for column in columns)
    live = torch.where(valid, at.live, 0).to(torch.int32)
    if gains is not None:
        new = update_reference(gains, state, at.entropy, at.varentropy, valid)
        next_state = new if next_state is None else next_state.copy_(new)
    token = torch.where(valid, token, -1).to(torch.int32)
    return Sampled(*(token, *readings, temperature.to(precision), live, valid, next_state))


def _cut(z: Any, keep: Any) -> Any:
    return torch.where(keep, z, -float("inf"))


def update_reference(gains: PIGains, state: Any, entropy: Any, varentropy: Any, valid: Any) -> Any:
    """`PITemperature.update` on a state tensor of shape (5, rows)."""
    _, h, v, integral, target = state
    h = h + gains.filter * (entropy - h)
    v = v + gains.filter * (varentropy - v)
    divisor = v.clamp(min=gains.v_min) if gains.schedule == "varentropy" else torch.ones_like(v)
    low, high = torch.tensor(gains.bounds, dtype=torch.float64).log().tolist()
    integral = (integral + gains.ki * (target - entropy)).clamp(low, high)
    u = (integral + gains.kp * (target - h) / divisor).clamp(low, high)
    moved = torch.stack([u, h, v, integral, target.to(u.dtype)]).to(state.dtype)
    return torch.where(valid, moved, state)


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
    CONTROL: tl.constexpr, SCHEDULE: tl.constexpr, TRUNCATE: tl.constexpr, BEFORE: tl.constexpr,
    RAW: tl.constexpr,
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
        valid, live, peak, norm, log_norm, h, v, raw_norm, raw_h = row_stage(
            row_stats, temperature, inverse, TILES=TILES, NT=NT, RAW=RAW
        )
        cold = temperature <= _GREEDY
        warmth = within_limits(temperature)
        limit = peak * 0.0 - _INF
        last = vocab * 1
        realized = h
        if TRUNCATE:
            if BEFORE:
                limit, last = truncation_limit(
                    row_logits, row_stats, truncation + row, rows, vocab, peak, raw_norm,
                    warmth * 0.0 + 1.0, inverse * 0.0 + 1.0, TILES=TILES, RUNS=RUNS,
                )  # fmt: skip
            else:
                limit, last = truncation_limit(
                    row_logits, row_stats, truncation + row, rows, vocab, peak, norm, warmth, inverse,
                    TILES=TILES, RUNS=RUNS,
                )  # fmt: skip
            count, norm, realized, spread = truncate(
                row_logits, row_stats, row_runs, vocab, peak, limit, last, inverse,
                TILES=TILES, RUNS=RUNS,
            )  # fmt: skip
            realized = tl.where(cold, 0.0, realized)
            h = realized
            v = tl.where(cold, 0.0, spread)
            log_norm = tl.where(cold, 0.0, tl.log(norm))
            live = tl.where(valid, count, 0)
        token, surprisal = draw(
            row_logits, row_stats, row_runs, vocab, peak, limit, last, norm, warmth, inverse,
            tl.load(seeds + row), tl.load(steps + row),
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
        tl.store(out + 5 * rows + row, or_nan(valid, realized))
        tl.store(out + 6 * rows + row, or_nan(valid, tl.where(cold, 0.0, surprisal)))
        # Of an invalid row the token is anything.
        z = tl.load(row_logits + token, mask=(token >= 0) & (token < vocab), other=0.0)
        own = tl.log(raw_norm) - (z.to(tl.float64) - peak.to(tl.float64))
        tl.store(out + 7 * rows + row, or_nan(valid, own))
        tl.store(out + 8 * rows + row, temperature)
        tl.store(live_out + row, live)
        tl.store(valid_out + row, valid)
        if CONTROL:
            update(
                state + row, next_state + row, rows, h.to(tl.float32), v.to(tl.float32), valid,
                kp, ki, smoothing, low, high, v_min, SCHEDULE=SCHEDULE,
            )  # fmt: skip


@triton.jit
def update(
    state, next_state, rows, entropy, varentropy, valid,
    kp, ki, smoothing, low, high, v_min, SCHEDULE: tl.constexpr,
):  # fmt: skip
    """`PITemperature.update` of one row."""
    u = tl.load(state)
    h = tl.load(state + rows)
    v = tl.load(state + 2 * rows)
    integral = tl.load(state + 3 * rows)
    target = tl.load(state + 4 * rows)
    least, most = tl.log(low * 1.0), tl.log(high * 1.0)
    new_h = h + smoothing * (entropy - h)
    new_v = v + smoothing * (varentropy - v)
    new_integral = tl.minimum(tl.maximum(integral + ki * (target - entropy), least), most)
    error = target - new_h
    if SCHEDULE:
        error = error / tl.maximum(new_v, v_min)
    new_u = tl.minimum(tl.maximum(new_integral + kp * error, least), most)
    tl.store(next_state, tl.where(valid, new_u, u))
    tl.store(next_state + rows, tl.where(valid, new_h, h))
    tl.store(next_state + 2 * rows, tl.where(valid, new_v, v))
    tl.store(next_state + 3 * rows, tl.where(valid, new_integral, integral))
    tl.store(next_state + 4 * rows, target)


@triton.jit
def draw(
    row_logits, row_stats, row_runs, vocab, peak, limit, last, norm, temperature, inverse, seed, step,
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
    w = tl.where(kept(z, token, limit, last), tl.exp(y), 0.0)
    passed = tl.sum((tl.cumsum(w, 0) <= point - below).to(tl.int32), 0)
    inner = tl.minimum(passed, tl.max(tl.where(w > 0, cell, 0), 0))
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
    return tl.min(tl.where(z == peak, tokens_of(first, RUNS), vocab - 1))
