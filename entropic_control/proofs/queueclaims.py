"""Which claims about queues are made of which priority controller and engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from entropic_control.controllers import EntropicPriority
from entropic_control.proofs.claim import Claim
from entropic_control.proofs.indexorder import index_order
from entropic_control.proofs.subject import Subject
from entropic_control.proofs.table import claim
from entropic_control.proofs.throughput import work_conservation
from entropic_control.proofs.waiting import bounded_waiting


@claim("priority")
def queueing(subject: Subject) -> Iterable[Claim | str]:
    """Waiting, work and order under the entropic priority."""
    priority = subject.priority
    if isinstance(priority, EntropicPriority):
        yield replace(bounded_waiting(priority), broken=_seats(subject))
        yield work_conservation(priority)
        yield index_order(priority)
    elif priority is not None:
        yield f"priority '{priority.kind}' is not covered by a claim"


def _seats(subject: Subject) -> tuple[str, ...]:
    """Why an overdue request may have to wait for a seat all the same."""
    if subject.preempts is not False:
        return ()
    seats = "its seats" if subject.slots is None else f"its {subject.slots} seats"
    remedy = (
        "set backend.voluntary_preemption: true"
        if subject.backend == "vllm"
        else "use a backend that can swap"
    )
    return (
        f"backend '{subject.backend}' takes no running request's seat, so with more requests than {seats} "
        f"an overdue one waits until another is done: {remedy}",
    )
