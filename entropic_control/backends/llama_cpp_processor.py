"""The temperature loop inside the `Llama` class of llama-cpp-python, as a logits processor."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from entropic_control.backends.caller import innermost
from entropic_control.backends.micro import MicroLoop, Source
from entropic_control.controllers.base import Array
from entropic_control.controllers.measurement import sample
from entropic_control.controllers.sampling import uniform
from entropic_control.controllers.softmax import load_compiled
from entropic_control.errors import CapabilityError, EntropicError, LogitsError

_INSTEAD = "give this processor truncation '{}' instead"
_PENALTY = "put a processor that does it in front of this one"
_BEHIND: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temp": (lambda t: t == 1, "leave temperature out, since the controller sets it"),
    "top_k": (lambda k: k <= 0, _INSTEAD.format("top_k")),
    "top_p": (lambda p: p >= 1, _INSTEAD.format("top_p")),
    "min_p": (lambda p: p <= 0, _INSTEAD.format("min_p")),
    "typical_p": (lambda p: p >= 1, "leave it out"),
    "mirostat_mode": (lambda mode: mode == 0, "give this processor the controller 'mirostat'"),
    "repeat_penalty": (lambda r: r == 1, _PENALTY),
    "frequency_penalty": (lambda f: f == 0, _PENALTY),
    "presence_penalty": (lambda p: p == 0, _PENALTY),
    "grammar": (lambda g: g is None, "it would forbid tokens that are drawn already: leave it out"),
}
"""Settings of `Llama.sample` that act behind every processor: when they do nothing, and what to do."""


_BY_HAND = 64
"""Completions in loops of users' own that may take turns."""


@dataclass(eq=False, slots=True)
class _Completion:
    """One completion under the controller."""

    loop: MicroLoop
    frame: int = 0
    """The call of `Llama.generate` that it is."""
    key: int = 0
    """Seed of its draws."""
    ids: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """Its tokens so far, where nothing else tells completions apart."""
    refused: bool = False
    error: EntropicError | None = None


def entropic_logits_processor(
    source: Source, *, target: float | None = None, seed: int | None = None
) -> EntropicSampler:
    """A logits processor for `Llama.create_completion`.

    Parameters
    ----------
    source : TemperatureController, Config, mapping or path
        The controller, and with any of the others truncation and estimator.
    target : float, optional
        The entropy to hold, nats, where it is not to be the controller's.
    seed : int, optional
        Of the draws; by default the completion's.

    Raises
    ------
    ConfigError
        If the source cannot be used, or its controller has no such target.

    Examples
    --------
    >>> processor = entropic_logits_processor(PITemperature())  # doctest: +SKIP
    >>> llm.create_completion("Once", max_tokens=200, **processor.arguments)  # doctest: +SKIP
    """
    return EntropicSampler(source, {} if target is None else {"target": target}, seed)


