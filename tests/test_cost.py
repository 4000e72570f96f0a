"""The cost model: what it learns from, and what it does not believe."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from engines import ids, simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_control import Request
from entropic_control.backends import SimulatedConfig
from entropic_control.backends.cost import CostModel, Shape, Weights
from entropic_control.controllers import FirstCome, NoPruning

TRUTH = Weights(4e-3, 6e-3, 2e-6, 5e-3, 4e-7, 1e-3)


def shapes(count: int, seed: int = 0) -> list[Shape]:
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        rows, prompt = int(rng.integers(0, 9)), int(rng.integers(0, 400) * rng.integers(0, 2))
        prompt = prompt or (0 if rows else 10)
        reads, measured = prompt * int(rng.integers(1, 4000)), prompt * int(rng.integers(0, 2))
        longest = int(rng.integers(64, 8000)) if rows else 0
        out.append(Shape(rows, longest, prompt, reads, measured))
    return out


def taught(prior: Weights, truth: Weights, noise: float = 0.0, count: int = 600) -> CostModel:
    model, true = CostModel(prior), CostModel(truth)
    rng = np.random.default_rng(1)
    for shape in shapes(count):
        model.observe(shape, true.predict(shape) * float(np.exp(noise * rng.standard_normal())))
    return model


@pytest.mark.parametrize("factor", [0.2, 0.5, 3.0])
def test_the_fit_recovers_the_costs(factor: float) -> None:
    model = taught(Weights(*(factor * w for w in TRUTH)), TRUTH)
    # The tie to the prior may pull at what weighs little in any step, not at a prediction.
    np.testing.assert_allclose(model.weights, TRUTH, rtol=0.4)
    np.testing.assert_allclose(model.weights[1:4], TRUTH[1:4], rtol=0.1)
    for shape in shapes(50, seed=9):
        assert model.predict(shape) == pytest.approx(CostModel(TRUTH).predict(shape), rel=0.1)


def test_the_fit_sees_through_noise() -> None:
    model = taught(Weights(*(2 * w for w in TRUTH)), TRUTH, noise=0.2)
    errors = [
        model.predict(shape) / CostModel(TRUTH).predict(shape) - 1 for shape in shapes(80, seed=9)
    ]
    assert np.median(np.abs(errors)) < 0.1


def test_stalls_are_not_news_about_the_engine() -> None:
    """Steps that took a hundred times as long were another process on the cores."""
    model, true = CostModel(TRUTH), CostModel(TRUTH)
    rng = np.random.default_rng(2)
    for shape in shapes(400):
        stalled = 100.0 if rng.random() < 0.02 else 1.0
        model.observe(shape, stalled * true.predict(shape))
    for shape in shapes(50, seed=9):
        assert model.predict(shape) == pytest.approx(true.predict(shape), rel=0.25)


def test_the_fit_follows_an_engine_that_slows_down() -> None:
    model = taught(TRUTH, TRUTH)
    slower = CostModel(Weights(*(2 * w for w in TRUTH)))
    for shape in shapes(2500, seed=3):
        model.observe(shape, slower.predict(shape))
    for shape in shapes(50, seed=9):
        assert model.predict(shape) == pytest.approx(slower.predict(shape), rel=0.1)


def test_features_that_never_occur_keep_their_prior() -> None:
    model, true = CostModel(TRUTH), CostModel(Weights(*(3 * w for w in TRUTH)))
    for rows in range(1, 9):
        for longest in range(256, 4096, 128):
            shape = Shape(rows, longest, 0, 0, 0)
            model.observe(shape, true.predict(shape))
    np.testing.assert_allclose(model.weights[3:], TRUTH[3:])
    np.testing.assert_allclose(model.weights[:3], 3 * np.array(TRUTH[:3]), rtol=0.25)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.tuples(
                st.integers(0, 64),
                st.integers(0, 100_000),
                st.integers(0, 4096),
                st.integers(0, 10**9),
                st.integers(0, 4096),
            ),
            st.floats(1e-2, 1e6) | st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf]),
        ),
        max_size=40,
    )
)
def test_whatever_is_observed_costs_are_finite_and_never_negative(
    observed: list[tuple[Any, float]],
) -> None:
    model = CostModel(TRUTH)
    for columns, times in observed:
        shape = Shape(*columns)
        model.observe(shape, times * CostModel(TRUTH).predict(shape))
    assert np.all(np.isfinite(model.weights))
    assert np.all(model.weights > 0)
    small, large = model.decode(np.array([1, 8]), np.array([256, 256]))
    assert 0 < small <= large


def test_longer_and_more_cost_more() -> None:
    model = taught(TRUTH, TRUTH)
    rows, longest = np.meshgrid(np.arange(1, 9), np.arange(256, 8192, 256))
    seconds = model.decode(rows, longest)
    assert np.all(np.diff(seconds, axis=0) > 0)
    assert np.all(np.diff(seconds, axis=1) > 0)
    tokens = np.arange(1, 500)
    assert np.all(np.diff(model.prefill(tokens, np.zeros(499))) > 0)
    assert np.all(model.prefill(tokens, 100, measured=True) > model.prefill(tokens, 100))


def test_swaps_are_learnt() -> None:
    model = CostModel(TRUTH)
    before = model.swap(1000)
    for _ in range(30):
        model.observe_swap(1000, 5.0)
    assert before < 1.0
    assert model.swap(1000) == pytest.approx(5.0, rel=0.01)
    model.observe_swap(0, 1.0)
    assert model.swap(1000) == pytest.approx(5.0, rel=0.01)


def test_an_engine_learns_the_simulated_costs() -> None:
    """End to end: wrong at first, then within a few percent of the clock of the plant."""
    engine = simulated(priority=FirstCome(), pruning=NoPruning())
    truth = SimulatedConfig().costs()
    engine.backend.cost = CostModel(Weights(*(3 * w for w in truth)))
    engine.run([Request(prompt=ids(20 + 150 * (n % 5), n), max_tokens=90 + n) for n in range(24)])
    steps = engine.trace.steps
    error = np.abs(steps["predicted"] / steps["forward"] - 1)
    assert error[0] > 1.5
    assert np.median(error[-100:]) < 0.03
    assert engine.report().summary["cost_error_median"] < 0.1


@pytest.mark.parametrize("seconds", [5e-324, 1e-200, 1e-30])
def test_a_step_of_no_time_neither_breaks_the_fit_nor_owns_it(seconds: float) -> None:
    model = CostModel(TRUTH)
    shape = Shape(rows=4, longest=500, prompt_tokens=0, prompt_reads=0, measured=0)
    usual = model.predict(shape)
    model.observe(shape, seconds)
    for _ in range(200):
        model.observe(shape, usual)
    assert np.isfinite(model.weights).all()
    assert model.predict(shape) > 0.1 * usual
