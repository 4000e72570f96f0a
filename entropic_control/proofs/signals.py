"""The signals of a run that the proofs look at, request by request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from entropic_control import json_lines
from entropic_control.controllers.base import Array
from entropic_control.errors import CapabilityError, TraceError


class Signals(NamedTuple):
    """One request, arrays of shape (tokens,)."""

    entropy: Array
    """H of what was measured, nats."""
    varentropy: Array
    """Nats^2."""
    log_temperature: Array
    """u = ln T in force."""
    target: float | None = None
    """H* of the request, nats, where the trace has one."""


def signals(source: str | Path | Mapping[str, ArrayLike]) -> list[Signals]:
    """The signals of every request of a run.

    Parameters
    ----------
    source : path or mapping
        A run directory with a `trace.jsonl` or `trace.parquet`, such a file, or columns: entropy,
        temperature, and optionally varentropy, request, token and target.

    Raises
    ------
    TraceError
        If the trace is missing, empty, lacks a column, or holds NaN or a temperature of zero.
    CapabilityError
        For Parquet without pyarrow.
    """
    columns = _read(Path(source)) if isinstance(source, (str, Path)) else dict(source)
    for name in ("entropy", "temperature"):
        if name not in columns:
            raise TraceError(f"the trace has no column {name!r} (it has: {', '.join(columns)})")
    entropy = np.asarray(columns["entropy"], float)
    if entropy.ndim != 1 or not entropy.size:
        raise TraceError("the trace is empty: there is nothing to learn from no tokens")
    temperature = _column(columns, "temperature", entropy.size)
    varentropy = (
        _column(columns, "varentropy", entropy.size)
        if "varentropy" in columns
        else np.ones_like(entropy)
    )
    request = np.asarray(columns.get("request", np.zeros(entropy.size)))
    token = np.asarray(columns.get("token", np.arange(entropy.size)))
    for name, column in (
        ("entropy", entropy),
        ("temperature", temperature),
        ("varentropy", varentropy),
    ):
        _refuse_nan(name, column, request, token)
    if not (temperature > 0).all():
        raise TraceError("the trace holds a temperature of 0 (greedy): ln T does not exist there")
    target = np.asarray(columns.get("target", np.full(entropy.size, np.nan)), float)
    found = []
    for name in dict.fromkeys(request.tolist()):
        rows = np.flatnonzero(request == name)
        rows = rows[np.argsort(token[rows], kind="stable")]
        aim = None if np.isnan(target[rows[0]]) else float(target[rows[0]])
        found.append(Signals(entropy[rows], varentropy[rows], np.log(temperature[rows]), aim))
    return found


def _column(columns: Mapping[str, ArrayLike], name: str, size: int) -> Array:
    column = np.asarray(columns[name], float)
    if column.shape != (size,):
        raise TraceError(f"column {name!r} has {column.size} values where entropy has {size}")
    return column


def _refuse_nan(name: str, column: Array, request: Array, token: Array) -> None:
    bad = np.flatnonzero(~np.isfinite(column))
    if bad.size:
        at = bad[0]
        raise TraceError(
            f"{name} is {column[at]} at token {token[at]} of request {request[at]!s}, and at "
            f"{bad.size} tokens in all: leave those rows out or find out why they were not measured"
        )


_WANTED = ("request", "token", "entropy", "varentropy", "temperature", "target")


def _read(source: Path) -> dict[str, ArrayLike]:
    path = _trace_in(source) if source.is_dir() else source
    read = _parquet if path.suffix == ".parquet" else _json_lines
    try:
        columns = read(path)
    except OSError as error:
        raise TraceError(f"no trace at {str(path)!r}: {error.strerror or error}") from None
    if columns is None:
        raise TraceError(f"the trace at {str(path)!r} is empty")
    return columns


def _trace_in(directory: Path) -> Path:
    """The trace of a run, in whichever format it was written; the newer one if in both."""
    found = [directory / "trace.jsonl", directory / "trace.parquet"]
    found = [path for path in found if path.is_file()]
    if not found:
        raise TraceError(f"no trace.jsonl or trace.parquet in {str(directory)!r}")
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def _json_lines(path: Path) -> dict[str, ArrayLike] | None:
    try:
        rows = [json_lines.parse(line) for _, line in json_lines.lines(path)]
    except ValueError as error:
        raise TraceError(f"{str(path)!r} is no JSON lines file: {error}") from None
    if not rows:
        return None
    if not all(isinstance(row, dict) for row in rows):
        raise TraceError(f"{str(path)!r} is no trace: its lines must hold one object each")
    return {
        name: [row[name] if name == "request" else json_lines.number(row.get(name)) for row in rows]
        for name in _WANTED
        if name in rows[0]
    }


def _parquet(path: Path) -> dict[str, ArrayLike] | None:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise CapabilityError(
            "Parquet needs pyarrow: pip install 'entropic-control[parquet]'"
        ) from error
    try:
        known = parquet.read_schema(path).names
        table = parquet.read_table(path, columns=[name for name in _WANTED if name in known])
    except ArrowInvalid as error:
        raise TraceError(f"{str(path)!r} is no Parquet file: {error}") from None
    return {name: table[name].to_numpy() for name in table.column_names} if len(table) else None
