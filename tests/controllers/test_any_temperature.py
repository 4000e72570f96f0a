"""Any number whatever as a temperature: what can be drawn is drawn right, and the rest draws nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_control.controllers import FullEntropy, MinP, NoTruncation, TopK, TopP
from entropic_control.controllers.base import Array
from entropic_control.controllers.measurement import measure, sample
from entropic_control.controllers.softmax import GREEDY, HOTTEST, load_compiled
from entropic_control.controllers.temperature import Command, PITemperature

INF = np.inf
CUTS = [
    NoTruncation(),
    *(cut for place in ("before", "after") for cut in (TopK(k=3, place=place), MinP(place=place))),
    TopP(p=0.9),
]
temperatures = st.one_of(
    st.floats(),
    st.floats(-1e-5, 1e-5),
    st.floats(1e20, 1.7e308),
    st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 1e38, 3.5e38, 1e45, INF, -INF, math.nan]),
)


@st.composite
def rows(draws: st.DrawFn) -> Array:
    """Rows of up to three blocks, most of them no whole number of blocks, with masks."""
    size = draws(st.integers(1, 700))
    seed = draws(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    row = (random.standard_normal(size) * draws(st.sampled_from([1, 30, 3000]))).astype(np.float32)
    row[random.random(size) < draws(st.sampled_from([0.0, 0.5, 0.99]))] = -INF
    if row.max() == -INF:
        row[random.integers(size)] = 0.0
    return row


def paths(row: Array) -> dict[str, Array]:
    """The row as compiled code takes it, as numpy does, and in double precision."""
    return {
        "compiled": row,
        "numpy": np.stack([row, row], axis=1)[:, 0],
        "double": row.astype(np.float64),
    }


def drawn(row: Array, command: Command, cut: Any, uniform: float) -> tuple[int, Any]:
    (token,), reading, _ = sample([row], command, FullEntropy(), cut, [uniform], [-1])
    return token, reading


@given(rows(), temperatures, st.floats(0, 1, exclude_max=True), st.sampled_from(CUTS))
def test_every_path_draws_a_live_token_or_none(
    row: Array, temperature: float, uniform: float, cut: Any
) -> None:
    command = Command(np.array([temperature]))
    fit = 0 <= temperature < INF
    entropies = []
    for name, form in paths(row).items():
        token, reading = drawn(form, command, cut, uniform)
        assert reading.valid.tolist() == [fit], name
        if not fit:
            assert token == -1
            assert np.isnan(reading.entropy[0])
            assert np.isnan(reading.surprisal[0])
            assert reading.live[0] == 0
            continue
        assert row[token] > -INF, name
        live = np.count_nonzero(row > -INF)
        assert 0 <= reading.entropy[0] <= math.log(live) + 1e-4
        assert np.isfinite(
            [reading.varentropy[0], reading.raw_entropy[0], reading.surprisal[0]]
        ).all()
        entropies.append(float(reading.entropy[0]))
        if temperature <= GREEDY:
            assert token == int(row.argmax())
            assert reading.entropy[0] == 0
    if entropies:
        assert np.ptp(entropies) < 1e-3


@pytest.mark.parametrize("temperature", [1e12, 1e27, 1e38, 3.5e38, 1e45, 1e300, 1.7e308])
@pytest.mark.parametrize("size", [255, 256, 1000])
def test_the_hottest_draw_is_an_even_one(temperature: float, size: int) -> None:
    row = np.linspace(-9, 9, size).astype(np.float32)
    row[::3] = -INF
    live = np.flatnonzero(row > -INF)
    uniforms = (np.arange(len(live)) + 0.5) / len(live)
    for form in paths(row).values():
        tokens = [
            drawn(form, Command(np.array([temperature])), NoTruncation(), u)[0] for u in uniforms
        ]
        assert tokens == live.tolist()
        reading = drawn(form, Command(np.array([temperature])), NoTruncation(), 0.5)[1]
        np.testing.assert_allclose(reading.entropy, math.log(len(live)), atol=1e-5)


@given(st.one_of(st.floats(), st.sampled_from([-0.0, -INF, INF, math.nan])))
def test_a_cut_that_is_no_number_of_nats_draws_nothing(limit: float) -> None:
    row = np.array([0.0, 1.0, -INF, 2.0], np.float32)
    command = Command(np.ones(1), np.array([limit]))
    token, reading = drawn(row, command, NoTruncation(), 0.3)
    assert reading.valid[0] == (limit >= 0)
    assert (token >= 0) == (limit >= 0)
    assert token != 2


@given(temperatures)
def test_bad_rows_leave_their_neighbours_alone(temperature: float) -> None:
    row = np.linspace(-2, 2, 300).astype(np.float32)
    among = Command(np.array([0.7, temperature, 1.3]))
    alone = [drawn(row, Command(np.array([t])), NoTruncation(), 0.4)[0] for t in (0.7, 1.3)]
    tokens, reading, _ = sample(
        [row] * 3, among, FullEntropy(), NoTruncation(), [0.4] * 3, [-1] * 3
    )
    assert tokens[::2] == alone
    assert reading.valid[::2].all()
    measured = measure([row] * 3, among, FullEntropy(), NoTruncation()).reading
    np.testing.assert_allclose(measured.entropy[::2], reading.entropy[::2], atol=1e-5)


@given(temperatures)
def test_the_compiled_law_is_not_moved_by_a_temperature_that_is_none(temperature: float) -> None:
    fast = pytest.importorskip("numba") and load_compiled()
    assert fast is not None
    law = PITemperature()
    state = law.init(1)
    row = fast.whole_blocks(np.linspace(-5, 5, 300).astype(np.float32))
    counts, valid, table = np.zeros((2, 1), np.int64), np.zeros(1, np.bool_), np.zeros((11, 1))
    if 0 <= temperature <= GREEDY:
        return
    gains = law.compiled_gains
    fast.control(row, temperature, 0.5, -1, counts, valid, table, 0, tuple(state), gains)
    assert valid[0] == (0 <= temperature < INF)
    assert (counts[0, 0] == -1) != valid[0]
    assert counts[0, 0] < 300
    if not valid[0]:
        assert table[6:, 0].tolist() == [float(leaf[0]) for leaf in state]


def test_what_is_hottest_is_the_same_everywhere() -> None:
    rows = pytest.importorskip("torch") and pytest.importorskip("entropic_control.kernels.rows")
    assert rows.HOTTEST == HOTTEST
