"""That the plant's gain is the varentropy is claimed of every loop."""

from __future__ import annotations

from collections.abc import Iterable

from entropic_control.proofs.claim import Claim
from entropic_control.proofs.subject import Subject
from entropic_control.proofs.table import claim
from entropic_control.proofs.varentropy import largest


@claim("temperature")
def plant_gain(subject: Subject) -> Iterable[Claim | str]:
    """For as many tokens as can be drawn in a step."""
    yield largest(subject.support)
