"""Calibration error and temperature scaling."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose
from test_softmax import oracle

from entropic_control.controllers import (
    CalibratedEntropy,
    TopKEntropy,
    expected_calibration_error,
    fit_temperature,
)
from entropic_control.controllers.base import Array
from entropic_control.controllers.softmax import moments

pytestmark = pytest.mark.filterwarnings("error")


def labelled(true_temperature: float, n: int = 3000, vocab: int = 40) -> tuple[Array, Array]:
    """Logits of a model that is honest at `true_temperature`, and labels drawn from it."""
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((n, vocab)) * 3).astype(np.float32)
    labels = [rng.choice(vocab, p=oracle(row, true_temperature)[0]) for row in logits]
    return logits, np.array(labels)


@pytest.mark.parametrize("true_temperature", [0.6, 1.0, 2.5])
def test_fit_finds_the_temperature_the_labels_were_drawn_at(true_temperature: float) -> None:
    logits, labels = labelled(true_temperature)
    found = fit_temperature(logits, labels)
    assert_allclose(found.temperature, true_temperature, rtol=0.06)
    assert found.nll <= found.nll_before + 1e-9
    assert found.error < 0.04
    if true_temperature != 1.0:
        assert found.error < 0.5 * found.error_before


def test_fit_is_the_minimum_of_the_likelihood() -> None:
    logits, labels = labelled(1.8, n=300)
    found = fit_temperature(logits, labels)

    def nll(temperature: float) -> float:
        p = [oracle(row, temperature)[0][label] for row, label in zip(logits, labels, strict=True)]
        return float(-np.mean(np.log(p)))

    assert_allclose(found.nll, nll(found.temperature), rtol=1e-5)
    assert_allclose(found.nll_before, nll(1.0), rtol=1e-5)
    for nearby in (0.97, 1.03):
        assert nll(found.temperature * nearby) > found.nll


def test_fit_refuses_what_it_cannot_use() -> None:
    logits, labels = labelled(1.0, n=5)
    with pytest.raises(ValueError, match="5 rows, 4 labels"):
        fit_temperature(logits, labels[:4])
    with pytest.raises(ValueError, match="0 rows"):
        fit_temperature(logits[:0], labels[:0])
    masked = logits.copy()
    masked[3, labels[3]] = -np.inf
    with pytest.raises(ValueError, match="row 3"):
        fit_temperature(masked, labels)
    masked[1] = np.nan
    with pytest.raises(ValueError, match="row 1"):
        fit_temperature(masked, labels)


def test_calibration_error_by_hand() -> None:
    # Bins (0, 0.5] and (0.5, 1]: gaps |0.4 - 0.5| over two samples and |0.9 - 1/3| over three.
    confidences, correct = [0.3, 0.5, 0.8, 0.9, 1.0], [1, 0, 1, 0, 0]
    found = expected_calibration_error(confidences, correct, bins=2)
    assert_allclose(found, (2 * 0.1 + 3 * (0.9 - 1 / 3)) / 5)


def test_calibration_error_at_its_ends() -> None:
    assert expected_calibration_error([1.0] * 4, [True] * 4) == 0.0
    assert expected_calibration_error([1.0] * 4, [False] * 4) == 1.0
    assert expected_calibration_error([0.0] * 4, [False] * 4) == 0.0
    rng = np.random.default_rng(0)
    p = rng.random(50_000)
    assert expected_calibration_error(p, rng.random(50_000) < p) < 0.02
    for bad in (([], []), ([0.5], [1, 0]), ([1.2], [1]), ([np.nan], [1])):
        with pytest.raises(ValueError, match="confidences"):
            expected_calibration_error(*bad)


def test_calibrated_entropy_moves_the_decisions_only() -> None:
    row = np.random.default_rng(0).standard_normal(300) * 4
    inner = TopKEntropy(k=10)
    estimator = CalibratedEntropy(inner=inner, temperature=1.6)
    raw, at = moments(row, 1.0), moments(row, 0.7)
    assert estimator.estimate(row, at) == inner.estimate(row, at)
    assert_allclose(estimator.decision_entropy(row, raw), oracle(row, 1.6)[1])
    assert inner.decision_entropy(row, raw) == raw.entropy
    assert estimator.decision_entropy(row, raw) > raw.entropy
