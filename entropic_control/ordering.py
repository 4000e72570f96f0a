"""Asking the priority controller who runs; where it fails, first come, first served.

Who runs first changes no token, so a controller that raises here, or plans what cannot be run, fails
nobody: the step goes by arrival, and says so in the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from entropic_control.controllers import hooks
from entropic_control.controllers.base import Array
from entropic_control.controllers.priority import (
    Candidates,
    Cost,
    FirstCome,
    Limits,
    Plan,
    Priority,
)
from entropic_control.errors import ControllerFault

_ARRIVAL = FirstCome()


class Ordering:
    """The plans and orders of a priority controller, checked.

    Parameters
    ----------
    priority : Priority
        The controller.
    failed : function
        Called with the fault whenever the controller fails.
    """

    def __init__(self, priority: Priority, failed: Callable[[ControllerFault], Any]) -> None:
        self._priority = priority
        self._failed = failed

    def plan(self, state: Any, candidates: Candidates, cost: Cost, limits: Limits) -> Plan:
        """`Priority.plan`; by arrival where it fails. Never empty."""
        hook = self._priority.plan
        try:
            return _runnable(
                hook, hooks.ask(hook, state, candidates, cost, limits), candidates, limits
            )
        except ControllerFault as fault:
            self._failed(fault)
        plan = _ARRIVAL.plan(state, candidates, cost, limits)
        if plan.rows.size:
            return plan
        return Plan(np.argsort(candidates.arrival)[:1], np.ones(1, np.intp), "the first to arrive")

    @property
    def overtaking(self) -> bool:
        """`Priority.overtaking`."""
        return bool(self._priority.overtaking)

    def pays(self, state: Any, candidates: Candidates, cost: Cost, coming: int, going: int) -> bool:
        """`Priority.pays`; where it fails, nobody is swapped out for the other's worth."""
        hook = self._priority.pays
        try:
            answer = hooks.ask(hook, state, candidates, cost, coming, going)
            if not isinstance(answer, (bool, np.bool_)):
                raise hooks.fault(hook, f"returned {hooks.described(answer)}, not a yes or no")
        except ControllerFault as fault:
            self._failed(fault)
            return False
        return bool(answer)

    def order(self, state: Any, candidates: Candidates, cost: Cost) -> Array:
        """`Priority.order`; by arrival where it fails."""
        hook, rows = self._priority.order, len(candidates.arrival)
        try:
            order = hooks.column(hook, hooks.ask(hook, state, candidates, cost), rows, "iu")
            if sorted(order.tolist()) != list(range(rows)):
                raise hooks.fault(hook, f"returned {hooks.described(order)}, not each row once")
        except ControllerFault as fault:
            self._failed(fault)
            return np.argsort(candidates.arrival)
        return order


def _runnable(hook: hooks.Hook, plan: Any, candidates: Candidates, limits: Limits) -> Plan:
    """A plan that can be run; `ControllerFault` if it cannot."""
    if not isinstance(plan, Plan) or not isinstance(plan.rows, np.ndarray):
        raise hooks.fault(hook, f"returned {hooks.described(plan)}, not a Plan")
    count = len(plan.rows) if plan.rows.ndim else 0
    rows = hooks.column(hook, plan.rows, count, "iu").tolist()
    tokens = hooks.column(hook, plan.tokens, count, "iu").tolist()
    known = rows and min(rows) >= 0 and max(rows) < len(candidates.arrival)
    if not known or len(set(rows)) < count:
        raise hooks.fault(hook, f"planned the rows {rows}, of {len(candidates.arrival)}, each once")
    if min(tokens) < 1 or sum(tokens) > limits.step_tokens:
        raise hooks.fault(
            hook, f"gave {tokens} tokens: each row needs one, and a step holds {limits.step_tokens}"
        )
    forced = plan.forced if plan.forced in ("deadline", "patience") else ""
    return plan._replace(reason=str(plan.reason), forced=forced)
