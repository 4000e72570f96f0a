"""Faulty controllers on the paged backend: drawn by kernels, by numpy, and with blocks selected."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from families import backend
from faulty import FAMILIES, FAULTS, Spoiled, check, finished, hooks_of, requests

from entropic_control import Engine
from entropic_control.config import Config
from entropic_control.controllers import (
    EntropicPriority,
    EntropicPruning,
    EntropicSelection,
    FixedTemperature,
    FullEntropy,
    NgramSpeculation,
    NoPruning,
    TopK,
)
from entropic_control.controllers.base import Controller

PARTS: dict[str, Controller] = {
    "temperature": FixedTemperature(temperature=0.9),
    "priority": EntropicPriority(patience=3),
    "pruning": NoPruning(),
}
MEMBERS: dict[str, Controller] = {
    **PARTS,
    "pruning": EntropicPruning(
        budget=48, sinks=1, recent=2, min_tokens=64, gate=None, measured=1.0
    ),
    "speculation": NgramSpeculation(shortest=1, draft=4, when="always"),
    "estimator": FullEntropy(),
    "truncation": TopK(k=30, place="after"),
}
SELECTING = EntropicSelection(budget=48, sinks=1, recent=2, min_tokens=64, low=10.0, high=11.0)
TABLE = [(family.family, hook) for family in FAMILIES for hook in hooks_of(family)]


def member(family: str, hook: str) -> Controller:
    return SELECTING if hook == "select" else MEMBERS[family]


@lru_cache
def on() -> Any:
    return backend(context=256, slots=4)


def run(family: str, controller: Controller) -> dict[str, Any]:
    config = Config(**{**PARTS, family: controller})
    return finished(Engine(config, on()), list(requests(8, 172)))


@lru_cache
def undisturbed(family: str, selecting: bool) -> dict[str, Any]:
    return run(family, SELECTING if selecting else MEMBERS[family])


@pytest.mark.parametrize("fault", ["raises", "nan", "one more row"])
@pytest.mark.parametrize(("family", "hook"), TABLE)
def test_a_faulty_method_hurts_nobody_else(family: str, hook: str, fault: str) -> None:
    assert fault in FAULTS
    spoiled = Spoiled(member(family, hook), hook, fault, after=1)
    done = run(family, spoiled.controller)
    check(done, undisturbed(family, hook == "select"), spoiled, fault)
