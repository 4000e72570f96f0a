"""Measuring, control and sampling on the device, for backends that can and controllers that fit.

One copy to the host a step brings the tokens and, with them, the readings and states that the trace, the
scheduler and a rollback need; everything before it is queued without waiting.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from entropic_control.backends.base import Backend, Chunk, Draw, Drawing, Forward
from entropic_control.config import Config
from entropic_control.controllers import (
    FixedTemperature,
    FullEntropy,
    MinP,
    NoTruncation,
    PITemperature,
    TopK,
    TopP,
    Truncation,
)
from entropic_control.controllers.base import Array
from entropic_control.controllers.signals import Reading
from entropic_control.sequence import Sequence as Work

_CUTS: dict[type[Truncation], str] = {TopK: "k", TopP: "p", MinP: "p"}
"""The truncations that the kernel knows, with the field that is their setting."""


class DeviceDraw:
    """One step of the temperature loop where the logits live.

    Parameters
    ----------
    config : Config
        Whose controllers `fits` approved of.
    backend : Drawing
        Where the logits live.
    """

    def __init__(self, config: Config, backend: Drawing) -> None:
        self._config = config
        # Weakly: a sequence that is done holds its loops, and must not hold the model.
        self._backend: Drawing = weakref.proxy(backend)

    @classmethod
    def of(cls, config: Config, backend: Backend | None) -> DeviceDraw | None:
        """What runs `config` on the device, or None: then numpy does it, with any controller."""
        if backend is None or not backend.capabilities.can_draw:
            return None
        return cls(config, cast("Drawing", backend)) if fits(config) else None

    def forward(self, chunks: Sequence[Chunk]) -> Forward:
        """Run a step of the backend; the logits stay where they are."""
        return self._backend.forward(chunks, resident=True)

    def __call__(
        self, works: Sequence[Work], logits: Sequence[Any], state: Any
    ) -> tuple[list[int], Reading, Array, Any]:
        """Tokens, readings, the next temperature, and the states after."""
        temperature, truncation = self._config.temperature, self._config.truncation
        controlled = isinstance(temperature, PITemperature)
        field = _CUTS.get(type(truncation))
        drawn = self._backend.draw(
            logits,
            Draw(
                seeds=[work.seed for work in works],
                steps=[len(work.tokens) for work in works],
                temperature=temperature.command(state).temperature,
                gains=temperature if controlled else None,
                state=np.stack(state) if controlled else None,
                cut=None if field is None else (truncation.kind, getattr(truncation, field)),
                place=truncation.place,
            ),
        )
        if drawn.state is None:
            commanded, state = temperature.update(state, drawn.reading)
        else:
            dtype = state[0].dtype
            state = type(state)(*drawn.state.astype(dtype, copy=False))
            commanded = temperature.command(state).temperature
        return drawn.tokens, drawn.reading, commanded, state

    @staticmethod
    def fetched(logits: Sequence[Any]) -> list[Array]:
        """The rows on the host, for what the kernel cannot do."""
        return [row.float().cpu().numpy() for row in logits]


def fits(config: Config) -> bool:
    """Whether the kernel implements these controllers; subclasses may differ from what it does."""
    return (
        type(config.temperature) in (PITemperature, FixedTemperature)
        and type(config.estimator) is FullEntropy
        and type(config.truncation) in (NoTruncation, *_CUTS)
    )
