"""Measuring, control and sampling of the rows of a step in one kernel, where the logits live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from entropic_control.backends.base import Draw, Drawn
from entropic_control.backends.paged.step import upload
from entropic_control.controllers.base import Array
from entropic_control.controllers.signals import Distribution, whole_row_reading
from entropic_control.kernels._torch import torch
from entropic_control.kernels.control_sample import PIGains, Sampled, control_sample
from entropic_control.kernels.dispatch import Mode
from entropic_control.kernels.rows import workspace
from entropic_control.kernels.truncation import truncation

_WORD = 0xFFFFFFFFFFFFFFFF


class Sampler:
    """Draws the tokens of a backend's steps.

    Parameters
    ----------
    rows, vocab : int
        The largest batch of logits.
    device : torch.device
        Where they live.
    mode : str
        Which implementation; see `kernels.dispatch.Mode`.
    """

    def __init__(self, rows: int, vocab: int, device: Any, mode: Mode) -> None:
        self._mode = mode
        self._device = device
        self._space = workspace(rows, vocab, device)
        self._cuts: dict[tuple[str, float, int], Any] = {}

    def __call__(self, logits: Sequence[Any], draw: Draw) -> Drawn:
        """Measure, control and sample; waits for the device once, for everything together."""
        rows = len(logits)
        _, (seeds, steps) = upload(
            [
                np.array([seed & _WORD for seed in draw.seeds], np.uint64).view(np.int64),
                np.array(draw.steps, np.int64),
            ],
            self._device,
        )
        given = draw.temperature if draw.state is None else draw.state
        _, (held,) = upload([np.asarray(given, np.float32)], self._device)
        loop: dict[str, Any] = {"temperature": held}
        if draw.state is not None:
            loop = {"gains": PIGains.of(draw.gains), "state": held}
        sampled = control_sample(
            joined(logits),
            seeds,
            steps,
            **loop,
            truncation=self._cut(draw, rows),
            place=draw.place,
            mode=self._mode,
            workspace=self._space,
        )
        return _drawn(sampled, draw)

    def _cut(self, draw: Draw, rows: int) -> Any:
        if draw.cut is None:
            return None
        key = (*draw.cut, rows)
        if key not in self._cuts:
            name, value = draw.cut
            self._cuts[key] = truncation(rows, self._device, **{name: value})
        return self._cuts[key]


def joined(rows: Sequence[Any]) -> Any:
    """Rows of logits as one tensor, shape (rows, vocab): as they lie, where they are neighbours."""
    first = rows[0]
    size = first.numel() * first.element_size()
    if all(row.data_ptr() == first.data_ptr() + at * size for at, row in enumerate(rows)):
        return first.as_strided((len(rows), first.numel()), (first.numel(), 1))
    return torch.stack(list(rows))


def _drawn(sampled: Sampled, draw: Draw) -> Drawn:
    columns = [
        sampled.token,
        sampled.live,
        sampled.valid,
        sampled.entropy,
        sampled.varentropy,
        sampled.raw_entropy,
        sampled.realized_entropy,
        sampled.surprisal,
        sampled.raw_surprisal,
    ]
    if sampled.state is not None:
        columns += sampled.state
    # The one place where the host waits for the device. Token ids are exact in float64.
    host: Array = torch.stack([column.double() for column in columns]).cpu().numpy()
    token, live, valid, entropy, varentropy, raw, realized, surprisal, own = host[:9]
    reading = whole_row_reading(
        entropy,
        varentropy,
        raw,
        live,
        draw.temperature,
        valid > 0,
        realized_entropy=realized,
        surprisal=surprisal,
        raw_surprisal=own,
        distribution=Distribution.TEMPERED if draw.cut is None else Distribution.TRUNCATED,
    )
    state = None if sampled.state is None else host[9:]
    return Drawn(token.astype(np.int64).tolist(), reading, state)
