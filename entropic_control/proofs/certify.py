"""From a configuration, or one controller, to its certificate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from entropic_control.controllers import (
    EntropicPriority,
    Estimator,
    PITemperature,
    Priority,
    Pruning,
    TemperatureController,
    TopKEntropy,
)
from entropic_control.controllers.base import Controller
from entropic_control.errors import ConfigError
from entropic_control.proofs.attention import dropped_mass, measures_mass
from entropic_control.proofs.bounded import bounded
from entropic_control.proofs.claim import Certificate, Claim
from entropic_control.proofs.convergence import convergence
from entropic_control.proofs.coupled import coupled
from entropic_control.proofs.fastgain import fast_gain
from entropic_control.proofs.indexorder import index_order
from entropic_control.proofs.linearloop import LinearLoop, linear_loop
from entropic_control.proofs.noise import noise_response
from entropic_control.proofs.retention import retention
from entropic_control.proofs.scheduled import scheduled_gain
from entropic_control.proofs.signals import Signals, signals
from entropic_control.proofs.throughput import work_conservation
from entropic_control.proofs.topk import top_k_bounds
from entropic_control.proofs.varentropy import VarentropyGain, largest
from entropic_control.proofs.waiting import Seating, bounded_waiting

VOCAB = 49_152
"""Tokens assumed where the configuration does not say: SmolLM2's."""
LEAST_GAIN = 0.1
"""Slope of the entropy, nats, from which on the loop is asked to be stable; below, only bounded."""
PARTS = ("temperature", "priority", "pruning", "estimator")


def certify(
    subject: Any,
    *,
    delay: int = 1,
    vocab: int | None = None,
    gain: tuple[float, float] | None = None,
    gm: float = 6.0,
    pm: float = 30.0,
    trace: str | Path | Mapping[str, ArrayLike] | None = None,
    trials: int = 0,
) -> Certificate:
    """Prove what can be proven about a configuration.

    Parameters
    ----------
    subject : Config or Controller
        All parts of a configuration, or one controller.
    delay : int
        Tokens from a measurement to the first token drawn under the command it led to.
    vocab : int, optional
        Tokens of the vocabulary; by default the backend's, or 49,152.
    gain : (float, float), optional
        Slopes dH/d(ln T) to be borne, nats; by default 0.1 to the most the vocabulary allows.
    gm, pm : float
        Gain margin, dB, and phase margin, degrees, asked of the linear loop.
    trace : path or mapping, optional
        A run on which assumptions are checked (see `signals`).
    trials : int
        Cases for each claim's falsifier; 0 leaves it at the checks.

    Raises
    ------
    ConfigError
        If there is nothing to certify.
    TraceError
        If the trace is empty, holds NaN or does not move.
    """
    parts = _parts(subject)
    tokens = vocab or getattr(getattr(subject, "backend", None), "vocab", None) or VOCAB
    asked = gain or (LEAST_GAIN, largest(tokens).bound)
    seen = None if trace is None else signals(trace)
    claims: list[Claim] = []
    notes: list[str] = []
    for part in parts:
        match part:
            case TemperatureController():
                claims += _temperature(part, delay, tokens, asked, gm, pm, seen, notes)
            case EntropicPriority():
                waiting = bounded_waiting(part, seating=Seating.of(subject))
                claims += [waiting, work_conservation(part), index_order(part)]
            case Pruning():
                claims.append(retention(part))
                if measures_mass(part):
                    claims.append(dropped_mass(part, tokens))
                elif part.kind != "none":
                    notes.append(
                        f"pruning '{part.kind}' does not rank by attention alone: nothing bounds the "
                        "attention mass that it drops"
                    )
            case TopKEntropy():
                claims.append(top_k_bounds(part, tokens))
            case Priority() | Estimator():
                if part.kind != "full":
                    notes.append(f"{part.family} '{part.kind}' is not covered by a claim")
    name = "configuration" if len(parts) > 1 else f"{parts[0].family} '{parts[0].kind}'"
    return Certificate(name, claims, notes, trials)


def _parts(subject: Any) -> list[Controller]:
    if isinstance(subject, Controller):
        return [subject]
    found = [getattr(subject, part, None) for part in PARTS]
    parts = [part for part in found if isinstance(part, Controller)]
    if not parts:
        raise ConfigError(
            f"{type(subject).__name__} is neither a controller nor a configuration that holds some"
        )
    return parts


def _temperature(
    controller: TemperatureController,
    delay: int,
    vocab: int,
    gain: tuple[float, float],
    gm: float,
    pm: float,
    trace: list[Signals] | None,
    notes: list[str],
) -> Iterator[Claim]:
    if delay < 1:
        raise ConfigError(f"a decode loop has a delay of one token or more, not {delay}")
    yield largest(vocab)
    if controller.linearize().outputs != ("ln temperature",):
        notes.append(
            f"temperature '{controller.kind}' does not command ln T: no claim covers its loop"
        )
        return
    if controller.reads_logits:
        notes.append(
            f"temperature '{controller.kind}' acts on the logits of its own token; what it does there is "
            "not part of the loop that is certified"
        )
    yield linear_loop(controller, gain, delay, gm, pm)
    inner = getattr(controller, "inner", None)
    if isinstance(inner, TemperatureController):
        notes.append(
            f"'{controller.kind}' is certified where it does not act, as its inner '{inner.kind}'"
        )
        covered = {VarentropyGain.name, LinearLoop.name}
        for claim in _temperature(inner, delay, vocab, gain, gm, pm, trace, notes):
            if claim.name not in covered:
                yield claim
        return
    if isinstance(controller, PITemperature):
        yield from _pi(controller, delay, vocab, trace)
    elif _same_everywhere(controller):
        yield fast_gain(controller, *gain, delay)
    else:
        notes.append(
            f"'{controller.kind}' schedules its gains: no claim covers a gain that varies fast"
        )


def _pi(
    controller: PITemperature,
    delay: int,
    vocab: int,
    trace: list[Signals] | None,
) -> Iterator[Claim]:
    yield scheduled_gain(controller, delay, vocab)
    yield bounded(controller, vocab)
    yield noise_response(controller, delay, trace)
    yield convergence(controller, vocab, delay, trace)
    yield coupled(controller, delay, vocab, trace=trace)


def _same_everywhere(controller: TemperatureController) -> bool:
    """Whether the controller is the same linear system at any varentropy."""
    calm, lively = controller.linearize(0.1), controller.linearize(10.0)
    return all(np.array_equal(a, b) for a, b in zip(calm[:4], lively[:4], strict=True))
