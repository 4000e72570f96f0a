"""Who sits in which row of vLLM's batch, with what controller state: the one piece behind both adapters.

vLLM moves requests between rows, takes them out and puts them back, and computes logits for prompts that
are not complete. A state belongs to the request, not to its row, and moves on only when a token of the
request was really emitted.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from entropic_control.backends.vllm.cuts import Cuts
from entropic_control.backends.vllm.own import Own
from entropic_control.controllers import hooks
from entropic_control.controllers.base import Array
from entropic_control.controllers.signals import Reading, rows_of
from entropic_control.controllers.state import split, stack
from entropic_control.controllers.temperature.base import TemperatureController
from entropic_control.errors import ControllerFault

GREEDY = 1e-5
"""vLLM takes the largest logit at request temperatures below this."""

PARKED = 1024
"""States kept of requests that left the batch: vLLM does not say whether they will come back."""


class Seat:
    """A request and its temperature state.

    Parameters
    ----------
    key : hashable
        What identifies the request for as long as it lives.
    tokens : sized or None
        Its emitted tokens, which the engine extends; None if readings come of emitted tokens only.
    controller : TemperatureController or None
        None for a request that is measured but not controlled.
    state
        The controller's state, of one row.
    asked : float
        The temperature its sender asked for, by which vLLM divides in the end.
    """

    def __init__(
        self,
        key: Hashable,
        tokens: Sized | None,
        controller: TemperatureController | None = None,
        state: Any = None,
        asked: float = 1.0,
    ) -> None:
        self.key = key
        self.tokens = tokens
        self.controller = controller
        self.state = state
        self.asked = asked
        self.cuts: Cuts = ()
        """What vLLM cuts off after the temperature."""
        self.updates = 0
        """Tokens that the state has seen."""
        self.error: ControllerFault | None = None
        """Why it is not controlled any more; None if its controller did nothing wrong."""
        self._before = 0

    @property
    def target(self) -> float:
        """The entropy it aims at, nats; NaN without one."""
        targets = self.controller.targets(self.state) if self.controller else None
        return float("nan") if targets is None else float(targets[0])

    def let_go(self, error: ControllerFault) -> None:
        """Its controller failed: from now on it gets the temperature that its sender asked for.

        vLLM cannot end a single request from here.
        """
        self.controller, self.state, self.error = None, None, error
        warnings.warn(f"request {self.key!r} is no longer controlled: {error}", stacklevel=2)

    def about_to_sample(self) -> None:
        """A reading is taken: whether it counts shows by what the engine emits after this."""
        self._before = len(self.tokens) if self.tokens is not None else -1

    @property
    def emitted(self) -> bool:
        """Whether a token came out since the reading."""
        return self.tokens is None or len(self.tokens) > self._before


class _Pending(NamedTuple):
    seats: Sequence[Seat]
    read: Callable[[], Reading]


class Book:
    """The rows of a batch.

    Parameters
    ----------
    default : TemperatureController
        The controller of requests that set nothing for themselves.
    enabled : bool
        Whether requests that say nothing are controlled.
    observe : bool
        Whether requests that are not controlled are measured all the same.
    """

    def __init__(self, default: TemperatureController, *, enabled: bool, observe: bool) -> None:
        self._default = default
        self._enabled = enabled
        self._observe = observe
        self._seats: dict[int, Seat] = {}
        self._parked: OrderedDict[Hashable, Seat] = OrderedDict()
        self._pending: _Pending | None = None

    def enter(
        self, row: int, key: Hashable, own: Own, tokens: Sized | None, asked: float = 1.0
    ) -> bool:
        """A request takes a row, for the first time or again; returns whether it is looked at.

        One whose sender asked for a temperature of 0 is never controlled.
        """
        self.leave(row)
        seat = self._known(key) or self._fresh(key, own, tokens, asked)
        if seat is None:
            return False
        seat.tokens = tokens
        self._seats[row] = seat
        return True

    def _known(self, key: Hashable) -> Seat | None:
        """The seat of a request that was in the batch before; it may still be in its last row."""
        row = next((row for row, seat in self._seats.items() if seat.key == key), None)
        return self._parked.pop(key, None) if row is None else self._seats.pop(row)

    def _fresh(self, key: Hashable, own: Own, tokens: Sized | None, asked: float) -> Seat | None:
        wanted = own.enabled if own.enabled is not None else self._enabled or own.target is not None
        if wanted and asked >= GREEDY:
            controller = own.controller(self._default)
            state = controller.init(1, **own.overrides(controller))
            return Seat(key, tokens, controller, state, asked)
        return Seat(key, tokens) if self._observe else None

    def leave(self, row: int) -> None:
        """The request in a row left the batch, for good or to come back."""
        self.settle()
        self._park(self._seats.pop(row, None))

    def move(self, source: int, target: int, *, swap: bool = False) -> None:
        """The request of one row goes to another, or two change places.

        Whoever sits where another moves to without a swap has left: vLLM fills the rows of requests
        that left from the end of the batch, and does not name them as removed then.
        """
        moved, displaced = self._seats.pop(source, None), self._seats.pop(target, None)
        if moved is not None:
            self._seats[target] = moved
        if not swap:
            self._park(displaced)
        elif displaced is not None:
            self._seats[source] = displaced

    def _park(self, seat: Seat | None) -> None:
        if seat is None:
            return
        self._parked[seat.key] = seat
        while len(self._parked) > PARKED:
            self._parked.popitem(last=False)

    def __contains__(self, row: int) -> bool:
        return row in self._seats

    def at(self, row: int) -> Seat:
        """Who sits in a row."""
        return self._seats[row]

    def rows(self, count: int) -> list[int]:
        """The taken rows below `count`, rising."""
        return sorted(row for row in self._seats if row < count)

    def temperatures(self, rows: Sequence[int]) -> Array:
        """The temperatures to sample the rows under, shape (rows,); 1 where nothing is controlled."""
        self.settle()
        out = np.ones(len(rows))
        for controller, members in _by_controller([self._seats[row] for row in rows]):
            _alone_if_need_be(_command, controller, members, out)
        return out

    def measured(self, rows: Sequence[int], read: Callable[[], Reading]) -> None:
        """A step's reading of these rows was taken; `read` gives it when it is wanted.

        It is asked for after the step, so that a device need not be waited for within it.
        """
        self.settle()
        seats = [self._seats[row] for row in rows]
        for seat in seats:
            seat.about_to_sample()
        self._pending = _Pending(seats, read)

    def settle(self) -> None:
        """Let the last reading move the states of the requests that emitted a token by it."""
        if self._pending is None:
            return
        (seats, read), self._pending = self._pending, None
        emitted = [(at, seat) for at, seat in enumerate(seats) if seat.emitted]
        if not emitted:
            return
        reading = read()
        for _, seat in emitted:
            seat.updates += 1
        for controller, members in _by_controller([seat for _, seat in emitted]):
            placed = [(emitted[at][0], seat) for at, seat in members]
            _alone_if_need_be(_update, controller, placed, reading)


_Members = Sequence[tuple[int, Seat]]


def _alone_if_need_be(
    act: Callable[[TemperatureController, _Members, Any], None],
    controller: TemperatureController,
    members: _Members,
    on: Any,
) -> None:
    """Do something for all members; if the controller fails, for each alone, and let go who it fails."""
    try:
        act(controller, members, on)
    except ControllerFault as error:
        if len(members) == 1:
            members[0][1].let_go(error)
            return
        for member in members:
            _alone_if_need_be(act, controller, [member], on)


def _command(controller: TemperatureController, members: _Members, out: Array) -> None:
    state = stack([seat.state for _, seat in members])
    told = hooks.ask(controller.command, state)
    command = hooks.command(controller.command, told, len(members))
    out[[at for at, _ in members]] = command.temperature


def _update(controller: TemperatureController, members: _Members, reading: Reading) -> None:
    state = stack([seat.state for _, seat in members])
    rows = np.array([at for at, _ in members])
    told = hooks.ask(controller.update, state, rows_of(reading, rows))
    _, state = hooks.moved(controller.update, told, state, len(members))
    for (_, seat), own in zip(members, split(state, len(members)), strict=True):
        seat.state = own


def _by_controller(
    seats: Sequence[Seat],
) -> list[tuple[TemperatureController, list[tuple[int, Seat]]]]:
    """The controlled seats with their places, by controller; as a rule there is but one."""
    groups: dict[int, tuple[TemperatureController, list[tuple[int, Seat]]]] = {}
    for at, seat in enumerate(seats):
        if seat.controller is not None:
            groups.setdefault(id(seat.controller), (seat.controller, []))[1].append((at, seat))
    return list(groups.values())
