"""The decode loop: schedule, forward, measure, update, sample, account, prune. One for every backend."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from entropic_control import persistence
from entropic_control.backends.base import Backend, Chunk, Prompt, step_shape
from entropic_control.backends.cost import Shape
from entropic_control.config import Config
from entropic_control.controllers.base import Array
from entropic_control.controllers.priority import Candidates, FirstCome, Forced, Limits
from entropic_control.errors import (
    CacheError,
    CapabilityError,
    ConfigError,
    ControllerFault,
    DecodeError,
    EngineBusy,
    EngineClosed,
    EntropicError,
    LogitsError,
    NoRoom,
)
from entropic_control.intake import Intake, Names, rejected
from entropic_control.journal import Journal
from entropic_control.loops import Loops, Record, failure
from entropic_control.ordering import Ordering
from entropic_control.pruner import prune, would_prune
from entropic_control.report import Report
from entropic_control.request import Event, Failed, Finished, FinishReason, Request, Token
from entropic_control.requirements import require
from entropic_control.roster import Roster
from entropic_control.seats import Seating, Seats, Share
from entropic_control.sequence import Sequence as Work
from entropic_control.speculator import Row, Speculator
from entropic_control.trace import Trace
from entropic_control.turn import Turn
from entropic_control.weakly import weakly

_NAP = 0.02
"""Seconds, at most, until an engine that waits for an arrival hears of another request or a cancel."""


class Engine:
    """Runs requests on a backend under the controllers of a configuration.

    Parameters
    ----------
    config : Config
        The controllers and defaults; `load` makes an engine from a file.
    backend : Backend, optional
        An engine that is open already; by default the configuration's is opened.
    dry_run : bool
        Observe only: every reading is taken and every controller updated, but requests run first
        come, first served, dense, without drafts, at the temperature the controller starts from.

    Raises
    ------
    CapabilityError
        If the configuration asks for what the backend cannot do.
    """

    def __init__(
        self, config: Config, backend: Backend | None = None, *, dry_run: bool = False
    ) -> None:
        self.config = config
        self.dry_run = dry_run
        self.backend = backend if backend is not None else config.backend.open()
        if config.backend.cost_model == "fixed":
            self.backend.cost = self.backend.cost.assumed
        self.trace = Trace()
        self.done: list[Work] = []
        self._roster = Roster(self.backend.capabilities.slots)
        self._live: list[Work] = []
        """Those that this step weighs."""
        self._inbox: deque[Work] = deque()
        """Submitted, and not on the roster yet."""
        self._cancelled: deque[Work] = deque()
        self._leaving: list[Work] = []
        """Finished, with their slots still to be freed."""
        self._outbox: list[Event] = []
        self._names, self._unfinished = Names(), dict[str, Work]()
        self._past = 0
        self._seats = Seats(self.backend, weakly(self._preempted))
        self._loops = Loops(config, self.backend, dry_run=dry_run)
        self._intake = Intake(config, self.backend, self._loops)
        self._step_number = 0
        self._journal: Journal | None = None
        """Of a step whose tokens are not all drawn."""
        self._tail: _Tail | None = None
        """Of a step whose tokens are drawn."""
        self._turn, self._door = Turn(), threading.Lock()
        priority = FirstCome() if dry_run else config.priority
        self._order = Ordering(priority, weakly(self._by_arrival))
        try:
            require(config, self.backend.capabilities)
        except CapabilityError:
            if backend is None:
                self.backend.close()
            raise
        drafts = config.speculation.drafts and not dry_run
        self._speculator = Speculator(config, self.backend) if drafts else None

    # -- requests ---------------------------------------------------------------------------------

    def submit(self, request: Request | Prompt) -> str:
        """Queue a request, from any thread; returns its id.

        Raises
        ------
        RequestError
            If it cannot be run: a `PromptError` if the prompt is empty, or leaves no room in the context.
        ConfigError
            If the id is taken, or a per-request setting is unknown or out of range.
        """
        return self._submit(request).id

    def _submit(self, request: Request | Prompt, reserved: Collection[str] = ()) -> Work:
        self._turn.require_open()
        with self._door:
            number = len(self.trace.names)
            work = self._intake.accepted(request, self._names, number, reserved)
            work.arrived = self.backend.now() + work.request.arrive
            self._queue(work)
        return work

    def prepare(self, request: Request, prompt: Array) -> Work:
        """A sequence with fresh controller states, for a request with every field set.

        Raises
        ------
        PromptError
            If the prompt leaves no room in the context.
        ConfigError
            If the id is taken or a per-request setting is not one of the controller's.
        """
        return self._intake.sequence(request, prompt, self._names, len(self.trace.names))

    def adopt(self, work: Work) -> None:
        """Queue a sequence that was at work in another engine.

        Raises
        ------
        ConfigError
            If its id is taken.
        """
        self._turn.require_open()
        with self._door:
            if work.id in self._names:
                raise ConfigError(f"request id {work.id!r} is taken")
            self._loops.adopt(work)
            work.number = len(self.trace.names)
            self._queue(work)

    def _queue(self, work: Work) -> None:
        self._name(work)
        self._unfinished[work.id] = work
        self._inbox.append(work)

    def _name(self, work: Work) -> None:
        self.trace.names.append(work.id)
        self._names.take(work.id)

    @property
    def unfinished(self) -> list[Work]:
        """The sequences that are not done, in order of arrival."""
        return sorted(self._unfinished.copy().values(), key=lambda work: work.number)

    def cancel(self, request: str) -> None:
        """End a request at the next step, from any thread; its tokens so far are kept.

        One that is done already, or was never there, is not missed.
        """
        work = self._unfinished.get(request)
        if work is not None:
            self._cancelled.append(work)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self._unfinished

    # -- running ----------------------------------------------------------------------------------

    def submit_all(self, requests: Iterable[Request | Prompt]) -> list[Failed]:
        """Queue requests; one that cannot be accepted fails by itself and is reported as failed.

        Those without an id get one that none of them chose.
        """
        return self._submit_all(requests)[1]

    def _submit_all(self, requests: Iterable[Request | Prompt]) -> tuple[list[Work], list[Failed]]:
        self._turn.require_open()
        requests = list(requests)
        named = [request.id for request in requests if isinstance(request, Request)]
        reserved = {name for name in named if isinstance(name, str)}
        works, failed = [], []
        for request in requests:
            try:
                works.append(self._submit(request, reserved))
            except EntropicError as error:
                failed.append(self._reject(request, error, reserved))
        return works, failed

    def _reject(
        self, request: Request | Prompt, error: EntropicError, reserved: Collection[str]
    ) -> Failed:
        with self._door:
            name = request.id if isinstance(request, Request) else None
            if not isinstance(name, str) or not name or name in self._names:
                name = self._names.free(reserved)  # not to be taken for the one that has the id
            work = rejected(error, name, len(self.trace.names))
            self._name(work)
            work.arrived = work.finished = self.backend.now()
            self.done.append(work)
        self._note("failed", work, reason=str(error))
        return Failed(work.id, error)

    def stream(self, requests: Iterable[Request | Prompt] = ()) -> Iterator[Event]:
        """Submit requests and yield events until everything submitted is done.

        Closing it early, or to stop reading it, ends its own requests. After an interrupt they go on with
        the next step.
        """
        works, failed = self._submit_all(requests)
        stepping = False
        try:
            yield from failed
            while not self.idle:
                stepping = True
                events = self.step()
                stepping = False
                yield from events
        finally:
            if not stepping:
                self._end(works)

    def _end(self, works: Iterable[Work]) -> None:
        """Cancel requests now, or, where another thread is in the engine, with its next step."""
        self._cancelled.extend(work for work in works if work.reason is None)
        if self._cancelled:
            try:
                with self._turn:
                    self._mend()
                    self._take_in()
            except (EngineBusy, EngineClosed):
                pass

    def run(self, requests: Iterable[Request | Prompt] = ()) -> Report:
        """Submit requests, run everything to its end, and report on it.

        An idle engine forgets earlier runs first, so that the report is of this one and memory does
        not grow with the number of runs.
        """
        if self.idle:
            self.forget()
        self.submit_all(requests)
        while not self.idle:
            self.step()
        return self.report()

    @property
    def progress(self) -> tuple[int, int]:
        """Prompt and generated tokens done, and those to be done at most."""
        waiting = sum(len(work.prompt) + work.limit for work in tuple(self._inbox))
        return self._past + self._roster.fed, self._past + self._roster.reach + waiting

    def forget(self) -> None:
        """Drop the finished requests with their part of the trace, and its steps; ids may be used again.

        An engine that is never idle is kept from growing by calling it now and then. What is unfinished
        keeps its rows of the trace, under new numbers.

        Raises
        ------
        EngineBusy
            If another thread is in the engine.
        """
        with self._turn, self._door:
            self._mend()
            works = self.unfinished
            self._names.drop([work.id for work in self.done])
            self.trace = self.trace.only([work.number for work in works])
            for number, work in enumerate(works):
                work.number = number
            self.done, self._past, self._tail = [], 0, None
            if not works:
                self._names, self._outbox = Names(), []
                self._cancelled.clear()

    def report(self) -> Report:
        """What was done so far."""
        return Report.of(self.done, self.trace, self.backend.capabilities.name)

    def step(self) -> list[Event]:
        """One turn of the loop; returns what happened.

        Interrupted, it takes back what it began, and the next step begins it again: tokens are those of an
        undisturbed run. Ctrl-C waits for its end; a second one does not.

        Raises
        ------
        EngineBusy
            If another thread is in the engine.
        """
        if self._inbox:
            with self._turn:
                self._mend()
                self._take_in()
        self._await_arrival()
        with self._turn:
            try:
                self._step()
            except BaseException:
                self._mend()
                raise
        events, self._outbox = self._outbox, []
        return events

    def _step(self) -> None:
        self._mend()
        if self._tail is not None:
            self._end_step(self._tail._replace(clock=self.backend.now() - self._tail.seconds))
        events = self._outbox
        clock = self.backend.now()
        self._take_in()
        self._admit(clock, events)
        if not self._live:
            return
        seating = self._schedule(events)
        self._depart()
        self._roster.settle(self._live)
        if not seating.shares:
            return
        shares = seating.shares if len(seating.shares) == 1 else self._side_by_side(seating.shares)
        self._loops.clear()
        journal = self._journal = Journal((work for work, _ in shares), self._loops, self.trace)
        if self._speculator is not None:
            self._speculator.propose(shares)
        results, engine_seconds = self._forward(shares, events)
        shape = step_shape(self.backend, [chunk for _, chunk, _, _ in results])
        tau, accepted = self._sample(results, events)
        self._tail = _Tail(
            clock, shape, engine_seconds, tau, accepted, seating.reason, journal.apart
        )
        self._journal = None
        self._depart()
        self._end_step(self._tail)

    def _end_step(self, tail: _Tail) -> None:
        self._prune(self._outbox)
        self._record_step(tail)
        self._tail = None
        self._step_number += 1

    def _mend(self) -> None:
        """Take back a step that was cut short, and let those go that are done."""
        if self._journal is not None:
            ended = {work.id for work in self.done}
            lost = self._journal.undo(self.backend, ended)
            self._outbox[:] = [e for e in self._outbox if e.request in ended]
            self._leaving = [work for work in self._leaving if work.reason is not None]
            self._journal = None
            for work, error in lost:
                self._resync(work, error, self._outbox)
        elif self._tail is not None:  # cut short while it pruned
            for work in self._live:
                if work.slot is not None:
                    work.ledger.resync(self.backend.held(work.slot))
        self._depart()
        self._roster.settle(self._live)

    # -- schedule ---------------------------------------------------------------------------------

    def _await_arrival(self) -> None:
        """Outside the turn: meanwhile other threads may submit and cancel, which ends the wait."""
        virtual = self.backend.capabilities.virtual_clock
        while not self._inbox and not self._cancelled:
            arrival = self._roster.next_arrival
            wait = 0.0 if arrival is None else arrival - self.backend.now()
            if wait <= 0:
                return
            self.backend.sleep(wait if virtual else min(wait, _NAP))

    def _take_in(self) -> None:
        """What other threads asked for meanwhile."""
        while self._inbox:
            self._roster.add(self._inbox.popleft())
        for _ in range(len(self._cancelled)):
            work = self._cancelled.popleft()
            if work.reason is None:
                self._finish(work, "cancelled", self._outbox)
        self._depart()

    def _admit(self, now: float, events: list[Event]) -> None:
        self._roster.arrive(now, self._step_number)
        for work in self._roster.overdue(now):
            self._finish(work, "deadline", events)
        self._depart()
        self._live = self._roster.weighed()

    def _candidates(self, live: Sequence[Work]) -> Candidates:
        now = self.backend.now()
        columns = [
            (
                w.number,
                self._step_number - w.served,
                w.prompt_left,
                w.decode_left,
                w.ledger.cells if w.slot is None else self.backend.extent(w.slot),
                w.deadline - now,
                w.slot is not None,
            )
            for w in live
        ]
        number, waited, prompt, decode, cells, slack, seated = (
            np.array(column) for column in zip(*columns, strict=True)
        )
        return Candidates(number, waited, prompt, decode, cells, slack, seated)

    def _schedule(self, events: list[Event]) -> Seating:
        """The sequences of this step with the tokens each gets; all of them hold slots, and fit."""
        live = self._live
        shares, reason, forced = self._plan(live)
        seating = self._seated(live, shares, reason, forced)
        if seating.refused:
            # Nobody overtakes one that waited too long, where there is no seat for it yet.
            passing = self._order.overtaking and forced != "patience"
            live = [w for w in live if w.slot is not None or (passing and self._seats.can_run(w))]
            seating = self._seated(live, *self._plan(live))
        if seating.starved is not None:
            work = seating.starved
            error = NoRoom(
                1, f"no KV cells are left for request {work.id!r}, and no other can give way"
            )
            self._fail(work, error, events)
        self._fail_faulty(events)
        return seating

    def _seated(
        self, live: Sequence[Work], shares: list[Share], reason: str, forced: Forced
    ) -> Seating:
        order, pays = partial(self._in_order, live), partial(self._pays, live)
        return self._seats.take(
            shares,
            order,
            reason,
            forced=forced,
            pays=pays,
            overtaking=self._order.overtaking,
        )

    def _by_arrival(self, fault: ControllerFault) -> None:
        """A step goes by arrival because the controller failed."""
        self._note("fault", self._live[0], reason=str(fault))

    def _side_by_side(self, shares: list[Share]) -> list[Share]:
        """The shares in the order of their slots, the rows that decode brought together."""
        for work in self._seats.gather(shares):
            self._note("moved", work, slot=work.slot)
        # In the order of slots: llama.cpp takes neighbouring streams through in one pass, and a batch in
        # any other order in several.
        return sorted(shares, key=lambda share: share[0].slot or 0)

    def _plan(self, live: Sequence[Work]) -> tuple[list[Share], str, Forced]:
        most = self.backend.capabilities.step_tokens
        if len(live) == 1:
            return [(live[0], min(max(live[0].prompt_left, 1), most))], "nothing else to do", ""
        limits = Limits(self._seats.free, most)
        plan = self._order.plan(
            self._loops.flows(live), self._candidates(live), self.backend.cost, limits
        )
        pairs = zip(plan.rows.tolist(), plan.tokens.tolist(), strict=True)
        return [(live[row], tokens) for row, tokens in pairs], plan.reason, plan.forced

    def _in_order(self, live: Sequence[Work]) -> list[Work]:
        order = self._order.order(
            self._loops.flows(live), self._candidates(live), self.backend.cost
        )
        return [live[row] for row in order]

    def _pays(self, live: Sequence[Work], coming: Work, going: Work) -> bool:
        return self._order.pays(
            self._loops.flows(live),
            self._candidates(live),
            self.backend.cost,
            live.index(coming),
            live.index(going),
        )

    def _preempted(self, work: Work, reason: str) -> None:
        self._note("preempted", work, reason=reason, cells_kept=work.ledger.cells)

    # -- forward ----------------------------------------------------------------------------------

    def _forward(self, chosen: list[Share], events: list[Event]) -> tuple[list[_Result], float]:
        """Run the step. If the engine fails, each sequence is tried alone, so that one fails alone."""
        chosen, chunks = self._chunks(chosen, events)
        if not chunks:
            return [], 0.0
        try:
            forward = self._loops.forward(self.backend, chunks)
        except Exception as error:  # noqa: BLE001 - of anybody's code
            if self._speculator is not None and self._speculator.withdraw(w for w, _ in chosen):
                self._note(
                    "retried", chosen[0][0], reason=f"without drafts: {error}", rows=len(chosen)
                )
                return self._forward(chosen, events)
            if len(chosen) > 1:
                return self._one_by_one(chosen, error, events)
            self._resync(chosen[0][0], error, events)
            return [], 0.0
        rows = iter(forward.logits)
        results: list[_Result] = []
        for (work, _), chunk, surprisal in zip(chosen, chunks, forward.surprisal, strict=True):
            results.append((work, chunk, list(islice(rows, chunk.outputs)), surprisal))
            work.longest_wait = max(work.longest_wait, self._step_number - work.served)
            work.served = self._step_number
            work.ledger.extend(len(chunk.tokens) - chunk.drafts)
            if surprisal is not None:
                work.learn(chunk.start + 1, surprisal)
        if forward.attention:
            for (work, _), looked in zip(chosen, forward.attention, strict=True):
                if looked is not None:
                    work.ledger.attended(looked.number, looked.mass)
        return results, forward.seconds

    def _chunks(self, chosen: list[Share], events: list[Event]) -> tuple[list[Share], list[Chunk]]:
        """What each sequence is fed; those that a controller fails drop out."""
        chunks = []
        for work, tokens in chosen:
            if work.fault is None:
                try:
                    chunks.append(self._chunk(work, tokens))
                except ControllerFault as error:
                    work.fault = failure(work, error)
        if len(chunks) < len(chosen):
            chosen = [share for share in chosen if share[0].fault is None]
            self._fail_faulty(events)
        return chosen, chunks

    def _chunk(self, work: Work, tokens: int) -> Chunk:
        assert work.slot is not None
        return Chunk(
            slot=work.slot,
            start=work.ledger.length,
            tokens=work.upcoming(tokens),
            sample=work.prompt_left <= tokens,
            following=work.following(tokens),
            drafts=len(work.draft),
            attend=self._loops.selected(work),
            score=self._loops.watches(work),
        )

    def _one_by_one(
        self, chosen: list[Share], error: Exception, events: list[Event]
    ) -> tuple[list[_Result], float]:
        self._note("retried", chosen[0][0], reason=str(error), rows=len(chosen))
        results: list[_Result] = []
        total = 0.0
        if self._journal is not None:
            self._journal.apart = True
        for pair in chosen:
            alone, seconds = self._forward([pair], events)
            total += seconds
            if alone:
                shape = step_shape(self.backend, [chunk for _, chunk, _, _ in alone])
                self.backend.cost.observe(shape, seconds)
            results += [(w, c, [_kept(row) for row in rows], s) for w, c, rows, s in alone]
        return results, total

    def _resync(self, work: Work, error: Exception, events: list[Event]) -> None:
        """Believe the engine about what it holds, and end the request that it refused."""
        if work.slot is not None:
            try:
                held = self.backend.held(work.slot)
            except Exception:  # noqa: BLE001 - of anybody's code
                held = np.zeros(0, np.int64)
            work.ledger.resync(held)
        if not isinstance(error, EntropicError):
            error = DecodeError(-1, f"the engine raised {error!r}")
        self._fail(work, error, events)
        self._leave(work)  # now: others may need its cells

    # -- sample -----------------------------------------------------------------------------------

    def _sample(self, results: Sequence[_Result], events: list[Event]) -> tuple[float, int]:
        """Draw the tokens of a step.

        Returns
        -------
        tau : float
            The entropic time that passed, nats.
        accepted : int
            Tokens that came of guesses.
        """
        if self._speculator is None:
            rows = [(work, logits[0]) for work, _, logits, _ in results if logits]
            return (self._draw(rows, events) if rows else 0.0), 0
        runs = [(work, logits) for work, _, logits, _ in results if logits]
        drawn = len(self.trace.tokens)
        tau = self._speculator.verify(runs, lambda rows: self._draw(rows, events))
        accepted = len(self.trace.tokens) - drawn - len(runs)
        for work, error in self._speculator.take_back(
            work for work, _ in runs if work.reason is None
        ):
            self._resync(work, error, events)
        return tau, accepted

    def _draw(self, rows: list[Row], events: list[Event]) -> float:
        """Draw one token for each row. Returns the entropic time that passed, nats."""
        works = [work for work, _ in rows]
        for work, row in rows:
            if len(work.tokens) < work.request.min_tokens:
                row[self.backend.ends] = -np.inf
        sampled = self._loops.step(works, [row for _, row in rows])
        now = self.backend.now()
        accounts = [(w.number, len(w.tokens), w.ledger.cells, w.tau) for w in works]
        record = Record(self._step_number, now, accounts, sampled)
        self.trace.tokens.append(len(works), self._loops.columns, record)
        tau = 0.0
        reading = sampled.reading
        rows_of = zip(
            works,
            sampled.tokens,
            reading.raw_entropy.tolist(),
            reading.raw_surprisal,
            sampled.passed,
            strict=True,
        )
        for place, (work, token, entropy, surprisal, nats) in enumerate(rows_of):
            if token < 0:
                reason = "the model gave no usable distribution (all masked, NaN or +inf)"
                error = sampled.errors.get(place) or LogitsError(work.id, reason)
                self._fail(work, error, events)
                continue
            work.raw_entropy = entropy
            work.tau += nats
            tau += nats
            if work.survey is not None:
                work.ledger.record(work.ledger.length, np.array([surprisal]))
            self._take(work, token, events)
        return tau

    def _take(self, work: Work, token: int, events: list[Event]) -> None:
        work.tokens.append(token)
        if work.first_token is None:
            work.first_token = self.backend.now()
        if self.backend.is_end(token) and not work.request.ignore_eos:
            events.append(Token(work.id, token, ""))
            self._finish(work, "end", events)
            return
        text = work.text.feed(self.backend.piece(token))
        events.append(Token(work.id, token, text))
        if work.text.stopped:
            self._finish(work, "stop", events)
        elif work.decode_left < 1:
            full = work.limit < (work.request.max_tokens or 0)
            self._finish(work, "context" if full else "length", events)

    def _finish(self, work: Work, reason: FinishReason, events: list[Event]) -> None:
        """End it. It leaves once the step's tokens are drawn: until then the step can be taken back."""
        work.reason = reason
        work.finished = self.backend.now()
        self._leaving.append(work)
        if reason != "failed":
            events.append(Finished(work.id, reason, work.text.finish()))
        self._note(reason, work, tokens=len(work.tokens))

    def _fail(self, work: Work, error: Exception, events: list[Event]) -> None:
        work.error = error
        events.append(Failed(work.id, error))
        self._finish(work, "failed", events)

    def _depart(self) -> None:
        while self._leaving:
            self._leave(self._leaving[0])

    def _leave(self, work: Work) -> None:
        self._seats.leave(work)
        work.swapped = None
        self._roster.remove(work)
        self._live = [other for other in self._live if other is not work]
        self._unfinished.pop(work.id, None)
        self._past += work.ledger.length
        self.done.append(work)
        self._leaving.remove(work)

    # -- record -----------------------------------------------------------------------------------

    def _prune(self, events: list[Event]) -> None:
        # Asked of a short one, the controller would first have to be brought up to date.
        least = self.config.pruning.min_tokens
        for work in [w for w in self._live if w.ledger.length >= least]:
            try:
                if self.dry_run:
                    would_prune(work, self.config.pruning, self._note)
                else:
                    prune(work, self.config.pruning, self.backend, self._note)
            except ControllerFault as error:
                work.fault = failure(work, error)
            except CacheError as error:
                self._resync(work, error, events)
        self._fail_faulty(events)

    def _fail_faulty(self, events: list[Event]) -> None:
        """End the requests that a controller or the engine has failed since this was last asked."""
        for work in [w for w in self._live if w.fault is not None]:
            assert work.fault is not None
            self._fail(work, work.fault, events)

    def _note(self, what: str, work: Work, **details: Any) -> None:
        self.trace.event(self._step_number, self.backend.now(), what, work.id, **details)

    def _record_step(self, tail: _Tail) -> None:
        weights = self.backend.cost.weights
        shape = tail.shape
        if tail.apart:  # each was learnt from by itself
            shape = shape._replace(passes=shape.rows)
        else:
            self.backend.cost.observe(shape, tail.seconds)
        record = _StepRecord(
            self._step_number,
            tail.clock,
            shape,
            weights,
            tail.seconds,
            self.backend.now() - tail.clock,
            sum(w.ledger.cells for w in self._live if w.slot is not None),
            self._roster.waiting,
            tail.tau,
            tail.accepted,
            tail.reason,
        )
        self.trace.steps.append(1, _step_columns, record)

    @property
    def steps(self) -> int:
        """Steps done."""
        return self._step_number

    @steps.setter
    def steps(self, number: int) -> None:
        """Count on from where an earlier part of the run stopped."""
        self._step_number = number

    # -- saving -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write every unfinished request, its KV and its controller states to one file."""
        with self._turn:
            self._mend()
            persistence.save(self, Path(path))

    def close(self) -> None:
        """Free the backend; what was done stays readable, and anything else is `EngineClosed`.

        Raises
        ------
        EngineBusy
            If another thread is in the engine.
        """
        if self._turn.closed:
            return
        with self._turn:
            self.backend.close()
            self._turn.closed = True

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Tail(NamedTuple):
    """What is left of a step once its tokens are drawn: to prune, and to write it down."""

    clock: float
    shape: Shape
    seconds: float
    """In the backend."""
    tau: float
    accepted: int
    reason: str
    apart: bool


class _StepRecord(NamedTuple):
    step: int
    time: float
    shape: Shape
    weights: Array
    """Of the cost model, when the step was planned."""
    forward: float
    seconds: float
    cells: int
    waiting: int
    tau: float
    accepted: int
    reason: str


def _step_columns(records: Sequence[_StepRecord]) -> dict[str, Any]:
    columns: dict[str, Any] = dict(
        zip(_StepRecord._fields, zip(*records, strict=True), strict=True)
    )
    shapes, weights = columns.pop("shape"), columns.pop("weights")
    columns["predicted"] = [shape.seconds(own) for shape, own in zip(shapes, weights, strict=True)]
    return columns | dict(zip(Shape._fields, zip(*shapes, strict=True), strict=True))


def _kept(logits: Any) -> Any:
    """A copy of a row of logits, an array or a tensor on the device."""
    return logits.copy() if isinstance(logits, np.ndarray) else logits.clone()


_Result = tuple[Work, Chunk, list[Array], Array | None]
"""A sequence, what it was fed, the logits to draw from, and its prompt surprisals."""
