"""The controllers of a configuration at work on sequences: fresh states, one step of every loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from entropic_control.backends.base import Backend, Chunk, Forward
from entropic_control.config import Config
from entropic_control.controllers import hooks
from entropic_control.controllers.base import Array
from entropic_control.controllers.measurement import sample, truncated_before
from entropic_control.controllers.priority import fallen
from entropic_control.controllers.pruning import Survey
from entropic_control.controllers.sampling import uniform
from entropic_control.controllers.signals import Reading, joined, rows_of, unread
from entropic_control.controllers.state import Together, stack
from entropic_control.controllers.temperature import Command
from entropic_control.drawing import DeviceDraw
from entropic_control.errors import (
    ConfigError,
    ControllerError,
    ControllerFault,
    EntropicError,
    RequestError,
)
from entropic_control.numerals import Numerals
from entropic_control.sequence import Sequence as Work
from entropic_control.trace import TOKEN_COLUMNS
from entropic_control.weakly import weakly

_TOGETHER = 64
"""Readings that the priority and pruning loops take in together, if nobody looks at them before."""

_READ = [name for name in TOKEN_COLUMNS if name in Reading._fields]
"""What the trace takes from a reading."""


class Sampled(NamedTuple):
    """What one step measured, commanded and drew, by row."""

    tokens: list[int]
    """Token ids; -1 where the row was no distribution, or has an error."""
    reading: Reading
    commanded: Array
    """The temperature for the next step."""
    states: list[Any]
    """The temperature states after the step: one of all rows, or one of each."""
    passed: list[float]
    """Entropic time of the step, nats."""
    errors: Mapping[int, Exception] = {}
    """By row: why it could not be measured, controlled or drawn. Its states are as before."""


class Record(NamedTuple):
    """A step that drew tokens, as the trace wants it."""

    step: int
    time: float
    accounts: list[tuple[int, int, int, float]]
    """Number, tokens, cells and entropic time of each sequence, before the step's tokens count."""
    sampled: Sampled


