"""Which claims about kept KV blocks are made of which pruning controller."""

from __future__ import annotations

from collections.abc import Iterable

from entropic_control.proofs.attention import dropped_mass, measures_mass
from entropic_control.proofs.claim import Claim
from entropic_control.proofs.retention import retention
from entropic_control.proofs.subject import Subject
from entropic_control.proofs.table import claim


@claim("pruning")
def keeping(subject: Subject) -> Iterable[Claim | str]:
    """What stays, and what dropping the rest does."""
    pruning = subject.pruning
    if pruning is None:
        return
    yield retention(pruning)
    if measures_mass(pruning):
        yield dropped_mass(pruning, subject.vocab)
    elif pruning.kind != "none":
        yield (
            f"pruning '{pruning.kind}' does not rank by attention alone: nothing bounds the attention "
            "mass that it drops"
        )