class EntropicSampler(list["EntropicSampler"]):
    """Draws each token under the controller, and leaves llama.cpp that token alone to choose from.

    llama.cpp applies temperature, top-k, top-p and more behind every processor, with defaults that are
    not neutral; with one token left they draw what was measured. Settings that are neither neutral nor
    llama-cpp-python's defaults would be lost, and are refused. Every completion begins with a fresh
    state, and completions of several `Llama` objects may take turns; `trace`, `state` and `error` are
    those of the one that drew last. Completions of one `Llama` share its KV cache: where they take turns,
    the one that was left behind is refused.

    It is a list that holds itself, because llama-cpp-python wants a list of processors.

    Notes
    -----
    llama.cpp calls processors through ctypes, which prints what they raise and goes on. So an error is
    kept in `error`, the logits stay as they were, and `stopping_criteria` raises it behind the token.
    """

    def __init__(self, source: Source, overrides: dict[str, float], seed: int | None) -> None:
        super().__init__([self])
        self._overrides = overrides
        self._seed = seed
        self._now = _Completion(MicroLoop(source, overrides))
        self._parts = self._now.loop.parts
        self._of_chain: WeakKeyDictionary[Any, _Completion] = WeakKeyDictionary()
        self._by_hand: deque[_Completion] = deque(maxlen=_BY_HAND)
        load_compiled()

    @property
    def error(self) -> EntropicError | None:
        """What went wrong in the completion that drew last; None if nothing did."""
        return self._now.error

    @property
    def arguments(self) -> dict[str, Any]:
        """What `create_completion` has to be told."""
        return {"logits_processor": self, "stopping_criteria": self.stopping_criteria}

    @property
    def trace(self) -> dict[str, Array]:
        """Columns of the completion that drew last, one entry a token."""
        return self._now.loop.trace

    @property
    def state(self) -> Any:
        """The controller's state, one row."""
        return self._now.loop.state

    def stopping_criteria(self, *_: Array) -> bool:
        """Never stops; raises what went wrong in the processor."""
        if self.error is not None:
            raise self.error
        return False

    def extend(self, others: Iterable[Any]) -> list[Any]:  # type: ignore[override]
        """The processors with `others` in front.

        llama-cpp-python 0.3.36 joins `logit_bias` to the processors by what `extend` returns, which for
        a list is None: both would be dropped.
        """
        return [*others, self]

    def __call__(self, input_ids: Array, scores: Array) -> Array:
        call = innermost("llama_cpp.llama", "generate")
        chain = getattr(call.variables["self"], "_sampler", None) if call else None
        known = self._continued(input_ids) if chain is None else self._of_chain.get(chain)
        frame = call.frame if call else 0
        self._now = known if known is not None else _Completion(self._fresh(), frame)
        try:
            if known is None:
                if chain is None:
                    self._by_hand.append(self._now)
                else:
                    self._of_chain[chain] = self._now
                self._begin(self._now)
            elif known.frame != frame:
                self._now = _Completion(known.loop, frame)
                raise CapabilityError(
                    "another completion of the same Llama began meanwhile, and took its KV cache: "
                    "finish one first, or make a Llama for each"
                )
            if chain is None:
                self._now.ids = np.array(input_ids)
            return scores if self._now.refused else self._draw(self._now, scores)
        except EntropicError as error:
            self._now.error = error
            raise

    def _fresh(self) -> MicroLoop:
        return MicroLoop(self._parts, self._overrides)

    def _continued(self, input_ids: Array) -> _Completion | None:
        """The completion by hand that these tokens are one more than."""
        before = np.asarray(input_ids)[:-1]
        return next((c for c in self._by_hand if np.array_equal(c.ids, before)), None)

    def _begin(self, now: _Completion) -> None:
        now.refused = True
        call = innermost("llama_cpp.llama", "sample")
        if call:
            _check(call.variables)
            if call.variables["logits_processor"][-1] is not self:
                raise CapabilityError(
                    "a processor comes behind this one, which has drawn the token already: put this "
                    "one last"
                )
        seed = getattr(call.variables["self"], "_seed", 0) if call else 0
        now.key = seed if self._seed is None else self._seed
        now.refused = False

    def _draw(self, now: _Completion, scores: Array) -> Array:
        loop = now.loop
        row = np.array(scores, np.float32)
        command = loop.command([row])
        count = int(loop.counts[0])
        (token,), reading, _ = sample(
            [row],
            command,
            loop.parts.estimator,
            loop.parts.truncation,
            [uniform(now.key, count)],
            [-1],
        )
        if token < 0:
            raise LogitsError(
                "completion",
                f"token {count} has no usable distribution (all masked, NaN or +inf); the "
                "controller's state has not moved on it",
            )
        loop.observe(reading)
        loop.settle(np.array([token]), reading.surprisal)
        row.fill(-np.inf)
        row[token] = 0.0
        return row


def _check(settings: dict[str, Any]) -> None:
    """Refuse settings of `Llama.sample` that would be without effect, and are not the defaults."""
    llm = settings["self"]
    methods = [llm.create_completion, llm.create_chat_completion, llm.generate]
    for name, (neutral, remedy) in _BEHIND.items():
        value = settings.get(name)
        names = (name, "temperature") if name == "temp" else (name,)
        known = [inspect.signature(m).parameters.get(n) for m in methods for n in names]
        defaults = [parameter.default for parameter in known if parameter is not None]
        if name in settings and not neutral(value) and value not in defaults:
            shown = f" = {value:g}" if isinstance(value, (int, float)) else ""
            raise CapabilityError(
                f"{names[-1]}{shown} acts behind this processor, which has drawn the token already: "
                f"{remedy}"
            )
