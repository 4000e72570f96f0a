"""`init`, `command` and `update` of a temperature controller, driven in lockstep as the engine does.

Every function returns what it found wrong, in words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from entropic_control.controllers import TemperatureController
from entropic_control.controllers.base import Array
from entropic_control.controllers.signals import Reading, reading
from entropic_control.controllers.softmax import GREEDY
from entropic_control.controllers.state import split, stack
from entropic_control.errors import ConfigError
from entropic_control.proofs.rollout import (
    Rollout,
    bounds_of,
    innermost,
    leaves,
    settled,
    target_of,
)

SMALL = 1e-4
"""Deviations, nats, that count as small."""
AGREE = 1e-3
"""How far, as a share, a small response may be from the linear one."""
RUNAWAY = 12.0
"""How far ln T may go from its start where no bounds are declared: a factor of 160,000."""
ROUNDING = 0.02
"""How far ln T in single precision may be from double after some dozens of tokens."""

SIGNALS = {"ln temperature": "temperature", "surprisal limit [nats]": "max_surprisal"}
"""Outputs of a linear model, and where a command has them."""


class Drive(NamedTuple):
    """Inputs of some tokens, arrays of shape (tokens, rows)."""

    entropy: Array
    varentropy: Array
    live: Array
    logits: Array | None = None
    """Shape (tokens, rows, vocab), for controllers that read them."""

    def at(self, token: int, temperature: Array, **others: Any) -> Reading:
        """What is measured at a token under the temperature in force."""
        wide = {"live": self.live[token], "temperature": temperature}
        return reading(self.entropy[token], self.varentropy[token], **{**wide, **others})

    def row(self, row: int) -> Drive:
        """The inputs of one row."""
        rows = slice(row, row + 1)
        logits = None if self.logits is None else self.logits[:, rows]
        return Drive(self.entropy[:, rows], self.varentropy[:, rows], self.live[:, rows], logits)


def drive(
    controller: TemperatureController, vocab: int, rows: int, tokens: int, rng: np.random.Generator
) -> Drive:
    """Bounded readings, random and adversarial: all certain, all flat, in turn, zero and largest gain."""
    top = float(np.log(vocab))
    h = top * rng.random((tokens, rows))
    beat = np.arange(tokens)[:, None] // rng.integers(1, 60, rows) % 2
    pattern = np.arange(rows) % 4
    h = np.where(
        pattern == 1, top * beat, np.where(pattern == 2, 0.0, np.where(pattern == 3, top, h))
    )
    h = np.where(rng.random(rows) < 0.2, rng.random((tokens, rows)) * target_of(controller), h)
    v = np.where(
        rng.random((tokens, rows)) < 0.3, 0.0, np.exp(rng.uniform(-5, 3.4, (tokens, rows)))
    )
    live = np.exp(rng.uniform(0, top, (tokens, rows))).astype(np.int64)
    logits = rng.normal(0, 3, (tokens, rows, 48)) if controller.reads_logits else None
    return Drive(h, v, np.maximum(live, 1), logits)


def commanded(controller: TemperatureController, state: Any, logits: Any = None) -> Array:
    """The temperatures that the engine samples under, shape (rows,)."""
    return controller.command(state, logits if controller.reads_logits else None).temperature


def small_signal(
    controller: TemperatureController, rng: np.random.Generator, tokens: int = 160
) -> tuple[float, list[str]]:
    """The command sampled under, against `linearize().respond`, about loops at rest.

    Returns
    -------
    mismatch : float
        The largest difference, as a share of the response.
    faults : list of str
    """
    model = controller.linearize()
    if controller.reads_logits or model.outputs[0] not in SIGNALS:
        return 0.0, []
    start = float(getattr(innermost(controller), "v_start", 2.0))
    varentropy = np.array([start, 0.3, 1.0, 4.0, 12.0])
    loops, rest = settled(controller, varentropy)
    if not rest.any():
        u = loops.in_force[0]
        return np.inf, [
            f"with the entropy at the target and the varentropy steady the command does not come to rest "
            f"(ln T {u:.4g} and moving)"
        ]
    low, high = np.log(bounds_of(controller))
    size = min(SMALL, 1e-3 * float(high - low))
    faults: list[str] = []
    worst = 0.0
    target, surprised = target_of(controller), model.inputs[0].startswith("surprisal")
    least = max(int(np.exp(target)) + 2, 16)
    lives = np.array([least, 4 * least, 5_000 + least, 60_000 + least, 1 << 20])
    noise = size * rng.normal(size=tokens)
    for name, of_entropy, of_varentropy in (
        ("H", noise, 0.0 * noise),
        ("V", 0.0 * noise, noise / 10),
    ):
        now, out = loops, np.empty((tokens, len(varentropy)))
        at_rest = _signal(now, model.outputs[0])
        for token in range(tokens):
            h = np.full(len(varentropy), target + of_entropy[token])
            fields = (
                {"surprisal": h, "entropy": np.full_like(h, target)}
                if surprised
                else {"surprisal": np.full_like(h, target), "entropy": h}
            )
            entropy = fields.pop("entropy")
            v = varentropy * (1 + of_varentropy[token])
            now = now.step(entropy, v, live=rng.choice(lives), **fields)
            out[token] = _signal(now, model.outputs[0]) - at_rest
        for row in np.flatnonzero(rest):
            linear = controller.linearize(float(varentropy[row])).respond(of_entropy[:, None])[:, 0]
            scale = max(float(np.abs(linear).max()), 0.02 * size)
            gap = float(np.abs(out[:, row] - linear).max()) / scale
            worst = max(worst, gap) if gap == gap else np.inf
            if not gap <= AGREE and not faults:
                faults.append(
                    f"a small change of {name} at V = {varentropy[row]:g} moves what is sampled under by "
                    f"{np.abs(out[:, row]).max():.3g} where `linearize` says "
                    f"{np.abs(linear).max():.3g} (off by {gap:.3g} of it): `update` or `command` does "
                    "other than `linearize`"
                )
    return worst, faults


def direction(controller: TemperatureController, vocab: int) -> list[str]:
    """All certain must heat and all flat must cool, where the linear model says so of small errors."""
    model = controller.linearize()
    if controller.reads_logits or model.outputs[0] != "ln temperature":
        return []
    tokens = 80
    wanted = -np.sign(np.round(model.respond(np.ones((tokens, 1)))[-1, 0], 9))
    top = float(np.log(vocab))
    measured = np.array([0.0, 0.0, top, top])
    state = controller.init(4)
    first = commanded(controller, state)
    aim = target_of(controller)
    for _ in range(tokens):
        temperature = commanded(controller, state)
        _, state = controller.update(
            state,
            reading(measured, np.array([0.0, 8.0, 8.0, 0.5]), temperature=temperature, live=vocab),
        )
    moved = commanded(controller, state) - first
    expected = wanted * np.sign(aim - measured)
    if np.any(moved * expected < -1e-9 * first):
        return [
            "an entropy far from the target moves the temperature the other way than a near one"
        ]
    return []


def _signal(loops: Rollout, output: str) -> Array:
    command = loops.controller.command(loops.state)
    value = getattr(command, SIGNALS[output])
    return np.asarray(np.log(np.maximum(value, GREEDY)) if output == "ln temperature" else value)


def large_signal(
    controller: TemperatureController, inputs: Drive
) -> tuple[tuple[float, float], list[str]]:
    """The commands under bounded readings: finite, positive, within the bounds, and as returned.

    Returns
    -------
    reach : (float, float)
        The least and the largest ln T.
    faults : list of str
    """
    rows = inputs.entropy.shape[1]
    state = controller.init(rows)
    low, high = bounds_of(controller)
    declared = hasattr(innermost(controller), "bounds")
    reach, first = (np.inf, -np.inf), None
    for token in range(len(inputs.entropy)):
        logits = None if inputs.logits is None else inputs.logits[token]
        temperature = commanded(controller, state, logits)
        if np.shape(temperature) != (rows,):
            return reach, [f"the command has shape {np.shape(temperature)} for {rows} rows"]
        if not (np.isfinite(temperature).all() and np.all(temperature >= 0)):
            return reach, [
                f"the temperature is {temperature.min():g} or not a number at token {token}"
            ]
        u = np.log(np.maximum(temperature, GREEDY))
        first = u if first is None else first
        reach = min(reach[0], float(u.min())), max(reach[1], float(u.max()))
        if declared and not (
            temperature.min() >= low * (1 - 1e-6) and temperature.max() <= high * (1 + 1e-6)
        ):
            return reach, [
                f"the temperature is in [{temperature.min():.4g}, {temperature.max():.4g}] at token "
                f"{token}, outside the bounds [{low:g}, {high:g}]"
            ]
        away = float((u - first if controller.reads_logits else np.abs(u - first)).max())
        if not declared and away > RUNAWAY:
            return reach, [
                f"bounded readings drive ln T away by {away:.3g} within {token} tokens, and no bounds "
                "stop it"
            ]
        returned, after = controller.update(state, inputs.at(token, temperature))
        said = temperature if controller.reads_logits else commanded(controller, after)
        if not np.allclose(returned, said, rtol=1e-6, atol=1e-9):
            at = int(np.argmax(np.abs(np.asarray(returned) - said)))
            return reach, [
                f"`update` returns the temperature {returned[at]:.6g} and `command` samples under "
                f"{said[at]:.6g}"
            ]
        state = after
    return reach, []


def contract(controller: TemperatureController, vocab: int, rng: np.random.Generator) -> list[str]:
    """What the engine counts on: pure, row by row, holding on invalid rows, in either precision, and
    per-request settings that do what the same field does."""
    inputs = drive(controller, vocab, 4, 60, rng)
    return [
        *_pure_and_by_row(controller, inputs),
        *_invalid_rows_hold(controller, inputs),
        *_single_precision(controller, inputs),
        *_overrides(controller, inputs),
    ]


def run(
    controller: TemperatureController, inputs: Drive, dtype: Any = np.float64, **overrides: Any
) -> tuple[Array, Any]:
    """Temperatures in force, shape (tokens, rows), and the state after the last token."""
    state = controller.init(inputs.entropy.shape[1], dtype=dtype, **overrides)
    out = []
    for token in range(len(inputs.entropy)):
        logits = None if inputs.logits is None else inputs.logits[token]
        out.append(commanded(controller, state, logits))
        _, state = controller.update(state, inputs.at(token, out[-1]))
    return np.array(out), state


def _pure_and_by_row(controller: TemperatureController, inputs: Drive) -> list[str]:
    rows = inputs.entropy.shape[1]
    _, state = run(controller, inputs)
    logits = None if inputs.logits is None else inputs.logits[0]
    temperature = commanded(controller, state, logits)
    kept = [a.copy() for a in leaves(state)]
    measured = inputs.at(0, temperature)
    _, together = controller.update(state, measured)
    if not _equal(kept, leaves(state)):
        return ["`update` writes into the state it was given"]
    _, again = controller.update(state, measured)
    if not _equal(leaves(together), leaves(again)):
        return ["`update` gives two answers to the same state and reading"]
    parts = split(state, rows)
    apart = [
        controller.update(parts[row], inputs.row(row).at(0, temperature[row : row + 1]))[1]
        for row in range(rows)
    ]
    joined = zip(leaves(together), leaves(stack(apart)), strict=True)
    if not all(np.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True) for a, b in joined):
        return ["a row's state depends on the rows beside it"]
    return []


def _invalid_rows_hold(controller: TemperatureController, inputs: Drive) -> list[str]:
    rows = inputs.entropy.shape[1]
    _, state = run(controller, inputs)
    logits = None if inputs.logits is None else inputs.logits[0]
    temperature = commanded(controller, state, logits)
    valid = np.arange(rows) % 2 == 0
    for garbage in (np.nan, 3.0):
        dirt = {
            name: np.where(valid, getattr(inputs.at(0, temperature), name), garbage)
            for name in ("entropy", "varentropy", "surprisal", "raw_entropy", "realized_entropy")
        }
        clean = inputs.at(0, temperature)
        _, right = controller.update(state, clean)
        dirty = Reading(**{**clean._asdict(), **dirt, "valid": valid})
        _, after = controller.update(state, dirty)
        for old, expected, new in zip(leaves(state), leaves(right), leaves(after), strict=True):
            if not np.array_equal(old[~valid], new[~valid], equal_nan=True):
                return ["a row without a valid reading moves its state"]
            if not np.allclose(expected[valid], new[valid], rtol=1e-9, equal_nan=True):
                return ["an invalid row changes the state of a valid one beside it"]
    return []


def _single_precision(controller: TemperatureController, inputs: Drive) -> list[str]:
    double, _ = run(controller, inputs)
    single, state = run(controller, inputs, np.float32)
    floats = [a.dtype for a in leaves(state) if np.issubdtype(a.dtype, np.floating)]
    if any(dtype != np.float32 for dtype in floats):
        return ["a state in single precision does not stay one"]
    gap = np.abs(np.log(np.maximum(single, GREEDY)) - np.log(np.maximum(double, GREEDY)))
    if not gap.max() <= ROUNDING:
        return [f"in single precision ln T is off by {gap.max():.3g} after {len(gap)} tokens"]
    return []


def _overrides(controller: TemperatureController, inputs: Drive) -> list[str]:
    """A field set for one request must do what it does when the controller has it."""
    for name in sorted(controller.overridable):
        for factor in (0.6, 1.0, 1.5):
            value = factor * float(getattr(innermost(controller), name))
            try:
                other = with_field(controller, name, value)
                alone, _ = run(controller, inputs, **{name: value})
            except ConfigError:
                continue
            meant, state = run(other, inputs)
            if not np.allclose(alone, meant, rtol=1e-6, atol=1e-9):
                return [
                    f"a request's own {name} = {value:g} does other than the controller's: temperatures "
                    f"differ by {np.abs(alone - meant).max():.3g}"
                ]
            aims = other.targets(state)
            if name == "target" and aims is not None and not np.allclose(aims, value):
                return [f"`targets` says {aims[0]:g} where the request asked for {value:g}"]
    return []


def with_field(controller: TemperatureController, name: str, value: float) -> TemperatureController:
    """The controller with a field of its own, or of what it wraps, set.

    Raises
    ------
    ConfigError
        If the field cannot have that value.
    """
    inner = getattr(controller, "inner", None)
    if name not in type(controller).model_fields and isinstance(inner, TemperatureController):
        return controller.replace(inner=with_field(inner, name, value))
    try:
        return controller.replace(**{name: value})
    except ValueError as error:
        raise ConfigError(f"{name} cannot be {value:g}: {error}") from None


def _equal(some: list[Array], others: list[Array]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
