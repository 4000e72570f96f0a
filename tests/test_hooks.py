"""Whatever a controller's method does at one request, the others never know."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from engines import events_of
from faulty import FAMILIES, FAULTS, FIRST, Spoiled, check, finished, hooks_of, requests

from entropic_control import Engine
from entropic_control.backends import SimulatedConfig
from entropic_control.backends.simulated import Simulated
from entropic_control.config import Config
from entropic_control.controllers import (
    EntropicPriority,
    EntropicPruning,
    FixedTemperature,
    FullEntropy,
    NgramSpeculation,
    NoPruning,
    TopK,
)
from entropic_control.controllers.base import Array, Controller
from entropic_control.errors import ControllerError, EntropicError

SIZE = SimulatedConfig(vocab=128, slots=3, step_tokens=64, context=256)
PARTS: dict[str, Controller] = {
    "temperature": FixedTemperature(temperature=0.9),
    "priority": EntropicPriority(),
    "pruning": NoPruning(),
}
MEMBERS: dict[str, Controller] = {
    "temperature": FixedTemperature(temperature=0.9),
    "priority": EntropicPriority(patience=3),
    "pruning": EntropicPruning(
        budget=48, sinks=1, recent=2, min_tokens=64, gate=None, measured=1.0
    ),
    "speculation": NgramSpeculation(shortest=1, draft=4, when="always"),
    "estimator": FullEntropy(),
    "truncation": TopK(k=30, place="after"),
}
"""What is spoiled of each family."""
NOT_HERE = {("pruning", "select")}
"""No simulated step asks it: the paged backend's tests do."""
TABLE = [
    (family.family, hook)
    for family in FAMILIES
    for hook in hooks_of(family)
    if (family.family, hook) not in NOT_HERE
]


class Single(Simulated):
    """The plant with rows as models give them, in single precision, which compiled passes take."""

    def _row(self, text: Any) -> Array:
        return super()._row(text).astype("f4")


def engine(family: str, controller: Controller) -> Engine:
    return Engine(Config(backend=SIZE, **{**PARTS, family: controller}), Single(SIZE))


@lru_cache
def undisturbed(family: str) -> dict[str, Any]:
    done = finished(engine(family, MEMBERS[family]), list(requests()))
    assert {work.reason for work in done.values()} == {"length"}
    return done


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("family", "hook"), TABLE)
def test_a_faulty_method_hurts_nobody_else(family: str, hook: str, fault: str, after: int) -> None:
    spoiled = Spoiled(MEMBERS[family], hook, fault, after)
    done = finished(engine(family, spoiled.controller), list(requests()))
    check(done, undisturbed(family), spoiled, fault)


MUST_FAIL = {
    ("temperature", "command"), ("temperature", "update"), ("priority", "update"),
    ("pruning", "update"), ("pruning", "keep"), ("pruning", "due"), ("pruning", "survey"),
    ("speculation", "update"), ("speculation", "guess"), ("estimator", "estimate"),
    ("truncation", "keep"),
}  # fmt: skip


@pytest.mark.parametrize("fault", ["raises", "all wrong", "none"])
@pytest.mark.parametrize(("family", "hook"), sorted(MUST_FAIL))
def test_the_one_at_fault_fails_with_an_error_that_names_it(
    family: str, hook: str, fault: str
) -> None:
    spoiled = Spoiled(MEMBERS[family], hook, fault)
    done = finished(engine(family, spoiled.controller), list(requests()))
    assert spoiled.aimed
    assert [name for name, work in done.items() if work.reason == "failed"] == ["victim"]
    error = done["victim"].error
    assert isinstance(error, ControllerError)
    assert f"{family} '{MEMBERS[family].kind}': " in str(error)
    assert fault == "raises" or f": {hook} returned" in str(error)
    assert error.request == "victim"


