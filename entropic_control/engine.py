"""The decode loop: schedule, forward, measure, update, sample, account, prune. One for every backend."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
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
    CapabilityError,
    DecodeError,
    EngineBusy,
    EngineClosed,
    LogitsError,
    NoRoom,
    RequestError,
)
from entropic_control.intake import Intake, rejected
from entropic_control.loops import Loops, Record
from entropic_control.pruner import prune, would_prune
from entropic_control.report import Report
from entropic_control.request import Event, Failed, Finished, FinishReason, Request, Token
from entropic_control.requirements import require
from entropic_control.seats import Seating, Seats, Share
from entropic_control.sequence import Sequence as Work
from entropic_control.speculator import Row, Speculator
from entropic_control.trace import Trace
from entropic_control.weakly import weakly


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
        self._live: list[Work] = []
        self._coming: list[Work] = []
        self._seats = Seats(self.backend, weakly(self._preempted))
        self._loops = Loops(config, self.backend, dry_run=dry_run)
        self._intake = Intake(config, self.backend, self._loops)
        self._step_number = 0
        self._cancelled: set[str] = set()
        self._turn = _Turn()
        self._order = FirstCome() if dry_run else config.priority
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
        """Queue a request; returns its id.

        Raises
        ------
        PromptError
            If the prompt is empty, or leaves no room in the context.
        ConfigError
            If the id is taken, or a per-request setting is unknown or out of range.
        """
        with self._turn:
            return self._submit(request)

    def _submit(self, request: Request | Prompt) -> str:
        work = self._intake.accepted(request, self.trace.names)
        work.arrived = self.backend.now() + work.request.arrive
        self._queue(work)
        return work.id

    def prepare(self, request: Request, prompt: Array) -> Work:
        """A sequence with fresh controller states, for a request with every field set.

        Raises
        ------
        PromptError
            If the prompt leaves no room in the context.
        ConfigError
            If the id is taken or a per-request setting is not one of the controller's.
        """
        return self._intake.sequence(request, prompt, self.trace.names)

    def adopt(self, work: Work) -> None:
        """Queue a sequence that was at work in another engine."""
        with self._turn:
            self._loops.adopt(work)
            self._queue(work)

    def _queue(self, work: Work) -> None:
        self.trace.names.append(work.id)
        self._coming.append(work)
        self._coming.sort(key=lambda w: (w.arrived, w.number))

    @property
    def unfinished(self) -> list[Work]:
        """The sequences that are not done, in order of arrival."""
        return sorted(self._live + self._coming, key=lambda w: w.number)

    def cancel(self, request: str) -> None:
        """End a request at the next step, from any thread; its tokens so far are kept."""
        self._cancelled.add(request)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self._live and not self._coming

    # -- running ----------------------------------------------------------------------------------

    def submit_all(self, requests: Iterable[Request | Prompt]) -> list[Failed]:
        """Queue requests; one that cannot be accepted fails by itself and is reported as failed."""
        failed = []
        for request in requests:
            try:
                self.submit(request)
            except RequestError as error:
                failed.append(self._reject(request, error))
        return failed

    def _reject(self, request: Request | Prompt, error: RequestError) -> Failed:
        work = rejected(request, error, self.trace.names)
        self.trace.names.append(work.id)
        work.arrived = work.finished = self.backend.now()
        self.done.append(work)
        self._note("failed", work, reason=str(error))
        return Failed(work.id, error)

    def stream(self, requests: Iterable[Request | Prompt] = ()) -> Iterator[Event]:
        """Submit requests and yield events until everything submitted is done."""
        self._turn.require_open()
        yield from self.submit_all(requests)
        while not self.idle:
            yield from self.step()

    def run(self, requests: Iterable[Request | Prompt] = ()) -> Report:
        """Submit requests, run everything to its end, and report on it.

        An idle engine forgets earlier runs first, so that the report is of this one and memory does
        not grow with the number of runs.
        """
        if self.idle:
            self.forget()
        for _ in self.stream(requests):
            pass
        return self.report()

    @property
    def progress(self) -> tuple[int, int]:
        """Prompt and generated tokens done, and those to be done at most."""
        now = [(w.ledger.length, len(w.prompt) + w.limit) for w in self.unfinished]
        past = sum(w.ledger.length for w in self.done)
        return past + sum(n for n, _ in now), past + sum(n for _, n in now)

    def forget(self) -> None:
        """Drop the finished requests and the trace; ids may be used again.

        Raises
        ------
        EngineBusy
            If requests are unfinished: their rows in the trace would lose their names.
        """
        if not self.idle:
            raise EngineBusy(
                "requests are unfinished: run or cancel them before forgetting the rest"
            )
        self.done = []
        self.trace = Trace()

    def report(self) -> Report:
        """What was done so far."""
        return Report.of(self.done, self.trace, self.backend.capabilities.name)

    def step(self) -> list[Event]:
        """One turn of the loop; returns what happened.

        Raises
        ------
        EngineBusy
            If another thread is in the engine.
        """
        with self._turn:
            return self._step()

    def _step(self) -> list[Event]:
        self._await_arrival()
        clock = self.backend.now()
        events: list[Event] = []
        self._admit(clock, events)
        if not self._live:
            return events
        seating = self._schedule(events)
        if not seating.shares:
            return events
        shares = seating.shares if len(seating.shares) == 1 else self._side_by_side(seating.shares)
        if self._speculator is not None:
            self._speculator.propose(shares)
        results, engine_seconds = self._forward(shares, events)
        shape = step_shape(self.backend, [chunk for _, chunk, _, _ in results])
        tau, accepted = self._sample(results, events)
        self._prune()
        self._record_step(clock, shape, engine_seconds, tau, accepted, seating.reason)
        self._step_number += 1
        return events

    # -- schedule ---------------------------------------------------------------------------------

    def _await_arrival(self) -> None:
        if not self._live and self._coming:
            self.backend.sleep(max(self._coming[0].arrived - self.backend.now(), 0.0))

    def _admit(self, now: float, events: list[Event]) -> None:
        while self._coming and self._coming[0].arrived <= now:
            work = self._coming.pop(0)
            work.served = self._step_number
            self._live.append(work)
        for name in tuple(self._cancelled):  # another thread may add to it meanwhile
            self._cancelled.discard(name)
            for work in [w for w in self._live + self._coming if w.id == name]:
                self._finish(work, "cancelled", events)
        for work in [w for w in self._live if now >= w.deadline]:
            self._finish(work, "deadline", events)

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
        chunks = [self._chunk(work, tokens) for work, tokens in chosen]
        try:
            forward = self._loops.forward(self.backend, chunks)
        except DecodeError as error:
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
        self, chosen: list[Share], error: DecodeError, events: list[Event]
    ) -> tuple[list[_Result], float]:
        self._note("retried", chosen[0][0], reason=str(error), rows=len(chosen))
        results: list[_Result] = []
        total = 0.0
        for pair in chosen:
            alone, seconds = self._forward([pair], events)
            total += seconds
            results += [(w, c, [_kept(row) for row in rows], s) for w, c, rows, s in alone]
        return results, total

    def _resync(self, work: Work, error: DecodeError, events: list[Event]) -> None:
        """Believe the engine about what it holds, and end the request that it refused."""
        if work.slot is not None:
            work.ledger.resync(self.backend.held(work.slot))
        self._fail(work, error, events)

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
        for work, error in self._speculator.take_back(work for work, _ in runs):
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
        for work, token, entropy, surprisal, nats in rows_of:
            if token < 0:
                reason = "the model gave no usable distribution (all masked, NaN or +inf)"
                self._fail(work, LogitsError(work.id, reason), events)
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
        work.reason = reason
        work.finished = self.backend.now()
        self._seats.leave(work)
        work.swapped = None
        (self._live if work in self._live else self._coming).remove(work)
        self.done.append(work)
        self._note(reason, work, tokens=len(work.tokens))
        if reason != "failed":
            events.append(Finished(work.id, reason, work.text.finish()))

    def _fail(self, work: Work, error: Exception, events: list[Event]) -> None:
        work.error = error
        self._finish(work, "failed", events)
        events.append(Failed(work.id, error))

    # -- record -----------------------------------------------------------------------------------

    def _prune(self) -> None:
        # Asked of a short one, the controller would first have to be brought up to date.
        least = self.config.pruning.min_tokens
        for work in [w for w in self._live if w.ledger.length >= least]:
            if self.dry_run:
                would_prune(work, self.config.pruning, self._note)
            else:
                prune(work, self.config.pruning, self.backend, self._note)

    def _note(self, what: str, work: Work, **details: Any) -> None:
        self.trace.event(self._step_number, self.backend.now(), what, work.id, **details)

    def _record_step(
        self,
        clock: float,
        shape: Shape,
        engine_seconds: float,
        tau: float,
        accepted: int,
        reason: str,
    ) -> None:
        weights = self.backend.cost.weights
        self.backend.cost.observe(shape, engine_seconds)
        seated = [w.ledger.cells for w in self._live if w.slot is not None]
        record = _StepRecord(
            self._step_number,
            clock,
            shape,
            weights,
            engine_seconds,
            self.backend.now() - clock,
            sum(seated),
            len(self._live) - len(seated),
            tau,
            accepted,
            reason,
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


class _Turn:
    """Held by the one thread that is in the engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.closed = False

    def require_open(self) -> None:
        if self.closed:
            raise EngineClosed("the engine was closed: load another one")

    def __enter__(self) -> None:
        self.require_open()
        if not self._lock.acquire(blocking=False):
            raise EngineBusy(
                "the engine is in use by another thread: give each thread its own engine, or one "
                "thread the engine and a queue"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


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
