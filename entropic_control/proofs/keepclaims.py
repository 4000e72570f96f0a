"""Which claims about kept KV blocks are made of which pruning controller."""

from __future__ import annotations

from collections.abc import Iterable

from entropic_control.proofs.attention import dropped_mass
from entropic_control.proofs.claim import Claim
from entropic_control.proofs.retention import retention
from entropic_control.proofs.subject import Subject
from entropic_control.proofs.table import claim


@claim("pruning")
def keeping(subject: Subject) -> Iterable[Claim | str]:
    """What stays, and what dropping the rest does."""
    if subject.pruning is not None:
        yield retention(subject.pruning)
        if subject.pruning.kind != "none":
            yield dropped_mass(tokens=subject.vocab)
