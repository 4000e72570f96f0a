"""What every controller must do, over the table of all of them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from pydantic import ValidationError
from table import EVERYTHING, LOOPS, PRIORITIES, PRUNINGS, TEMPERATURES

from entropic_control.controllers import kinds
from entropic_control.controllers.base import Array, Controller, Strict
from entropic_control.controllers.kinds import KindOf
from entropic_control.controllers.signals import Reading, reading
from entropic_control.controllers.state import map_leaves, split, stack, take
from entropic_control.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("error")
VOCAB = 64


def over(table: dict[str, Controller]) -> Any:
    return pytest.mark.parametrize("controller", table.values(), ids=table.keys())


class Step:
    """The signals of one step: a reading without the temperature, and logits."""

    def __init__(self, rng: np.random.Generator, rows: int, valid: Array | bool = True) -> None:
        self.logits = rng.standard_normal((rows, VOCAB)) * 3
        self.columns: dict[str, Any] = {
            "entropy": rng.gamma(2.0, 1.0, rows),
            "varentropy": rng.gamma(2.0, 1.0, rows),
            "raw_entropy": rng.gamma(2.0, 1.0, rows),
            "surprisal": rng.gamma(2.0, 1.0, rows),
            "valid": np.broadcast_to(valid, rows),
        }
        for name, column in self.columns.items():
            if name != "valid":
                column[~self.columns["valid"]] = np.nan
        self.logits[~self.columns["valid"]] = np.nan

    def of(self, rows: slice) -> Step:
        part = object.__new__(Step)
        part.logits = self.logits[rows]
        part.columns = {name: column[rows] for name, column in self.columns.items()}
        return part

    def read(self, controller: Controller, state: Any) -> Reading:
        temperature: Any = 1.0
        if controller.family == "temperature":
            temperature = command(controller, state, self.logits).temperature
        return reading(**self.columns, temperature=temperature)


def command(controller: Any, state: Any, logits: Array) -> Any:
    return controller.command(state, logits if controller.reads_logits else None)


def steps(count: int, rows: int, seed: int = 0) -> list[Step]:
    rng = np.random.default_rng(seed)
    return [Step(rng, rows) for _ in range(count)]


def drive(controller: Any, state: Any, inputs: list[Step]) -> tuple[list[Array], Any]:
    outputs = []
    for step in inputs:
        output, state = controller.update(state, step.read(controller, state))
        outputs.append(output)
    return outputs, state


def leaves(state: Any) -> list[Array]:
    found: list[Array] = []
    map_leaves(lambda leaf: found.append(leaf) or leaf, state)
    return found


def same(one: Any, other: Any) -> None:
    """Bit for bit, dtype included."""
    assert type(one) is type(other)
    for a, b in zip(leaves(one), leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert_array_equal(a, b)


def frozen(state: Any) -> Any:
    def lock(leaf: Array) -> Array:
        leaf = leaf.copy()
        leaf.flags.writeable = False
        return leaf

    return map_leaves(lock, state)


def test_table_is_complete() -> None:
    here = {(controller.family, controller.kind) for controller in EVERYTHING.values()}
    families = ("temperature", "priority", "pruning", "speculation", "estimator", "truncation")
    known = {
        (family, kind)
        for family in families
        for kind, cls in kinds.kinds_of(family).items()
        if cls.__module__.startswith("entropic_control.controllers.")
    }
    assert here == known


@over(LOOPS)
def test_many_rows_are_as_many_single_ones(controller: Any) -> None:
    inputs = steps(20, 5)
    outputs, state = drive(controller, controller.init(5), inputs)
    for row, alone in enumerate(split(state, 5)):
        part = slice(row, row + 1)
        solo, end = drive(controller, controller.init(1), [step.of(part) for step in inputs])
        same(end, alone)
        assert_array_equal(np.concatenate(solo), [output[row] for output in outputs])


@over(LOOPS)
def test_states_split_and_stack(controller: Any) -> None:
    _, state = drive(controller, controller.init(4), steps(5, 4))
    same(stack(split(state, 4)), state)
    same(take(state, np.array([2, 0])), stack([split(state, 4)[2], split(state, 4)[0]]))


@over(LOOPS)
def test_states_and_readings_are_never_written_to(controller: Any) -> None:
    _, warm = drive(controller, controller.init(3), steps(4, 3))
    for state in (frozen(controller.init(3)), frozen(warm)):
        before = map_leaves(np.copy, state)
        step = Step(np.random.default_rng(1), 3)
        read = Reading(*map(_locked, step.read(controller, state)[:-1]))
        controller.update(state, read)
        same(state, before)


def _locked(column: Array) -> Array:
    column = column.copy()
    column.flags.writeable = False
    return column


@over(LOOPS)
def test_a_controller_remembers_nothing_outside_its_state(controller: Any) -> None:
    inputs = steps(10, 2)
    expected, _ = drive(controller, controller.init(2), inputs)
    drive(controller, controller.init(3), steps(7, 3, seed=9))
    again, _ = drive(controller, controller.init(2), inputs)
    assert_array_equal(again, expected)
    twin = type(controller).model_validate(controller.model_dump())
    assert_array_equal(drive(twin, twin.init(2), inputs)[0], expected)


@over(LOOPS)
def test_case_5_going_back_to_a_state_is_bit_identical(controller: Any) -> None:
    _, kept = drive(controller, controller.init(2), steps(6, 2, seed=1))
    draft, after = steps(5, 2, seed=2), steps(8, 2, seed=3)
    expected, end = drive(controller, kept, after)
    drive(controller, kept, draft)
    outputs, again = drive(controller, kept, after)
    assert_array_equal(outputs, expected)
    same(again, end)


@over(LOOPS)
def test_reset_is_a_fresh_state(controller: Any) -> None:
    fresh = frozen(controller.init(2))
    drive(controller, controller.init(2), steps(9, 2))
    same(controller.init(2), fresh)


@over(LOOPS)
def test_invalid_readings_move_nothing(controller: Any) -> None:
    _, state = drive(controller, controller.init(3), steps(6, 3))
    for start in (controller.init(3), state):
        step = Step(np.random.default_rng(4), 3, valid=False)
        step.logits[1], step.logits[2] = -np.inf, np.inf
        output, end = controller.update(start, step.read(controller, start))
        same(end, start)
        assert np.isfinite(output).all()


@over(LOOPS)
def test_case_2_an_invalid_row_leaves_its_neighbours_alone(controller: Any) -> None:
    _, state = drive(controller, controller.init(4), steps(6, 4))
    step = Step(np.random.default_rng(4), 4, valid=np.array([True, True, False, True]))
    output, end = controller.update(state, step.read(controller, state))
    for row in range(4):
        part = slice(row, row + 1)
        alone = take(state, part)
        solo, expected = controller.update(alone, step.of(part).read(controller, alone))
        same(take(end, part), expected)
        assert_array_equal(output[part], solo)
    same(take(end, slice(2, 3)), take(state, slice(2, 3)))


@over(TEMPERATURES)
def test_case_2_commands_of_invalid_rows_are_finite(controller: Any) -> None:
    step = Step(np.random.default_rng(4), 2, valid=np.array([False, True]))
    temperature = command(controller, controller.init(2), step.logits).temperature
    assert np.isfinite(temperature).all()


@over(LOOPS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_precision_is_kept(controller: Any, dtype: Any) -> None:
    state = controller.init(2, dtype=dtype)
    inputs = [*steps(3, 2), Step(np.random.default_rng(1), 2, valid=np.array([True, False]))]
    _, end = drive(controller, state, inputs)
    for leaf in [*leaves(state), *leaves(end)]:
        assert leaf.dtype == dtype
        assert leaf.shape == (2,)


@over(TEMPERATURES)
def test_single_precision_follows_double(controller: Any) -> None:
    inputs = steps(12, 2)
    single, _ = drive(controller, controller.init(2, dtype=np.float32), inputs)
    double, _ = drive(controller, controller.init(2), inputs)
    assert_allclose(single, double, rtol=2e-5)


@over(TEMPERATURES)
def test_update_returns_what_is_commanded_next(controller: Any) -> None:
    state = controller.init(3)
    for step in steps(15, 3):
        read = step.read(controller, state)
        output, state = controller.update(state, read)
        expected = read.temperature
        if not controller.reads_logits:
            expected = controller.command(state).temperature
        assert_allclose(output, expected, rtol=1e-14)


@over(TEMPERATURES)
def test_every_kind_reports_saturation_feasibility_and_targets(controller: Any) -> None:
    state = controller.init(3)
    assert controller.saturated(state).tolist() == [0, 0, 0]
    targets = controller.targets(state)
    feasible = controller.feasible(state, np.array([1, 2, 100_000]))
    if targets is None:
        assert feasible.tolist() == [True, True, True]
    else:
        assert targets.shape == (3,)
        assert feasible.tolist() == [False, False, True]


OVERRIDES = {"target": [0.5, 1.0, 2.0], "temperature": [0.3, 0.7, 1.5]}


@over(TEMPERATURES)
def test_overrides_are_rows_of_the_state(controller: Any) -> None:
    assert controller.overridable
    inputs = steps(10, 3)
    for field in controller.overridable:
        state = controller.init(3, **{field: OVERRIDES[field]})
        outputs, end = drive(controller, state, inputs)
        for row, value in enumerate(OVERRIDES[field]):
            part = slice(row, row + 1)
            own = _with(controller, field, value)
            solo, alone = drive(own, own.init(1), [step.of(part) for step in inputs])
            same(take(end, part), alone)
            assert_array_equal(np.concatenate(solo), [output[row] for output in outputs])
        everyone = controller.init(3, **{field: 0.5})
        same(everyone, controller.init(3, **{field: [0.5, 0.5, 0.5]}))


def _with(controller: Any, field: str, value: float) -> Any:
    """The controller whose own parameter is the override, inside wrappers too."""
    if field in type(controller).model_fields:
        return controller.replace(**{field: value})
    return controller.replace(inner=_with(controller.inner, field, value))


@over(TEMPERATURES)
def test_bad_overrides_are_refused(controller: Any) -> None:
    field = next(iter(controller.overridable))
    for bad in (-1.0, np.nan, np.inf, [1.0, -1.0], [1.0, 2.0, 3.0], "warm", None):
        with pytest.raises(ConfigError, match=field):
            controller.init(2, **{field: bad})
    with pytest.raises(ConfigError, match=f"no per-request setting 'tarrget'.*{field}"):
        controller.init(2, tarrget=1.0)


@over(EVERYTHING)
def test_configurations_survive_a_round_trip(controller: Any) -> None:
    class Holder(Strict):
        held: Annotated[Controller, KindOf(controller.family)]

    cls = type(controller)
    assert cls.model_validate(controller.model_dump()) == controller
    text = controller.model_dump_json()
    assert cls.model_validate_json(text) == controller
    assert Holder.model_validate({"held": json.loads(text)}).held == controller
    holder = Holder(held=controller)
    assert Holder.model_validate_json(holder.model_dump_json()) == holder
    assert hash(controller) == hash(cls.model_validate_json(text))


@over(EVERYTHING)
def test_unknown_keys_are_refused_with_the_known_listed(controller: Any) -> None:
    known = ", ".join(sorted(type(controller).model_fields))
    with pytest.raises(ValidationError, match="unknown key 'no_such_key'") as caught:
        type(controller).model_validate({**controller.model_dump(), "no_such_key": 1})
    assert f"(known: {known})" in str(caught.value)


@over(EVERYTHING)
def test_parameters_are_frozen_and_finite(controller: Any) -> None:
    for field, value in dict(controller).items():
        with pytest.raises(ValidationError, match="frozen"):
            setattr(controller, field, value)
        if isinstance(value, float):
            for bad in (np.nan, np.inf):
                with pytest.raises(ValidationError):
                    controller.replace(**{field: bad})


def inputs_and_outputs(model: Any) -> None:
    order = model.A.shape[0]
    assert model.A.shape == (order, order)
    assert model.B.shape == (order, len(model.inputs))
    assert model.C.shape == (len(model.outputs), order)
    assert model.D.shape == (len(model.outputs), len(model.inputs))


def base(controller: Any) -> Any:
    return base(controller.inner) if hasattr(controller, "inner") else controller


@over(TEMPERATURES)
def test_linear_model_reproduces_update_temperature(controller: Any) -> None:
    rng = np.random.default_rng(5)
    small = rng.standard_normal(60) * 1e-4
    varentropy = getattr(base(controller), "v_start", 1.0)
    model = controller.linearize(varentropy)
    inputs_and_outputs(model)
    expected = model.respond(small[:, None])[:, 0]
    state = controller.init(1)
    logits = rng.standard_normal((1, VOCAB))
    is_mirostat = base(controller).kind == "mirostat"
    rest = 1.0 if (targets := controller.targets(state)) is None else float(targets[0])
    first = command(controller, state, logits)
    at_rest = first.max_surprisal if is_mirostat else np.log(first.temperature)
    found = []
    for deviation in small:
        now = command(controller, state, logits).temperature
        signals = {"entropy": rest, "surprisal": rest + deviation}
        if not is_mirostat:
            signals["entropy"] = rest + deviation
        read = reading(**signals, varentropy=varentropy, temperature=now, rows=1)
        output, state = controller.update(state, read)
        after = command(controller, state, logits).max_surprisal if is_mirostat else np.log(output)
        found.append(float((after - at_rest)[0]))
    assert_allclose(found, expected, rtol=1e-9, atol=1e-14)
    assert np.any(expected) == (base(controller).kind in ("pi", "mirostat"))


@over(PRIORITIES)
def test_linear_model_reproduces_update_priority(controller: Any) -> None:
    rng = np.random.default_rng(5)
    model = controller.linearize()
    inputs_and_outputs(model)
    rest = getattr(controller, "prior", 0.0)
    falls = rest + rng.uniform(-0.1, 0.1, 40)
    level = 1000 - np.cumsum(falls)
    gain, state = controller.update(controller.init(1), reading(1000.0))
    found = []
    for entropy in level:
        gain, state = controller.update(state, reading(entropy))
        found.append(float(gain[0]) - rest)
    expected = model.respond((falls - rest)[:, None])[:, 0]
    assert_allclose(found, expected, rtol=1e-9, atol=1e-11)
    assert np.any(expected) == (controller.kind == "entropic")


@over(PRUNINGS)
def test_linear_model_reproduces_update_pruning(controller: Any) -> None:
    rng = np.random.default_rng(5)
    model = controller.linearize()
    inputs_and_outputs(model)
    rest = getattr(controller, "entropy_floor", 0.0)
    above = rng.uniform(0, 1, 40)
    state = map_leaves(lambda leaf: np.full_like(leaf, rest), controller.init(1))
    found = []
    for deviation in above:
        _, state = controller.update(state, reading(rest + deviation))
        found.append(float(sum(leaves(state), start=np.zeros(1))[0]) - rest)
    expected = model.respond(above[:, None])[:, 0]
    assert_allclose(found, expected if leaves(state) else np.zeros(40), rtol=1e-9)
    assert np.any(expected) == (controller.kind in ("entropic", "selection"))
