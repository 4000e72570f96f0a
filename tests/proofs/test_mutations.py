"""An unsound claim cannot pass: flip a sign or a bound in a certificate or a controller: it is caught."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from claims import CLAIMS, PLAIN

from entropic_control.controllers import (
    AttentionPruning,
    EntropicPriority,
    EntropicPruning,
    PITemperature,
    SlidingWindow,
)
from entropic_control.controllers.priority import Plan, Priority
from entropic_control.proofs import Claim
from entropic_control.proofs.attention import dropped_mass
from entropic_control.proofs.coupled import PeakGain
from entropic_control.proofs.noise import Spread

TRIALS = 2_000

# The classes below have no default kind, so that they stay out of the registry.


def caught(claim: Claim) -> bool:
    """Whether the check or the falsifier sees through the claim."""
    return bool(claim.check()) or claim.falsify(TRIALS) is not None


Change = dict[str, Any] | Callable[[Any], dict[str, Any]]

FORGED: list[tuple[str, Change]] = [
    ("plant gain", lambda c: {"bound": -c.bound}),
    ("plant gain", lambda c: {"bound": 0.99 * c.bound}),
    ("plant gain", lambda c: {"bound": 1.01 * c.bound}),
    ("plant gain", lambda c: {"rest": 1 - c.rest}),
    (
        "linear loop",
        lambda c: {"margins": replace(c.margins, gain_margin=1.05 * c.margins.gain_margin)},
    ),
    ("linear loop", lambda c: {"margins": replace(c.margins, gain_margin=np.inf)}),
    ("linear loop", lambda c: {"margins": replace(c.margins, pole_radius=0.9)}),
    ("linear loop", lambda c: {"margins": replace(c.margins, stable=False)}),
    ("linear loop", {"least_gain_margin": 60.0}),
    ("linear loop", {"least_phase_margin": 100.0}),
    ("linear loop, no schedule", {"gain": (0.1, 600.0)}),
    ("time-varying gain", lambda c: {"P": -c.P}),
    ("time-varying gain", {"P": np.eye(2)}),
    ("time-varying gain", lambda c: {"P": c.P * [[1, -1], [-1, 1]]}),
    ("time-varying gain", {"high": 40.0}),
    ("time-varying gain", lambda c: {"circle": 1.2 * c.circle}),
    ("time-varying gain", lambda c: {"circle": 0.9 * c.circle}),
    ("time-varying gain", lambda c: {"clipped": 2 * c.clipped}),
    ("varentropy schedule", lambda c: {"P": -c.P}),
    ("varentropy schedule", {"P": np.eye(2)}),
    ("varentropy schedule", lambda c: {"P": c.P * [[1, -1], [-1, 1]]}),
    ("varentropy schedule", {"share": 0.1}),
    ("varentropy schedule", {"mismatch": (0.2, 4.0)}),
    ("varentropy schedule", lambda c: {"controller": c.controller.replace(kp=2.5)}),
    ("varentropy schedule", {"drift": 0.01}),
    ("boundedness", lambda c: {"step": 0.5 * c.step}),
    ("boundedness", lambda c: {"step": -c.step}),
    ("boundedness", lambda c: {"error": (c.error[0] / 2, c.error[1])}),
    ("boundedness", lambda c: {"filtered": (1.0, c.filtered[1])}),
    ("boundedness", {"log_temperature": (-1.0, 0.3)}),
    ("spread", lambda c: {"predicted": Spread(-c.predicted.entropy, c.predicted.log_temperature)}),
    (
        "spread",
        lambda c: {"predicted": Spread(c.predicted.entropy, 1.1 * c.predicted.log_temperature)},
    ),
    ("spread", lambda c: {"gain": 3 * c.gain, "controller": PLAIN}),
    (
        "spread",
        lambda c: {"measured": Spread(c.predicted.entropy, 2 * c.predicted.log_temperature)},
    ),
    ("mean entropy", lambda c: {"sum_bound": 0.5 * c.sum_bound}),
    ("mean entropy", lambda c: {"sum_bound": -c.sum_bound}),
    ("mean entropy", {"vocab": 2}),
    ("mean entropy", {"at_bounds": 0.5}),
    ("coupled loops", lambda c: {"peak": PeakGain(c.peak.entropy, 0.8 * c.peak.log_temperature)}),
    ("coupled loops", lambda c: {"peak": PeakGain(1.2 * c.peak.entropy, c.peak.log_temperature)}),
    ("coupled loops", lambda c: {"reaction": 1.01 / c.peak.log_temperature}),
    ("coupled loops", {"delay_margin": 0.0}),
    ("coupled loops", {"replayed": 0.5}),
    ("bounded waiting", lambda c: {"bound": c.bound - 1}),
    ("bounded waiting", lambda c: {"bound": c.bound + 1}),
    ("bounded waiting", lambda c: {"attained": c.attained + 1}),
    ("work conservation", {"dearest": 1.1}),
    ("work conservation", {"drift_light": 0.5}),
    ("work conservation", lambda c: {"drift_heavy": -c.drift_heavy}),
    ("work conservation", {"gain_of_batching": 0.9}),
    ("index order", {"regret": 0.01}),
    ("index order", lambda c: {"set_up_mean": 2 * c.set_up_worst}),
    ("retention", lambda c: {"kept_blocks": c.kept_blocks + 1}),
    ("retention", lambda c: {"most_open": c.most_open - 1}),
    ("retention, gate that closes", lambda c: {"most": c.most // 2}),
    ("retention, between chunks", lambda c: {"most": c.most + 1}),
    ("bounded waiting, no swap", {"bound": 516}),
    ("bounded waiting, no swap", lambda c: {"attained": c.attained + 1}),
    ("dropped mass", lambda c: {"mass": 0.9 * c.mass}),
    ("dropped mass", {"pruning": SlidingWindow()}),
    ("dropped mass, lean", lambda c: {"pruning": c.pruning.replace(budget=0.5)}),
    ("dropped mass", lambda c: {"output_bound": 0.5 * c.output_bound}),
    ("dropped mass", lambda c: {"output_bound": -c.output_bound}),
    ("dropped mass", lambda c: {"entropy_bound": 0.9 * c.entropy_bound}),
    ("dropped mass", lambda c: {"entropy_bound": 1.1 * c.entropy_bound}),
    ("top-k bounds", lambda c: {"lower": 1.01 * c.lower}),
    ("top-k bounds", lambda c: {"upper": 0.99 * c.upper}),
    ("top-k bounds", lambda c: {"lower": c.upper, "upper": c.lower}),
]


@pytest.mark.parametrize(("name", "change"), FORGED)
def test_forged_numbers_are_caught_by_the_check(name: str, change: Change) -> None:
    claim = CLAIMS[name]()
    forged = replace(claim, **(change(claim) if callable(change) else change))
    assert not forged.holds, "the check must see what was changed"


class FlippedSign(PITemperature):
    """A controller that heats when the entropy is too high."""

    kind: str

    def update(self, state, reading):  # type: ignore[no-untyped-def]
        target = state.target
        wrong = reading._replace(entropy=2 * target - reading.entropy)
        return super().update(state, wrong)


class NoClip(PITemperature):
    """A controller that forgets its bounds."""

    kind: str

    def update(self, state, reading):  # type: ignore[no-untyped-def]
        loose = self.replace(bounds=(1e-9, 1e9))
        return PITemperature.update(loose, state, reading)


class WindingUp(PITemperature):
    """A controller whose last error is always forgotten, so that kp acts as more integral gain."""

    kind: str

    def update(self, state, reading):  # type: ignore[no-untyped-def]
        temperature, new = super().update(state._replace(error=np.zeros_like(state.error)), reading)
        return temperature, new


WRONG_CONTROLLERS = [
    ("linear loop", FlippedSign(kind="flipped_sign")),
    ("spread", FlippedSign(kind="flipped_sign")),
    ("coupled loops", FlippedSign(kind="flipped_sign")),
    ("varentropy schedule", FlippedSign(kind="flipped_sign")),
    ("time-varying gain", FlippedSign(kind="flipped_sign", schedule="none", kp=0.05, ki=0.01)),
    ("mean entropy", WindingUp(kind="winding_up")),
    ("time-varying gain", WindingUp(kind="winding_up", schedule="none", kp=0.05, ki=0.01)),
    ("varentropy schedule", WindingUp(kind="winding_up")),
    ("coupled loops", WindingUp(kind="winding_up")),
    ("spread", WindingUp(kind="winding_up")),
    ("boundedness", NoClip(kind="no_clip")),
    ("time-varying gain", NoClip(kind="no_clip", schedule="none", kp=0.05, ki=0.01)),
]


@pytest.mark.parametrize(
    ("name", "controller"), WRONG_CONTROLLERS, ids=lambda v: getattr(v, "kind", v)
)
def test_a_controller_that_does_not_do_what_it_linearizes_to_is_caught(
    name: str, controller: PITemperature
) -> None:
    assert caught(replace(CLAIMS[name](), controller=controller))


class Starving(EntropicPriority):
    """A scheduler without patience."""

    kind: str

    def plan(self, state, candidates, cost, limits) -> Plan:  # type: ignore[no-untyped-def]
        waited = np.zeros_like(candidates.waited)
        return super().plan(state, candidates._replace(waited=waited), cost, limits)


class Upside(EntropicPriority):
    """A scheduler that serves the least useful first."""

    kind: str

    def index(self, state, candidates, cost):  # type: ignore[no-untyped-def]
        return -super().index(state, candidates, cost)


class Idle(EntropicPriority):
    """A scheduler that rests when one request is left."""

    kind: str

    def plan(self, state, candidates, cost, limits) -> Plan:  # type: ignore[no-untyped-def]
        plan = super().plan(state, candidates, cost, limits)
        if len(candidates.arrival) == 1:
            return plan._replace(rows=plan.rows[:0], tokens=plan.tokens[:0])
        return plan


class Padder(EntropicPriority):
    """Serves every row in one step, whatever their lengths."""

    kind: str
    plan = Priority.plan


@pytest.mark.parametrize(
    ("name", "priority"),
    [
        ("bounded waiting", Starving(kind="starving")),
        ("bounded waiting", Idle(kind="idle")),
        ("index order", Upside(kind="upside_down")),
        ("work conservation", Idle(kind="idle")),
        ("work conservation", Padder(kind="padder")),
    ],
    ids=lambda v: getattr(v, "kind", v),
)
def test_wrong_schedulers_are_caught(name: str, priority: EntropicPriority) -> None:
    claim = replace(CLAIMS[name](), priority=priority)
    assert claim.falsify(TRIALS) is not None


class SinkDropper(EntropicPruning):
    """A rule that lets sinks go."""

    kind: str

    def keep(self, blocks):  # type: ignore[no-untyped-def]
        kept = super().keep(blocks)
        kept[:1] = False
        return kept


class Hoarder(EntropicPruning):
    """A rule that keeps one block too many."""

    kind: str

    def keep(self, blocks):  # type: ignore[no-untyped-def]
        kept = super().keep(blocks)
        if not kept.all():
            kept[np.flatnonzero(~kept)[0]] = True
        return kept


class NeverDue(EntropicPruning):
    """A rule that finds no sequence worth pruning."""

    kind: str

    def due(self, blocks, length, size=16):  # type: ignore[no-untyped-def]
        return False


class KeepsAll(EntropicPruning):
    """A rule without a budget."""

    kind: str

    def keep(self, blocks):  # type: ignore[no-untyped-def]
        return np.ones(len(blocks.number), np.bool_)


class Generous(EntropicPruning):
    """A rule whose budget grows with its state."""

    kind: str

    def at(self, state):  # type: ignore[no-untyped-def]
        return self.model_copy(update={"budget": 1.5 * self.budget})


@pytest.mark.parametrize(
    "pruning",
    [
        SinkDropper(kind="sink_dropper"),
        Hoarder(kind="hoarder"),
        NeverDue(kind="never_due"),
        KeepsAll(kind="keeps_all"),
        Generous(kind="generous"),
    ],
    ids=lambda p: p.kind,
)
def test_wrong_pruning_rules_are_caught(pruning: EntropicPruning) -> None:
    claim = replace(CLAIMS["retention"](), pruning=pruning)
    assert claim.check()
    assert claim.falsify(TRIALS) is not None


def test_wrong_measurements_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from entropic_control.proofs import topk, varentropy

    honest = varentropy.moments
    monkeypatch.setattr(
        varentropy,
        "moments",
        lambda row, t: (m := honest(row, t))._replace(varentropy=-m.varentropy),
    )
    assert CLAIMS["plant gain"]().falsify(100) is not None
    bounds = topk.tail_bounds
    monkeypatch.setattr(
        topk,
        "tail_bounds",
        lambda top, unseen: (bounds(top, unseen)[0], 0.99 * bounds(top, unseen)[1], 1.0),
    )
    assert CLAIMS["top-k bounds"]().falsify(2000) is not None


@pytest.mark.parametrize("factor", [-1.0, 0.9])
def test_wrong_entropy_bound_is_falsified(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    from entropic_control.proofs import attention

    honest = attention.entropy_change
    claim = CLAIMS["dropped mass"]()
    monkeypatch.setattr(attention, "entropy_change", lambda t, n: factor * honest(t, n))
    assert claim.falsify(TRIALS) is not None


class LooksAway(AttentionPruning):
    """A rule that drops what is attended to most."""

    kind: str

    def score(self, blocks):  # type: ignore[no-untyped-def]
        return -super().score(blocks)


class Spendthrift(AttentionPruning):
    """A rule that keeps half of its budget."""

    kind: str

    def keep(self, blocks):  # type: ignore[no-untyped-def]
        return self.best(blocks, self.budget_blocks(blocks.length, blocks.size) // 2)


@pytest.mark.parametrize(
    "pruning", [LooksAway(kind="looks_away"), Spendthrift(kind="spendthrift")], ids=lambda p: p.kind
)
def test_dropping_more_attention_than_the_budget_lets_is_caught(pruning: AttentionPruning) -> None:
    claim = replace(CLAIMS["dropped mass"](), pruning=pruning)
    assert claim.falsify(TRIALS) is not None


def test_the_dropped_mass_depends_on_the_budget() -> None:
    masses = [dropped_mass(AttentionPruning(budget=b)).mass for b in (0.02, 0.25, 0.5, 0.95)]
    assert masses == sorted(masses, reverse=True)
    assert masses[0] > 0.9
    assert masses[-1] < 0.06
