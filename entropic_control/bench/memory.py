"""Whether memory stays flat over many requests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from entropic_control.bench.prompts import SHORT, request
from entropic_control.config import Config
from entropic_control.engine import Engine

_FORGET = 100
"""Finished requests after which a busy engine is made to forget them."""


def resident_bytes() -> int:
    """Resident set of this process, bytes (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run_busy(
    config: Config, bar: Progress, *, requests: int = 10_000, tokens: int = 2
) -> dict[str, Any]:
    """Growth of the resident memory over requests that finish in an engine that is never idle.

    Twice as many requests as slots are unfinished at any time, and the engine forgets the finished ones
    every hundred. The slope is a line through the samples after the first fifth, bytes a request.
    """
    with Engine(config) as engine:
        size = 2 * engine.backend.capabilities.slots
        task = bar.add_task("requests, never idle", total=requests)
        samples: list[tuple[int, int]] = []
        submitted = finished = 0
        while finished < requests:
            while len(engine.unfinished) < size:
                n = submitted
                engine.submit(request(f"busy {n}", SHORT[n % len(SHORT)], tokens, n))
                submitted += 1
            engine.step()
            if len(engine.done) >= _FORGET:
                finished += len(engine.done)
                engine.forget()
                bar.update(task, completed=min(finished, requests))
                bar.refresh()
                if finished >= requests / 5:
                    samples.append((finished, resident_bytes()))
    counts, resident = np.array(samples, float).T
    slope = np.polyfit(counts, resident, 1)[0] if len(samples) > 1 else 0.0
    return {
        "busy_requests": finished,
        "busy_bytes_a_request": float(slope),
        "busy_growth_percent": 100 * float(resident[-1] / resident[0] - 1),
    }


def run_memory(
    config: Config, bar: Progress, *, requests: int = 1000, tokens: int = 8
) -> dict[str, Any]:
    """Resident memory after a tenth of the requests and after all of them.

    The requests come in runs of twice the slots, so that slots are re-used within a run; the first
    tenth fills the allocators and is not counted.
    """
    with Engine(config) as engine:
        size = 2 * engine.backend.capabilities.slots
        task = bar.add_task("requests", total=requests)
        samples: list[int] = []
        done = 0
        while done < requests:
            works = [
                request(str(n), SHORT[n % len(SHORT)], tokens, n) for n in range(done, done + size)
            ]
            engine.run(works)
            done += size
            bar.update(task, completed=min(done, requests))
            bar.refresh()
            if done >= requests / 10:
                samples.append(resident_bytes())
    return {
        "requests": done,
        "resident_bytes_start": samples[0],
        "resident_bytes_end": samples[-1],
        "growth_percent": 100 * (samples[-1] / samples[0] - 1),
    }
