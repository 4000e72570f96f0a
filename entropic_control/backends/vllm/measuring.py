"""Entropies of the rows of a logits tensor, on the device it is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from entropic_control.controllers.base import Array
from entropic_control.controllers.signals import Reading, whole_row_reading
from entropic_control.controllers.softmax import Moments, extremes, moments, raw_and_tempered


def measure(logits: Any, temperature: Array, raw: bool = True) -> Callable[[], Reading]:
    """Measure softmax(logits / T) by rows.

    Parameters
    ----------
    logits : torch.Tensor, shape (rows, vocab), float32
        They may be overwritten as soon as this returns.
    temperature : array, shape (rows,)
        T of each row.
    raw : bool
        Whether the entropy at T = 1 is wanted, almost half of the work; it is NaN otherwise.

    Returns
    -------
    function
        Gives the reading; on an accelerator that waits for the device. Surprisals are NaN: tokens are
        not known here.
    """
    if logits.device.type == "cpu":
        columns = _on_host(logits.detach().numpy(), temperature, raw)
        return lambda: _reading(columns, temperature)
    on_device = _on_device(logits, temperature, raw)
    return lambda: _reading(on_device.double().cpu().numpy(), temperature)


def _on_host(logits: Array, temperature: Array, raw: bool) -> Array:
    """Row by row through the cache: at 16 rows of 49,152 that is 2 ms, and 30 ms as one batch in torch."""
    columns = np.full((4, len(logits)), np.nan)
    columns[3] = 0
    for row, (z, t) in enumerate(zip(logits, temperature.tolist(), strict=True)):
        both = raw_and_tempered(z, t) if raw else _tempered(z, t)
        if both is not None:
            own, at = both
            columns[:, row] = at.entropy, at.varentropy, own.entropy if own else np.nan, at.live
    return columns


def _tempered(row: Array, temperature: float) -> tuple[None, Moments] | None:
    ends = extremes(row)
    return (None, moments(row, temperature, ends)) if ends.valid else None


def _on_device(logits: Any, temperature: Array, raw: bool) -> Any:
    import torch

    from entropic_control.kernels.entropy import entropy

    t = torch.from_numpy(temperature.astype(np.float32)).to(logits.device, non_blocking=True)
    at = entropy(logits, t, raw=raw)
    return torch.stack([at.entropy, at.varentropy, at.raw_entropy, at.live.float()])


def _reading(columns: Array, temperature: Array) -> Reading:
    entropy, varentropy, raw, live = columns
    return whole_row_reading(entropy, varentropy, raw, live, temperature, live > 0)
