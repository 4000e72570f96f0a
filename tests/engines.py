"""Engines to test on: small configurations, prompts, and what a run came to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from entropic_control.backends import SimulatedConfig
from entropic_control.config import Config
from entropic_control.controllers import FirstCome, FixedTemperature, NoPruning
from entropic_control.engine import Engine
from entropic_control.report import Report

GREEDY = FixedTemperature(temperature=0.0)
PLAIN: dict[str, Any] = {
    "temperature": FixedTemperature(temperature=1.0),
    "priority": FirstCome(),
    "pruning": NoPruning(),
}
"""First come, first served, dense, at the model's own temperature."""


def configured(backend: dict[str, Any] | None = None, **parts: Any) -> Config:
    """A configuration on the simulated backend; `backend` holds its settings."""
    return Config(backend=SimulatedConfig(**(backend or {})), **parts)


def simulated(backend: dict[str, Any] | None = None, **parts: Any) -> Engine:
    """An engine on the simulated backend."""
    return Engine(configured(backend, **parts))


def ids(length: int, start: int = 1) -> list[int]:
    """A prompt of token ids."""
    return [1 + (start * 7919 + n * 31) % 500 for n in range(length)]


def tokens_of(report: Report) -> dict[str, list[int]]:
    """The generated tokens of each request."""
    return {done.id: done.tokens for done in report.completions}


def reasons(report: Report) -> dict[str, str]:
    """How each request ended."""
    return {done.id: done.finish_reason for done in report.completions}


def events_of(engine: Engine, what: str) -> list[dict[str, Any]]:
    """The traced decisions of one sort."""
    return [event for event in engine.trace.events if event["event"] == what]


def ledgers_are_true(engine: Engine) -> int:
    """Check every seated sequence's ledger against its engine; returns how many were checked."""
    seated = [work for work in engine.unfinished if work.slot is not None]
    for work in seated:
        assert work.slot is not None
        held: Sequence[int] = engine.backend.held(work.slot).tolist()
        assert work.ledger.positions().tolist() == held
        assert work.ledger.cells == len(held)
    return len(seated)
