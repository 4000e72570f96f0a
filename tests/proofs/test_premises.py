"""A claim whose premise the configuration breaks fails, and says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import entropic_control
from entropic_control.backends import SimulatedConfig
from entropic_control.backends.vllm import VllmConfig
from entropic_control.backends.vllm.own import GAINS, Own
from entropic_control.config import Config, load_config
from entropic_control.controllers import PITemperature, SlewLimit
from entropic_control.errors import ConfigError
from entropic_control.proofs import Subject, certify
from entropic_control.proofs.requestgains import request_gains
from entropic_control.proofs.varentropy import largest

SIMULATED: dict[str, Any] = {"backend": {"kind": "simulated", "vocab": 49_152}}

BROKEN: list[tuple[dict[str, Any], str, str]] = [
    ({"truncation": {"kind": "top_k", "k": 1}}, "mean entropy", "out of reach"),
    ({"truncation": {"kind": "top_k", "k": 1, "place": "after"}}, "mean entropy", "out of reach"),
    (
        {"truncation": {"kind": "top_k", "k": 5}, "temperature": {"kind": "pi", "target": 1.75}},
        "mean entropy",
        "5 tokens hold less than",
    ),
    ({"truncation": {"kind": "top_p", "p": 0.9, "place": "after"}}, "measured slope", "'before'"),
    (
        {"truncation": {"kind": "min_p", "p": 0.05, "place": "after"}},
        "every gain",
        "place to 'before'",
    ),
    ({"estimator": {"kind": "top_k", "k": 16}}, "measured slope", "use 'full'"),
    ({"estimator": {"kind": "top_k", "k": 64, "tail": "lower"}}, "every gain", "use 'full'"),
    ({"temperature": {"kind": "pi", "kp": 50.0}}, "every gain", "no common Lyapunov"),
    (
        {"backend": {"kind": "vllm"}, "temperature": {"kind": "pi", "v_min": 0.3}},
        "per-request gains",
        "raise v_min",
    ),
]


@pytest.mark.parametrize(("parts", "name", "words"), BROKEN)
def test_a_broken_premise_is_named(parts: dict[str, Any], name: str, words: str) -> None:
    certificate = certify(load_config({**SIMULATED, **parts}))
    assert not certificate.holds
    assert not certificate[name].holds
    assert any(words in fault for fault in certificate[name].faults), certificate[name].faults


KEPT: list[dict[str, Any]] = [
    {},
    {"truncation": {"kind": "min_p", "p": 0.05}},
    {"truncation": {"kind": "top_p", "p": 0.95}},
    {"truncation": {"kind": "top_k", "k": 40}},
    {"truncation": {"kind": "top_k", "k": 40, "place": "after"}},
    {"estimator": {"kind": "top_k", "k": 64, "tail": "exact"}},
    {"temperature": {"kind": "fixed"}, "truncation": {"kind": "top_p", "place": "after"}},
    {"temperature": {"kind": "exact"}, "estimator": {"kind": "top_k", "k": 16}},
    {"backend": {"kind": "vllm", "voluntary_preemption": True}},
]


@pytest.mark.parametrize("parts", KEPT)
def test_what_breaks_no_premise_holds(parts: dict[str, Any]) -> None:
    certificate = certify(load_config({**SIMULATED, **parts}))
    assert certificate.holds, str(certificate)


@pytest.mark.parametrize(
    "backend",
    [
        {"kind": "simulated", "vocab": 49_152, "slots": 2, "can_swap": False},
        {"kind": "vllm", "voluntary_preemption": False},
    ],
)
def test_the_wait_that_is_claimed_is_that_of_an_engine_that_gives_no_seat(
    backend: dict[str, Any],
) -> None:
    stuck = certify(load_config({"backend": backend}))["bounded waiting"]
    usual = certify(Config())["bounded waiting"]
    assert stuck.holds
    assert stuck.figures["longest wait [steps]"] > 2 * usual.figures["longest wait [steps]"]


def test_a_truncation_to_few_tokens_narrows_what_is_borne() -> None:
    few = certify(load_config({**SIMULATED, "truncation": {"kind": "top_k", "k": 40}}))
    assert few["plant gain"].figures["V_max [nats^2]"] == pytest.approx(largest(40).bound)


class RunsAhead(SimulatedConfig):
    """An engine that samples two more tokens before it takes a reading in."""

    kind: str

    @property
    def delay(self) -> int:
        return 3


def test_the_delay_is_the_backends_unless_asked_otherwise() -> None:
    ahead = Config(
        backend=RunsAhead(kind="runs_ahead"), temperature=PITemperature(kp=0.02, ki=0.005)
    )
    assert Subject.of(Config()).delay == 1
    assert Subject.of(Config(backend=VllmConfig(async_scheduling=True))).delay == 1
    assert Subject.of(ahead).delay == 3
    assert Subject.of(ahead, delay=2).delay == 2
    found = certify(ahead)["linear loop"]
    assert found.delay == 3  # type: ignore[attr-defined]
    wild = certify(ahead.replace(temperature=PITemperature(kp=0.3, ki=0.06)))
    assert not wild["linear loop"].holds


def test_an_engine_says_what_it_can_do() -> None:
    config = load_config({"backend": {"kind": "simulated", "slots": 2, "context": 64}})
    with entropic_control.load(config, dry_run=True) as engine:
        subject = Subject.of(engine)
        notes = certify(engine).notes
    assert (subject.vocab, subject.slots, subject.context, subject.can_swap) == (512, 2, 64, True)
    assert "temperature" in subject.dry
    assert any("only observes" in note for note in notes)


def test_a_file_is_certified(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("backend: simulated\npruning: none\n")
    assert entropic_control.certify(path).holds
    assert entropic_control.certify(str(path), delay=1).holds
    assert not entropic_control.certify({"temperature": {"kind": "pi", "kp": 50.0}}).holds
    with pytest.raises(ConfigError, match=r"entropic_control\.certify\(path\)"):
        certify(path)


# -- gains of a request's own, on vLLM ---------------------------------------------------------------


def inside(name: str, share: float) -> float:
    low, high = GAINS[name]
    return low + share * (high - low)


@pytest.mark.parametrize("name", GAINS)
def test_gains_outside_the_certified_range_are_refused(name: str) -> None:
    low, high = GAINS[name]
    for share in (0.0, 0.5, 1.0):
        assert getattr(Own.read({name: inside(name, share)}), name) == inside(name, share)
    for outside in (high * 1.01, 50.0, low - 1e-6, -1.0):
        with pytest.raises(ConfigError, match=f"{name} cannot be"):
            Own.read({name: outside})


@pytest.mark.parametrize("vocab", [49_152, 262_144])
@pytest.mark.parametrize("v_min", [1.0, 2.0])
def test_the_accepted_range_is_certified(vocab: int, v_min: float) -> None:
    claim = request_gains(PITemperature(v_min=v_min), GAINS, 1, largest(vocab).bound)
    assert claim.holds, claim.faults
    assert claim.falsify(300) is None


def test_the_range_is_certified_of_what_a_wrapper_holds() -> None:
    slew = Config(backend=VllmConfig(), temperature=SlewLimit(inner=PITemperature()))
    assert certify(slew)["per-request gains"].holds
    plain = Config(
        backend=VllmConfig(), temperature=PITemperature(schedule="none", v_min=0.1, kp=0.01)
    )
    assert certify(plain)["per-request gains"].controller == plain.temperature  # type: ignore[attr-defined]
    fixed = load_config({"backend": {"kind": "vllm"}, "temperature": "fixed"})
    assert "per-request gains" not in {claim.name for claim in certify(fixed).claims}


def test_the_defaults_lie_in_the_range() -> None:
    for name, (low, high) in GAINS.items():
        assert low <= getattr(PITemperature(), name) <= high
