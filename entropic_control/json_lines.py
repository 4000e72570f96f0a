"""JSON as this package reads and writes it: strict in both directions, and one document a line.

A line ends at a line feed and nowhere else, since JSON strings may hold any other separator. JSON knows no
NaN and no infinity: NaN, which stands for "not measured", is written as null, the infinities as the strings
"Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}


def parse(text: str) -> Any:
    """The value of a JSON text; a byte-order mark in front of it is skipped.

    Raises
    ------
    ValueError
        If it is not JSON, or an object in it has a key twice.
    """
    return json.loads(
        text.removeprefix("\ufeff"), object_pairs_hook=_object, parse_constant=_no_constant
    )


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that hold something, with their numbers from 1.

    Raises
    ------
    OSError, UnicodeDecodeError
        If it cannot be read as text.
    """
    text = path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    return ((n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip())


def dumps(value: Any, indent: int | None = None) -> str:
    """A value as JSON."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)


def write_lines(file: IO[str], values: Iterable[Any]) -> None:
    """Write each value as a line."""
    file.writelines(dumps(value) + "\n" for value in values)


def finite(value: Any) -> Any:
    """A value with what JSON has no number for replaced."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def number(value: Any) -> Any:
    """A number that was written by `finite`; anything else as it is."""
    if value is None:
        return math.nan
    return INFINITIES.get(value, value) if isinstance(value, str) else value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice")
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
