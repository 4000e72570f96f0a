"""What is certified: the parts of a configuration and what is known of its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from entropic_control.controllers import (
    Estimator,
    Priority,
    Pruning,
    Speculation,
    TemperatureController,
    Truncation,
)
from entropic_control.controllers.base import Controller
from entropic_control.controllers.truncation import TopK
from entropic_control.errors import ConfigError
from entropic_control.proofs.signals import Signals, signals
from entropic_control.proofs.varentropy import largest

VOCAB = 49_152
"""Tokens assumed where the configuration does not say: SmolLM2's."""
LEAST_GAIN = 0.1
"""Slope of the entropy, nats, from which on the loop is asked to be stable; below, only bounded."""
PARTS = ("temperature", "truncation", "estimator", "priority", "pruning", "speculation")
"""The controllers of a configuration, in the order in which their claims are told."""


@dataclass(frozen=True)
class Subject:
    """Everything a claim may ask about what it is certified for; None where it is not known.

    A bare controller is a subject with one part.
    """

    temperature: TemperatureController | None = None
    truncation: Truncation | None = None
    estimator: Estimator | None = None
    priority: Priority | None = None
    pruning: Pruning | None = None
    speculation: Speculation | None = None
    vocab: int = VOCAB
    delay: int = 1
    """Tokens from a measurement to the first token drawn under the command it led to."""
    asked_gain: tuple[float, float] | None = None
    """Slopes dH/d(ln T) to be borne, nats, where they were asked for."""
    gain_margin: float = 6.0
    """dB asked of the linear loop."""
    phase_margin: float = 30.0
    """Degrees asked of the linear loop."""
    trace: tuple[Signals, ...] | None = None
    backend: str | None = None
    """Kind of the engine."""
    slots: int | None = None
    """Sequences the engine holds at once."""
    context: int | None = None
    step_tokens: int | None = None
    cells: int | None = None
    """KV cells of all slots together."""
    max_tokens: int | None = None
    """Tokens that a request generates at most."""
    can_swap: bool | None = None
    """Whether the engine can take a sequence out and put it back."""
    preempts: bool | None = None
    """Whether a running request gives its seat to one that must go first."""
    request_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """What a single request may set for itself besides the rows of the state: fields of the temperature
    controller, with the least and the most that is accepted."""
    dry: frozenset[str] = frozenset()
    """Parts that only observe."""

    @property
    def parts(self) -> dict[str, Controller]:
        """The controllers there are, by family."""
        found = {name: getattr(self, name) for name in PARTS}
        return {name: part for name, part in found.items() if part is not None}

    @property
    def name(self) -> str:
        """What is certified, in words."""
        parts = list(self.parts.values())
        return "configuration" if len(parts) > 1 else f"{parts[0].family} '{parts[0].kind}'"

    @property
    def support(self) -> int:
        """The most tokens that can be drawn in a step."""
        cut = self.truncation
        return min(self.vocab, cut.k) if isinstance(cut, TopK) else self.vocab

    @property
    def gain(self) -> tuple[float, float]:
        """Slopes dH/d(ln T) to be borne, nats: as asked for, or 0.1 to the most there can be."""
        return self.asked_gain or (LEAST_GAIN, max(largest(self.support).bound, LEAST_GAIN))

    def trace_list(self) -> list[Signals] | None:
        """The trace as a list of requests."""
        return None if self.trace is None else list(self.trace)

    def replace(self, **changes: Any) -> Subject:
        """The subject with some of it changed."""
        return replace(self, **changes)

    @classmethod
    def of(
        cls,
        what: Any,
        *,
        delay: int | None = None,
        vocab: int | None = None,
        trace: str | Path | Mapping[str, ArrayLike] | None = None,
        **asked: Any,
    ) -> Subject:
        """The subject that a configuration, an engine or a controller is.

        Parameters
        ----------
        what : Config, Engine, Controller or Subject
            An engine says what its backend can do and whether it is a dry run; a configuration what its
            backend section says.
        delay, vocab, trace
            As in `certify`.
        asked
            Other fields.

        Raises
        ------
        ConfigError
            If it holds no controller, or the delay is below one token.
        """
        seen = None if trace is None else tuple(signals(trace))
        known = _known(what)
        known |= {"delay": delay} if delay is not None else {}
        known |= {"vocab": vocab} if vocab else {}
        known |= {"trace": seen} if seen is not None else {}
        subject = cls(**{**known, **asked})
        if subject.delay < 1:
            raise ConfigError(
                f"a decode loop has a delay of one token or more, not {subject.delay}"
            )
        return subject


_OF_A_BACKEND = ("vocab", "slots", "context", "step_tokens", "cells", "can_swap")


def _known(what: Any) -> dict[str, Any]:
    if isinstance(what, Subject):
        return {name: getattr(what, name) for name in what.__dataclass_fields__}
    if isinstance(what, Controller):
        if what.family not in PARTS:
            raise ConfigError(f"no claim is about a {what.family} (there are: {', '.join(PARTS)})")
        return {what.family: what}
    if isinstance(what, str | Path):
        raise ConfigError(
            f"{str(what)!r} is a path: certify what it holds, entropic_control.load_config(path), or call "
            "entropic_control.certify(path), which reads files"
        )
    config = getattr(what, "config", what)
    parts = {name: getattr(config, name, None) for name in PARTS}
    parts = {name: part for name, part in parts.items() if isinstance(part, Controller)}
    if not parts:
        raise ConfigError(
            f"{type(what).__name__} is neither a controller nor a configuration that holds some"
        )
    section = getattr(config, "backend", None)
    able = getattr(getattr(what, "backend", None), "capabilities", None)
    facts: dict[str, Any] = {}
    for name in _OF_A_BACKEND:
        value = getattr(section, name, None) if able is None else getattr(able, name, None)
        facts |= {} if value is None else {name: value}
    for name in ("delay", "preempts", "request_ranges"):
        value = getattr(section, name, None)
        facts |= {} if value is None else {name: value}
    facts.setdefault("preempts", facts.get("can_swap"))
    facts["max_tokens"] = getattr(getattr(config, "generation", None), "max_tokens", None)
    dry = frozenset(parts) if getattr(what, "dry_run", False) else frozenset()
    return {**parts, **facts, "backend": getattr(section, "kind", None), "dry": dry}
