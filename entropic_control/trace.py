"""The trace: what every step measured, commanded, decided and cost, in columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from entropic_control.controllers.base import Array
from entropic_control.errors import CapabilityError

Format = Literal["jsonl", "parquet"]

TOKEN_COLUMNS: dict[str, str] = {
    "step": "i8",
    "time": "f8",
    "request": "i4",
    "token": "i4",
    "token_id": "i4",
    "temperature": "f8",
    "commanded": "f8",
    "entropy": "f8",
    "varentropy": "f8",
    "raw_entropy": "f8",
    "realized_entropy": "f8",
    "lower": "f8",
    "upper": "f8",
    "tail_mass": "f8",
    "live": "i8",
    "surprisal": "f8",
    "raw_surprisal": "f8",
    "target": "f8",
    "saturated": "i1",
    "feasible": "?",
    "cells": "i4",
    "tau": "f8",
}
"""One row a token. Entropies, surprisal and tau in nats, varentropy in nats^2, time in seconds."""

STEP_COLUMNS: dict[str, str] = {
    "step": "i8",
    "time": "f8",
    "rows": "i4",
    "longest": "i4",
    "prompt_tokens": "i4",
    "prompt_reads": "i8",
    "measured": "i4",
    "drafted": "i4",
    "passes": "i4",
    "accepted": "i4",
    "predicted": "f8",
    "forward": "f8",
    "seconds": "f8",
    "cells": "i8",
    "waiting": "i4",
    "tau": "f8",
    "reason": "U48",
}
"""One row a step. `drafted` tokens were guessed, and `accepted` of them held, in
`passes` through the model. `reason` is the scheduler's, `forward` the engine's own time, `seconds` the
whole step, both in seconds."""

_TOGETHER = 64
"""Records that are written together."""

Maker = Callable[[list[Any]], Mapping[str, Any]]
"""Gives the columns of some records: arrays as long as their rows together, or scalars."""


class Table:
    """Columns that grow by doubling."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._columns = {name: np.zeros(1024, dtype) for name, dtype in columns.items()}
        self._size = 0
        self._unwritten: list[tuple[int, Maker, Any]] = []

    def __len__(self) -> int:
        return self._size

    def append(self, rows: int, maker: Maker, record: Any) -> None:
        """Add `rows` rows of a record.

        They are written later, when the table is read or many records wait: `maker` gets a list of them and
        gives each column's values. After a decode, which leaves nothing of this in the processor's caches,
        to write every record at once took ten times as long.
        """
        self._unwritten.append((rows, maker, record))
        self._size += rows
        if len(self._unwritten) >= _TOGETHER:
            self._write()

    def truncate(self, rows: int) -> None:
        """Drop all but the first `rows` rows, where a record ends."""
        while self._size > rows and self._unwritten:
            self._size -= self._unwritten.pop()[0]
        self._size = min(self._size, rows)

    def _write(self) -> None:
        while self._size > len(next(iter(self._columns.values()))):
            for name, column in self._columns.items():
                self._columns[name] = np.concatenate([column, np.zeros_like(column)])
        start = self._size - sum(rows for rows, _, _ in self._unwritten)
        for maker, group in groupby(self._unwritten, key=itemgetter(1)):
            entries = list(group)
            values = maker([record for _, _, record in entries])
            stop = start + sum(rows for rows, _, _ in entries)
            for name, column in self._columns.items():
                column[start:stop] = values[name]
            start = stop
        self._unwritten = []

    def __getitem__(self, name: str) -> Array:
        self._write()
        return self._columns[name][: self._size]

    def columns(self) -> dict[str, Array]:
        """All columns, cut to size."""
        return {name: self[name] for name in self._columns}


