"""The decode step as a captured CUDA graph: one launch in place of the hundreds a layer stack takes.

A graph fixes addresses and shapes, so decoding rows are padded to a few sizes and copied into the same
tensors at each step. What a graph cannot hold (a model that looks at its data on the host, as some
mixtures of experts do) runs uncaptured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from entropic_control.backends.paged.step import Row, Step
from entropic_control.kernels._torch import torch
from entropic_control.kernels.dispatch import power_of_two

LEAST_WIDTH = 16
"""Blocks of the narrowest table."""

Run = Callable[[], Any]
Record = Callable[[Run], Run]
"""Takes a function without arguments and returns one that repeats its work on the same tensors."""


class _Recorded(NamedTuple):
    step: Step
    replay: Run


class DecodeGraphs:
    """Recorded decode steps, by padded size.

    Parameters
    ----------
    run : function
        The model's forward of a step; returns logits of all its rows, shape (height, vocab).
    device : torch.device
        Where the model is.
    record : function
        Makes the recording; `captured` on CUDA.
    """

    def __init__(self, run: Callable[[Step], Any], device: Any, record: Record) -> None:
        self._run = run
        self._device = device
        self._record = record
        self._steps: dict[tuple[int, int, bool], _Recorded] = {}
        self.refused = False
        """Whether the model could not be captured."""

    def __call__(self, rows: Sequence[Row], *, score: bool) -> tuple[Any, Step] | None:
        """Logits of the rows, shape (rows, vocab), and the step that ran; None if it must run uncaptured.

        The logits lie in the recording's own memory: they hold until its next run.
        """
        if self.refused:
            return None
        widest = max(len(row.blocks) for row in rows)
        size = power_of_two(len(rows)), max(power_of_two(widest), LEAST_WIDTH), score
        if size not in self._steps:
            recorded = self._make(rows, *size)
            if recorded is None:
                return None
            self._steps[size] = recorded
        step, replay = self._steps[size]
        step.refill(rows)
        return replay()[: len(rows)], step

    def _make(self, rows: Sequence[Row], height: int, width: int, score: bool) -> _Recorded | None:
        step = Step(rows, self._device, score=score, height=height, width=width)
        try:
            return _Recorded(step, self._record(lambda: self._run(step)))
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.refused = True
            warnings.warn(
                f"the decode step cannot be captured as a CUDA graph and runs without: {error}",
                stacklevel=2,
            )
            return None


def captured(run: Run) -> Run:
    """A CUDA graph of `run`. The warm-up compiles kernels and fills caches, which a capture must not."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> Any:
        graph.replay()
        return result

    return replay
