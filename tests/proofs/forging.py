"""Every way to forge a certificate, one field at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from entropic_control.controllers.base import Controller
from entropic_control.proofs import Claim
from entropic_control.proofs.signals import Signals


def forgeries(claim: Claim) -> Iterator[tuple[str, Claim]]:
    """Claims with one number changed, and what was changed. What was asked about stays: the controllers
    and the recorded run."""
    for field in fields(claim):
        if field.name in ("broken", "seating"):  # what the engine can hold is asked about too
            continue
        for how, value in forged(getattr(claim, field.name)):
            yield f"{field.name}{how}", replace(claim, **{field.name: value})


def forged(value: Any) -> Iterator[tuple[str, Any]]:
    """Other values in the place of a value, with the way each was made."""
    if isinstance(value, bool):
        yield " flipped", not value
    elif isinstance(value, int):
        yield from ((f" {n:+d}", value + n) for n in (1, -1))
        if value:
            yield " negated", -value
    elif isinstance(value, float):
        others = {
            " x 1.1": 1.1 * value,
            " x 0.9": 0.9 * value,
            " negated": -value,
            " nan": math.nan,
        }
        if value == 0:
            others = {" + 0.05": 0.05, " - 0.05": -0.05, " nan": math.nan}
        yield from ((how, other) for how, other in others.items() if other != value)
    elif isinstance(value, np.ndarray):
        yield from _arrays(value)
    elif isinstance(value, Controller | Signals):
        return
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            for how, other in forged(getattr(value, field.name)):
                yield f".{field.name}{how}", replace(value, **{field.name: other})
    elif isinstance(value, tuple):
        if any(isinstance(part, Signals) for part in value):
            return
        make = type(value)._make if hasattr(value, "_make") else tuple
        for at, part in enumerate(value):
            for how, other in forged(part):
                yield f"[{at}]{how}", make([*value[:at], other, *value[at + 1 :]])
        if value and make is tuple:
            yield " cut short", value[:-1]


def _arrays(value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if not np.any(value):
        return
    yield " x 1.1", 1.1 * value
    yield " x 0.9", 0.9 * value
    yield " negated", -value
    yield " nan", np.full_like(value, np.nan)
    at = np.unravel_index(int(np.argmax(np.abs(value))), value.shape)
    for factor in (1.1, 0.9, -1.0):
        other = value.copy()
        other[at] *= factor
        yield f" [{at}] x {factor:g}", other
