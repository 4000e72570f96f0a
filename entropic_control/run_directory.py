"""A run directory that is written while the run goes on, and from which it goes on after a stop or a kill.

Completions, trace rows, steps and events are appended as they come. Every so often the engine's state is
saved beside the lengths that the files have at that moment. To resume is to cut the files back to those
lengths and to go on from that state: what came after it is decoded again, to the same tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entropic_control import json_lines
from entropic_control.config import Config, dump_config, load_config
from entropic_control.errors import ConfigError, OutputError, StateError
from entropic_control.persistence import restore
from entropic_control.report import Completion, Report, completion_of, write_json
from entropic_control.request import Request
from entropic_control.trace import Format, check_format, read_table, rows_of, write_table

if TYPE_CHECKING:
    from entropic_control.engine import Engine

_FILES = ("completions", "trace", "steps", "events")
_RESUME = "resume"
"""Name of the directory that holds what resuming takes; it is gone when the run is finished."""
_INTERVAL = 1.0
"""Seconds between two writings of the trace. Completions are written at once."""
_SHARE = 0.05
"""Most of a run's time that saving its state may take."""


def is_finished(path: Path) -> bool:
    """Whether a directory holds a run that came to its end."""
    return (path / "summary.json").is_file() and not (path / _RESUME / "plan.json").is_file()


