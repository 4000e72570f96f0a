"""The temperature loop inside `model.generate` of transformers, as a logits processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from entropic_control.backends.caller import Call, innermost
from entropic_control.backends.micro import MicroLoop, Source
from entropic_control.backends.torch_rows import Measured, measure
from entropic_control.controllers.base import Array
from entropic_control.errors import CapabilityError, LogitsError

try:
    from transformers import LogitsProcessor
except ImportError as error:
    raise CapabilityError(
        "this processor needs transformers: pip install 'entropic-control[gpu]'"
    ) from error

_MODES = {
    "_beam_search": "beam search ranks whole sequences and draws no token: pass num_beams=1",
    "_assisted_decoding": "assisted generation drafts tokens and takes some of them back: leave the "
    "assistant (assistant_model, prompt_lookup_num_tokens) out",
}
_REMEDIES = {
    "TemperatureLogitsWarper": "pass temperature=1.0, since the controller sets the temperature",
    "TopKLogitsWarper": "pass top_k=0, and give this processor truncation 'top_k' if it is wanted",
    "TopPLogitsWarper": "pass top_p=1.0, and give this processor truncation 'top_p' if it is wanted",
    "MinPLogitsWarper": "leave min_p out, and give this processor truncation 'min_p' if it is wanted",
}


class EntropicLogitsProcessor(LogitsProcessor):  # type: ignore[misc]
    """Divides the logits by the temperature that holds the entropy of what is drawn near its target.

    What is drawn must be what was measured: sampling has to be on, and nothing may change the scores
    behind this processor. `arguments` says all that to `generate`. Each call of `generate` begins with
    fresh states; rows that have ended move nothing any more.

    Parameters
    ----------
    source : TemperatureController, Config, mapping or path
        The controller, and with any of the others a truncation, which then is part of this processor.
    targets : array_like, shape (rows,), optional
        The entropy that each row aims at, nats.
    overrides : mapping, optional
        Other settings of the rows' own, by the names of the controller's per-request settings.

    Raises
    ------
    ConfigError
        If the source cannot be used, or a setting is unknown, out of range or not one a row.
    CapabilityError
        For an estimator other than 'full'; and from `generate` for greedy decoding, beam search,
        assisted generation, and processors behind this one.
    LogitsError
        From `generate`, if a row is all -inf or holds NaN or +inf; no state has moved on it.

    Examples
    --------
    >>> processor = EntropicLogitsProcessor(PITemperature(), targets=[1.0, 2.0])  # doctest: +SKIP
    >>> model.generate(**inputs, **processor.arguments, max_new_tokens=200)  # doctest: +SKIP
    """

    supports_continuous_batching = False

    def __init__(
        self,
        source: Source,
        *,
        targets: ArrayLike | None = None,
        overrides: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        self._loop = MicroLoop(
            source, {**(overrides or {}), **({} if targets is None else {"target": targets})}
        )
        estimator = self._loop.parts.estimator.kind
        if estimator != "full":
            raise CapabilityError(
                f"estimator '{estimator}' is for engines that show part of a row; this processor sees "
                "all of it: set estimator to 'full'"
            )
        self._chain: Any = None
        self._shape = (0, 0)
        self._measured: Measured | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """What `generate` has to be told: this processor, sampling, and nothing behind it."""
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None, "typical_p": 1.0}
        return {"logits_processor": [self], "do_sample": True, "num_beams": 1, **neutral}

    @property
    def trace(self) -> dict[str, Array]:
        """Columns of the last `generate`, one entry a token; `request` is the row of the batch.

        Processors are not shown the last token of a generation: its `token_id` is -1.
        """
        return self._loop.trace

    @property
    def state(self) -> Any:
        """The controller's state, one row a sequence."""
        return self._loop.state

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        rows, length = input_ids.shape
        call = innermost("transformers.generation.utils")
        variables = call.variables if call else {}
        chain = variables.get("logits_processor")
        if chain is not self._chain or self._shape != (rows, length - 1):
            if call:
                self._check(call, chain)
            self._loop.start(rows)
        elif self._measured:
            tokens = input_ids[:, -1]
            self._loop.settle(tokens.cpu().numpy(), self._measured.surprisal(tokens))
        unfinished = variables.get("unfinished_sequences")
        alive = np.ones(rows, np.bool_) if unfinished is None else unfinished.cpu().numpy() > 0
        self._measured = self._measure(scores.float(), alive)
        self._chain, self._shape = chain, (rows, length)
        return self._measured.scores.to(scores.dtype)

    def _measure(self, logits: Any, alive: Array) -> Measured:
        controller, cut = self._loop.parts.temperature, self._loop.parts.truncation
        command = self._loop.command(logits.cpu().numpy() if controller.reads_logits else None)
        measured = measure(logits, command, cut)
        for row in np.flatnonzero(alive & ~measured.reading.valid):
            raise LogitsError(
                f"row {row}",
                f"token {self._loop.counts[row]} has no usable distribution (all masked, NaN or +inf); "
                "the controllers' states have not moved on it",
            )
        # What a row that has ended goes on to compute is padding.
        reading = measured.reading._replace(valid=alive)
        self._loop.observe(reading)
        return measured._replace(reading=reading)

    def _check(self, call: Call, chain: Any) -> None:
        """Refuse to work where the tokens are not drawn from this processor's scores."""
        settings = call.variables.get("generation_config")
        if settings is None:
            return
        mode = "_assisted_decoding" if settings.is_assistant else call.name
        if mode != "_sample":
            raise CapabilityError(_MODES.get(mode, f"transformers' {mode} is not plain sampling"))
        if not settings.do_sample:
            raise CapabilityError(
                "greedy decoding draws no tokens, so that no temperature changes it: pass "
                "do_sample=True, or leave this processor out"
            )
        place = next((n for n, one in enumerate(chain) if one is self), len(chain))
        for other in chain[place + 1 :]:
            name = type(other).__name__
            if name != "LogitNormalization":
                remedy = _REMEDIES.get(name, "put this processor last, or leave that one out")
                raise CapabilityError(
                    f"{name} comes behind this processor, so what is drawn would not be what was "
                    f"measured: {remedy}"
                )
