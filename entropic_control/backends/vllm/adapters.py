"""The two shapes of vLLM's logits processors, thin around one `Book`. Neither imports vLLM nor torch.

Version 1 of vLLM's interface tells of changes of the batch and hands over rows in batch order; version 2
(the default runner on GPUs) gives each request a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from entropic_control.backends.vllm import compat
from entropic_control.backends.vllm.bookkeeping import Book, Seat
from entropic_control.backends.vllm.config import Settings
from entropic_control.backends.vllm.cuts import cuts_of
from entropic_control.backends.vllm.measuring import measure
from entropic_control.backends.vllm.own import Own, default_controller
from entropic_control.controllers.base import Array
from entropic_control.controllers.signals import Reading, rows_of
from entropic_control.errors import CapabilityError

COLDEST = 1e-4
"""Temperatures below this are this: a row divided by less may overflow."""

Readings = dict[Hashable, tuple[float, ...]]
"""Of a step, by request: raw entropy, entropy, temperature and target (NaN without one), in nats."""

_loaded: WeakValueDictionary[int, Adapter] = WeakValueDictionary()


def at_work(vllm_config: Any) -> Adapter | None:
    """The adapter that this process runs for a configuration of vLLM's."""
    return _loaded.get(id(vllm_config))


class Adapter:
    """What both versions share: a book, and sampling from it.

    Parameters
    ----------
    vllm_config : vllm.config.VllmConfig
        vLLM's configuration, with our settings in `additional_config`.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config  # kept alive, so that its identity stays its own
        settings = Settings.found_in(vllm_config.additional_config)
        speculating = vllm_config.speculative_config is not None
        if settings is not None and speculating:
            raise CapabilityError(compat.SPECULATION)
        default = settings.temperature if settings else default_controller()
        self._raw = settings is not None and settings.reads_entropies
        self.book = Book(default, enabled=settings is not None, observe=self._raw)
        self._last: tuple[list[Seat], Callable[[], Reading], Array] | None = None
        # Another instance may do the work, and an installed package must not stop a vLLM that speculates.
        self.idle = speculating or _loaded.setdefault(id(vllm_config), self) is not self

    def _take(self, row: int, params: Any, key: Any, tokens: Any) -> bool:
        if self.idle:
            return False
        own = Own.read(params.extra_args)
        taken = self.book.enter(row, key, own, tokens, params.temperature)
        if taken:
            self.book.at(row).cuts = cuts_of(params)
        return taken

    def _control(self, logits: Any, rows: list[int], at: list[int], emitting: Array | None) -> Any:
        """Measure `logits[at]`, the logits of the requests in `rows`, and temper them in place."""
        temperature = np.maximum(self.book.temperatures(rows), COLDEST)
        whole = at == list(range(logits.shape[0]))
        seats = [self.book.at(row) for row in rows]
        cuts = [seat.cuts for seat in seats]
        read = measure(logits if whole else logits[at], temperature, self._raw, cuts)
        self._last = (seats, read, temperature)
        counted = list(range(len(rows))) if emitting is None else np.flatnonzero(emitting).tolist()
        if len(counted) == len(rows):
            self.book.measured(rows, read)
        elif counted:
            self.book.measured(
                [rows[i] for i in counted], lambda: rows_of(read(), np.array(counted))
            )
        return temperature

    def _scale(self, rows: list[int], temperature: Array) -> Array:
        """What the rows are multiplied by, so that after vLLM's own division they are z / T."""
        seats = [self.book.at(row) for row in rows]
        asked = np.array([seat.asked for seat in seats])
        controlled = np.array([seat.controller is not None for seat in seats])
        return np.where(controlled, asked / temperature, 1.0)

    def take_readings(self) -> Callable[[], Readings]:
        """Gives the readings of the last step, once; on an accelerator the call waits for the device."""
        last, self._last = self._last, None
        if last is None:
            return dict
        seats, read, temperature = last

        def readings() -> Readings:
            reading = read()
            columns = zip(
                seats,
                reading.valid.tolist(),
                reading.raw_entropy.tolist(),
                reading.entropy.tolist(),
                temperature.tolist(),
                strict=True,
            )
            return {
                seat.key: (raw, entropy, t, seat.target)
                for seat, valid, raw, entropy, t in columns
                if valid
            }

        return readings


class ProcessorV1(Adapter):
    """For the V1 model runner, whose rows are the batch and whose prompts in progress have rows too."""

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        super().__init__(vllm_config)

    def is_argmax_invariant(self) -> bool:
        """False, so that it sees the logits before vLLM divides them by the request's temperature."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the batch: what was removed, added and moved, in this order."""
        self.book.settle()
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.book.leave(row)
        for row, params, _, output in batch_update.added:
            # The list of a request's output is one object while the request lives, so it stands in
            # for the name where our scheduler is not at work to give one.
            tag = compat.tag_of(params)
            self._take(row, params, ("list", id(output)) if tag is None else tag, output)
        for source, target, direction in batch_update.moved:
            self.book.move(source, target, swap=compat.is_swap(direction))

    def apply(self, logits: Any) -> Any:
        """Temper the rows of controlled requests, in place."""
        rows = self.book.rows(logits.shape[0])
        if not rows:
            return logits
        temperature = self._control(logits, rows, rows, None)
        return _multiplied(logits, rows, self._scale(rows, temperature))


class ProcessorV2(Adapter):
    """For the V2 model runner, where a request keeps its slot and rows come in any order."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        super().__init__(vllm_config)
        self._states = req_states

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """A request takes a slot, which may have been another's."""
        tag = compat.tag_of(sampling_params)
        key = object() if tag is None else tag
        return self._take(req_idx, sampling_params, key, None)

    def apply_staged_writes(self) -> None:
        """Let the last step's readings move the states, now that the device is done with it."""
        self.book.settle()

    def apply(self, logits: Any, ctx: Any) -> Any:
        """Temper the rows of controlled requests, in place."""
        slots = ctx.idx_mapping_np.tolist()
        at = [place for place, slot in enumerate(slots) if slot in self.book]
        if self.idle or not at:
            return logits
        rows = [slots[place] for place in at]
        # Prompts in progress have rows too; what they sample is thrown away.
        complete = self._states.prefill_len.np[rows] <= ctx.seq_lens_upper_bound_np[at]
        temperature = self._control(logits, rows, at, complete)
        return _multiplied(logits, at, self._scale(rows, temperature))


def _multiplied(logits: Any, at: list[int], scale: Array) -> Any:
    if (scale == 1.0).all():
        return logits
    factor = np.ones(logits.shape[0], np.float32)
    factor[at] = scale
    column = logits.new_tensor(factor)[:, None]
    return logits.mul_(column)
