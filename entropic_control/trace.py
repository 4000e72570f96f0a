"""The trace: what every step measured, commanded, decided and cost, in columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from entropic_control import json_lines
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
    "reason": "O",
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

    def extend(self, columns: Mapping[str, Any]) -> None:
        """Add rows that stand in columns already."""
        rows = len(next(iter(columns.values())))
        self.append(rows, lambda _: columns, None)

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

    def columns(self, start: int = 0) -> dict[str, Array]:
        """All columns, from row `start` on."""
        return {name: self[name][start:] for name in self._columns}


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

    def of(self, name: str) -> dict[str, Array]:
        """The token columns of one request."""
        mine = self.tokens["request"] == self.names.index(name)
        return {column: values[mine] for column, values in self.tokens.columns().items()}

    def named(self, start: int = 0) -> dict[str, Array]:
        """The token columns from row `start` on, with the requests by their names."""
        columns = self.tokens.columns(start)
        columns["request"] = np.array(self.names or [""], dtype=object)[columns["request"]]
        return columns

    def adopt(
        self,
        tokens: Mapping[str, Array],
        steps: Mapping[str, Array],
        events: Iterable[dict[str, Any]],
        later: float,
    ) -> None:
        """Take over what an earlier part of the run wrote.

        Parameters
        ----------
        tokens, steps : columns
            As `read_table` gives them.
        events : iterable of dict
            The events.
        later : float
            What is added to their times, seconds, because this part's clock began elsewhere.
        """
        if len(tokens.get("request", ())):
            found = dict.fromkeys(tokens["request"].tolist())
            self.names += [name for name in found if name not in self.names]
            number = {name: place for place, name in enumerate(self.names)}
            requests = np.array([number[name] for name in tokens["request"].tolist()])
            self.tokens.extend({**tokens, "request": requests, "time": tokens["time"] + later})
        if len(steps.get("step", ())):
            self.steps.extend({**steps, "time": steps["time"] + later})
        self.events += [{**event, "time": event["time"] + later} for event in events]

    def write(self, directory: Path, format: Format = "jsonl") -> list[Path]:
        """Write trace, steps and events; returns the files.

        The files of an earlier run in the other format are removed.

        Raises
        ------
        CapabilityError
            If Parquet is asked for and pyarrow is not installed.
        """
        check_format(format)
        directory.mkdir(parents=True, exist_ok=True)
        return [
            write_table(directory, "trace", self.named(), format),
            write_table(directory, "steps", self.steps.columns(), format),
            _lines(directory / "events.jsonl", self.events),
        ]


def check_format(format: Format) -> None:
    """See that tables can be written in a format.

    Raises
    ------
    CapabilityError
        If Parquet is asked for and pyarrow is not installed.
    """
    if format == "parquet":
        _pyarrow()


def write_table(directory: Path, name: str, columns: Mapping[str, Array], format: Format) -> Path:
    """Write a table in one format, and remove what another format holds of it."""
    path = directory / f"{name}.{format}"
    if format == "parquet":
        _parquet(path, columns)
    else:
        _lines(path, rows_of(columns))
    (directory / f"{name}.{'jsonl' if format == 'parquet' else 'parquet'}").unlink(missing_ok=True)
    return path


def rows_of(columns: Mapping[str, Array]) -> Iterator[dict[str, Any]]:
    """The rows of a table."""
    lists = [column.tolist() for column in columns.values()]
    return (dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True))


def read_table(directory: Path, name: str, format: Format | None = None) -> dict[str, Array]:
    """The columns of a table that `Trace.write` wrote, "trace" or "steps".

    Where it is there in both formats, and none is asked for, the newer one counts.

    Raises
    ------
    FileNotFoundError
        If the run directory holds no such table.
    """
    formats = ("jsonl", "parquet") if format is None else (format,)
    found = [directory / f"{name}.{one}" for one in formats]
    found = [path for path in found if path.is_file()]
    if not found:
        raise FileNotFoundError(f"no {name}.jsonl or {name}.parquet in {str(directory)!r}")
    path = max(found, key=lambda path: path.stat().st_mtime_ns)
    if path.suffix == ".parquet":
        table = _pyarrow().read_table(path)
        return {key: table[key].to_numpy() for key in table.column_names}
    rows = [json_lines.parse(line) for _, line in json_lines.lines(path)]
    keys = rows[0] if rows else {}
    return {key: _column(key, [row[key] for row in rows]) for key in keys}


def _column(name: str, values: list[Any]) -> Array:
    dtype = (TOKEN_COLUMNS | STEP_COLUMNS).get(name, "")
    if dtype == "f8" or any(value is None for value in values):
        return np.array([json_lines.number(value) for value in values], float)
    return np.array(values)


def _lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8") as file:
        json_lines.write_lines(file, rows)
    return path


def _parquet(path: Path, columns: Mapping[str, Array]) -> None:
    parquet = _pyarrow()
    import pyarrow

    parquet.write_table(pyarrow.table(dict(columns)), path)


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise CapabilityError(
            "Parquet needs pyarrow: pip install 'entropic-control[parquet]'"
        ) from error
    return pyarrow.parquet
