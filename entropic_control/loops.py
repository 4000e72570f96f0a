"""The controllers of a configuration at work on sequences: fresh states, one step of every loop."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from entropic_control.backends.base import Backend, Chunk, Forward
from entropic_control.config import Config
from entropic_control.controllers.base import Array
from entropic_control.controllers.measurement import sample, truncated_before
from entropic_control.controllers.priority import fallen
from entropic_control.controllers.sampling import uniform
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.state import Together, stack
from entropic_control.controllers.temperature import Command
from entropic_control.drawing import DeviceDraw
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
    """Token ids; -1 where the row was no distribution."""
    reading: Reading
    commanded: Array
    """The temperature for the next step."""
    state: Any
    """The temperature states after the step."""
    passed: list[float]
    """Entropic time of the step, nats."""


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
        """Give a sequence fresh states, with its own settings where it has any."""
        work.temperature = self.config.temperature.init(1, **work.request.temperature)
        if self._dry_run and not self.config.temperature.reads_logits:
            work.start = float(self.config.temperature.command(work.temperature).temperature[0])
        self.adopt(work)
        work.priority = self.config.priority.init(1)
        work.pruning = self.config.pruning.init(1)
        work.speculation = self.config.speculation.init(1)
        length = len(work.prompt) + work.limit
        if self.config.pruning.measures(length):
            numbers = self._numerals.among(work.prompt)
            work.survey = self.config.pruning.survey(work.prompt, length, numbers)
            work.ledger.record(0, work.survey.estimate)

    def adopt(self, work: Work) -> None:
        """From now on these loops keep the sequence's states up to date."""
        work.catch_up()
        work.catch_up = self._catch_up

    def flows(self, works: Sequence[Work]) -> Any:
        """The priority states of sequences, in one."""
        return self._priorities.stack([work.priority for work in works])

    def watches(self, work: Work) -> bool:
        """Whether the attention of the sequence's next token is wanted."""
        return self.config.pruning.needs_attention and not work.prompt_left

    def forward(self, backend: Backend, chunks: Sequence[Chunk]) -> Forward:
        """Run a step; the logits are left where these loops want them."""
        return backend.forward(chunks) if self._device is None else self._device.forward(chunks)

    def selected(self, work: Work) -> Array | None:
        """Numbers of the blocks that the sequence's next token attends to; None for all."""
        pruning = self.config.pruning
        if not pruning.selects or self._dry_run or work.prompt_left:
            return None
        view = work.ledger.view()
        mask = pruning.select(work.pruning, view)
        return None if mask is None else view.number[mask]

    def step(self, works: Sequence[Work], logits: list[Array]) -> Sampled:
        """Measure each row, draw its token, and update its controllers.

        A row that is no distribution draws no token and moves no state. A forced token takes the place
        of a draw, and is measured like one.
        """
        config, count = self.config, len(works)
        state = self._temperatures.stack([work.temperature for work in works])
        draw: Any = self._draw
        if self._device is not None and any(work.request.forced for work in works):
            logits = self._device.fetched(logits)  # the kernel always draws
        elif self._device is not None:
            draw = self._device
        tokens, reading, commanded, state = draw(works, logits, state)
        for work, own in zip(works, self._temperatures.split(state, count), strict=True):
            work.temperature = own
        self._unread.append((works, reading))
        if len(self._unread) >= _TOGETHER:
            self._catch_up()
        if config.speculation.drafts:
            guessing = self._guesses.stack([work.speculation for work in works])
            _, guessing = config.speculation.update(guessing, reading)
            for work, one in zip(works, self._guesses.split(guessing, count), strict=True):
                work.speculation = one
        entropies = zip(works, reading.raw_entropy.tolist(), strict=True)
        passed = [fallen(work.raw_entropy, entropy) for work, entropy in entropies]
        return Sampled(tokens, reading, commanded, state, passed)

    def _catch_up(self) -> None:
        """Show the priority and pruning loops what was measured since they were last looked at.

        A sequence that runs alone is not ranked, and a short one is not pruned: their updates wait, and
        run by the dozen from warm caches.
        """
        unread, self._unread = self._unread, []
        for works, group in groupby(unread, key=itemgetter(0)):
            priority = self.flows(works)
            pruning = self._prunings.stack([work.pruning for work in works])
            for _, reading in group:
                _, priority = self.config.priority.update(priority, reading)
                prunable, pruning = self.config.pruning.update(pruning, reading)
            priorities = self._priorities.split(priority, len(works))
            prunings = self._prunings.split(pruning, len(works))
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
            commanded, state = config.temperature.update(state, reading)
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
        if not temperature.reads_logits:
            return temperature.command(state)
        return temperature.command(state, truncated_before(logits, self.config.truncation))

    def columns(self, records: Sequence[Record]) -> dict[str, Any]:
        """The trace columns of some steps."""
        steps, times, accounts, sampled = zip(*records, strict=True)
        counts = [len(rows) for rows in accounts]
        request, token, cells, tau = zip(*chain.from_iterable(accounts), strict=True)
        state = stack([s.state for s in sampled])
        reading = {
            name: np.concatenate([getattr(s.reading, name) for s in sampled]) for name in _READ
        }
        temperature = self.config.temperature
        targets = temperature.targets(state)
        return {
            "step": np.repeat(steps, counts),
            "time": np.repeat(times, counts),
            "request": request,
            "token": token,
            "token_id": list(chain.from_iterable(s.tokens for s in sampled)),
            "commanded": np.concatenate([s.commanded for s in sampled]),
            **reading,
            "target": np.nan if targets is None else targets,
            "saturated": temperature.saturated(state),
            "feasible": temperature.feasible(state, reading["live"]),
            "cells": cells,
            "tau": np.add(tau, list(chain.from_iterable(s.passed for s in sampled))),
        }
