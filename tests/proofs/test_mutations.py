"""An unsound claim cannot pass: forge any number of a certificate, or run a part that is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from claims import CLAIMS, PLAIN
from forging import forgeries
from mutants import SOUND_LOOPS, WRONG_CUTS, WRONG_ESTIMATORS, WRONG_LOOPS

from entropic_control.controllers import AttentionPruning, EntropicPriority, EntropicPruning
from entropic_control.controllers.priority import Plan, Priority
from entropic_control.proofs import Claim, certify
from entropic_control.proofs.attention import dropped_mass

TRIALS = 300

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # some mutants overflow


def named(part: Any) -> str:
    inner = getattr(part, "inner", None)
    return part.kind if inner is None else f"{part.kind} of {named(inner)}"


@pytest.mark.parametrize("name", CLAIMS)
def test_every_forged_number_is_caught_by_the_check(name: str) -> None:
    claim = CLAIMS[name]()
    assert claim.holds, claim.faults
    forged = list(forgeries(claim))
    assert forged
    # With another length as many blocks stay: that is no forgery but the truth about another question.
    survivors = [how for how, other in forged if other.holds and not how.startswith("length")]
    assert not survivors, f"of {len(forged)} forgeries"


@pytest.mark.parametrize("controller", WRONG_LOOPS, ids=named)
def test_a_wrong_loop_fails_without_a_falsifier(controller: Any) -> None:
    certificate = certify(controller)
    assert not certificate.holds
    assert not certificate["conformance"].holds


@pytest.mark.parametrize("controller", WRONG_LOOPS, ids=named)
def test_a_wrong_loop_is_falsified(controller: Any) -> None:
    claim = certify(controller)["conformance"]
    assert claim.falsify(TRIALS) is not None


@pytest.mark.parametrize("controller", SOUND_LOOPS, ids=named)
def test_a_sound_loop_holds_whatever_is_tried(controller: Any) -> None:
    certificate = certify(controller, trials=TRIALS)
    assert certificate.counterexamples == {}
    assert certificate.holds, str(certificate)


@pytest.mark.parametrize("part", [*WRONG_CUTS, *WRONG_ESTIMATORS], ids=named)
def test_a_wrong_truncation_or_estimator_fails_and_is_falsified(part: Any) -> None:
    certificate = certify(part)
    assert not certificate.holds
    wrong = next(claim for claim in certificate.claims if not claim.holds)
    assert wrong.falsify(TRIALS) is not None


Change = dict[str, Any]
WEAKER: list[tuple[str, Change]] = [
    ("linear loop", {"least_gain_margin": 60.0}),
    ("linear loop", {"least_phase_margin": 100.0}),
    ("linear loop, no schedule", {"gain": (0.1, 600.0)}),
    ("time-varying gain, fixed", {"P": np.eye(2)}),
    ("every gain", {"P": np.eye(2)}),
    ("spread", {"gain": 6.0, "controller": PLAIN}),
    ("mean entropy", {"vocab": 2}),
    ("coupled loops", {"replayed": 0.5}),
]


@pytest.mark.parametrize(("name", "change"), WEAKER)
def test_numbers_of_another_question_are_caught(name: str, change: Change) -> None:
    assert not replace(CLAIMS[name](), **change).holds


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
    assert claim.falsify(2_000) is not None


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
    assert not claim.holds
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
    claim: Claim = CLAIMS["dropped mass"]()
    monkeypatch.setattr(attention, "entropy_change", lambda t, n: factor * honest(t, n))
    assert claim.falsify(2_000) is not None


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
    assert claim.falsify(2_000) is not None


def test_the_dropped_mass_depends_on_the_budget() -> None:
    masses = [dropped_mass(AttentionPruning(budget=b)).mass for b in (0.02, 0.25, 0.5, 0.95)]
    assert masses == sorted(masses, reverse=True)
    assert masses[0] > 0.9
    assert masses[-1] < 0.06
