"""From a configuration, or one controller, to its certificate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from entropic_control.proofs.claim import Certificate, Claim
from entropic_control.proofs.subject import PARTS, Subject
from entropic_control.proofs.table import claims_of, registered


def certify(
    subject: Any,
    *,
    delay: int | None = None,
    vocab: int | None = None,
    gain: tuple[float, float] | None = None,
    gm: float = 6.0,
    pm: float = 30.0,
    trace: str | Path | Mapping[str, ArrayLike] | None = None,
    trials: int = 0,
) -> Certificate:
    """Prove what can be proven about a configuration: every claim of the table that is about it.

    Parameters
    ----------
    subject : Config, Engine, Controller or Subject
        All parts of a configuration, or one controller. A file is read by `entropic_control.certify`.
    delay : int, optional
        Tokens from a measurement to the first token drawn under the command it led to; by default the
        backend's, or 1.
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
    about = Subject.of(
        subject,
        delay=delay,
        vocab=vocab,
        trace=trace,
        gain_margin=gm,
        phase_margin=pm,
        **({} if gain is None else {"asked_gain": gain}),
    )
    claims: list[Claim] = []
    notes: list[str] = []
    for one in claims_of(about):
        if isinstance(one, str):
            notes.append(one)
        else:
            claims.append(one)
    covered = {entry.part for entry in registered()}
    notes += [
        f"{name} '{part.kind}' is not covered by a claim"
        for name, part in about.parts.items()
        if name in PARTS and name not in covered and part.kind not in ("none", "full")
    ]
    return Certificate(about.name, claims, list(dict.fromkeys(notes)), trials)
