"""What the scheduler decided and why: a JSONL trace, and counters beside vLLM's own metrics."""

from __future__ import annotations

import json
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from entropic_control.errors import ConfigError


class Decisions:
    """The record of a scheduler.

    Parameters
    ----------
    path : str or None
        Where the trace goes, one JSON object a line; None writes none.
    """

    def __init__(self, path: str | None) -> None:
        self._file = None
        self._metrics = metrics()
        if path is not None:
            try:
                self._file = Path(path).open(  # noqa: SIM115 (open as long as the engine is)
                    "a", buffering=1, encoding="utf-8"
                )
            except OSError as error:
                raise ConfigError(f"backend.trace {path!r} cannot be written: {error}") from None

    def note(self, step: int, event: str, request: str, **details: Any) -> None:
        """A decision about a request, with its reasons."""
        self._metrics.decisions.labels(event).inc()
        if self._file is not None:
            line = {
                "step": step,
                "time": time.time(),
                "event": event,
                "request": request,
                **details,
            }
            self._file.write(json.dumps(line) + "\n")

    def measured(self, readings: list[tuple[float, ...]]) -> None:
        """What the last step measured: raw entropy, entropy, temperature and target of each request."""
        for name, gauge in self._metrics.means.items():
            at = NAMES.index(name)
            values = [reading[at] for reading in readings if reading[at] == reading[at]]
            if values:
                gauge.set(sum(values) / len(values))

    def freed(self, blocks: int) -> None:
        """KV blocks were pruned."""
        self._metrics.freed.inc(blocks)

    def close(self) -> None:
        """Close the trace."""
        if self._file is not None:
            self._file.close()


NAMES = ("raw_entropy_nats", "entropy_nats", "temperature", "target_nats")
"""Of the numbers in a reading, in order."""


class Metrics:
    """Prometheus metrics in the registry that vLLM's `/metrics` shows."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge

        self.decisions = Counter(
            "entropic_decisions", "Decisions of the entropic scheduler.", ["event"]
        )
        self.freed = Counter("entropic_pruned_blocks", "KV blocks freed by pruning.")
        self.means = {
            name: Gauge(
                f"entropic_{name}",
                f"Mean {name.removesuffix('_nats').replace('_', ' ')} over the last step's requests.",
                multiprocess_mode="mostrecent",
            )
            for name in NAMES
        }


@lru_cache(maxsize=1)
def metrics() -> Metrics:
    """The metrics of this process; they can be registered only once."""
    return Metrics()
