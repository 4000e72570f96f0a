"""Whether memory stays flat over many requests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.progress import Progress

from entropic_control.bench.prompts import SHORT, request
from entropic_control.config import Config
from entropic_control.engine import Engine


def resident_bytes() -> int:
    """Resident set of this process, bytes (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


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
