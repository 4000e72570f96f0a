"""Entropy from part of a row, and what bounds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from test_softmax import logit_rows, oracle

from entropic_control.controllers.estimators import (
    FullEntropy,
    TopKEntropy,
    floored,
    tail_bounds,
    tail_bounds_unnormalised,
)
from entropic_control.controllers.softmax import moments

pytestmark = pytest.mark.filterwarnings("error")
INF = np.inf


@given(logit_rows, st.integers(1, 40), st.floats(0.2, 3))
def test_tail_bounds_hold_the_full_entropy(row: list[float], k: int, temperature: float) -> None:
    # The functions themselves: `estimate` clips its bounds to the entropy, so it could not fail.
    p, entropy, _ = oracle(row, temperature)
    live = int(np.isfinite(row).sum())
    top = np.sort(p[p > 0])[::-1][:k]
    lower, upper, mass = tail_bounds(top, live - len(top))
    assert lower - 1e-9 <= entropy <= upper + 1e-9
    assert_allclose(mass, max(1 - top.sum(), 0), atol=1e-12)
    lower, upper, largest = tail_bounds_unnormalised(top / top[0], live - len(top))
    assert lower - 1e-9 <= entropy <= upper + 1e-9
    assert largest >= mass - 1e-9


def test_tail_bounds_are_reached() -> None:
    top = np.array([0.5, 0.2])
    flat = [*top, *[0.3 / 10] * 10]
    peaked = [*top, 0.2, 0.1]
    lower, upper, mass = tail_bounds(top, 10)
    assert_allclose(upper, -np.sum(flat * np.log(flat)))
    assert_allclose(lower, -np.sum(peaked * np.log(peaked)))
    assert_allclose(mass, 0.3)


@given(logit_rows, st.integers(1, 60), st.booleans())
def test_estimates_are_ordered_and_report_what_was_asked(
    row: list[float], k: int, known: bool
) -> None:
    z = np.array(row)
    of = moments(z, 0.8)
    for tail in ("conservative", "lower", "exact"):
        found = TopKEntropy(k=k, tail=tail, log_sum_exp=known).estimate(z, of)
        assert found.lower <= of.entropy <= found.upper
        expected = {"conservative": found.upper, "lower": found.lower, "exact": of.entropy}
        assert found.entropy == expected[tail]
        assert 0 <= found.tail_mass <= 1


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("tail", ["conservative", "lower", "exact"])
def test_case_4_top_k_of_all_tokens_is_the_full_entropy(tail: Any, known: bool) -> None:
    row = np.random.default_rng(0).standard_normal(500) * 2
    for k in (500, 501, 10_000):
        of = moments(row, 0.7)
        found = TopKEntropy(k=k, tail=tail, log_sum_exp=known).estimate(row, of)
        assert found == (of.entropy, of.entropy, of.entropy, 0.0)


def test_case_4_masked_tokens_are_not_part_of_the_tail() -> None:
    row = np.full(1000, -INF)
    row[::100] = np.linspace(0, 3, 10)
    of = moments(row, 1.0)
    found = TopKEntropy(k=10).estimate(row, of)
    assert found == (of.entropy, of.entropy, of.entropy, 0.0)
    found = TopKEntropy(k=9).estimate(row, of)
    # One token is left: its mass is known, so nothing is open.
    assert_allclose([found.lower, found.upper], of.entropy, atol=1e-9)


def test_bounds_tighten_with_k() -> None:
    row = np.random.default_rng(1).standard_normal(5000) * 3
    of = moments(row, 1.0)
    widths = []
    for k in (1, 4, 16, 64, 256, 1024):
        found = TopKEntropy(k=k).estimate(row, of)
        widths.append(found.upper - found.lower)
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.05 < widths[0]


def test_greedy_rows_have_no_entropy() -> None:
    row = np.arange(100.0)
    assert TopKEntropy(k=3).estimate(row, moments(row, 0.0)) == (0.0, 0.0, 0.0, 0.0)
    assert FullEntropy().estimate(row, moments(row, 0.0)) == (0.0, 0.0, 0.0, 0.0)


def test_floor_is_not_undercut() -> None:
    assert floored(np.array([0.0, 0.5, 2.0]), 0.5).tolist() == [0.5, 0.5, 2.0]