class Loops:
    """The temperature, priority, pruning and speculation loops of a configuration.

    Parameters
    ----------
    config : Config
        Whose controllers they are.
    backend : Backend
        Where the logits live; the controllers run there too if it and they can.
    dry_run : bool
        Update every controller, but sample at the temperature the controller starts from; at 1 if
        it would choose that from the logits.
    """

    def __init__(self, config: Config, backend: Backend, *, dry_run: bool = False) -> None:
        self.config = config
        self._dry_run = dry_run
        self._temperatures, self._priorities = Together(), Together()
        self._prunings, self._guesses = Together(), Together()
        self._unread: list[tuple[Sequence[Work], Reading]] = []
        self._gains = config.temperature.compiled_gains
        self._next: tuple[Any, Command] | None = None
        """The last state, and what it commands."""
        self._numerals = Numerals(weakly(backend.piece))
        self._device = None if dry_run else DeviceDraw.of(config, backend)

    def enter(self, work: Work) -> None:
        """Give a sequence fresh states, with its own settings where it has any.

        Raises
        ------
        ConfigError
            If a setting is unknown or out of range.
        ControllerError
            If a controller raises, or gives what is no state or survey.
        """
        try:
            self._enter(work)
        except ControllerFault as fault:
            raise ControllerError(work.id, str(fault)) from fault

    def _enter(self, work: Work) -> None:
        config = self.config
        work.temperature = _fresh(config.temperature, **work.request.temperature)
        if self._dry_run and not config.temperature.reads_logits:
            told = hooks.ask(config.temperature.command, work.temperature)
            command = hooks.command(config.temperature.command, told, 1)
            work.start = float(command.temperature[0])
        self.adopt(work)
        work.priority = _fresh(config.priority)
        work.pruning = _fresh(config.pruning)
        work.speculation = _fresh(config.speculation)
        length = len(work.prompt) + work.limit
        if hooks.integer(config.pruning.measures, hooks.ask(config.pruning.measures, length)):
            numbers = self._numerals.among(work.prompt)
            hook = config.pruning.survey
            work.survey = _checked(hook, hooks.ask(hook, work.prompt, length, numbers), work)
            work.ledger.record(0, work.survey.estimate)

    def adopt(self, work: Work) -> None:
        """From now on these loops keep the sequence's states up to date."""
        work.catch_up()
        work.catch_up = self._catch_up

    @property
    def unread(self) -> int:
        """How many readings wait to be taken in; set to fewer, it drops the last ones."""
        return len(self._unread)

    @unread.setter
    def unread(self, count: int) -> None:
        del self._unread[count:]

    def clear(self) -> None:
        """Take in what waits, if the next step might: then what that step adds can be dropped again."""
        looks = self.config.speculation.drafts or self.config.pruning.selects
        if looks or len(self._unread) >= _TOGETHER - 1:
            self._catch_up()

    def flows(self, works: Sequence[Work]) -> Any:
        """The priority states of sequences, in one; None if they are not alike, which is to rank nobody."""
        try:
            return self._priorities.stack([work.priority for work in works])
        except Exception:  # noqa: BLE001 - of anybody's code
            return None

    def watches(self, work: Work) -> bool:
        """Whether the attention of the sequence's next token is wanted."""
        return self.config.pruning.needs_attention and not work.prompt_left

    def forward(self, backend: Backend, chunks: Sequence[Chunk]) -> Forward:
        """Run a step; the logits are left where these loops want them."""
        return backend.forward(chunks) if self._device is None else self._device.forward(chunks)

    def selected(self, work: Work) -> Array | None:
        """Numbers of the blocks that the sequence's next token attends to; None for all.

        Raises
        ------
        ControllerFault
            If the controller raises, or chooses by what is no mask of them.
        """
        pruning = self.config.pruning
        if not pruning.selects or self._dry_run or work.prompt_left:
            return None
        view = work.ledger.view()
        mask = hooks.ask(pruning.select, work.pruning, view)
        if mask is None:
            return None
        return view.number[hooks.mask(pruning.select, mask, len(view.number))]

    def step(self, works: Sequence[Work], logits: list[Array]) -> Sampled:
        """Measure each row, draw its token, and update its controllers.

        A row that is no distribution draws no token and moves no state. A forced token takes the place
        of a draw, and is measured like one. If a controller fails, each row is tried alone: states are
        values, and a random number belongs to its seed and token, so that the others come out as they
        would have together.
        """
        try:
            return self._step(works, logits)
        except Exception as error:  # noqa: BLE001 - of anybody's code
            if len(works) == 1:
                return self._failed(works[0], error)
        return _joined([self.step([work], [row]) for work, row in zip(works, logits, strict=True)])

    def _step(self, works: Sequence[Work], logits: list[Array]) -> Sampled:
        config, count = self.config, len(works)
        state = self._temperatures.stack([work.temperature for work in works])
        draw: Any = self._draw
        if self._device is not None and any(work.request.forced for work in works):
            logits = self._device.fetched(logits)  # the kernel always draws
        elif self._device is not None:
            draw = self._device
        tokens, reading, commanded, state = draw(works, logits, state)
        guessing = None
        if config.speculation.drafts:
            guessing = self._guesses.stack([work.speculation for work in works])
            guessing = _updated(config.speculation, guessing, reading, count)[1]
        # Nothing of the step has been kept so far, and nothing of what follows can fail.
        for work, own in zip(works, self._temperatures.split(state, count), strict=True):
            work.temperature = own
        if guessing is not None:
            for work, one in zip(works, self._guesses.split(guessing, count), strict=True):
                work.speculation = one
        self._unread.append((works, reading))
        if len(self._unread) >= _TOGETHER:
            self._catch_up()
        entropies = zip(works, reading.raw_entropy.tolist(), strict=True)
        passed = [fallen(work.raw_entropy, entropy) for work, entropy in entropies]
        return Sampled(tokens, reading, commanded, [state], passed)

    def _failed(self, work: Work, error: Exception) -> Sampled:
        unknown = np.full(1, np.nan)
        why = failure(work, error)
        return Sampled([-1], unread(), unknown, [work.temperature], [0.0], {0: why})

    def _catch_up(self) -> None:
        """Show the priority and pruning loops what was measured since they were last looked at.

        A sequence that runs alone is not ranked, and a short one is not pruned: their updates wait, and
        run by the dozen from warm caches.
        """
        unread, self._unread = self._unread, []
        taken = 0
        try:
            for works, group in groupby(unread, key=itemgetter(0)):
                readings = [reading for _, reading in group]
                self._take_in(works, readings)
                taken += len(readings)
        finally:  # what an interrupt leaves waits on
            self._unread = unread[taken:] + self._unread

    def _take_in(self, works: Sequence[Work], readings: list[Reading]) -> None:
        """`_catch_up` of some sequences; one whose controller fails keeps its states, and the fault."""
        count = len(works)
        try:
            priority = self._priorities.stack([work.priority for work in works])
            pruning = self._prunings.stack([work.pruning for work in works])
            for reading in readings:
                _, priority = _updated(self.config.priority, priority, reading, count)
                prunable, pruning = _updated(self.config.pruning, pruning, reading, count)
            prunable = hooks.mask(self.config.pruning.update, prunable, count)
        except Exception as error:  # noqa: BLE001 - of anybody's code
            if count == 1:
                works[0].fault = failure(works[0], error)
                return
            for row, work in enumerate(works):
                own = slice(row, row + 1)
                self._take_in([work], [rows_of(reading, own) for reading in readings])
            return
        priorities = self._priorities.split(priority, count)
        prunings = self._prunings.split(pruning, count)
        for row, work in enumerate(works):
            work.priority, work.pruning = priorities[row], prunings[row]
            work.prunable = bool(prunable[row])

    def _draw(
        self, works: Sequence[Work], logits: list[Array], state: Any
    ) -> tuple[list[int], Reading, Array, Any]:
        config = self.config
        command = self._command(works, state, logits)
        tokens, reading, moved = sample(
            logits,
            command,
            config.estimator,
            config.truncation,
            [uniform(work.seed, len(work.tokens)) for work in works],
            [work.forced for work in works],
            None if self._gains is None else (state, self._gains),
        )
        if moved is None:
            hook = config.temperature.update
            commanded, state = hooks.moved(hook, hooks.ask(hook, state, reading), state, len(works))
            # A row that drew no token fails for that, whatever is commanded then.
            drawn = commanded if -1 not in tokens else commanded[reading.valid]
            hooks.temperatures(hook, drawn, len(drawn))
        else:
            state, command = self._next = moved, config.temperature.command(moved)
            commanded = command.temperature
        return tokens, reading, commanded, state

    def _command(self, works: Sequence[Work], state: Any, logits: list[Array]) -> Command:
        temperature = self.config.temperature
        if self._dry_run:
            return Command(np.array([work.start for work in works]))
        if self._next is not None and state is self._next[0]:
            return self._next[1]
        if temperature.reads_logits:
            seen = truncated_before(logits, self.config.truncation)
            command = hooks.ask(temperature.command, state, seen)
        else:
            command = hooks.ask(temperature.command, state)
        return hooks.command(temperature.command, command, len(works))

    def columns(self, records: Sequence[Record]) -> dict[str, Any]:
        """The trace columns of some steps."""
        steps, times, accounts, sampled = zip(*records, strict=True)
        counts = [len(rows) for rows in accounts]
        request, token, cells, tau = zip(*chain.from_iterable(accounts), strict=True)
        reading = {
            name: np.concatenate([getattr(s.reading, name) for s in sampled]) for name in _READ
        }
        target, saturated, feasible = self._aims(
            [state for s in sampled for state in s.states],
            [live for s in sampled for live in np.split(s.reading.live, len(s.states))],
        )
        return {
            "step": np.repeat(steps, counts),
            "time": np.repeat(times, counts),
            "request": request,
            "token": token,
            "token_id": list(chain.from_iterable(s.tokens for s in sampled)),
            "commanded": np.concatenate([s.commanded for s in sampled]),
            **reading,
            "target": target,
            "saturated": saturated,
            "feasible": feasible,
            "cells": cells,
            "tau": np.add(tau, list(chain.from_iterable(s.passed for s in sampled))),
        }

    def _aims(self, states: Sequence[Any], live: Sequence[Array]) -> tuple[Array, Array, Array]:
        """Target, saturation and feasibility of some steps' rows, for the trace.

        Where the controller fails to say, which moves nothing, they are NaN, 0 and true.
        """
        temperature, rows = self.config.temperature, sum(map(len, live))
        try:
            state, together = stack(states), np.concatenate(live)
            target = hooks.ask(temperature.targets, state)
            if target is None:
                target = np.full(rows, np.nan)
            saturated = hooks.ask(temperature.saturated, state)
            feasible = hooks.ask(temperature.feasible, state, together)
            return (
                hooks.column(temperature.targets, target, rows),
                hooks.finite(temperature.saturated, saturated, rows),
                hooks.mask(temperature.feasible, feasible, rows),
            )
        except Exception:  # noqa: BLE001 - of anybody's code
            if len(states) == 1:
                return np.full(rows, np.nan), np.zeros(rows), np.ones(rows, np.bool_)
        each = [self._aims([state], [own]) for state, own in zip(states, live, strict=True)]
        target, saturated, feasible = (np.concatenate(column) for column in zip(*each, strict=True))
        return target, saturated, feasible


