"""The predicted spread against a real run, and against a real run under other gains."""

from pathlib import Path

import numpy as np
import pytest
from recorded import HELD, HELD_GAINS, TUNED, TUNED_GAINS

from entropic_control.controllers import PITemperature
from entropic_control.errors import TraceError
from entropic_control.proofs.noise import (
    Disturbance,
    disturbance_of,
    mean_gain,
    measure,
    noise_response,
    predict,
)
from entropic_control.proofs.signals import Signals, signals


def test_spread_of_a_real_run_is_predicted_within_25_percent() -> None:
    claim = noise_response(PITemperature(**HELD_GAINS), trace=signals(HELD))
    assert claim.holds
    assert claim.measured is not None
    assert claim.predicted.entropy == pytest.approx(claim.measured.entropy, rel=0.25)
    assert claim.predicted.log_temperature == pytest.approx(
        claim.measured.log_temperature, rel=0.25
    )
    assert max(claim.errors) <= 0.25


def test_spread_under_other_gains_is_predicted_from_the_first_run() -> None:
    tuned = PITemperature(**TUNED_GAINS)
    before, after = signals(HELD), signals(TUNED)
    promised = predict(tuned, mean_gain(before), disturbance_of(before))
    came = measure(tuned, after)
    assert promised.entropy == pytest.approx(came.entropy, rel=0.25)
    assert promised.log_temperature == pytest.approx(came.log_temperature, rel=0.25)


def test_white_noise_through_a_filter_alone_has_its_textbook_spread() -> None:
    # With gains of nothing F[H] is white noise through an average: variance a / (2 - a).
    still = PITemperature(kp=0.0, ki=1e-9, schedule="none", filter=0.2)
    found = predict(still, 1.0, Disturbance(np.zeros(1), 2.0))
    assert found.entropy == pytest.approx(2 * np.sqrt(0.2 / 1.8), rel=1e-3)


def test_autoregression_is_recovered() -> None:
    rng = np.random.default_rng(0)
    noise = np.zeros(8000)
    for t in range(2, len(noise)):
        noise[t] = 0.5 * noise[t - 1] - 0.2 * noise[t - 2] + 0.4 * rng.normal()
    u = 0.1 * rng.normal(size=len(noise))
    found = disturbance_of([Signals(1 + noise + 2 * u, np.full_like(u, 2.0), u)], order=4)
    assert found.coefficients[:2] == pytest.approx([0.5, -0.2], abs=0.04)
    assert found.std == pytest.approx(0.4, rel=0.03)


def test_an_unstable_loop_has_no_spread() -> None:
    wild = PITemperature(kp=2.5, schedule="none", v_start=30.0)
    assert predict(wild, 30.0, Disturbance(np.zeros(1), 1.0)).entropy == np.inf
    assert "no stationary spread" in noise_response(wild).faults[0]


def test_short_and_constant_traces_are_refused() -> None:
    one = Signals(np.ones(30), np.ones(30), np.zeros(30))
    with pytest.raises(TraceError, match="too few"):
        disturbance_of([one])
    flat = Signals(np.ones(300), np.ones(300), np.zeros(300))
    with pytest.raises(TraceError, match="constant"):
        disturbance_of([flat])


def test_a_request_with_its_own_target_is_measured_about_it(run: Path) -> None:
    controller = PITemperature(target=1.0)
    trace = signals(run)
    moved = [one._replace(entropy=one.entropy + 3, target=4.0) for one in trace]
    assert measure(controller, moved).entropy == pytest.approx(measure(controller, trace).entropy)
    assert mean_gain(moved) == mean_gain(trace)
