# mypy: allow-subclassing-any
"""vLLM's schedulers with the priority controller's order over their queues.

vLLM's own rules stay: what runs is decided token by token, running requests first, and KV pressure
preempts the last. The controller says who comes first and who is last.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from entropic_control.backends.cost import Shape
from entropic_control.backends.vllm import compat
from entropic_control.backends.vllm.config import Settings
from entropic_control.backends.vllm.decisions import Decisions
from entropic_control.backends.vllm.ranking import Ranked, Ranking, View
from entropic_control.backends.vllm.retention import retention
from entropic_control.controllers.base import Array
from entropic_control.controllers.priority.base import Limits
from entropic_control.errors import CapabilityError, ConfigError

SyncBase, AsyncBase = compat.scheduler_bases()

MARGIN = 2.0
"""How much higher a waiting request's index must be than a running one's to take its seat, which costs
the running one its prefill again."""

RERANK = 8
"""Steps after which requests are ranked anew where none came or went."""


class Entropic:
    """What both schedulers add to vLLM's; mixed in before it."""

    asynchronous = False

    # Of vLLM's scheduler.
    requests: dict[str, Any]
    running: list[Any]
    max_num_scheduled_tokens: int
    current_step: int

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = Settings.found_in(vllm_config.additional_config)
        if settings is None:
            raise ConfigError(
                "the entropic scheduler found no settings in additional_config: start vLLM with "
                "**entropic_control.backends.vllm.arguments(config)"
            )
        _check(vllm_config, settings, self.asynchronous)
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        self._settings = settings
        self._ranking = Ranking(settings.priority)
        self._decisions = Decisions(settings.backend.trace)
        self._retention = retention(settings, vllm_config.cache_config.block_size)
        self._freed: dict[str, tuple[Array, int]] = {}
        if self._retention is not None:
            compat.check_prunable(self)
        self._wishes: dict[str, int] = {}
        self._ranked: Ranked | None = None
        self._steps_since_ranked = 0
        self._tags = 0
        self._in_flight: deque[tuple[Shape, float]] = deque()
        self._updated_at = 0.0

    # -- what vLLM calls --------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """A request comes in."""
        if request.request_id not in self.requests:
            self._tags += 1
            compat.tag(request, f"{request.request_id}#{self._tags}")
            self._wishes[request.request_id] = request.priority
            self._ranking.arrive(request.request_id)
            self._ranked = None
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Order the queues, then let vLLM fill the step."""
        self._forget_finished()
        self._order()
        if self._settings.backend.voluntary_preemption:
            self._give_way()
        preemptions = {id: request.num_preemptions for id, request in self.requests.items()}
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._explain(output, preemptions)
        self._ranking.served(list(output.num_scheduled_tokens))
        self._in_flight.append((self._shape_of(output), time.monotonic()))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in what a step gave."""
        self._observe_cost()
        readings = _emitted(model_runner_output)
        self._ranking.heard({id: reading[0] for id, reading in readings.items()})
        self._decisions.measured(list(readings.values()))
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._prune()
        return outputs

    def shutdown(self) -> None:
        """Close the trace with the engine."""
        self._decisions.close()
        super().shutdown()  # type: ignore[misc]

    # -- order ------------------------------------------------------------------------------------

    def _forget_finished(self) -> None:
        requests = self.requests
        if len(self._wishes) != len(requests):
            self._wishes = {id: wish for id, wish in self._wishes.items() if id in requests}
            self._freed = {id: freed for id, freed in self._freed.items() if id in requests}
            self._ranking.forget_all_but(requests)
            self._ranked = None

    def _order(self) -> None:
        self._steps_since_ranked += 1
        if self._ranked is not None and self._steps_since_ranked < RERANK:
            return
        running, waiting = self.running, compat.waiting_requests(self)
        if not running and not waiting:
            return
        views = [_view(r, self._wishes[r.request_id], True) for r in running]
        views += [_view(r, self._wishes[r.request_id], False) for r in waiting]
        free = compat.seats(self) - len(running)
        limits = Limits(max(free, 0), self.max_num_scheduled_tokens)
        self._ranked = self._ranking.rank(views, limits)
        self._steps_since_ranked = 0
        place = {id: number for number, id in enumerate(self._ranked.ids)}
        for request in (*running, *waiting):
            request.priority = place[request.request_id]
        compat.reorder(self)

    def _give_way(self) -> None:
        """One running request at most gives its seat to a waiting one."""
        waiting = compat.waiting_requests(self)
        running = self.running
        if self._ranked is None or not waiting or len(running) < compat.seats(self):
            return
        first = min(waiting, key=lambda r: r.priority)
        last = max(running, key=lambda r: r.priority)
        index, waited = self._ranked.indices, self._ranked.waited
        first_id, last_id = first.request_id, last.request_id
        if first.priority > last.priority or first.num_preemptions:
            return
        if first.priority == 0 and "waited" in self._ranked.reason:
            reason = f"{first_id} waited {waited[first_id]} steps"
        elif index[first_id] > MARGIN * index[last_id]:
            reason = f"index {index[first_id]:.3g} of {first_id} against {index[last_id]:.3g}"
        else:
            return
        lost = last.num_computed_tokens
        compat.preempt(self, last, time.monotonic())
        self._note("gave way", last_id, to=first_id, reason=reason, tokens_lost=lost)

    # -- explain ----------------------------------------------------------------------------------

    def _explain(self, output: Any, preemptions: dict[str, int]) -> None:
        if self._ranked is None:
            return
        seated = {"admitted": [new.req_id for new in output.scheduled_new_reqs]}
        seated["resumed"] = list(output.scheduled_cached_reqs.resumed_req_ids)
        queue = compat.waiting_requests(self)
        for event, ids in seated.items():
            for id in ids:
                arrived = self.requests[id].arrival_time
                overtook = sum(request.arrival_time < arrived for request in queue)
                self._note(event, id, overtook=overtook, reason=self._ranked.reason)
        for id, before in preemptions.items():
            request = self.requests.get(id)
            if request is not None and request.num_preemptions > before:
                reason = "no KV blocks were left, and it was last in order"
                self._note("preempted", id, reason=reason, tokens_kept=request.num_output_tokens)

    def _note(self, event: str, id: str, **details: Any) -> None:
        """Record a decision with where the request stood in the order that it was made by."""
        assert self._ranked is not None
        standing = {
            "place": self._ranked.ids.index(id) if id in self._ranked.indices else None,
            "index": self._ranked.indices.get(id),
            "waited": self._ranked.waited.get(id),
        }
        self._decisions.note(self.current_step, event, id, **standing, **details)

    # -- cost and memory --------------------------------------------------------------------------

    def _shape_of(self, output: Any) -> Shape:
        """What a step does. Attention reads pages, so rows cost their own cells: the mean stands for
        the longest."""
        decoding, prompts, reads = [], 0, 0
        for id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[id]
            if tokens == 1 and request.num_output_tokens:
                decoding.append(request.num_computed_tokens)
            else:
                prompts += tokens
                reads += int(tokens * (request.num_computed_tokens - tokens / 2))
        mean = sum(decoding) // len(decoding) if decoding else 0
        return Shape(len(decoding), mean, prompts, max(reads, 0), 0)

    def _observe_cost(self) -> None:
        (shape, scheduled_at), now = self._in_flight.popleft(), time.monotonic()
        if shape.rows or shape.prompt_tokens:
            self._ranking.observe(shape, now - max(scheduled_at, self._updated_at))
        self._updated_at = now

    def _prune(self) -> None:
        if self._retention is None:
            return
        for request in self.running:
            if request.num_computed_tokens < request.num_tokens - 1:
                continue  # prefill reads whole sequences
            id, again = request.request_id, request.num_preemptions
            dropped = self._retention.dropped(request.num_computed_tokens + 1)
            before, when = self._freed.get(id, (None, again))
            if dropped is before and when == again:
                continue
            self._freed[id] = (dropped, again)
            freed = compat.free_blocks(self, id, dropped.tolist())
            if freed:
                self._decisions.freed(freed)
                reason = (
                    f"{self._settings.pruning.kind} at {request.num_computed_tokens + 1} tokens"
                )
                self._decisions.note(self.current_step, "pruned", id, blocks=freed, reason=reason)


