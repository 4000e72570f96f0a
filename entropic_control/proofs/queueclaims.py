"""Which claims about queues are made of which priority controller and engine."""

from __future__ import annotations

from collections.abc import Iterable

from entropic_control.controllers import EntropicPriority
from entropic_control.proofs.claim import Claim
from entropic_control.proofs.indexorder import index_order
from entropic_control.proofs.subject import Subject
from entropic_control.proofs.table import claim
from entropic_control.proofs.throughput import work_conservation
from entropic_control.proofs.waiting import Seating, bounded_waiting


@claim("priority")
def queueing(subject: Subject) -> Iterable[Claim | str]:
    """Waiting, work and order under the entropic priority."""
    priority = subject.priority
    if isinstance(priority, EntropicPriority):
        yield bounded_waiting(priority, seating=Seating.of(subject))
        yield work_conservation(priority)
        yield index_order(priority)
    elif priority is not None:
        yield f"priority '{priority.kind}' is not covered by a claim"
