"""The paper's table: arms on workloads, cell by cell, kept so that an interrupted run goes on."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from entropic_control import __version__
from entropic_control.backends.base import Backend
from entropic_control.backends.cost import CostModel, Weights
from entropic_control.backends.dimensions import SMOLLM2, Dimensions
from entropic_control.bench import resources
from entropic_control.bench.arms import arms_of
from entropic_control.bench.ceilings import limits
from entropic_control.bench.measures import measure_run
from entropic_control.bench.workloads import FULL, QUICK, WORKLOADS, Setting, Task, Workload
from entropic_control.config import Config
from entropic_control.controllers import EntropicPriority
from entropic_control.engine import Engine
from entropic_control.errors import CapabilityError, ConfigError
from entropic_control.progress import follow
from entropic_control.report import write_json

Cells = dict[tuple[str, str, int], dict[str, Any]]
"""Stored runs, by workload, arm and repeat."""

_CALIBRATION = 4096
"""Tokens of the longest sequence that the costs are measured on: half a minute of work."""


class Cell(NamedTuple):
    """One run of the table."""

    workload: Workload
    arm: str
    repeat: int

    @property
    def path(self) -> Path:
        """Where it is kept, from the run directory."""
        return Path("cells") / self.workload.name / f"{self.arm}.{self.repeat}.json"


class Paper:
    """A table to be filled.

    Parameters
    ----------
    config : Config
        The configuration under test; every arm is made from it.
    out : path
        Run directory. What it holds of the same run is taken over.
    quick : bool
        Small sizes and fewer workloads: minutes, and rough figures.
    workloads, arms : sequence of str
        Which of them; all by default.
    repeats : int
        Runs of each cell, the workload's own number at least.

    Raises
    ------
    ConfigError
        If a name is unknown, or the directory holds another run.
    CapabilityError
        If the memory does not suffice for a workload.
    """

    def __init__(
        self,
        config: Config,
        out: Path,
        *,
        quick: bool = False,
        workloads: Sequence[str] = (),
        arms: Sequence[str] = (),
        repeats: int = 1,
    ) -> None:
        self.config = config
        self.out = out
        self.sizes = QUICK if quick else FULL
        self._arms = arms_of(config)
        usual = [name for name, workload in WORKLOADS.items() if workload.quick or not quick]
        self._chosen = _known("workload", workloads or usual, WORKLOADS)
        _known("arm", arms, self._arms)
        self._wanted = tuple(arms)
        self._repeats = repeats
        # A small engine tells the size of the model and spells the texts.
        backend = sized_backend(config, 512, min(self.sizes.slots, 4)).open()
        try:
            self.dimensions: Dimensions = getattr(backend, "dimensions", SMOLLM2)
            self._check_memory(backend)
            self.manifest = self._manifest(quick, backend)
            self._tasks = {name: self._tasks_of(WORKLOADS[name], backend) for name in self._chosen}
        finally:
            backend.close()

    # -- the plan ---------------------------------------------------------------------------------

    def cells(self) -> Iterator[Cell]:
        """The runs in order: the arms of a workload alternate, in turned order every other time."""
        for name in self._chosen:
            workload = WORKLOADS[name]
            arms = [arm for arm in workload.arms if not self._wanted or arm in self._wanted]
            arms = [arm for arm in arms if arm in self._arms]
            for repeat in range(max(self._repeats, workload.repeats)):
                for arm in arms[:: -1 if repeat % 2 else 1]:
                    yield Cell(workload, arm, repeat)

    @property
    def missing(self) -> list[Cell]:
        """The runs that are not done yet."""
        return [cell for cell in self.cells() if not (self.out / cell.path).is_file()]

    @property
    def expected_seconds(self) -> float:
        """A rough guess at the time the missing runs take."""
        cost, slots = self._cost(), self.sizes.slots
        return sum(
            resources.expected_seconds(self._tasks[cell.workload.name], cost, slots)
            for cell in self.missing
        )

    def _cost(self) -> CostModel:
        return CostModel(Weights(*self.manifest["weights"]))

    def _tasks_of(self, workload: Workload, backend: Backend) -> list[Task]:
        setting = Setting(backend, self.sizes)
        tasks = workload.tasks(setting)
        if workload.load is None:
            return tasks
        seconds = resources.dense_seconds(tasks, self.config, self._cost(), self.sizes.slots)
        return workload.tasks(setting._replace(rate=workload.load * len(tasks) / seconds))

    def _check_memory(self, backend: Backend) -> None:
        available = resources.available_bytes()
        if available is None or not hasattr(backend, "dimensions"):
            return
        able = backend.capabilities
        for name in self._chosen:
            need = resources.needed_bytes(
                self.dimensions,
                self.sizes.slots,
                WORKLOADS[name].context(self.sizes),
                able.step_tokens,
                able.vocab,
            )
            if need > available:
                others = " ".join(other for other in self._chosen if other != name)
                raise CapabilityError(
                    f"workload '{name}' needs about {need / 2**30:.1f} GiB of memory and "
                    f"{available / 2**30:.1f} GiB are available: free some"
                    + (f", or leave it out (--workloads {others})" if others else "")
                )

    def _manifest(self, quick: bool, backend: Backend) -> dict[str, Any]:
        """What the run is; of a run begun before, with the costs it was planned by."""
        fresh = {
            "version": __version__,
            "quick": quick,
            "sizes": json.loads(json.dumps(asdict(self.sizes))),
            "config": self.config.model_dump(mode="json"),
        }
        path = self.out / "manifest.json"
        if path.is_file():
            old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            changed = [key for key in fresh if old.get(key) != fresh[key]]
            if changed:
                raise ConfigError(
                    f"{str(self.out)!r} holds a run with another {', '.join(changed)}: choose another "
                    f"--out, or remove that directory"
                )
            return old
        fresh |= {
            "made": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "backend": backend.capabilities.name,
            "weights": self._calibrated(),
        }
        self.out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, fresh)
        return fresh

    def _calibrated(self) -> list[float]:
        longest = max(WORKLOADS[name].context(self.sizes) for name in self._chosen)
        backend = sized_backend(self.config, min(longest, _CALIBRATION), self.sizes.slots).open()
        try:
            return list(resources.calibrated(backend))
        finally:
            backend.close()

    # -- running ----------------------------------------------------------------------------------

    def run(self, bar: Progress) -> None:
        """Run what is missing; each run is written when it is finished."""
        missing = self.missing
        whole = bar.add_task("runs", total=len(missing))
        for cell in missing:
            figures = self._run(cell, bar)
            write_atomically(self.out / cell.path, figures)
            bar.update(bar.task_ids[-1], visible=False)
            bar.update(whole, advance=1)
            bar.refresh()

    def _run(self, cell: Cell, bar: Progress) -> dict[str, Any]:
        workload, tasks = cell.workload, self._tasks[cell.workload.name]
        config = self._arms[cell.arm].replace(
            backend=sized_backend(self.config, workload.context(self.sizes), self.sizes.slots)
        )
        requests = [
            task.request.replace(seed=(task.request.seed or 0) + 1000 * cell.repeat)
            for task in tasks
        ]
        with Engine(config) as engine:
            follow(engine, requests, bar, f"{workload.name}, {cell.arm}")
            spell, report = engine.backend.piece, engine.report()
            figures = measure_run(
                tasks,
                report,
                self.dimensions,
                self._cost(),
                lambda tokens: b"".join(map(spell, tokens)).decode("utf-8", "replace"),
                self._wait_bound(config, len(tasks)),
                getattr(self.config.temperature, "target", None),
            )
            figures["measures"] |= limits(tasks, report, config, self._cost(), self.sizes.slots)
        return {"workload": workload.name, "arm": cell.arm, "repeat": cell.repeat, **figures}

    def _wait_bound(self, config: Config, live: int) -> int | None:
        from entropic_control.proofs.waiting import longest_wait

        if not isinstance(config.priority, EntropicPriority):
            return None
        return longest_wait(config.priority.patience, live)

    def done(self) -> Cells:
        """The runs that are done, of those that were asked for."""
        return {
            (cell.workload.name, cell.arm, cell.repeat): json.loads(
                (self.out / cell.path).read_text(encoding="utf-8")
            )
            for cell in self.cells()
            if (self.out / cell.path).is_file()
        }


def sized_backend(config: Config, context: int, slots: int) -> Any:
    """The backend of a configuration with these sizes, reading text as it is."""
    sized = {"context": -(-context // 256) * 256, "slots": slots, "chat": False}
    fields = type(config.backend).model_fields
    return config.backend.replace(**{key: sized[key] for key in sized if key in fields})


def write_atomically(path: Path, data: Any) -> None:
    """Write JSON so that the file is either the whole of it or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    write_json(part, data)
    part.replace(path)


def _known(what: str, names: Sequence[str], known: Any) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown {what} '{name}' (known: {', '.join(known)})")
    return tuple(name for name in known if not names or name in names)
