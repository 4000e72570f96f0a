"""From logits to readings and tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats
from test_softmax import oracle

from entropic_control.controllers import (
    CalibratedEntropy,
    Distribution,
    FullEntropy,
    MinP,
    NoTruncation,
    PITemperature,
    TopK,
    TopKEntropy,
    TopP,
    Typical,
)
from entropic_control.controllers.base import Array
from entropic_control.controllers.measurement import measure, truncated_before
from entropic_control.controllers.sampling import uniform
from entropic_control.controllers.state import split, stack
from entropic_control.controllers.temperature import Command
from entropic_control.errors import EntropicError

pytestmark = pytest.mark.filterwarnings("error")
INF = np.inf
COLUMNS = ("entropy", "varentropy", "raw_entropy", "lower", "upper", "tail_mass")
CUTS = [NoTruncation(), TopP(p=0.9), TopK(k=20, place="after"), MinP(p=0.05), Typical(p=0.9)]


def rows_of(count: int, vocab: int = 800, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, vocab)) * 2.5


def plain(logits: Any, temperature: Any, truncation: Any = NoTruncation(), **cut: Any) -> Any:  # noqa: B008
    command = Command(np.broadcast_to(np.asarray(temperature, float), (len(logits),)), **cut)
    return measure(logits, command, FullEntropy(), truncation)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_readings_match_the_oracle(dtype: Any) -> None:
    logits = rows_of(4).astype(dtype)
    temperatures = np.array([0.5, 1.0, 1.3, 0.0])
    found = plain(logits, temperatures).reading
    for row, temperature in enumerate(temperatures):
        _, raw, _ = oracle(logits[row])
        _, entropy, varentropy = oracle(logits[row], temperature) if temperature else (0, 0.0, 0.0)
        assert_allclose(found.raw_entropy[row], raw, atol=1e-5)
        assert_allclose(found.entropy[row], entropy, atol=1e-5)
        assert_allclose(found.varentropy[row], varentropy, atol=1e-4)
    assert_array_equal(found.realized_entropy, found.entropy)
    assert found.distribution is Distribution.TEMPERED
    assert found.live.tolist() == [800] * 4
    assert found.valid.all()
    assert_array_equal(found.temperature, temperatures)
    for name, column in found._asdict().items():
        if name not in ("live", "valid", "distribution"):
            assert column.dtype == np.float64, name
            assert column.shape == (4,), name
    assert np.isnan(found.surprisal).all()


def kept_of(measured: Any, row: int, vocab: int = 800) -> Array:
    """The tokens that can be drawn, found by their surprisals."""
    count = len(measured.supports)
    every = [measured.completed([token] * count).surprisal[row] for token in range(vocab)]
    return np.isfinite(every)


def test_a_list_of_rows_is_as_good_as_an_array() -> None:
    logits = rows_of(3).astype(np.float32)
    one, other = plain(logits, 0.7).reading, plain(list(logits), 0.7).reading
    for a, b in zip(one, other, strict=True):
        assert_array_equal(a, b)


def test_logits_are_not_changed() -> None:
    logits = rows_of(2).astype(np.float32)
    logits.flags.writeable = False
    for truncation in CUTS:
        measured = plain(logits, 0.7, truncation, max_surprisal=np.full(2, 3.0))
        measured.completed([measured.draw(row, 0.5) for row in range(2)])


@pytest.mark.parametrize("truncation", CUTS, ids=repr)
@pytest.mark.parametrize("bad", [np.nan, INF, -INF])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_case_2_an_invalid_row_fails_alone(truncation: Any, bad: float, dtype: Any) -> None:
    logits = rows_of(4).astype(dtype)
    good = plain(logits, 0.7, truncation).reading
    logits[2, 5 if bad == INF else slice(None)] = bad
    measured = plain(logits, 0.7, truncation, max_surprisal=None)
    others = [0, 1, 3]
    assert measured.reading.valid.tolist() == [True, True, False, True]
    for name, column in measured.reading._asdict().items():
        if name not in ("distribution", "surprisal"):
            assert_array_equal(column[others], getattr(good, name)[others])
    for name in (*COLUMNS, "realized_entropy"):
        assert np.isnan(getattr(measured.reading, name)[2])
    tokens = [measured.draw(row, 0.4) for row in others]
    assert all(0 <= token < 800 for token in tokens)
    with pytest.raises(ValueError, match="row 2 is no distribution"):
        measured.draw(2, 0.4)
    tokens.insert(2, -1)
    assert np.isfinite(measured.completed(tokens).surprisal).tolist() == [True, True, False, True]


def test_case_2_no_controller_moves_on_an_invalid_row() -> None:
    controller = PITemperature()
    state = controller.init(4)
    logits = rows_of(4).astype(np.float32)
    logits[1] = np.nan
    measured = measure(logits, controller.command(state), FullEntropy(), NoTruncation())
    _, after = controller.update(state, measured.completed([0, 0, 0, 0]))
    before, now = split(state, 4), split(after, 4)
    assert now[1] == before[1]
    assert all(now[row] != before[row] for row in (0, 2, 3))


@pytest.mark.parametrize("truncation", CUTS, ids=repr)
@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-5])
def test_case_3_cold_rows_are_greedy_through_every_cut(truncation: Any, temperature: float) -> None:
    row = np.array([3.0, 11.06, -2.0, 11.0, -INF], np.float16)
    measured = plain([row], temperature, truncation, max_surprisal=np.array([5.0]))
    found = measured.completed([measured.draw(0, 0.999)])
    assert measured.draw(0, 0.0) == measured.draw(0, 0.999) == 1
    assert_allclose([found.entropy, found.realized_entropy, found.surprisal], 0.0, atol=1e-6)
    assert found.raw_entropy[0] > 0.5


@pytest.mark.parametrize("truncation", CUTS, ids=repr)
def test_draws_come_from_the_realized_distribution(truncation: Any) -> None:
    logits = rows_of(1, 60)
    measured = plain(logits, 0.8, truncation)
    kept = kept_of(measured, 0, 60)
    p, entropy, _ = oracle(np.where(kept, logits[0], -INF), 0.8)
    assert_allclose(measured.reading.realized_entropy, entropy, rtol=1e-9)
    count = 8000
    drawn = [measured.draw(0, uniform(1, step)) for step in range(count)]
    counts = np.bincount(drawn, minlength=60)
    assert counts[~kept].sum() == 0
    common = p * count >= 5
    observed, expected = [*counts[common]], [*(p[common] * count)]
    if (~common & kept).any():
        observed.append(counts[~common].sum())
        expected.append(p[~common].sum() * count)
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    surprisals = [measured.completed([token]).surprisal[0] for token in drawn]
    assert_allclose(surprisals, -np.log(p[drawn]), rtol=1e-9)
    assert abs(np.mean(surprisals) - entropy) < 0.05


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_case_8_truncation_before_the_temperature_is_part_of_what_is_measured(
    temperature: float,
) -> None:
    logits = rows_of(3)
    found = plain(logits, temperature, TopP(p=0.9, place="before")).reading
    for row in range(3):
        p, raw, _ = oracle(logits[row])
        order = np.argsort(-p)
        nucleus = order[: np.searchsorted(np.cumsum(p[order]), 0.9) + 1]
        cut = np.full(800, -INF)
        cut[nucleus] = logits[row, nucleus]
        _, entropy, varentropy = oracle(cut, temperature)
        assert_allclose(found.entropy[row], entropy)
        assert_allclose(found.varentropy[row], varentropy)
        assert_allclose(found.raw_entropy[row], raw)
        assert found.live[row] == len(nucleus)
    assert found.distribution is Distribution.TRUNCATED
    assert_array_equal(found.realized_entropy, found.entropy)


def test_case_8_truncation_after_the_temperature_is_measured_too() -> None:
    logits = rows_of(3)
    found = plain(logits, 1.5, TopP(p=0.9, place="after")).reading
    for row in range(3):
        p, _, _ = oracle(logits[row], 1.5)
        order = np.argsort(-p)
        nucleus = order[: np.searchsorted(np.cumsum(p[order]), 0.9) + 1]
        cut = np.full(800, -INF)
        cut[nucleus] = logits[row, nucleus]
        _, entropy, varentropy = oracle(cut, 1.5)
        assert_allclose(found.entropy[row], entropy)
        assert_allclose(found.varentropy[row], varentropy)
        assert found.live[row] == len(nucleus)
    assert found.distribution is Distribution.TRUNCATED
    assert_array_equal(found.realized_entropy, found.entropy)


@pytest.mark.parametrize("place", ["before", "after"])
def test_case_8_the_loop_holds_the_entropy_of_what_is_sampled(place: Any) -> None:
    controller = PITemperature(target=1.5)
    truncation = TopP(p=0.9, place=place)
    state = controller.init(1)
    rng = np.random.default_rng(0)
    readings = []
    for _ in range(500):
        logits = rng.standard_normal((1, 400)) * rng.uniform(1.5, 3)
        measured = measure(logits, controller.command(state), FullEntropy(), truncation)
        readings.append(measured.reading)
        _, state = controller.update(state, measured.reading)
    held = np.mean([r.entropy[0] for r in readings[150:]])
    realized = np.mean([r.realized_entropy[0] for r in readings[150:]])
    assert abs(held - 1.5) < 0.1
    assert realized == held


def test_max_surprisal_cuts_after_everything_else() -> None:
    logits = rows_of(2)
    limits = np.array([2.0, INF])
    found = plain(logits, 0.9, TopK(k=50), max_surprisal=limits)
    assert kept_of(found, 1).sum() == 50
    kept = kept_of(found, 0)
    cut = np.full(800, -INF)
    top = np.argsort(-logits[0])[:50]
    cut[top] = logits[0, top]
    p, entropy, _ = oracle(cut, 0.9)
    assert (kept == (p > np.exp(-2.0))).all()
    assert_allclose(found.reading.entropy[0], entropy)
    assert found.reading.realized_entropy[0] < found.reading.entropy[0]
    assert found.reading.realized_entropy[1] == found.reading.entropy[1]


def test_the_raw_surprisal_is_the_models_own_whatever_was_sampled_from() -> None:
    logits = np.random.default_rng(3).normal(0, 3, (2, 400))
    logits[1, 0] = np.nan
    command = Command(np.array([0.5, 0.5]))
    measured = measure(logits, command, FullEntropy(), TopK(k=5))
    token = measured.draw(0, 0.4)
    read = measured.completed([token, -1])
    own = np.log(np.exp(logits[0]).sum()) - logits[0, token]
    assert_allclose(read.raw_surprisal[0], own, rtol=1e-9)
    assert read.surprisal[0] != pytest.approx(own)
    assert np.isnan(read.raw_surprisal[1])


def test_a_token_that_was_cut_off_has_infinite_surprisal() -> None:
    logits = np.array([[3.0, 1.0, 2.0, 0.0, -INF]])
    for cut in (TopK(k=2), TopK(k=2, place="after")):
        measured = plain(logits, 1.0, cut)
        found = [float(measured.completed([token]).surprisal[0]) for token in range(5)]
        p = np.exp([3.0, 2.0]) / np.exp([3.0, 2.0]).sum()
        assert_allclose(found, [-np.log(p[0]), INF, -np.log(p[1]), INF, INF])
        assert {measured.draw(0, u) for u in np.linspace(0, 0.999, 50)} == {0, 2}


def test_estimators_are_used_at_the_measuring_point() -> None:
    logits = rows_of(1)
    command = Command(np.array([0.8]))
    found = measure(logits, command, TopKEntropy(k=10), NoTruncation()).reading
    _, entropy, _ = oracle(logits[0], 0.8)
    assert found.lower[0] < entropy < found.upper[0]
    assert found.entropy[0] == found.upper[0]
    assert 0 < found.tail_mass[0] < 1
    assert_allclose(found.realized_entropy[0], entropy)
    found = measure(logits, command, TopKEntropy(k=10), TopK(k=10)).reading
    assert found.lower[0] == found.entropy[0] == found.upper[0]


def test_a_calibrated_estimator_changes_what_decisions_see_and_nothing_else() -> None:
    logits = rows_of(2)
    command = Command(np.array([0.8, 1.0]))
    one = measure(logits, command, FullEntropy(), NoTruncation()).reading
    estimator = CalibratedEntropy(temperature=1.7)
    other = measure(logits, command, estimator, NoTruncation()).reading
    for name, column in one._asdict().items():
        if name not in ("raw_entropy", "distribution"):
            assert_array_equal(column, getattr(other, name))
    assert_allclose(other.raw_entropy, [oracle(row, 1.7)[1] for row in logits])


@pytest.mark.parametrize("truncation", [cut for cut in CUTS if cut.place == "before"], ids=repr)
def test_feed_forward_kinds_see_the_logits_at_the_measuring_point(truncation: Any) -> None:
    logits = rows_of(3).astype(np.float32)
    logits[1] = np.nan
    seen = truncated_before(logits, truncation)
    again = plain(seen, 0.7).reading
    found = plain(logits, 0.7, truncation).reading
    assert_allclose(again.entropy, found.entropy, rtol=1e-6)
    assert_array_equal(again.live, found.live)


def test_case_7_interleaved_sequences_are_as_if_alone_and_slots_start_clean() -> None:
    controller = PITemperature()
    targets = {"a": 0.8, "b": 2.4, "c": 1.6}

    def logits(name: str, step: int) -> Array:
        rng = np.random.default_rng([ord(name), step])
        return (rng.standard_normal((1, 300)) * rng.uniform(1, 5)).astype(np.float32)

    def advance(states: dict[str, Any], step: dict[str, int], trace: dict[str, list[Any]]) -> None:
        names = list(states)
        state = stack([states[name] for name in names])
        rows = np.concatenate([logits(name, step[name]) for name in names])
        measured = measure(rows, controller.command(state), FullEntropy(), NoTruncation())
        tokens = [measured.draw(i, uniform(ord(n), step[n])) for i, n in enumerate(names)]
        _, state = controller.update(state, measured.completed(tokens))
        for name, own, token in zip(names, split(state, len(names)), tokens, strict=True):
            states[name] = own
            trace.setdefault(name, []).append((token, float(own.log_temperature[0])))
            step[name] += 1

    def start(name: str) -> Any:
        return controller.init(1, target=targets[name])

    together: dict[str, list[Any]] = {}
    states = {"a": start("a"), "b": start("b")}
    at = dict.fromkeys("abc", 0)
    for _ in range(40):
        advance(states, at, together)
    del states["a"]
    states = {"c": start("c"), **states}
    for _ in range(40):
        advance(states, at, together)

    for name, length in (("a", 40), ("b", 80), ("c", 40)):
        solo: dict[str, list[Any]] = {}
        own, steps = {name: start(name)}, dict.fromkeys("abc", 0)
        for _ in range(length):
            advance(own, steps, solo)
        assert solo[name] == together[name]
    # The integrals did accumulate, so the comparison had something to find.
    for name in targets:
        assert abs(together[name][-1][1] - np.log(controller.start)) > 0.05


def test_case_9_a_target_above_what_the_live_tokens_allow() -> None:
    vocab = 32_000
    controller = PITemperature(target=1.0)
    state = controller.init(3)
    logits = rows_of(3, vocab).astype(np.float32)
    logits[0, 1:] = -INF
    logits[1, 2:] = -INF
    for _ in range(300):
        measured = measure(logits, controller.command(state), FullEntropy(), NoTruncation())
        found = measured.completed([measured.draw(row, 0.3) for row in range(3)])
        feasible = controller.feasible(state, found.live)
        assert feasible.tolist() == [False, False, True]
        _, state = controller.update(state, found)
    assert found.live.tolist() == [1, 2, vocab]
    assert controller.saturated(state).tolist() == [1, 1, 0]
    assert_allclose(state.log_temperature[:2], np.log(controller.bounds[1]))
    assert abs(found.entropy[2] - 1.0) < 0.1


def test_no_rows_are_no_trouble() -> None:
    measured = plain(np.zeros((0, 10)), np.zeros(0))
    assert measured.reading.entropy.shape == (0,)
    assert measured.completed([]).surprisal.shape == (0,)


def test_errors_are_plain_where_no_request_is_known() -> None:
    with pytest.raises(ValueError, match="row 0") as caught:
        plain(np.full((1, 3), np.nan), 1.0).draw(0, 0.5)
    assert not isinstance(caught.value, EntropicError)
