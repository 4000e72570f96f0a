"""The entropic index: expected entropy reduction per unit of cost, over sets of sequences."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from entropic_control.controllers.base import Array, Linear
from entropic_control.controllers.priority.base import (
    Candidates,
    Cost,
    Forced,
    Limits,
    Plan,
    Priority,
    eligible,
    fill,
)
from entropic_control.controllers.priority.deadlines import pressing, tokens_in_time
from entropic_control.controllers.priority.flow import (
    FlowState,
    flow_init,
    flow_linear,
    flow_update,
)
from entropic_control.controllers.signals import Reading

_HOPELESS = 1e-3
"""Tokens that a request counts for which can have none in time: served when nothing else can be."""

_BEST = "best gain per cost"

_CLEARLY = 2.0
"""A swap must save this many times what it costs, and serve one worth this many times the other:
gains are noisy, and a swap that they undo soon is lost."""

_ALIKE = 3
"""A prompt joins rows of at least a third of its length: pruning may have halved theirs."""


class EntropicPriority(Priority):
    """pi = E[dH] / (alpha C + beta M + gamma L), an index rule of the c-mu and Gittins family.

    C is the predicted seconds of the step, M the KV cells held and L the seconds until the request is
    done (or due). Decoding rows are served in sets of similar length, because an engine that pads
    attention to its longest row makes a mixed set dearer than its parts; the index of a set is the sum
    of the gains over the cost of the whole step. A prompt is worth the gain of all its tokens
    over the cost of prefill and decode together, the Gittins index of that job.

    A deadline counts for what it cuts off: a request is worth the tokens that it can still have in time,
    and the best of those that would lose some by waiting is served in every step, so that a prompt
    is not read for an answer that is then cut off. What cannot be had in time comes last.

    Parameters
    ----------
    alpha, beta, gamma : float
        Weights of seconds, of KV cells and of remaining seconds.
    filter : float
        EMA coefficient of the flow.
    prior : float
        Gain per token before anything was measured, of any sequence, nats.
    entropy_floor : float
        Entropies are not believed below this, nats.
    company : float
        Rows that a decoding set should have: a smaller one goes before a prompt of about its length,
        or one that is cheaper decoded along than alone, only if its index is higher in proportion, so
        that such prompts join it. 1 is shortest first, which suits the mean latency of a few requests;
        prompts of 2,000 to 4,000 tokens then decode a seventh slower all together.
    patience : int
        Steps after which a waiting request must be served next, the longest waiting first. With n
        live requests none waits longer than patience + n steps.
    """

    overtaking: ClassVar[bool] = True
    kind: Literal["entropic"] = "entropic"
    alpha: float = Field(1.0, gt=0)
    beta: float = Field(1e-6, ge=0)
    gamma: float = Field(1e-3, ge=0)
    filter: float = Field(0.05, gt=0, le=1)
    prior: float = Field(0.5, gt=0)
    entropy_floor: float = Field(0.02, gt=0)
    company: float = Field(8.0, ge=1)
    patience: int = Field(512, ge=1)

    def init(self, rows: int = 1, *, dtype: Any = np.float64) -> FlowState:
        return flow_init(rows, self.prior, dtype)

    def update(self, state: FlowState, reading: Reading) -> tuple[Array, FlowState]:
        state = flow_update(state, reading, self.filter, self.entropy_floor)
        return self.gain(state), state

    def linearize(self, varentropy: float = 1.0) -> Linear:
        return flow_linear(self.filter)

    def gain(self, state: FlowState) -> Array:
        """E[dH] of a step, nats, never zero: a certain sequence still has to be finished."""
        return np.maximum(state.flow, self.entropy_floor)

    def index(self, state: FlowState, candidates: Candidates, cost: Cost) -> Array:
        return self._jobs(state, candidates, cost).worth

    def pays(
        self, state: FlowState, candidates: Candidates, cost: Cost, coming: int, going: int
    ) -> bool:
        """By the exchange argument behind the index: each delays the other's gain by its own seconds.

        The sooner done with the higher gain a second goes first, if that saves clearly more than the swap
        costs, which delays everybody's gain. Of equals the one under way has less left: it stays.
        """
        job = self._jobs(state, candidates, cost)
        steps = np.minimum(candidates.decode_left, job.gain / job.flow)
        seconds = (
            job.prefill + steps * job.alone
        )  # alone: whose company is whose would depend on both
        saved = job.gain[coming] * seconds[going] - job.gain[going] * seconds[coming]
        rate = job.gain / seconds
        lost = cost.swap(int(candidates.cells[going])) * job.gain.sum()
        sooner = seconds[coming] < seconds[going] and rate[coming] > _CLEARLY * rate[going]
        return bool(sooner and saved > _CLEARLY * lost)

    def plan(self, state: FlowState, candidates: Candidates, cost: Cost, limits: Limits) -> Plan:
        only = self._only_set(state, candidates, cost, limits)
        if only is not None:
            return _decoding(only, _BEST)
        job = self._jobs(state, candidates, cost)
        order = np.lexsort((candidates.arrival, -job.worth))
        order = eligible(order, candidates, limits.free_slots)
        must, forced, reason = self._must(job, candidates, cost, limits)
        if must.size and must[0] not in order:
            order = np.concatenate([must, order])  # without a slot: the engine makes one free
        decoding = order[candidates.prompt_left[order] == 0]
        prompts = order[candidates.prompt_left[order] > 0]
        group, rate = self._best_group(
            self.gain(state), job.standing, candidates, cost, decoding, must, limits.step_tokens
        )
        if must.size:
            # First in the plan: it goes ahead if cells or slots are short.
            chosen = _led_by(must[0], prompts)
            group = _led_by(must[0], group)
        elif group.size:
            worth = job.worth[prompts] * self._company_factor(job, candidates, cost, prompts, group)
            chosen = prompts[worth > rate]
        else:
            chosen = self._with_company(job, candidates, cost, prompts)
        if chosen.size:
            rows, tokens = fill(chosen, candidates, limits.step_tokens)
            return Plan(rows, tokens, f"prompts: {reason}", forced)
        return _decoding(group, reason, forced)

    def _only_set(
        self, state: FlowState, c: Candidates, cost: Cost, limits: Limits
    ) -> Array | None:
        """The set that runs whatever anything is worth, or None: then there is something to weigh.

        All that hold slots decode, in one set, nobody else can have a slot and nobody must go first: most
        steps of a batch are such steps, and weighing costs a quarter of a millisecond.
        """
        if (limits.free_slots and not c.seated.all()) or (c.waited >= self.patience).any():
            return None
        if c.prompt_left[c.seated].any() or not np.isinf(c.slack).all():
            return None
        rows = by_length(c.seated.nonzero()[0], self.gain(state), c)
        sets = parted(c.cells[rows], cost, limits.step_tokens)
        return rows if len(sets) == 1 else None

    def _must(
        self, job: _Jobs, candidates: Candidates, cost: Cost, limits: Limits
    ) -> tuple[Array, Forced, str]:
        """The request that goes first whatever it is worth, or none; for what; why the step is made."""
        late = overdue(candidates, self.patience)[:1]
        if late.size:
            return late, "patience", f"waited {int(candidates.waited[late[0]])} steps"
        due = self._pressing(job, candidates, cost, limits)
        if due.size:
            return due, "deadline", "a deadline nears"
        return due, "", _BEST

    def _pressing(self, job: _Jobs, c: Candidates, cost: Cost, limits: Limits) -> Array:
        """The best request that loses tokens to its deadline unless it is served now, or none."""
        if np.isinf(c.slack).all():
            return np.zeros(0, np.intp)
        chunk = float(cost.prefill(np.array(limits.step_tokens), np.array(0)))
        rows = np.flatnonzero(pressing(c, job.prefill, job.alone, job.company, chunk))
        return rows[np.lexsort((c.arrival[rows], -job.worth[rows]))][:1]

    def _with_company(self, job: _Jobs, c: Candidates, cost: Cost, prompts: Array) -> Array:
        """The best prompt, and those that it gains by waiting for, as if it were decoding already.

        Reading costs by the token and not by the step, so longer prompts that would only fill its step
        are left for later.
        """
        first, rest = prompts[:1], prompts[1:]
        seconds = self.alpha * job.alone[first] + job.standing[first]
        worth = job.worth[rest] * self._company_factor(job, c, cost, rest, first)
        return np.concatenate([first, rest[worth > (job.flow[first] / seconds).sum()]])

    def _company_factor(
        self, job: _Jobs, c: Candidates, cost: Cost, prompts: Array, group: Array
    ) -> Array:
        """How much more a prompt is worth because it would join a small set, shape (prompts,)."""
        count, length = np.full(len(prompts), len(group)), job.length[prompts]
        longest = np.full(len(prompts), job.length[group].max(initial=0))
        apart = cost.decode(count, longest) + job.alone[prompts]
        saved = apart - cost.decode(count + 1, np.maximum(length, longest))
        # Rows of one length save all that a step costs by itself.
        most = cost.decode(count, longest) + cost.decode(np.ones_like(count), longest)
        joins = saved > (most - cost.decode(count + 1, longest)) / 4
        joins |= length <= _ALIKE * longest
        return np.where(joins, max(self.company / max(len(group), 1), 1.0), 1.0)

    def _jobs(self, state: FlowState, candidates: Candidates, cost: Cost) -> _Jobs:
        """Gain and cost of finishing each request, decode cost taken as its share of a batch."""
        c = candidates
        length = c.cells + c.prompt_left
        decoding = c.prompt_left == 0
        reach = length + c.decode_left  # rows up to here are company on the way
        peers = (decoding & (c.cells <= reach[:, None])).sum(axis=1)
        peers = np.maximum(peers - decoding, 0)
        share = cost.decode(peers + 1, length) - np.where(
            peers > 0, cost.decode(np.maximum(peers, 1), length), 0.0
        )
        share = np.maximum(share, 1e-9)
        prefill = np.where(decoding, 0.0, cost.prefill(c.prompt_left, c.cells))
        alone = cost.decode(np.ones_like(length), length)
        steps = np.maximum(tokens_in_time(c, prefill, alone), _HOPELESS)
        remaining = prefill + steps * share
        standing = self._standing(c, remaining, length)
        # A prompt that joins the rows at work shares the fixed cost of their steps; later it may have
        # to pay that alone. Without this credit the running rows always look dearer to delay.
        credit = np.where(decoding, 0.0, np.minimum(steps * (alone - share), 0.9 * remaining))
        total = self.alpha * (remaining - credit) + steps * standing
        company = cost.decode(peers + 1, length)
        flow = self._expected(state)
        return _Jobs(flow * steps, total, standing, prefill, alone, company, flow, length)

    def _expected(self, state: FlowState) -> Array:
        """Gains in a queue: a sequence that was never measured is taken for an average one."""
        gain, unknown = self.gain(state), np.isnan(state.entropy)
        if unknown.all() or not unknown.any():
            return gain
        return np.where(unknown, gain[~unknown].mean(), gain)

    def _standing(self, c: Candidates, remaining: Array, length: Array) -> Array:
        """The part of the cost that does not depend on the set: memory and latency."""
        return self.beta * length + self.gamma * np.minimum(remaining, np.maximum(c.slack, 0.0))

    def _best_group(
        self,
        gain: Array,
        standing: Array,
        c: Candidates,
        cost: Cost,
        decoding: Array,
        must: Array,
        room: int,
    ) -> tuple[Array, float]:
        """The set of decoding rows with the highest index, and that index.

        All rows are parted, by length, into the sets that cost the fewest seconds together, and the
        best of those sets is served: none is dearer than its rows one by one, and no row is left out
        for a low gain, which would only pay the fixed cost of a step again later. (Both were tried:
        choosing rows by gain shrinks the set to one row at a time, and serving everything up to the
        best length can cost more than its rows apart.)
        """
        if not decoding.size:
            return decoding, 0.0
        rows = by_length(decoding, gain, c)
        standing, gain = standing[rows], gain[rows]
        sets = parted(c.cells[rows], cost, room)
        if must.size and must[0] in rows:
            place = int(np.flatnonzero(rows == must[0])[0])
            sets = [(start, stop) for start, stop in sets if start <= place < stop]
        starts, stops = np.array(sets).T
        seconds = cost.decode(stops - starts, c.cells[rows][stops - 1])
        gains, stands = (np.add.reduceat(column, starts) for column in (gain, standing))
        rate = gains / (self.alpha * seconds + stands)
        best = int(np.argmax(rate))
        return rows[starts[best] : stops[best]], float(rate[best])


class _Jobs(NamedTuple):
    gain: Array
    cost: Array
    standing: Array
    prefill: Array
    """Seconds to read the rest of the prompt."""
    alone: Array
    """Seconds of a step that decodes this request only."""
    company: Array
    """Seconds of a step that decodes it and its peers."""
    flow: Array
    """Gain of a token, nats."""
    length: Array
    """Cells once the prompt is read."""

    @property
    def worth(self) -> Array:
        return np.asarray(self.gain / self.cost)


def _decoding(rows: Array, reason: str, forced: Forced = "") -> Plan:
    return Plan(rows, np.ones(len(rows), np.intp), f"decoding set: {reason}", forced)


def by_length(rows: Array, gain: Array, c: Candidates) -> Array:
    """`rows` from the shortest to the longest; of equals the highest gain first, then the earliest."""
    return rows[np.lexsort((c.arrival[rows], -gain[rows], c.cells[rows]))]


def _led_by(row: int, rows: Array) -> Array:
    """`rows` with `row` first, or none of them if it is not among them."""
    if row not in rows:
        return rows[:0]
    return np.concatenate([[row], rows[rows != row]])


def overdue(candidates: Candidates, patience: int) -> Array:
    """Rows that waited `patience` steps or more, the longest waiting first."""
    late = np.flatnonzero(candidates.waited >= patience)
    return late[np.lexsort((candidates.arrival[late], -candidates.waited[late]))]


def parted(cells: Array, cost: Cost, room: int) -> list[tuple[int, int]]:
    """The cheapest way to decode rows of rising length, in sets of at most `room`.

    Parameters
    ----------
    cells : array, shape (n,)
        Cells of the rows, rising.

    Returns
    -------
    list of (start, stop)
        Neighbouring rows belong together: swapping a longer row out of a set for a shorter one never
        makes it dearer. Found by dynamic programming over the last set.
    """
    count = len(cells)
    rows = np.arange(1, count + 1) - np.arange(count)[:, None]  # of the set [start, last]
    seconds = np.where(rows <= room, cost.decode(np.maximum(rows, 1), cells), np.inf).T.tolist()
    least, first = [0.0], []
    for last_set in seconds:
        total = [before + own for before, own in zip(least, last_set, strict=False)]
        best = min(total)
        # Of equals the shortest, so that earlier sets are full.
        first.append(max(start for start, s in enumerate(total) if s <= best * (1 + 1e-12)))
        least.append(best)
    sets: list[tuple[int, int]] = []
    stop = count
    while stop:
        sets.insert(0, (first[stop - 1], stop))
        stop = first[stop - 1]
    return sets