class RunDirectory:
    """The files of one run.

    Parameters
    ----------
    path : Path
        The directory.
    format : {"jsonl", "parquet"}
        Of the trace, when the run is finished; until then it is lines.
    checkpoint : float
        Seconds between two savings of the engine's state, at least.
    """

    def __init__(self, path: Path, format: Format, dry_run: bool, checkpoint: float) -> None:
        self.path = path
        self.dry_run = dry_run
        self._format = format
        self._interval = checkpoint
        self._files: dict[str, _Lines] = {}
        self._written = dict.fromkeys(_FILES, 0)
        """Of each file, the records of the engine that are in it."""
        self._later = 0.0
        """What is added to the engine's times, seconds, so that they go on from those in the files."""
        self._start: float | None = None
        self._before: list[Completion] = []
        self._number = 0
        self._next_rows = self._next_state = 0.0

    @classmethod
    def prepare(
        cls,
        path: Path,
        config: Config,
        requests: Sequence[Request],
        *,
        format: Format = "jsonl",
        dry_run: bool = False,
        checkpoint: float = 10.0,
    ) -> RunDirectory:
        """Write down what the run is, before anything is opened or decoded.

        Raises
        ------
        OutputError
            If the directory cannot be written, or holds a run that is not finished.
        CapabilityError
            If Parquet is asked for and pyarrow is not installed.
        """
        check_format(format)
        resume = path / _RESUME
        if (resume / "plan.json").exists():
            raise OutputError(
                f"{str(path)!r} holds a run that is not finished: go on with it by --resume {path}, "
                f"give another directory, or delete this one"
            )
        directory = cls(path, format, dry_run, checkpoint)
        plan = {"format": format, "dry_run": dry_run, "checkpoint": checkpoint}
        shutil.rmtree(resume, ignore_errors=True)  # of a run that was killed while it ended
        try:
            resume.mkdir(parents=True)
            (resume / "config.yaml").write_text(dump_config(config), encoding="utf-8")
            with (resume / "prompts.jsonl").open("w", encoding="utf-8") as file:
                json_lines.write_lines(
                    file, (r.model_dump(mode="json", exclude_unset=True) for r in requests)
                )
            _replace(resume / "plan.json", plan)
        except OSError as error:
            directory.abandon()
            raise OutputError(
                f"the run directory {str(path)!r} cannot be written: {error.strerror or error}"
            ) from error
        return directory

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        """The directory of a run that was stopped.

        Raises
        ------
        ConfigError
            If it holds no run that can go on.
        """
        plan = path / _RESUME / "plan.json"
        try:
            said = json_lines.parse(plan.read_text(encoding="utf-8"))
            return cls(path, said["format"], said["dry_run"], said["checkpoint"])
        except FileNotFoundError:
            raise ConfigError(
                f"nothing in {str(path)!r} can be resumed: give a directory that a run was writing"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{str(plan)!r} cannot be read: {error}") from None

    def abandon(self) -> None:
        """Take back what `prepare` wrote, if the run could not begin."""
        shutil.rmtree(self.path / _RESUME, ignore_errors=True)
        if self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    # -- beginning --------------------------------------------------------------------------------

    def resumed(self) -> Engine:
        """The engine of the run, where its last saved state was.

        Raises
        ------
        StateError
            If the state does not fit what is here.
        """
        from entropic_control.engine import Engine

        resume = self.path / _RESUME
        if not (resume / "checkpoint.json").is_file():  # killed before the first
            engine = Engine(load_config(resume / "config.yaml"), dry_run=self.dry_run)
            try:
                engine.submit_all(self._requests())
                self.begin(engine)
            except BaseException:
                engine.close()
                raise
            return engine
        try:
            point = json_lines.parse((resume / "checkpoint.json").read_text(encoding="utf-8"))
            engine = restore(resume / point["state"])
            self._later = point["time"] - engine.backend.now()
            self._start = point["start"]
            self._number = point["number"]
            engine.steps = point["step"]
            self._files = {
                name: _Lines(self.path / f"{name}.jsonl", point["sizes"][name]) for name in _FILES
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(f"{str(resume)!r} is damaged: {error!r}") from error
        self._take_over(engine)
        return engine

    def _requests(self) -> list[Request]:
        path = self.path / _RESUME / "prompts.jsonl"
        found = (json_lines.parse(line) for _, line in json_lines.lines(path))
        return [Request.model_validate(data) for data in found]

    def _take_over(self, engine: Engine) -> None:
        """Show the engine what the earlier part wrote, so that its report is of the whole."""
        done, events = (
            [json_lines.parse(line) for _, line in json_lines.lines(self.path / f"{name}.jsonl")]
            for name in ("completions", "events")
        )
        self._before = [Completion.read(data) for data in done]
        tokens, steps = (read_table(self.path, name, "jsonl") for name in ("trace", "steps"))
        engine.trace.adopt(tokens, steps, events, -self._later)
        trace = engine.trace
        self._written = {
            "completions": len(engine.done),
            "trace": len(trace.tokens),
            "steps": len(trace.steps),
            "events": len(trace.events),
        }
        self._schedule(0.0)

    def begin(self, engine: Engine) -> None:
        """Start the files; an earlier run in the directory is replaced."""
        with self._guarded():
            for name in _FILES:
                (self.path / f"{name}.parquet").unlink(missing_ok=True)
            for name in ("summary.json", "config.yaml", "run.png"):
                (self.path / name).unlink(missing_ok=True)
            self._files = {name: _Lines(self.path / f"{name}.jsonl", 0) for name in _FILES}
        works = [*engine.unfinished, *engine.done]
        self._start = min((work.arrived for work in works), default=engine.backend.now())
        self.checkpoint(engine)

    # -- while it runs ----------------------------------------------------------------------------

    def record(self, engine: Engine) -> None:
        """Write what is new; to be called after every step.

        Raises
        ------
        OutputError
            If it cannot be written. Whole lines stay, and the last saved state is as it was.
        """
        with self._guarded():
            self._write_completions(engine)
            now = time.monotonic()
            if now >= self._next_rows:
                self._write_rows(engine)
                self._next_rows = now + _INTERVAL
        if now >= self._next_state:
            self.checkpoint(engine)

    def checkpoint(self, engine: Engine) -> None:
        """Write everything, and save the state to go on from."""
        began = time.monotonic()
        resume = self.path / _RESUME
        with self._guarded():
            self._write_completions(engine)
            self._write_rows(engine)
            self._number += 1
            state = f"state-{self._number}"
            try:
                engine.save(resume / state)
            except OSError:
                (resume / f"{state}.partial").unlink(missing_ok=True)
                raise
            point = {
                "state": state,
                "number": self._number,
                "step": engine.steps,
                "time": engine.backend.now() + self._later,
                "start": self._start,
                "sizes": {name: file.size for name, file in self._files.items()},
            }
            _replace(resume / "checkpoint.json", point)
            for old in resume.glob("state-*"):
                if old.name != state:
                    old.unlink()
        self._schedule(time.monotonic() - began)

    def _schedule(self, took: float) -> None:
        self._next_state = time.monotonic() + max(self._interval, took / _SHARE)

    def _write_completions(self, engine: Engine) -> None:
        for work in engine.done[self._written["completions"] :]:
            self._files["completions"].add([asdict(completion_of(work, engine.trace))])
            self._written["completions"] += 1

    def _write_rows(self, engine: Engine) -> None:
        trace = engine.trace
        tables = {
            "trace": rows_of(trace.named(self._written["trace"])),
            "steps": rows_of(trace.steps.columns(self._written["steps"])),
            "events": iter(trace.events[self._written["events"] :]),
        }
        sizes = (len(trace.tokens), len(trace.steps), len(trace.events))
        for (name, rows), size in zip(tables.items(), sizes, strict=True):
            self._files[name].add({**row, "time": row["time"] + self._later} for row in rows)
            self._written[name] = size

    def unwritten(self, engine: Engine) -> list[Completion]:
        """Completions that are in no file, because it could not be written."""
        works = engine.done[self._written["completions"] :]
        return [completion_of(work, engine.trace) for work in works]

    # -- the end ----------------------------------------------------------------------------------

    def finish(self, engine: Engine) -> Report:
        """Write the rest, and the summary; after that there is nothing to resume."""
        with self._guarded():
            self._write_completions(engine)
            self._write_rows(engine)
            report = self.report(engine)
            if self._format == "parquet":
                trace = engine.trace
                tables = {"trace": trace.named(), "steps": trace.steps.columns()}
                for name, columns in tables.items():
                    shifted = {**columns, "time": columns["time"] + self._later}
                    write_table(self.path, name, shifted, "parquet")
            config = dump_config(engine.config)
            (self.path / "config.yaml").write_text(config, encoding="utf-8")
            write_json(self.path / "summary.json", report.summary)
            (self.path / _RESUME / "plan.json").unlink()
            shutil.rmtree(self.path / _RESUME)
        return report

    def report(self, engine: Engine) -> Report:
        """What the whole run came to so far."""
        name = engine.backend.capabilities.name
        start = None if self._start is None else self._start - self._later
        return Report.of(engine.done, engine.trace, name, self._before, start)

    def _guarded(self) -> _Guard:
        return _Guard(self.path)


class _Guard:
    """Turns a failure to write into an error with words."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError):
            raise OutputError(
                f"the run in {str(self._path)!r} cannot be written any more: {error.strerror or error}. "
                f"What is finished is there; with room, go on by: entropic run --resume {self._path}"
            ) from error


class _Lines:
    """A file that grows by whole lines, or not at all.

    Parameters
    ----------
    path : Path
        The file; made if it is not there.
    size : int
        Bytes of it that are kept.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        if (path.stat().st_size if path.exists() else 0) < size:
            raise ValueError(f"{str(path)!r} has lost lines")
        with path.open("ab") as file:
            file.truncate(size)
        self.size = size

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        data = "".join(json_lines.dumps(row) + "\n" for row in rows).encode()
        if not data:
            return
        try:
            with self._path.open("ab", buffering=0) as file:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError:
            os.truncate(self._path, self.size)
            raise
        self.size += len(data)


def _replace(path: Path, data: Any) -> None:
    """Write JSON so that the file holds either all of it or what it held before."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            json.dump(json_lines.finite(data), file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
