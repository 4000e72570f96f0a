"""The moments of a row and sampling from it, against double-precision oracles."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import stats

from entropic_control.controllers.base import Array
from entropic_control.controllers.sampling import uniform
from entropic_control.controllers.softmax import (
    draw,
    invalid,
    moments,
    surprisal,
    surprisals,
    working_precision,
)

pytestmark = pytest.mark.filterwarnings("error")
INF = np.inf


def oracle(row: Any, temperature: float = 1.0) -> tuple[Array, float, float]:
    """Probabilities, entropy and varentropy in double precision."""
    z = np.asarray(row, np.float64)
    p = np.zeros(z.size)
    live = np.isfinite(z)
    p[live] = np.exp((z[live] - z[live].max()) / temperature)
    p /= p.sum()
    log_p = np.log(p[p > 0])
    entropy = -np.sum(p[p > 0] * log_p)
    return p, float(entropy), float(np.sum(p[p > 0] * (log_p + entropy) ** 2))


logit_rows = st.lists(
    st.one_of(st.floats(-30, 30, width=32), st.just(-INF)), min_size=1, max_size=600
).filter(lambda row: max(row) > -INF)


@given(logit_rows, st.floats(0.05, 5), st.sampled_from([np.float32, np.float64]))
def test_moments_match_the_oracle(row: list[float], temperature: float, dtype: Any) -> None:
    of = moments(np.array(row, dtype), temperature)
    p, entropy, varentropy = oracle(row, temperature)
    assert_allclose(of.entropy, entropy, atol=2e-5)
    assert_allclose(of.varentropy, varentropy, atol=3e-4, rtol=1e-4)
    assert_allclose(of.log_norm, -np.log(p.max()), atol=1e-5)
    assert of.live == np.isfinite(row).sum()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_moments_at_the_size_of_a_vocabulary(temperature: float) -> None:
    row = np.random.default_rng(0).standard_normal(49_152).astype(np.float32) * 4
    of = moments(row, temperature)
    _, entropy, varentropy = oracle(row, temperature)
    assert_allclose(of.entropy, entropy, rtol=2e-6)
    assert_allclose(of.varentropy, varentropy, rtol=2e-5)


def test_varentropy_is_the_slope_of_entropy() -> None:
    row = np.random.default_rng(0).standard_normal(1000) * 3
    for u in (-1.0, 0.0, 0.8):
        rise = moments(row, np.exp(u + 1e-5)).entropy - moments(row, np.exp(u - 1e-5)).entropy
        assert_allclose(rise / 2e-5, moments(row, np.exp(u)).varentropy, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    ("row", "entropy"), [([0, -INF], 0.0), ([0, 0, -INF], np.log(2)), ([65504, -65504], 0.0)]
)
def test_case_1_masked_and_extreme_logits_have_their_entropy(
    row: list[float], entropy: float, dtype: Any
) -> None:
    logits = working_precision(np.array(row, dtype))
    assert not invalid(logits)
    for temperature in (1.0, 0.5, 2.0):
        of = moments(logits, temperature)
        assert_allclose(of.entropy, entropy, atol=1e-6)
        assert_allclose(of.varentropy, 0.0, atol=1e-6)


@pytest.mark.parametrize("mask", [-3.4028235e38, -1e30])
def test_case_1_masks_may_be_the_lowest_finite_number(mask: float) -> None:
    row = np.array([0, mask, 0, mask], np.float32)
    for temperature in (0.01, 0.5, 1.0, 3.0):
        of = moments(row, temperature)
        assert_allclose(of.entropy, np.log(2), atol=1e-6)
        assert draw(row, of, 0.999) == 2


@pytest.mark.parametrize(
    "row", [[-INF, -INF], [np.nan, np.nan], [0, np.nan], [0, INF], [-INF, INF], []]
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_case_2_rows_that_are_no_distribution_are_invalid(row: list[float], dtype: Any) -> None:
    assert invalid(working_precision(np.array(row, dtype)))


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-5])
def test_case_3_cold_is_the_argmax(temperature: float) -> None:
    row = working_precision(np.array([3.0, 11.06, -2.0, 11.0, -INF], np.float16))
    of = moments(row, temperature)
    assert of.entropy == pytest.approx(0.0, abs=1e-6)
    assert np.isfinite(of[:5]).all()
    assert {draw(row, of, u) for u in (0.0, 0.5, 1 - 2**-53)} == {1}
    assert surprisal(row, of, 1) == pytest.approx(0.0, abs=1e-6)


def test_case_3_entropy_falls_to_zero_with_the_temperature() -> None:
    row = working_precision(np.array([3.0, 11.06, -2.0, 11.0], np.float16))
    entropies = [moments(row, t).entropy for t in (1.0, 0.1, 0.02, 0.01, 1e-3, 1e-5, 0.0)]
    assert entropies == sorted(entropies, reverse=True)
    assert entropies[0] > 0.5
    assert entropies[-1] == 0.0


def test_case_3_equal_logits_stay_equal_until_greedy() -> None:
    row = np.zeros(3)
    assert_allclose(moments(row, 1e-5).entropy, np.log(3))
    assert moments(row, 0.0).entropy == 0.0
    assert draw(row, moments(row, 0.0), 0.99) == 0


@pytest.mark.parametrize("row", [[5.0], [-INF, 2.0, -INF], [1e4, -1e4]])
def test_case_6_a_single_token_has_no_variance(row: list[float]) -> None:
    for temperature in (0.0, 0.5, 1.0, 2.0):
        of = moments(np.array(row), temperature)
        assert of.varentropy == 0.0
        assert of.entropy == 0.0


@given(logit_rows, st.integers(-500, 500), st.floats(0.1, 3))
def test_a_shift_of_all_logits_changes_nothing(row: list[float], by: int, t: float) -> None:
    z = np.round(np.array(row) * 4) / 4  # so that the shift is exact
    one, other = moments(z, t), moments(z + by, t)
    assert one[1:5] == other[1:5]
    assert draw(z, one, 0.37) == draw(z + by, other, 0.37)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
def test_draws_follow_the_distribution(temperature: float) -> None:
    rng = np.random.default_rng(3)
    row = (rng.standard_normal(700) * 2).astype(np.float32)
    row[:300] = -INF  # a whole block, and part of the next
    of = moments(row, temperature)
    count = 20_000
    drawn = np.bincount([draw(row, of, u) for u in rng.random(count)], minlength=row.size)
    p, _, _ = oracle(row, temperature)
    assert drawn[:300].sum() == 0
    common = p * count >= 5
    observed = [*drawn[common], drawn[~common].sum()]
    expected = [*(p[common] * count), p[~common].sum() * count]
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_draws_at_the_edges_of_blocks() -> None:
    flat = np.zeros(1024, np.float32)
    of = moments(flat, 1.0)
    assert [draw(flat, of, q / 1024) for q in range(1024)] == list(range(1024))
    masked = np.full(1024, -INF, np.float32)
    masked[[600, 700]] = 0.0
    of = moments(masked, 1.0)
    assert [draw(masked, of, q) for q in (0.0, 0.49, 0.5, 1 - 2**-53)] == [600, 600, 700, 700]


@given(logit_rows, st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1e-3, 1.0, 3.0]))
def test_draw_is_the_quantile_and_never_a_masked_token(
    row: list[float], quantile: float, temperature: float
) -> None:
    z = np.array(row)
    of = moments(z, temperature)
    token = draw(z, of, quantile)
    assert np.isfinite(z[token])
    if temperature >= 1e-3:
        below = np.cumsum(oracle(z, temperature)[0])
        assert below[token] >= quantile - 1e-9
        assert (below[token - 1] if token else 0.0) <= quantile + 1e-9


@given(logit_rows, st.floats(0.1, 4), st.data())
def test_surprisal_is_minus_ln_p(row: list[float], temperature: float, data: Any) -> None:
    z = np.array(row)
    token = data.draw(st.sampled_from(np.flatnonzero(np.isfinite(z)).tolist()))
    found = surprisal(z, moments(z, temperature), token)
    expected = (z.max() - z[token]) / temperature - np.log(oracle(z, temperature)[0].max())
    assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_surprisals_of_many_rows() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((5, 300)).astype(np.float16)
    rows[2] = np.nan
    tokens = np.array([0, 7, 3, 299, 12])
    found = surprisals(rows, tokens)
    for row, token, value in zip(rows, tokens, found, strict=True):
        expected = np.nan if np.isnan(row).any() else -np.log(oracle(row)[0][token])
        assert_allclose(value, expected, rtol=1e-5)


def test_threads_do_not_share_buffers() -> None:
    rows = np.random.default_rng(0).standard_normal((4, 20_000))
    expected = [moments(row, 0.9)[:5] for row in rows]
    wrong: list[int] = []

    def work(index: int) -> None:
        found = [moments(rows[index], 0.9)[:5] for _ in range(100)]
        wrong.extend(index for one in found if one != expected[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_uniform_is_reproducible_and_depends_on_seed_and_step_alone() -> None:
    forwards = [uniform(7, step) for step in range(50)]
    backwards = [uniform(7, step) for step in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert len({uniform(seed, step) for seed in range(20) for step in range(20)}) == 400
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


def philox(key: int, counter: int) -> int:
    """The first word of Philox 4x64-10, from the paper's definition."""
    word = 2**64
    x0, x1, x2, x3, k0, k1 = counter, 0, 0, 0, key, 0
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * x0, 0xCA5A826395121157 * x2
        x0, x1, x2, x3 = (
            (second // word) ^ x1 ^ k0,
            second % word,
            (first // word) ^ x3 ^ k1,
            first % word,
        )
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % word, (k1 + 0xBB67AE8584CAA73B) % word
    return x0


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (7, 0), (7, 1), (2**63 + 5, 10**6)])
def test_uniform_is_philox_so_that_saved_runs_replay_anywhere(seed: int, step: int) -> None:
    # numpy counts up before it draws.
    assert uniform(seed, step) == (philox(seed, step + 1) >> 11) / 2**53


def test_uniform_is_uniform_along_steps_and_along_seeds() -> None:
    for numbers in ([uniform(1, n) for n in range(4000)], [uniform(n, 1) for n in range(4000)]):
        assert min(numbers) >= 0
        assert max(numbers) < 1
        assert stats.kstest(numbers, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05