def failure(work: Work, error: Exception) -> Exception:
    """What a sequence fails with for an error that is its own."""
    if isinstance(error, ControllerFault):
        typed: Exception = ControllerError(work.id, str(error))
    elif isinstance(error, EntropicError):
        return error
    else:
        typed = RequestError(work.id, f"its step could not be completed: {error!r}")
    typed.__cause__ = error
    return typed


def _fresh(controller: Any, **own: Any) -> Any:
    try:
        state = controller.init(1, **own)
    except ConfigError:
        raise
    except Exception as error:
        raise hooks.fault(controller.init, f"raised {error!r}") from error
    return hooks.fresh(controller.init, state)


def _updated(controller: Any, state: Any, reading: Reading, rows: int) -> tuple[Array, Any]:
    hook = controller.update
    told, state = hooks.moved(hook, hooks.ask(hook, state, reading), state, rows)
    # Whoever spoils a column has most likely spoiled the state of every row with it.
    if told.dtype.kind == "f":
        hooks.finite(hook, told, rows)
    return told, state


def _checked(hook: hooks.Hook, survey: Any, work: Work) -> Survey:
    """A survey of a sequence's prompt; `ControllerFault` if it is none."""
    size = len(work.prompt)
    if not isinstance(survey, Survey):
        raise hooks.fault(hook, f"returned {hooks.described(survey)}, not a Survey")
    hooks.column(hook, survey.estimate, size)
    hooks.mask(hook, survey.measured, size)
    hooks.finite(hook, survey.extra, size)
    return survey


def _joined(parts: Sequence[Sampled]) -> Sampled:
    """What steps of single rows come to."""
    return Sampled(
        tokens=[part.tokens[0] for part in parts],
        reading=joined([part.reading for part in parts]),
        commanded=np.concatenate([part.commanded for part in parts]),
        states=[part.states[0] for part in parts],
        passed=[part.passed[0] for part in parts],
        errors={row: part.errors[0] for row, part in enumerate(parts) if part.errors},
    )
