"""Exact verdicts against cases that floats cannot decide, and against an outside solver."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_control.controllers import PITemperature
from entropic_control.errors import ConfigError
from entropic_control.proofs.exactgain import ExactGain, exact_gain, smt_of
from entropic_control.proofs.rational import (
    exact,
    exact_corners,
    exact_decrease,
    exact_mean_decrease,
    exact_token,
    positive,
)
from entropic_control.proofs.scheduled import token_matrix
from entropic_control.proofs.varentropy import largest

VOCAB = 49_152
CONTROLLERS = [
    PITemperature(kp=0.1, ki=0.02),
    PITemperature(kp=0.0),
    PITemperature(kp=0.05, ki=0.01, schedule="none"),
    PITemperature(filter=1.0, kp=0.02, ki=0.02),
]


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("delay", [1, 2, 4])
def test_the_exact_matrices_are_those_of_the_float_loop(
    controller: PITemperature, delay: int
) -> None:
    for slope, q in [(0.0, 0.0), (1.5, 0.03), (30.0, 0.1)]:
        share = q if controller.kp else 0.0
        found = exact_token(controller, delay, slope, share)
        assert all(isinstance(entry, Fraction) for entry in found.flat)
        near = token_matrix(controller, delay, slope, share)
        assert found.astype(float) == pytest.approx(near, abs=1e-12)


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_the_certificate_stands_exactly(controller: PITemperature) -> None:
    claim = exact_gain(controller, VOCAB)
    assert claim.faults == []
    assert claim.falsify(500) is None


@pytest.mark.parametrize("delay", [2, 3])
def test_longer_delays_stand_where_a_certificate_exists(delay: int) -> None:
    assert exact_gain(PITemperature(kp=0.02, ki=0.004), VOCAB, delay).faults == []
    assert exact_gain(PITemperature(kp=0.3, ki=0.3), VOCAB, delay).faults


def test_a_decrease_below_any_rounding_is_told_from_none() -> None:
    P = np.eye(2)
    tiny = Fraction(1, 10**40)
    falls, stays, grows = (exact(np.eye(2)) * (1 - s * tiny) for s in (1, 0, -1))
    assert exact_decrease(P, [falls]) == []
    assert "does not fall at corner 1" in exact_decrease(P, [falls, stays])[0]
    assert exact_decrease(P, [falls, stays], strict=False) == []
    assert "can grow at corner 0" in exact_decrease(P, [grows], strict=False)[0]
    # In floats all three are the identity.
    assert np.array_equal(falls.astype(float), grows.astype(float))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_certificate_that_is_no_number_is_refused(bad: float) -> None:
    assert exact_decrease(np.array([[1.0, 0], [0, bad]]), [np.eye(2) / 2])


@given(st.lists(st.integers(-4, 4), min_size=9, max_size=9))
def test_pivots_and_eigenvalues_agree_where_eigenvalues_are_clear(entries: list[int]) -> None:
    S = np.array(entries, float).reshape(3, 3)
    S = S + S.T
    least = float(np.linalg.eigvalsh(S).min())
    if abs(least) > 1e-9:
        assert positive(exact(S)) == (least > 0)
        assert positive(exact(S), strict=False) == (least > 0)
    square = exact(S).dot(exact(S))  # semidefinite whatever S is
    assert positive(square, strict=False)


def test_a_mean_can_fall_where_a_matrix_grows() -> None:
    half = Fraction(1, 2)
    law = [(half, exact(np.eye(1) * 1.25)), (half, exact(np.eye(1) * 0.25))]
    assert exact_mean_decrease(np.eye(1), [law]) == []
    assert exact_decrease(np.eye(1), [A for _, A in law])
    assert exact_mean_decrease(
        np.eye(1), [[(Fraction(9, 10), law[0][1]), (Fraction(1, 10), law[1][1])]]
    )


FORGED: list[Any] = [
    lambda c: {"P": -c.P},
    {"P": np.eye(2)},
    lambda c: {"P": c.P * np.array([[60, 1], [1, 1]])},
    {"P": None},
    {"P": np.eye(3)},
    lambda c: {"controller": c.controller.replace(kp=2.0)},
    lambda c: {"controller": c.controller.replace(ki=0.2)},
    {"vocab": 10**40},
    {"delay": 2},
    {"delay": 0},
    lambda c: {"high": 0.9 * c.high},
    lambda c: {"vocab": c.vocab + 1},
]


@pytest.mark.parametrize("change", FORGED)
def test_forged_certificates_are_caught(change: Any) -> None:
    claim = exact_gain(PITemperature(kp=0.1, ki=0.02), VOCAB)
    assert not replace(claim, **(change(claim) if callable(change) else change)).holds


def test_the_whole_range_is_meant_and_not_its_corners() -> None:
    claim = exact_gain(PITemperature(kp=0.1, ki=0.02), VOCAB)
    corners = exact_corners(claim.controller, 1, claim.low, claim.high)
    rng = np.random.default_rng(0)
    for _ in range(30):
        slope = Fraction(float(rng.uniform(0, claim.high)))
        q = Fraction(float(rng.uniform(0, 0.1)))
        assert exact_decrease(claim.P, [exact_token(claim.controller, 1, slope, q)]) == []
    assert len(corners) == 4


def answer(text: str) -> str:
    z3 = pytest.importorskip("z3")
    solver = z3.Solver()
    solver.set("timeout", 60_000)
    solver.from_string(text)
    return str(solver.check())


def test_the_text_for_an_outside_solver_is_found_among_claims_or_refused_in_words() -> None:
    claim = exact_gain(PITemperature(), VOCAB)
    text = smt_of([largest(VOCAB), claim])
    assert text == claim.smt()
    assert text.count("(check-sat)") == 1
    assert text.count("(") == text.count(")")
    with pytest.raises(ConfigError, match="kind 'pi'"):
        smt_of([largest(VOCAB)])
    with pytest.raises(ConfigError, match="lower kp and ki"):
        smt_of([exact_gain(PITemperature(ki=0.5), VOCAB)])


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_an_outside_solver_proves_the_exported_certificate(controller: PITemperature) -> None:
    assert answer(exact_gain(controller, VOCAB).smt()) == "unsat"


@pytest.mark.parametrize("change", [*FORGED[:3], *FORGED[5:7], {"high": 1e4}])
def test_an_outside_solver_refutes_a_mutated_certificate(change: Any) -> None:
    claim = exact_gain(PITemperature(kp=0.1, ki=0.02), VOCAB)
    mutant: ExactGain = replace(claim, **(change(claim) if callable(change) else change))
    assert answer(mutant.smt()) == "sat"
