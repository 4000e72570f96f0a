"""Certificates: what holds, what fails and why, in words and in JSON."""

import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from forging import forgeries
from recorded import HELD

from entropic_control.config import Config, load_config
from entropic_control.controllers import (
    EntropicPriority,
    FixedTemperature,
    NgramSpeculation,
    NoPruning,
    PITemperature,
    RoundRobin,
    SlidingWindow,
    TopKEntropy,
)
from entropic_control.controllers.kinds import kinds_of
from entropic_control.errors import ConfigError, TraceError
from entropic_control.proofs import certify
from entropic_control.proofs.signals import signals

RECORDED = PITemperature(kp=0.1, ki=0.02)
"""What the run HELD was recorded under."""
UNSTABLE = {"temperature": {"kind": "pi", "kp": 2.5, "schedule": "none"}}


def test_default_configuration_is_certified_within_two_seconds() -> None:
    certify(Config())  # caches and imports are not what is timed
    started = time.process_time()
    certificate = certify(Config())
    text = str(certificate)
    assert time.process_time() - started < 2.0
    assert certificate.holds, text
    named = [claim.name for claim in certificate.claims]
    assert {"conformance", "linear loop", "every gain", "mean entropy", "retention"} <= set(named)
    assert len(named) == len(set(named))


def test_an_unstable_configuration_fails_in_words() -> None:
    certificate = certify(load_config(UNSTABLE), vocab=49_152)
    assert not certificate.holds
    linear = certificate["linear loop"]
    assert not linear.holds
    assert "unstable" in linear.faults[0]
    assert "multiplied by less than 0.2" in linear.faults[0]
    assert "no common Lyapunov function" in certificate["every gain"].faults[0]
    assert "FAILS" in str(certificate)


def test_an_unstable_configuration_oscillates_on_the_simulated_backend() -> None:
    from entropic_control import Request, load

    def mean_jump(changes: dict[str, Any]) -> float:
        """Mean |change of ln T| in a token, on a plant whose entropy is lively (V near 3)."""
        config = {
            "temperature": {"kind": "pi", "target": 3.0, "start": 1.0, **changes},
            "backend": {"kind": "simulated", "vocab": 49_152},
            "pruning": "none",
        }
        with load(config) as engine:
            engine.submit(Request(prompt="swing", id="a", max_tokens=150, min_tokens=150))
            for _ in engine.stream():
                pass
            return float(np.abs(np.diff(np.log(engine.trace.of("a")["temperature"]))).mean())

    assert mean_jump(UNSTABLE["temperature"]) > 0.3
    assert mean_jump({}) < 0.1


def test_a_certificate_is_json() -> None:
    certificate = certify(PITemperature(schedule="none", kp=2.5))
    data = json.loads(certificate.to_json())
    assert data["holds"] is False
    assert data["subject"] == "temperature 'pi'"
    by_name = {claim["name"]: claim for claim in data["claims"]}
    assert by_name["linear loop"]["faults"]
    assert by_name["plant gain"]["figures"]["V_max [nats^2]"] == pytest.approx(30.163, abs=1e-3)
    assert by_name["plant gain"]["source"]
    json.dumps(data, allow_nan=False)


def test_assumptions_are_checked_on_a_trace() -> None:
    assumed = certify(RECORDED).assumptions
    assert all(a.verdict is None for a in assumed)
    certificate = certify(RECORDED, trace=HELD)
    assert certificate.holds, str(certificate)
    checked = [a.text for a in certificate.assumptions if a.verdict]
    assert len(checked) >= 3
    assert certificate["coupled loops"].figures["commands replayed"] > 0.99
    assert "checked on the trace" in str(certificate)


def test_numbers_from_a_trace_are_gone_over_too() -> None:
    for name in ("spread", "mean entropy", "coupled loops"):
        claim = certify(RECORDED, trace=HELD)[name]
        assert claim.holds, claim.faults
        survivors = [how for how, other in forgeries(claim) if other.holds]
        assert not survivors, name


def test_a_trace_of_another_controller_is_noticed() -> None:
    certificate = certify(PITemperature(kp=0.4, ki=0.1), trace=HELD)
    assert not certificate["coupled loops"].holds
    assert "VIOLATED" in str(certificate)


def test_the_delay_a_trace_shows_is_the_delay_that_is_certified() -> None:
    assert certify(RECORDED, trace=HELD, delay=1)["coupled loops"].holds
    assert not certify(RECORDED, trace=HELD, delay=2)["coupled loops"].holds


def test_falsifiers_can_be_asked_for() -> None:
    certificate = certify(NoPruning(), trials=50)
    assert certificate.counterexamples == {}
    assert "no counterexample in 50 trials" in str(certificate)


def test_an_infeasible_target_fails_and_names_the_limit() -> None:
    certificate = certify(PITemperature(target=5.0), vocab=100)
    assert not certificate.holds
    assert "out of reach" in certificate["mean entropy"].faults[0]


def test_margins_that_are_asked_for_are_enforced() -> None:
    assert not certify(PITemperature(), gm=60.0)["linear loop"].holds
    assert "below the 60 dB" in certify(PITemperature(), gm=60.0)["linear loop"].faults[0]


@pytest.mark.parametrize("kind", ["fixed", "dynatemp", "edt", "exact", "mirostat"])
def test_other_temperature_kinds_are_certified_or_named_as_not_covered(kind: str) -> None:
    if kind not in kinds_of("temperature"):
        pytest.skip("not a kind of this version")
    certificate = certify(kinds_of("temperature")[kind]())
    assert certificate.holds
    names = {claim.name for claim in certificate.claims}
    assert "linear loop" in names or any("no claim covers" in note for note in certificate.notes)


def test_a_wrapper_is_certified_as_what_it_wraps() -> None:
    if "slew" not in kinds_of("temperature"):
        pytest.skip("not a kind of this version")
    wrapped = kinds_of("temperature")["slew"](inner=PITemperature())
    certificate = certify(wrapped)
    assert certificate.holds
    assert "every gain" in {claim.name for claim in certificate.claims}
    assert "certified where it does not act" in certificate.notes[0]


def test_parts_without_a_claim_are_named() -> None:
    assert "round_robin" in certify(RoundRobin()).notes[0]
    assert any("ngram" in note for note in certify(NgramSpeculation()).notes)
    assert certify(FixedTemperature()).holds
    assert certify(SlidingWindow(budget=512)).holds
    assert certify(TopKEntropy(k=4)).holds
    assert certify(EntropicPriority(patience=3)).holds


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: certify(object()), ConfigError, "neither a controller"),
        (lambda: certify(PITemperature(), delay=0), ConfigError, "one token or more"),
        (lambda: certify(PITemperature(), gain=(-1.0, 2.0)), ConfigError, "low <= high"),
        (
            lambda: certify(PITemperature(), trace={"entropy": [], "temperature": []}),
            TraceError,
            "empty",
        ),
        (
            lambda: certify(PITemperature(), trace={"entropy": [np.nan], "temperature": [1.0]}),
            TraceError,
            "nan",
        ),
        (lambda: PITemperature(kp=-1.0), ValueError, "greater than or equal to 0"),
        (lambda: signals({"temperature": [1.0]}), TraceError, "no column 'entropy'"),
    ],
)
def test_bad_input_is_refused_in_words(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_importing_the_commands_is_light() -> None:
    code = (
        "import sys, entropic_control.proof_commands; "
        "print([m for m in ('control', 'matplotlib', 'scipy.signal', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