@pytest.mark.parametrize("after", [0, 1, 6])
@pytest.mark.parametrize(
    "fault", ["nan", "inf", "-inf", "negative", "one more row", "a column", "objects"]
)
@pytest.mark.parametrize("hook", ["command", "update"])
def test_a_temperature_that_is_none_fails_its_sequence(hook: str, fault: str, after: int) -> None:
    spoiled = Spoiled(MEMBERS["temperature"], hook, fault, after)
    done = finished(engine("temperature", spoiled.controller), list(requests()))
    assert [name for name, work in done.items() if work.reason == "failed"] == ["victim"]
    assert isinstance(done["victim"].error, ControllerError)
    shown = {"nan": "nan", "inf": "inf", "-inf": "-inf", "negative": "-1"}.get(fault, "returned")
    assert shown in str(done["victim"].error)
    assert done["victim"].tokens == undisturbed("temperature")["victim"].tokens[:after]


@pytest.mark.parametrize("hook", ["plan", "order", "index"])
@pytest.mark.parametrize("fault", ["raises", "nan", "negative integers", "all wrong", "empty"])
def test_a_plan_that_cannot_be_run_is_by_arrival(hook: str, fault: str) -> None:
    spoiled = Spoiled(MEMBERS["priority"], hook, fault)
    it = engine("priority", spoiled.controller)
    done = finished(it, list(requests()))
    assert {work.reason for work in done.values()} == {"length"}
    if hook == "plan":
        assert events_of(it, "fault")


TIGHT = SIZE.model_copy(update={"cells": 256, "seconds_per_row_cell": 1e-3})
MOVED: dict[str, Controller] = {
    "priority": EntropicPriority(patience=3),  # so that they take turns in fewer slots
    "pruning": EntropicPruning(
        budget=48, sinks=1, recent=2, min_tokens=64, gate=None, measured=1.0
    ),
    "speculation": NgramSpeculation(shortest=1, draft=4, when="always"),
}


class Failing(Simulated):
    """An engine that raises at the n-th move of one sort, before it or after it was made.

    Parameters
    ----------
    move : str
        A method of the backend.
    nth : int
        Which of its calls fails, from 1; the later ones work.
    where : {"before", "after", "halfway"}
        Whether the call has done nothing, all of it, or lost what the slot held.
    """

    def __init__(self, move: str, nth: int, where: str) -> None:
        super().__init__(TIGHT)
        self.tried = 0
        original = getattr(self, move)

        def failing(slot: Any, *args: Any) -> Any:
            self.tried += 1
            if self.tried != nth:
                return original(slot, *args)
            if where == "after":
                original(slot, *args)
            if where == "halfway":
                Simulated.release(self, slot)
            raise RuntimeError("out of order")

        setattr(self, move, failing)


@pytest.mark.parametrize("where", ["before", "after", "halfway"])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("move", ["save", "restore", "evict", "rollback", "compact"])
def test_slots_and_cells_survive_an_engine_that_fails_at_moving_them(
    move: str, nth: int, where: str
) -> None:
    it = Engine(Config(backend=TIGHT, **{**PARTS, **MOVED}), Failing(move, nth, where))
    done = finished(it, list(requests(40)))
    whole = finished(Engine(Config(backend=TIGHT, **{**PARTS, **MOVED})), list(requests(40)))
    failed = [work for work in done.values() if work.reason == "failed"]
    assert len(failed) <= 1
    assert failed or where != "halfway"
    for work in failed:
        assert isinstance(work.error, EntropicError)
        assert "out of order" in str(work.error)
    assert it.backend.tried >= nth, "never asked"  # type: ignore[attr-defined]
    for name, work in done.items():
        if work.reason != "failed":
            assert work.tokens == whole[name].tokens
    assert it.backend.room() == TIGHT.cells


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_is_no_fault(stop: type[BaseException]) -> None:
    def update(self: Any, state: Any, reading: Any) -> Any:
        raise stop

    broken = type("Ends", (FixedTemperature,), {"update": update, "__module__": __name__})
    it = engine("temperature", broken())
    it.submit_all(requests())
    with pytest.raises(stop):
        finished(it, [])


def test_every_family_is_in_the_table() -> None:
    assert {family for family, _ in TABLE} == set(MEMBERS)
    assert next(iter(list(requests())[1].prompt)) == FIRST
