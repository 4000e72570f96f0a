"""Mean-square stability over recorded tokens and over all laws: figures, forgeries, wrong controllers."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from recorded import HELD, RUN, TUNED

from entropic_control.controllers import PITemperature
from entropic_control.errors import TraceError
from entropic_control.proofs.anylaw import AnyLaw, any_law
from entropic_control.proofs.exactgain import exact_gain
from entropic_control.proofs.meansquare import MeanSquare, mean_square
from entropic_control.proofs.scheduled import corners, token_matrix
from entropic_control.proofs.secondway import enclosed
from entropic_control.proofs.signals import Signals, signals
from entropic_control.proofs.tokenlaw import Outputs, recorded_tokens, token_law

VOCAB = 49_152
DEFAULT = PITemperature(kp=0.1, ki=0.02)
"""The gains of the run that is held."""
PLAIN = PITemperature(kp=0.05, ki=0.02, schedule="none")


@cache
def recorded(delay: int = 1) -> MeanSquare:
    return mean_square(DEFAULT, signals(HELD), delay)


@cache
def every(controller: PITemperature = DEFAULT) -> AnyLaw:
    return any_law(controller, VOCAB)


@pytest.mark.parametrize("path", [HELD, RUN, TUNED], ids=lambda p: p.name)
@pytest.mark.parametrize("controller", [DEFAULT, PLAIN], ids=["scheduled", "plain"])
def test_the_mean_square_dies_out_over_all_recorded_tokens(path: Any, controller: Any) -> None:
    trace = signals(path)
    slope, q = recorded_tokens(controller, 1, trace)
    assert (slope < 0.05).any(), "calm tokens are among them"
    A = np.array([token_matrix(controller, 1, *pair) for pair in zip(slope, q, strict=True)])
    whole = np.mean([np.kron(one, one) for one in A], axis=0)
    radius = token_law(controller, 1, slope, q).radius()
    assert radius == pytest.approx(np.abs(np.linalg.eigvals(whole)).max(), rel=1e-9)
    low, high = enclosed(A)
    assert low * (1 - 1e-9) <= radius <= high * (1 + 1e-9)
    assert radius < 0.97


@pytest.mark.parametrize("delay", [1, 2])
def test_the_claim_holds_and_predicts_the_spread_of_a_real_run(delay: int) -> None:
    claim = recorded(delay)
    assert claim.faults == []
    assert claim.falsify(4_000, seed=1) is None
    if delay == 1:  # as the run was made
        assert max(claim.errors) < 0.25
        H = np.concatenate([one.entropy for one in claim.trace])
        assert np.sqrt(np.mean((H - 1) ** 2)) < claim.bound
        assert claim.bound < 2.5 * claim.measured.entropy, "a bound far away says nothing"


def test_a_spread_that_is_not_the_predicted_one_violates_the_claim() -> None:
    trace = signals(HELD)
    restless = [
        one._replace(log_temperature=2 * (one.log_temperature - one.log_temperature.mean()))
        for one in trace
    ]
    assert any("predicted spread" in fault for fault in mean_square(DEFAULT, restless).faults)


def test_too_much_gain_grows_and_is_told() -> None:
    wild = PITemperature(ki=0.9)
    claim = mean_square(wild, signals(HELD))
    assert claim.decay > 1
    assert "grows by" in claim.check()[0]
    assert not np.isfinite(claim.bound)


def test_the_order_of_tokens_is_looked_at() -> None:
    """A text that is calm for long and then lively is worse than its shuffled self."""
    trace = signals(HELD)
    sorted_ = [
        Signals(*(np.sort(one.varentropy) if k == 1 else one[k] for k in range(3))) for one in trace
    ]
    claim = recorded()
    assert mean_square(DEFAULT, sorted_).ordered > claim.ordered + 0.01
    assert "recorded order" in str(replace(claim, ordered=1.01).faults)


def test_short_traces_are_refused() -> None:
    with pytest.raises(TraceError):
        mean_square(DEFAULT, [Signals(*(one[:20] for one in signals(HELD)[0][:3]))])


def off(outputs: Outputs, name: str, factor: float) -> Outputs:
    return outputs._replace(**{name: factor * getattr(outputs, name)})


FORGED: list[tuple[str, Callable[[Any], Any]]] = [
    ("decay", lambda c: 0.999 * c.decay),
    ("decay", lambda c: 1.001 * c.decay),
    ("ordered", lambda c: 0.999 * c.ordered),
    ("sigma", lambda c: 0.99 * c.sigma),
    ("P", lambda c: -c.P),
    ("P", lambda c: c.P * [[1, -1], [-1, 1]]),
    ("P", lambda _: np.diag([1e-6, 1.0])),
    ("delay", lambda _: 2),
    ("trace", lambda c: c.trace[:2]),
    ("controller", lambda c: c.controller.replace(ki=0.03)),
    *(
        (field, lambda c, field=field, name=name, f=f: off(getattr(c, field), name, f))
        for field in ("peak", "predicted", "measured")
        for name in Outputs._fields
        for f in (0.98, 1.02)
    ),
]


@pytest.mark.parametrize(("field", "change"), FORGED)
def test_every_forged_field_is_caught(field: str, change: Callable[[Any], Any]) -> None:
    claim = recorded()
    assert {f for f, _ in FORGED} >= {f.name for f in fields(claim) if not f.kw_only}
    assert replace(claim, **{field: change(claim)}).check()


@pytest.mark.parametrize(
    "controller",
    [DEFAULT, PLAIN, PITemperature(kp=0.0, ki=0.01), PITemperature(filter=1.0, kp=0.02, ki=0.02)],
)
def test_every_law_of_gains_is_borne(controller: PITemperature) -> None:
    claim = every(controller)
    assert claim.faults == []
    assert claim.falsify(2_000, seed=3) is None
    assert claim.decay < 1


@pytest.mark.parametrize("seed", range(20))
def test_random_laws_decay_at_least_as_fast_as_the_worst(seed: int) -> None:
    claim, rng = every(), np.random.default_rng(seed)
    slopes = rng.uniform(0, claim.high, 6) * (rng.random(6) < 0.5)
    chance = rng.dirichlet(np.ones(6))
    q = claim.controller.kp / rng.uniform(1.0, 30.0, 6)
    mean = float(chance @ slopes)
    if mean < claim.mean:
        return
    matrices = [token_matrix(claim.controller, 1, *at) for at in zip(slopes, q, strict=True)]
    kronecker = sum(p * np.kron(A, A) for p, A in zip(chance, matrices, strict=True))
    assert np.abs(np.linalg.eigvals(kronecker)).max() <= claim.decay * (1 + 1e-9)


def test_gains_that_some_law_breaks_are_not_certified() -> None:
    wild = PITemperature(ki=0.08)
    claim = any_law(wild, VOCAB)
    assert not claim.holds
    # And such a law exists: tokens of the largest slope alone.
    worst = corners(wild, 1, 0.0, claim.high)[-1]
    assert np.abs(np.linalg.eigvals(worst)).max() > 1


def test_a_trace_calmer_than_the_premise_says_so() -> None:
    quiet = [Signals(np.ones(200), np.full(200, 0.1), np.zeros(200))]
    assert "VIOLATED" in str(any_law(DEFAULT, VOCAB, trace=quiet))
    assert any_law(DEFAULT, VOCAB, trace=signals(HELD)).holds


LAW_FORGED: list[tuple[str, Callable[[Any], Any]]] = [
    ("mean", lambda c: 0.5 * c.mean),
    ("mean", lambda c: 2 * c.mean),
    ("mean", lambda _: 0.0),
    ("mean", lambda c: 2 * c.high),
    ("P", lambda c: -c.P),
    ("P", lambda _: None),
    ("P", lambda c: c.P * [[40, 1], [1, 1]]),
    ("P", lambda c: c.P + 0.01 * np.ones((2, 2))),
    ("decay", lambda c: 0.999 * c.decay),
    ("decay", lambda c: 1.001 * c.decay),
    ("noise_gain", lambda c: 0.99 * c.noise_gain),
    ("noise_gain", lambda c: 1.01 * c.noise_gain),
    ("vocab", lambda c: c.vocab + 1),
    ("high", lambda c: 0.9 * c.high),
    ("calmest", lambda _: 1.0),
    ("vocab", lambda _: 100),
    ("vocab", lambda _: 10**9),
    ("controller", lambda c: c.controller.replace(ki=0.01)),
    ("controller", lambda c: c.controller.replace(kp=0.4)),
]


@pytest.mark.parametrize(("field", "change"), LAW_FORGED)
def test_every_forged_field_of_the_law_is_caught(field: str, change: Callable[[Any], Any]) -> None:
    claim = every()
    assert replace(claim, **{field: change(claim)}).check()


class Flipped(PITemperature):
    """Heats when the entropy is too high."""

    kind: str

    def update(self, state, reading):  # type: ignore[no-untyped-def]
        return super().update(state, reading._replace(entropy=2 * state.target - reading.entropy))


class Forgetful(PITemperature):
    """Its integral leaks away."""

    kind: str

    def update(self, state, reading):  # type: ignore[no-untyped-def]
        leaked = state._replace(integral=0.9 * state.integral)
        return super().update(leaked, reading)


@pytest.mark.parametrize("wrong", [Flipped(kind="flipped_here"), Forgetful(kind="forgetful")])
def test_controllers_that_do_not_do_what_is_claimed_are_falsified(wrong: PITemperature) -> None:
    assert replace(recorded(), controller=wrong).falsify(1_000) is not None
    assert replace(every(), controller=wrong).falsify(1_000) is not None
    assert replace(exact_gain(DEFAULT, VOCAB), controller=wrong).falsify(1_000) is not None


def test_one_certificate_covers_a_range_of_gains_per_request() -> None:
    claim = exact_gain(DEFAULT, VOCAB)
    assert claim.covers((0.0, 0.1), (0.018, 0.022)) == []
    assert any("kp 50" in fault for fault in claim.covers((0.0, 50.0), (0.02, 0.02)))
    assert any("ki 0.2" in fault for fault in claim.covers((0.1, 0.1), (0.02, 0.2)))


def test_the_claims_are_cheap() -> None:
    import time

    started = time.process_time()
    for claim in (exact_gain(DEFAULT, VOCAB), any_law(DEFAULT, VOCAB)):
        assert claim.holds
    assert time.process_time() - started < 1.0
