"""The temperature kinds: their formulas, and the loop on toy plants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from pydantic import ValidationError
from test_softmax import oracle

from entropic_control.controllers import (
    DynamicTemperature,
    EDTTemperature,
    ExactTemperature,
    FixedTemperature,
    FullEntropy,
    MinP,
    Mirostat,
    NoTruncation,
    PITemperature,
    SlewLimit,
    TopK,
    TopP,
    Typical,
)
from entropic_control.controllers.base import Array
from entropic_control.controllers.measurement import measure
from entropic_control.controllers.sampling import uniform
from entropic_control.controllers.signals import Reading, reading
from entropic_control.controllers.softmax import moments

pytestmark = pytest.mark.filterwarnings("error")
INF = np.inf


def row_of(vocab: int = 500, scale: float = 3.0, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(vocab) * scale


def commanded(controller: Any, row: Array, **overrides: Any) -> float:
    state = controller.init(1, **overrides)
    return float(controller.command(state, row[None]).temperature[0])


def closed_loop(
    controller: Any, plant: Any, steps: int, truncation: Any = None, seed: int = 1
) -> list[Reading]:
    """Run a controller on `plant(step)`, which gives a row of logits."""
    state = controller.init(1)
    readings = []
    for step in range(steps):
        logits = plant(step)[None]
        command = controller.command(state, logits if controller.reads_logits else None)
        measured = measure(logits, command, FullEntropy(), truncation or NoTruncation())
        token = measured.draw(0, uniform(seed, step))
        readings.append(measured.completed([token]))
        _, state = controller.update(state, readings[-1])
    return readings


def drifting(step: int) -> Array:
    """Random rows whose sharpness drifts by a factor of three over 300 tokens, then stays."""
    rng = np.random.default_rng([5, step])
    return rng.standard_normal(400) * rng.uniform(2, 4) * (1 + min(step, 300) / 150)


# Fixed


def test_fixed_commands_its_temperature() -> None:
    assert commanded(FixedTemperature(temperature=0.3), row_of()) == 0.3
    assert commanded(FixedTemperature(temperature=0.0), row_of()) == 0.0


# PI


def test_pi_follows_its_formula() -> None:
    controller = PITemperature(target=1.3, kp=0.2, ki=0.05, filter=0.3, v_min=0.4, start=0.6)
    rng = np.random.default_rng(0)
    state = controller.init(1)
    integral, h, v = np.log(0.6), 1.3, controller.v_start
    low, high = np.log((0.1, 2.0))
    for _ in range(100):
        entropy, varentropy = rng.gamma(2, 0.65), rng.gamma(1, 0.5)
        output, state = controller.update(state, reading(entropy, varentropy))
        h += 0.3 * (entropy - h)
        v += 0.3 * (varentropy - v)
        integral = np.clip(integral + 0.05 * (1.3 - entropy), low, high)
        u = np.clip(integral + 0.2 * (1.3 - h) / max(v, 0.4), low, high)
        assert_allclose(output, np.exp(u), rtol=1e-12)


@pytest.mark.parametrize("schedule", ["varentropy", "none"])
@pytest.mark.parametrize("target", [0.8, 2.0])
def test_pi_holds_the_mean_entropy_against_drift(schedule: Any, target: float) -> None:
    controller = PITemperature(target=target, schedule=schedule, bounds=(0.05, 5.0))
    readings = closed_loop(controller, drifting, 800)
    entropy = np.array([r.entropy[0] for r in readings])
    temperature = np.array([r.temperature[0] for r in readings])
    assert abs(entropy[400:].mean() - target) < 0.04 * target
    # An integrator follows a ramp of ln T with the error it needs: the slope over ki.
    ramp = slice(100, 300)
    lag = np.log(temperature[300] / temperature[100]) / 200 / controller.ki
    assert abs(target - entropy[ramp].mean() - lag) < 0.06 * target
    # Tokens keep their differences: it is the mean that is held.
    assert entropy[400:].std() > 0.1
    fixed = closed_loop(FixedTemperature(temperature=float(temperature[20])), drifting, 500)
    assert abs(np.mean([r.entropy[0] for r in fixed[400:]]) - target) > 0.2 * target


def test_pi_comes_back_from_saturation_at_once() -> None:
    controller = PITemperature(target=1.5, bounds=(0.2, 2.0))
    state = controller.init(1)
    for _ in range(2000):
        _, state = controller.update(state, reading(0.01, 0.5))
    assert controller.saturated(state)[0] == 1
    assert_allclose(controller.command(state).temperature, 2.0)
    for step in range(40):  # noqa: B007
        _, state = controller.update(state, reading(4.0, 2.0))
        if controller.saturated(state)[0] == 0:
            break
    assert step == 0
    for _ in range(2000):
        _, state = controller.update(state, reading(6.0, 2.0))
    assert controller.saturated(state)[0] == -1


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("target", [0.6, 1.0, 1.4])
@pytest.mark.parametrize(
    "truncation",
    [NoTruncation(), MinP(p=0.05), TopP(p=0.95), TopK(k=40), Typical(p=0.95)],
    ids=repr,
)
def test_pi_holds_the_mean_where_many_tokens_cannot_have_the_target(
    truncation: Any, target: float, place: Any
) -> None:
    truncation = truncation.replace(place=place)

    def row(step: int) -> Array:
        # Words whose inside is certain, as a language model's rows are, and lively ones between.
        rng = np.random.default_rng([3, step])
        lively = rng.random() < 0.5
        logits = rng.standard_normal(400) * (2.5 if lively else 0.4)
        logits[0] += 0 if lively else 12.0
        return logits

    def mean_under(controller: Any) -> float:
        readings = closed_loop(controller, row, 2500, truncation)[300:]
        return float(np.mean([r.entropy[0] for r in readings]))

    controller = PITemperature(target=target)
    most = mean_under(FixedTemperature(temperature=controller.bounds[1]))
    assert abs(mean_under(controller) - min(target, most)) < 0.03 * target


def test_pi_runs_to_its_bound_where_no_temperature_reaches_the_target() -> None:
    controller = PITemperature(target=2.0)
    state = controller.init(2)
    for _ in range(300):
        _, state = controller.update(state, reading([0.0, 2.0], 0.0, live=np.array([1, 1000])))
    assert controller.saturated(state).tolist() == [1, 0]
    assert_allclose(controller.command(state).temperature[0], controller.bounds[1])
    assert controller.feasible(state, np.array([7, 8])).tolist() == [False, True]


def test_pi_holds_still_on_rows_that_are_no_distribution() -> None:
    controller = PITemperature(target=2.0)
    _, state = controller.update(controller.init(2), reading([1.0, 1.0]))
    _, after = controller.update(state, reading([1.0, np.nan], valid=np.array([True, False])))
    for old, new in zip(state, after, strict=True):
        assert new[1] == old[1]
    assert after.log_temperature[0] > state.log_temperature[0]


def test_pi_refuses_impossible_bounds() -> None:
    for bad in ({"bounds": (1.0, 0.5)}, {"bounds": (0.0, 1.0)}, {"start": 3.0}, {"ki": 0.0}):
        with pytest.raises(ValidationError):
            PITemperature(**bad)


# Exact


@given(
    st.integers(0, 50),
    st.floats(0.5, 8),
    st.floats(0.05, 5),
    st.sampled_from([np.float32, np.float64]),
)
def test_exact_reaches_its_target_or_the_nearest_bound(
    seed: int, scale: float, target: float, dtype: Any
) -> None:
    controller = ExactTemperature(target=target, bounds=(0.1, 4.0), tolerance=1e-3)
    row = row_of(300, scale, seed).astype(dtype)
    temperature = commanded(controller, row)
    least, most = oracle(row, 0.1)[1], oracle(row, 4.0)[1]
    entropy = oracle(row, temperature)[1]
    if least <= target <= most:
        assert abs(entropy - target) <= 1e-3 + 1e-5
    else:
        assert abs(entropy - np.clip(target, least, most)) <= 1e-3 + 1e-5


@pytest.mark.parametrize("last", [1e-9, 0.1, 0.7, 4.0, 1e9])
def test_exact_finds_the_same_solution_from_anywhere(last: float) -> None:
    controller = ExactTemperature(target=2.0, bounds=(0.1, 4.0), tolerance=1e-8)
    for scale in (0.5, 2.0, 10.0):
        row = row_of(300, scale)
        solution = controller.solve(row, 2.0, last)
        assert_allclose(solution, controller.solve(row, 2.0, 1.0), rtol=1e-6)


def test_exact_on_rows_where_newton_alone_fails() -> None:
    # Two levels far apart: a plateau at ln 2, a cliff, and almost no slope on either side.
    row = np.array([50.0, 50.0, *[0.0] * 1000])
    controller = ExactTemperature(bounds=(0.1, 100.0), tolerance=1e-6)
    for target in (0.7, 1.0, 3.0, 6.0):
        for last in (0.1, 1.0, 5.0, 7.0, 100.0):
            temperature = controller.solve(row, target, last)
            assert abs(oracle(row, temperature)[1] - target) < 2e-6
    assert controller.solve(row, 0.5, 1.0) == 0.1
    assert controller.solve(row, 6.95, 1.0) == 100.0


def test_exact_converges_on_rows_of_every_shape() -> None:
    rng = np.random.default_rng(0)
    controller = ExactTemperature(bounds=(0.02, 50.0), tolerance=1e-5)
    for _ in range(150):
        target, last = float(rng.uniform(0.001, 6)), float(np.exp(rng.uniform(-4, 4)))
        for row in (
            rng.standard_normal(200) * rng.uniform(0.1, 30),
            rng.standard_cauchy(200) * rng.uniform(0.1, 5),
            np.repeat(rng.uniform(-80, 80, 4), rng.integers(1, 60)),
        ):
            entropy = moments(row, controller.solve(row, target, last)).entropy
            least, most = moments(row, 0.02).entropy, moments(row, 50.0).entropy
            assert abs(entropy - np.clip(target, least, most)) < 1.1e-5


def test_exact_says_when_it_is_at_a_bound() -> None:
    controller = ExactTemperature(bounds=(0.2, 3.0))
    state = controller.init(3, target=[0.001, 1.5, 20.0])
    command = controller.command(state, np.stack([row_of()] * 3))
    _, state = controller.update(state, reading([1.0] * 3, temperature=command.temperature))
    assert controller.saturated(state).tolist() == [-1, 0, 1]
    wrapped = SlewLimit(inner=controller)
    assert wrapped.saturated(wrapped.init(3)._replace(inner=state)).tolist() == [-1, 0, 1]


def test_exact_is_cheap() -> None:
    passes = 0

    def counted(row: Array, temperature: float) -> Any:
        nonlocal passes
        passes += 1
        return moments(row, temperature)

    controller = ExactTemperature(target=1.5, bounds=(0.1, 4.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("entropic_control.controllers.temperature.exact.moments", counted)
        for seed in range(50):
            controller.solve(row_of(1000, 3.0, seed), 1.5, 1.0)
    assert passes / 50 < 7


def test_case_9_exact_with_one_live_token_is_finite() -> None:
    row = np.full(32_000, -INF)
    row[7] = 2.0
    controller = ExactTemperature(bounds=(0.2, 3.0))
    state = controller.init(1)
    assert commanded(controller, row) == 3.0
    assert not controller.feasible(state, np.array([1]))[0]


# Dynamic temperature and EDT


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_dynatemp_follows_its_formula(exponent: float) -> None:
    controller = DynamicTemperature(temperature=0.8, range=0.5, exponent=exponent)
    for scale in (0.1, 1.0, 4.0):
        row = row_of(200, scale)
        share = oracle(row)[1] / np.log(200)
        assert_allclose(commanded(controller, row), 0.3 + 1.0 * share**exponent)
    assert_allclose(commanded(controller, np.zeros(50)), 1.3)


def test_dynatemp_counts_live_tokens_and_stays_above_zero() -> None:
    row = np.full(1000, -INF)
    row[:10] = 0.0
    assert_allclose(commanded(DynamicTemperature(temperature=0.3, range=0.5), row), 0.8)
    row[0] = 200.0
    assert commanded(DynamicTemperature(temperature=0.3, range=0.5), row) == pytest.approx(0.0)
    row[1:] = -INF
    assert commanded(DynamicTemperature(temperature=0.3, range=0.5), row) == 0.3
    assert commanded(DynamicTemperature(temperature=0.3, range=0.0), row_of()) == 0.3


def test_edt_follows_its_formula() -> None:
    controller = EDTTemperature(temperature=1.2, theta=0.5)
    for scale in (0.1, 1.0, 4.0):
        row = row_of(200, scale)
        assert_allclose(commanded(controller, row), 1.2 * 0.8 ** (0.5 / oracle(row)[1]))
    certain = np.array([0.0, 900.0])
    assert commanded(controller, certain) == 0.0
    assert commanded(EDTTemperature(temperature=1.2, theta=0.0), certain) == 1.2


@pytest.mark.parametrize("cls", [ExactTemperature, DynamicTemperature, EDTTemperature])
def test_feed_forward_kinds_need_logits(cls: Any) -> None:
    controller = cls()
    assert controller.reads_logits
    with pytest.raises(ValueError, match="needs the logits"):
        controller.command(controller.init(1))


# Mirostat


def test_mirostat_follows_its_formula() -> None:
    controller = Mirostat(target=2.0, rate=0.3, temperature=0.9)
    state = controller.init(1)
    mu = 4.0
    for surprisal in (0.1, 3.0, 2.0, 7.5, 0.0):
        assert_allclose(controller.command(state).max_surprisal, mu)
        output, state = controller.update(state, reading(1.0, surprisal=surprisal))
        mu -= 0.3 * (surprisal - 2.0)
        assert output[0] == 0.9
    assert_allclose(state.limit, mu)


def test_mirostat_holds_the_mean_surprisal() -> None:
    readings = closed_loop(Mirostat(target=1.5), lambda step: row_of(400, 1.5, step), 1500)
    surprisal = np.array([r.surprisal[0] for r in readings])
    assert abs(surprisal[300:].mean() - 1.5) < 0.1
    free = closed_loop(FixedTemperature(), lambda step: row_of(400, 1.5, step), 300)
    assert np.mean([r.surprisal[0] for r in free]) > 3


def test_mirostat_is_not_moved_by_a_surprisal_that_is_not_finite() -> None:
    controller = Mirostat()
    state = controller.init(2)
    _, after = controller.update(state, reading([1.0, 1.0], surprisal=np.array([INF, np.nan])))
    assert_array_equal(after.limit, state.limit)


# Slew limit


def test_slew_without_effect_is_the_inner_controller_bit_for_bit() -> None:
    inner = PITemperature(kp=0.5, ki=0.1)
    for plain, limited in zip(
        closed_loop(inner, drifting, 100),
        closed_loop(SlewLimit(inner=inner, rate=1e6), drifting, 100),
        strict=True,
    ):
        for a, b in zip(plain, limited, strict=True):
            assert_array_equal(a, b)


@pytest.mark.parametrize(
    "inner",
    [
        PITemperature(kp=2.0, ki=0.5),
        ExactTemperature(),
        EDTTemperature(theta=2.0),
        SlewLimit(inner=ExactTemperature(), rate=0.5),
    ],
    ids=lambda inner: inner.kind,
)
def test_slew_bounds_the_rate(inner: Any) -> None:
    def temperatures(controller: Any) -> Array:
        return np.array([r.temperature[0] for r in closed_loop(controller, drifting, 80)])

    free = np.diff(np.log(np.maximum(temperatures(inner), 1e-6)))
    held = np.diff(np.log(temperatures(SlewLimit(inner=inner, rate=0.02))))
    assert np.abs(free).max() > 0.1
    assert np.abs(held).max() <= 0.02 + 1e-12
    assert np.abs(held).max() > 0.02 - 1e-9


def test_slew_moves_towards_the_command_step_by_step() -> None:
    controller = SlewLimit(inner=EDTTemperature(theta=0.0, temperature=2.0), rate=0.1)
    state = controller.init(1)
    first = controller.command(state, np.zeros((1, 4)))
    assert first.temperature[0] == 2.0  # the first step is free
    _, state = controller.update(state, reading(1.0, temperature=1.0))
    found = []
    for _ in range(9):
        temperature = controller.command(state, np.zeros((1, 4))).temperature
        found.append(temperature[0])
        _, state = controller.update(state, reading(1.0, temperature=temperature))
    assert_allclose(found[:6], np.exp(0.1 * np.arange(1, 7)))
    assert found[-1] == 2.0


def test_slew_keeps_an_integrator_from_running_ahead() -> None:
    inner = PITemperature(target=1.5, kp=0.5, ki=0.2, filter=1.0, bounds=(0.05, 5.0))
    controller = SlewLimit(inner=inner, rate=0.02)
    state = controller.init(1)
    temperature = controller.command(state).temperature
    for _ in range(30):  # far below the target: the inner one would heat fast
        temperature, state = controller.update(state, reading(0.2, 1.0, temperature=temperature))
        assert_allclose(state.inner.log_temperature, np.log(temperature), rtol=1e-12)
    assert_allclose(np.log(temperature), np.log(inner.start) + 30 * 0.02)
    hot = temperature
    temperature, state = controller.update(state, reading(3.0, 1.0, temperature=temperature))
    assert temperature < hot


def test_slew_passes_settings_and_the_surprisal_limit_through() -> None:
    controller = SlewLimit(inner=Mirostat(target=2.0), rate=0.1)
    assert controller.overridable == {"target"}
    state = controller.init(2, target=[1.0, 3.0])
    assert_allclose(controller.command(state).max_surprisal, [2.0, 6.0])
    assert_allclose(controller.targets(state), [1.0, 3.0])
    assert controller.feasible(state, np.array([3, 3])).tolist() == [True, False]
    assert not controller.reads_logits
    assert SlewLimit(inner=ExactTemperature()).reads_logits
    nested = SlewLimit(inner={"kind": "slew", "inner": {"kind": "pi", "target": 2.0}})
    assert nested.inner.inner == PITemperature(target=2.0)


def test_slew_refuses_other_families() -> None:
    with pytest.raises(ValidationError, match="unknown temperature kind 'entropic'"):
        SlewLimit(inner={"kind": "entropic"})
    with pytest.raises(ValidationError, match="unknown temperature kind 'full'"):
        SlewLimit(inner=FullEntropy())
