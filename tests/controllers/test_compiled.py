"""The compiled passes against the numpy ones, which strided rows are left to."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from test_softmax import oracle

from entropic_control.controllers.base import Array
from entropic_control.controllers.estimators import FullEntropy
from entropic_control.controllers.measurement import measure, sample
from entropic_control.controllers.softmax import (
    GREEDY,
    Moments,
    draw,
    load_compiled,
    moments,
    raw_and_tempered,
)
from entropic_control.controllers.temperature import Command, PITemperature
from entropic_control.controllers.truncation import NoTruncation

pytest.importorskip("numba")
pytestmark = pytest.mark.filterwarnings("error")
INF = np.inf
LARGEST = float(np.finfo(np.float32).max)

logits = st.one_of(
    st.floats(-30, 30, width=32),
    st.sampled_from([-INF, 0.0, 1.5, -LARGEST, LARGEST, 65504.0]),  # ties, masks, extremes
)
temperatures = st.one_of(
    st.floats(GREEDY, 10), st.sampled_from([GREEDY, np.nextafter(GREEDY, 1), 1.0, 10.0])
)


@st.composite
def rows(draws: st.DrawFn) -> Array:
    """Valid rows of up to three blocks, most of them no whole number of blocks."""
    size = draws(st.integers(1, 700))
    row = np.resize(np.array(draws(st.lists(logits, min_size=1, max_size=60)), np.float32), size)
    start, length = draws(st.integers(0, 699)), draws(st.integers(0, 600))
    row[start : start + length] = -INF
    if row.max() == -INF:
        row[draws(st.integers(0, size - 1))] = 0.0
    return row


def strided(row: Array) -> Array:
    return np.stack([row, row], axis=1)[:, 0]


def agree(one: Moments, other: Moments) -> None:
    assert one.peak == other.peak
    assert one.live == other.live
    assert one.temperature == other.temperature
    assert_allclose(one.log_norm, other.log_norm, atol=1e-5)
    assert_allclose(one.entropy, other.entropy, atol=2e-5)
    assert_allclose(one.varentropy, other.varentropy, atol=3e-4, rtol=1e-4)
    assert_allclose(one.blocks, other.blocks, rtol=3e-5, atol=1e-37)


def test_numba_is_used_where_it_is_installed() -> None:
    fast = load_compiled()
    assert fast is not None
    assert fast._walk.signatures
    assert fast.quantile.signatures


@given(rows(), temperatures)
def test_the_moments_are_those_of_the_numpy_pass(row: Array, temperature: float) -> None:
    agree(moments(row, temperature), moments(strided(row), temperature))
    both, expected = (raw_and_tempered(each, temperature) for each in (row, strided(row)))
    assert both is not None
    assert expected is not None
    for one, other in zip(both, expected, strict=True):
        agree(one, other)


@given(rows(), temperatures, st.floats(0, 1, exclude_max=True))
def test_the_token_is_the_quantile_and_never_a_masked_one(
    row: Array, temperature: float, uniform: float
) -> None:
    of = moments(row, temperature)
    token = draw(row, of, uniform)
    assert np.isfinite(row[token])
    if temperature > GREEDY:
        below = np.cumsum(oracle(row, temperature)[0])
        assert below[token] >= uniform - 1e-5
        assert (below[token - 1] if token else 0.0) <= uniform + 1e-5
    if row.size > 1:
        # The same weights in double precision: only a tie of rounding could tell the two apart.
        assert token == draw(strided(row), of, uniform)


@given(rows(), temperatures)
def test_masked_blocks_weigh_exactly_nothing(row: Array, temperature: float) -> None:
    padded = np.full(-(-row.size // 256) * 256, -INF, np.float32)
    padded[: row.size] = row
    masked = (padded.reshape(-1, 256) == -INF).all(axis=1)
    assert (moments(row, temperature).blocks[masked] == 0).all()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("size", [49_152, 50_257])
def test_the_oracle_agrees_at_the_size_of_a_vocabulary(size: int, temperature: float) -> None:
    row = np.random.default_rng(0).standard_normal(size).astype(np.float32) * 4
    of = moments(row, temperature)
    p, entropy, varentropy = oracle(row, temperature)
    assert_allclose(of.entropy, entropy, rtol=2e-6)
    assert_allclose(of.varentropy, varentropy, rtol=2e-5)
    assert_allclose(of.log_norm, -np.log(p.max()), rtol=1e-6)


def test_rows_that_are_no_distribution_are_refused_and_harm_no_other() -> None:
    good = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    bad = [np.where(np.arange(1000) == 700, wrong, good) for wrong in (np.nan, INF)]
    masked = np.full(1000, -INF)
    batch = [row.astype(np.float32) for row in (good, *bad, masked, good)]
    found = measure(batch, Command(np.full(5, 0.8)), FullEntropy(), NoTruncation())
    assert found.reading.valid.tolist() == [True, False, False, False, True]
    assert np.isnan(found.reading.entropy[1:4]).all()
    assert found.reading.entropy[0] == found.reading.entropy[4]


def test_rows_that_may_not_be_written_to_are_read() -> None:
    row = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    expected = moments(row, 0.8)[:5]
    row.flags.writeable = False
    of = moments(row, 0.8)
    assert of[:5] == expected
    assert 0 <= draw(row, of, 0.5) < 1000


@pytest.mark.parametrize(("setting", "found"), [("0", "True"), ("1", "False")])
def test_numba_can_be_told_to_stay_out_of_it(setting: str, found: str) -> None:
    code = "from entropic_control.controllers import softmax; print(softmax.load_compiled() is not None)"
    environment: dict[str, Any] = {**os.environ, "NUMBA_DISABLE_JIT": setting}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == found


@given(st.data(), st.sampled_from(["varentropy", "none"]))
def test_the_compiled_pi_law_is_the_law(data: st.DataObject, schedule: Any) -> None:
    """Bit for bit: whether a machine has numba must not show in what a reading does to a state."""
    controller = PITemperature(schedule=schedule, kp=0.7, ki=0.2, bounds=(0.3, 1.5))
    gains = controller.compiled_gains
    assert gains is not None
    targets = data.draw(st.lists(st.floats(0.1, 12), min_size=3, max_size=3))
    fast = controller.init(3, target=np.array(targets))
    slow = fast
    for _ in range(data.draw(st.integers(1, 4))):
        batch = [data.draw(rows()) for _ in targets]
        if data.draw(st.booleans()):
            batch[1] = np.full_like(batch[1], np.nan)
        parts = (controller.command(fast), FullEntropy(), NoTruncation())
        law = (fast, gains)
        _, seen, moved = sample(batch, *parts, [0.5] * 3, [-1] * 3, law)
        assert type(moved) is type(fast)
        fast = moved
        _, slow = controller.update(slow, seen)
        for one, other in zip(fast, slow, strict=True):
            np.testing.assert_array_equal(one, other)
    other = [row.astype(np.float64) for row in batch]
    assert sample(other, *parts, [0.5] * 3, [-1] * 3, law)[2] is None


def test_a_subclass_of_the_pi_law_runs_as_it_is_written() -> None:
    class Other(PITemperature):
        pass

    assert Other().compiled_gains is None


@given(st.data(), st.floats(1e-3, 5), st.floats(0, 1, exclude_max=True), st.booleans())
def test_a_sample_is_what_measuring_and_drawing_give(
    data: st.DataObject, temperature: float, uniform: float, force: bool
) -> None:
    batch = [data.draw(rows()) for _ in range(3)]
    batch[1] = np.where(np.arange(batch[1].size) == 0, np.nan, batch[1]).astype(np.float32)
    forced = [int(row.size - 1) if force else -1 for row in batch]
    command = Command(np.full(3, temperature))
    parts = (command, FullEntropy(), NoTruncation())
    tokens, seen, _ = sample(batch, *parts, [uniform] * 3, forced)
    expected, wanted, _ = sample([strided(row) for row in batch], *parts, [uniform] * 3, forced)
    assert tokens[1] == expected[1] == -1
    assert tokens[0::2] == forced[0::2] if force else np.isfinite(batch[0][tokens[0]])
    for name in ("entropy", "varentropy", "raw_entropy", "realized_entropy", "lower", "upper"):
        column, other = getattr(seen, name), getattr(wanted, name)
        assert_allclose(column, other, atol=3e-4, rtol=1e-4, err_msg=name)
    for name in ("live", "valid", "tail_mass", "temperature", "distribution"):
        np.testing.assert_array_equal(getattr(seen, name), getattr(wanted, name), name)
    if tokens == expected:  # or a tie of rounding told them apart
        for name in ("surprisal", "raw_surprisal"):
            assert_allclose(getattr(seen, name), getattr(wanted, name), atol=1e-4, rtol=1e-4)
