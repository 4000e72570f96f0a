"""Truncation against naive oracles: sort everything, count, and take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_softmax import logit_rows, oracle

from entropic_control.controllers import MinP, NoTruncation, TopK, TopP, Typical
from entropic_control.controllers.base import Array
from entropic_control.controllers.softmax import moments
from entropic_control.controllers.truncation import within_surprisal

pytestmark = pytest.mark.filterwarnings("error")
INF = np.inf
TIED = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.just(-INF)), min_size=1, max_size=700
).filter(lambda row: max(row) > -INF)
ROWS = st.one_of(TIED, logit_rows)


def ranked(row: Array) -> Array:
    """Token numbers from the most probable down, equals by index."""
    return np.lexsort((np.arange(row.size), -row))


def mask(row: Array, tokens: Any) -> Array:
    out = np.zeros(row.size, bool)
    out[tokens] = True
    return out & (row > -INF)


@given(ROWS, st.integers(1, 800), st.sampled_from([np.float32, np.float64]))
def test_top_k_is_the_first_k(row: list[float], k: int, dtype: Any) -> None:
    z = np.array(row, dtype)
    kept = TopK(k=k).keep(z, moments(z, 1.0))
    assert (kept == mask(z, ranked(z)[:k])).all()
    assert kept.sum() == min(k, np.isfinite(z).sum())


@given(ROWS, st.floats(0.01, 0.999), st.floats(0.3, 3))
def test_top_p_is_the_smallest_leading_set(row: list[float], p: float, temperature: float) -> None:
    z = np.array(row)
    of = moments(z, temperature)
    kept = TopP(p=p).keep(z, of)
    probability, _, _ = oracle(z, temperature)
    assert (kept == mask(z, ranked(z)[: kept.sum()])).all()
    assert probability[kept].sum() >= p - 1e-6
    last = ranked(z)[kept.sum() - 1]
    assert kept.sum() == 1 or probability[kept].sum() - probability[last] < p


@pytest.mark.parametrize("n", [2, 5, 10, 50, 100, 300, 1000, 4096])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_top_p_counts_equals_exactly(n: int, dtype: Any) -> None:
    row = np.full(n, 1.3, dtype)
    of = moments(row, 1.0)
    for count in {*range(1, min(n, 101)), n // 2, n - 1}:
        kept = TopP(p=count / n).keep(row, of)
        assert np.flatnonzero(kept).tolist() == list(range(count))


def test_top_p_of_a_flat_vocabulary_looks_beyond_its_first_guess() -> None:
    rng = np.random.default_rng(0)
    row = (rng.standard_normal(20_000) * 0.1).astype(np.float32)
    of = moments(row, 1.0)
    probability, _, _ = oracle(row)
    expected = np.searchsorted(np.cumsum(np.sort(probability)[::-1]), 0.9) + 1
    assert abs(int(TopP(p=0.9).keep(row, of).sum()) - expected) <= 1


@given(ROWS, st.floats(0.001, 1), st.floats(0.3, 3))
def test_min_p_is_relative_to_the_most_probable(
    row: list[float], p: float, temperature: float
) -> None:
    z = np.array(row)
    kept = MinP(p=p).keep(z, moments(z, temperature))
    probability, _, _ = oracle(z, temperature)
    share = probability / probability.max()
    assert kept[share > p * (1 + 1e-9)].all()
    assert not kept[share < p * (1 - 1e-9)].any()
    assert kept[z.argmax()]


@given(ROWS, st.floats(0.01, 0.999), st.floats(0.3, 3))
def test_typical_is_the_smallest_set_about_the_entropy(
    row: list[float], p: float, temperature: float
) -> None:
    z = np.array(row)
    kept = Typical(p=p).keep(z, moments(z, temperature))
    probability, entropy, _ = oracle(z, temperature)
    shift = np.full(z.size, INF)
    shift[probability > 0] = np.abs(-np.log(probability[probability > 0]) - entropy)
    assert kept.any()
    assert not kept[z == -INF].any()
    assert probability[kept].sum() >= p - 1e-6
    furthest = shift[kept].max()
    assert shift[~kept].min(initial=INF) >= furthest - 1e-6
    assert kept.sum() == 1 or probability[kept & (shift < furthest - 1e-9)].sum() < p + 1e-6


def test_typical_of_a_flat_vocabulary_looks_beyond_its_first_guess() -> None:
    row = (np.random.default_rng(0).standard_normal(20_000) * 0.1).astype(np.float32)
    kept = Typical(p=0.9).keep(row, moments(row, 1.0))
    assert oracle(row)[0][kept].sum() == pytest.approx(0.9, abs=1e-3)
    assert Typical(p=0.9).keep(row, moments(row, 0.0)).sum() == 1
    assert Typical(p=1.0).keep(row, moments(row, 0.7)).all()


@given(ROWS, st.floats(-5, 20), st.floats(0.3, 3))
def test_surprisal_cut_keeps_what_is_probable_enough(
    row: list[float], limit: float, temperature: float
) -> None:
    z = np.array(row)
    kept = within_surprisal(z, moments(z, temperature), limit)
    probability, _, _ = oracle(z, temperature)
    surprisal = np.full(z.size, INF)
    surprisal[probability > 0] = -np.log(probability[probability > 0])
    assert kept[z.argmax()]
    assert kept[surprisal < limit - 1e-9].all()
    dropped = surprisal > limit + 1e-9
    dropped[z.argmax()] = False
    assert not kept[dropped].any()


TRUNCATIONS = [NoTruncation(), TopK(k=3), TopP(p=0.7), TopP(p=1.0), MinP(p=0.2), MinP(p=1.0)]


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=repr)
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 50.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_something_live_is_always_kept(truncation: Any, temperature: float, dtype: Any) -> None:
    lowest = float(np.finfo(dtype).min)
    for row in ([1.0], [-INF, 2.0], [0.0] * 9, [-INF, 1.0, 3.0, 3.0, -2.0], [5.0, lowest / 4]):
        z = np.array(row, dtype)
        kept = truncation.keep(z, moments(z, temperature))
        assert kept.dtype == np.bool_
        assert kept[z.argmax()]
        assert not kept[z == -INF].any()


def test_all_live_tokens_stay_where_nothing_is_to_be_cut() -> None:
    z = np.array([0.0, -INF, -40.0, 3.0, -INF], np.float32)
    of = moments(z, 1.0)
    for truncation in (NoTruncation(), TopK(k=3), TopK(k=99), TopP(p=1.0)):
        assert (truncation.keep(z, of) == np.isfinite(z)).all()
    assert (within_surprisal(z, of, INF) == np.isfinite(z)).all()


def test_the_surprisal_cut_at_zero_temperature_is_greedy() -> None:
    z = np.array([0.0, 2.0, 1.0])
    assert within_surprisal(z, moments(z, 0.0), 5.0).tolist() == [False, True, False]