class Trace:
    """The record of a run: tokens, steps and events."""

    def __init__(self) -> None:
        self.tokens = Table(TOKEN_COLUMNS)
        self.steps = Table(STEP_COLUMNS)
        self.events: list[dict[str, Any]] = []
        self.names: list[str] = []
        """Names of the requests, by the number in `tokens`."""

    def event(self, step: int, time: float, what: str, request: str, **details: Any) -> None:
        """Note a decision and its reasons."""
        self.events.append(
            {"step": step, "time": time, "event": what, "request": request, **details}
        )

    def mark(self) -> tuple[int, int, int]:
        """What `rewind` goes back to."""
        return len(self.tokens), len(self.steps), len(self.events)

    def rewind(self, mark: tuple[int, int, int], ended: Collection[str] = ()) -> None:
        """Drop what was noted since a mark, but for the events of the requests that `ended`."""
        tokens, steps, events = mark
        self.tokens.truncate(tokens)
        self.steps.truncate(steps)
        self.events[events:] = [e for e in self.events[events:] if e["request"] in ended]

    def only(self, numbers: Sequence[int]) -> Trace:
        """The rows and events of some requests, which get the numbers 0, 1, ... in this order; no steps."""
        kept = Trace()
        kept.names = [self.names[number] for number in numbers]
        named = set(kept.names)
        kept.events = [event for event in self.events if event["request"] in named]
        anew = np.full(len(self.names) + 1, -1)
        anew[list(numbers)] = np.arange(len(numbers))
        request = anew[self.tokens["request"]]
        mine = request >= 0
        columns = {name: values[mine] for name, values in self.tokens.columns().items()}
        columns["request"] = request[mine]
        if mine.any():
            kept.tokens.append(int(mine.sum()), _ready, columns)
        return kept

    def of(self, name: str) -> dict[str, Array]:
        """The token columns of one request."""
        mine = self.tokens["request"] == self.names.index(name)
        return {column: values[mine] for column, values in self.tokens.columns().items()}

    def write(self, directory: Path, format: Format = "jsonl") -> list[Path]:
        """Write trace, steps and events; returns the files.

        Raises
        ------
        CapabilityError
            If Parquet is asked for and pyarrow is not installed.
        """
        directory.mkdir(parents=True, exist_ok=True)
        tokens = self.tokens.columns()
        named = np.array(self.names or [""], dtype=object)
        tokens["request"] = named[tokens["request"]]
        write = _parquet if format == "parquet" else _jsonl
        return [
            write(directory / "trace", tokens),
            write(directory / "steps", self.steps.columns()),
            _lines(directory / "events.jsonl", self.events),
        ]


def _ready(records: list[Any]) -> Mapping[str, Any]:
    """The columns of the one record that is columns already."""
    (columns,) = records
    return dict(columns)


def read_table(directory: Path, name: str) -> dict[str, Array]:
    """The columns of a table that `Trace.write` wrote, "trace" or "steps", in either format.

    Raises
    ------
    FileNotFoundError
        If the run directory holds no such table.
    """
    lines = directory / f"{name}.jsonl"
    if lines.is_file():
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        keys = rows[0] if rows else {}
        return {key: _column([row[key] for row in rows]) for key in keys}
    if (directory / f"{name}.parquet").is_file():
        table = _pyarrow().read_table(directory / f"{name}.parquet")
        return {key: table[key].to_numpy() for key in table.column_names}
    raise FileNotFoundError(f"no {name}.jsonl or {name}.parquet in {str(directory)!r}")


def _column(values: list[Any]) -> Array:
    if any(value is None for value in values):
        return np.array([np.nan if value is None else value for value in values], float)
    return np.array(values)


def _jsonl(path: Path, columns: dict[str, Array]) -> Path:
    lists = [
        [None if value != value else value for value in column.tolist()]  # NaN is no JSON
        for column in columns.values()
    ]
    names = list(columns)
    rows = (dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True))
    return _lines(path.with_suffix(".jsonl"), rows)


def _lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def _parquet(path: Path, columns: dict[str, Array]) -> Path:
    parquet = _pyarrow()
    import pyarrow

    target = path.with_suffix(".parquet")
    parquet.write_table(pyarrow.table(columns), target)
    return target


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise CapabilityError(
            "Parquet needs pyarrow: pip install 'entropic-control[parquet]'"
        ) from error
    return pyarrow.parquet
