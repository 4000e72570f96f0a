"""Dry run: everything is measured and every controller updated, and nothing is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import configured, events_of, ids, ledgers_are_true, simulated, tokens_of

from entropic_control import Engine, Request
from entropic_control.controllers import (
    EntropicPriority,
    EntropicPruning,
    FirstCome,
    FixedTemperature,
    Mirostat,
    NoPruning,
    PITemperature,
    SlewLimit,
    TemperatureController,
)

PRUNE = EntropicPruning(budget=96, sinks=1, recent=2, min_tokens=64, gate=None)


def requests(**more: Any) -> list[Request]:
    return [
        Request(id=f"r{n}", prompt=ids(140 + 30 * n, n), max_tokens=50, seed=n, **more)
        for n in range(4)
    ]


def dry(temperature: TemperatureController, **backend: Any) -> Engine:
    config = configured(
        backend, temperature=temperature, priority=EntropicPriority(), pruning=PRUNE
    )
    return Engine(config, dry_run=True)


@pytest.mark.parametrize(
    ("temperature", "plain"),
    [
        (PITemperature(start=0.9), 0.9),
        (SlewLimit(inner=PITemperature(start=0.8), rate=0.1), 0.8),
        (FixedTemperature(temperature=0.6), 0.6),
        (Mirostat(temperature=1.2), 1.2),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_tokens_are_those_of_the_plain_baseline(
    temperature: TemperatureController, plain: float
) -> None:
    baseline = simulated(
        {"slots": 2},
        temperature=FixedTemperature(temperature=plain),
        priority=FirstCome(),
        pruning=NoPruning(),
    )
    expected = tokens_of(baseline.run(requests()))
    engine = dry(temperature, slots=2)
    engine.submit_all(requests())
    while not engine.idle:
        engine.step()
        ledgers_are_true(engine)
        assert all(work.ledger.cells == work.ledger.length for work in engine.unfinished)
    assert tokens_of(engine.report()) == expected
    for column in ("step", "token_id", "entropy", "raw_entropy", "temperature"):
        np.testing.assert_array_equal(
            engine.trace.tokens[column], baseline.trace.tokens[column], column
        )
    assert not events_of(engine, "pruned")
    # Under the controllers it would have been another run.
    live = Engine(engine.config).run(requests())
    if temperature.kind in ("pi", "mirostat"):
        assert tokens_of(live) != expected


def test_commands_are_recorded_and_move() -> None:
    engine = dry(PITemperature(target=3.0, kp=0.3, ki=0.1))
    engine.run(requests())
    trace = engine.trace.of("r0")
    assert np.all(trace["temperature"] == 0.7)
    assert trace["commanded"][-1] > 0.9  # what it would have done about an entropy below the target
    assert len(set(trace["commanded"].tolist())) > 5
    assert np.all(trace["target"] == 3.0)


def test_what_pruning_would_do_is_noted_once_for_each_request() -> None:
    engine = dry(PITemperature())
    engine.run(requests())
    noted = events_of(engine, "would_prune")
    assert sorted(event["request"] for event in noted) == [f"r{n}" for n in range(4)]
    assert all(event["cells"] > 0 for event in noted)


def test_a_temperature_of_its_own_is_the_baseline_too() -> None:
    own = {"temperature": {"temperature": 0.3}}
    fixed = FixedTemperature(temperature=1.0)
    expected = simulated(temperature=fixed, pruning=NoPruning()).run(requests(**own))
    assert tokens_of(dry(fixed).run(requests(**own))) == tokens_of(expected)