class EntropicScheduler(Entropic, SyncBase):  # type: ignore[misc, valid-type]
    """vLLM's scheduler in the order of the priority controller."""


class EntropicAsyncScheduler(Entropic, AsyncBase):  # type: ignore[misc, valid-type]
    """The same over vLLM's asynchronous scheduler, which is one step ahead of the readings."""

    asynchronous = True


def _emitted(output: Any) -> dict[str, tuple[float, ...]]:
    """The readings that came with a step, of the requests that it gave a token."""
    named = {tag.rpartition("#")[0]: row for tag, row in getattr(output, "entropic", {}).items()}
    place = output.req_id_to_index
    return {
        id: row for id, row in named.items() if id in place and output.sampled_token_ids[place[id]]
    }


def _view(request: Any, wish: int, seated: bool) -> View:
    missing = request.num_tokens - request.num_computed_tokens
    decoding = request.num_output_tokens > 0 and missing <= 1
    return View(
        id=request.request_id,
        wish=wish,
        prompt_left=0 if decoding else max(missing, 1),
        decode_left=max(request.max_tokens - request.num_output_tokens, 1),
        cells=request.num_computed_tokens,
        seated=seated,
    )


def _check(vllm_config: Any, settings: Settings, asynchronous: bool) -> None:
    if vllm_config.speculative_config is not None:
        raise CapabilityError(compat.SPECULATION)
    scheduling = vllm_config.scheduler_config
    if bool(scheduling.async_scheduling) != asynchronous:
        have, want = ("does not run", "true") if asynchronous else ("runs", "false")
        raise CapabilityError(
            f"backend.async_scheduling is {want}, but vLLM {have} asynchronously here (on CPU, and with "
            f"some executors, it never does): set backend.async_scheduling to {not asynchronous}"
        )
    if scheduling.policy != "priority":
        raise CapabilityError(
            "the entropic scheduler needs scheduling_policy='priority'; "
            "entropic_control.backends.vllm.arguments(config) sets it"
        )
    if settings.backend.prune and vllm_config.cache_config.enable_prefix_caching:
        raise CapabilityError(
            "pruned KV blocks cannot be shared: start vLLM with enable_prefix_caching=False"
        )
