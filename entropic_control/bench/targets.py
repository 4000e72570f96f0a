"""How near the mean entropy comes to its target, by truncation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress
from rich.table import Table

from entropic_control.backends.base import Backend
from entropic_control.bench.prompts import SHORT
from entropic_control.config import Config
from entropic_control.controllers import MinP, NoTruncation, TopK, TopP, Truncation
from entropic_control.controllers.base import Array
from entropic_control.engine import Engine
from entropic_control.errors import ConfigError
from entropic_control.report import write_json
from entropic_control.request import Request
from entropic_control.trace import Trace

TARGETS = (0.6, 1.0, 1.4, 1.75, 2.0)
"""Nats."""

TRUNCATIONS: tuple[Truncation, ...] = (NoTruncation(), MinP(p=0.05), TopP(p=0.95), TopK(k=40))

TOLERANCE = 0.05
"""Share of the target within which a mean counts as held."""

_WARM_UP = 50
"""Tokens of each request that are left out: the loop starts from a temperature that it was given."""

_LAST = 100
"""Tokens at the end of a request that tell whether a bound stops it."""


def run_targets(
    config: Config,
    out: Path,
    bar: Progress,
    *,
    targets: Sequence[float] = TARGETS,
    places: Sequence[str] = ("before",),
    tokens: int = 400,
) -> list[dict[str, Any]]:
    """Run eight prompts under every target and truncation, but for the cells that `out` holds already.

    Returns
    -------
    list of dict
        A cell each: what it was, and the figures of `cell`.

    Raises
    ------
    ConfigError
        If the temperature controller of the configuration has no target.
    """
    if "target" not in type(config.temperature).model_fields:
        raise ConfigError(f"temperature '{config.temperature.kind}' has no target to hold")
    path = out / "targets.json"
    out.mkdir(parents=True, exist_ok=True)
    cells: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    wanted = [
        (truncation.replace(place=place), target)
        for truncation in TRUNCATIONS
        for place in (places if truncation.kind != "none" else places[:1])
        for target in targets
    ]
    task = bar.add_task("decoding", total=len(wanted) * len(SHORT) * tokens)
    backend = config.backend.open()
    try:
        for truncation, target in wanted:
            name = {"truncation": truncation.model_dump(mode="json"), "target": target}
            name |= {"slots": backend.capabilities.slots, "tokens": tokens}
            if not any(name.items() <= done.items() for done in cells):
                temperature = config.temperature.replace(target=target)
                changed = config.replace(temperature=temperature, truncation=truncation)
                cells.append(name | _run(changed, backend, tokens))
                write_json(path, cells)
            bar.advance(task, len(SHORT) * tokens)
            bar.refresh()
    finally:
        backend.close()
    return cells


def _run(config: Config, backend: Backend, tokens: int) -> dict[str, Any]:
    engine = Engine(config, backend)
    engine.run(
        Request(prompt=prompt, max_tokens=tokens, ignore_eos=True, seed=seed)
        for seed, prompt in enumerate(SHORT)
    )
    return cell(engine.trace, len(SHORT))


def cell(trace: Trace, requests: int) -> dict[str, Any]:
    """The figures of a run.

    Returns
    -------
    dict
        `entropy`, the mean over all tokens past the warm-up, nats; `by_request`; `stopped`, requests that
        end at the upper temperature bound, and `entropy_of_others`; shares of tokens `saturated` and
        `infeasible`; the mean `temperature`; `reachable`, the mean entropy of the tokens drawn while a
        request was stopped by the bound.
    """
    column = trace.tokens
    late = column["token"] >= _WARM_UP
    rows = [np.flatnonzero((column["request"] == n) & late) for n in range(requests)]
    means = [float(column["entropy"][mine].mean()) for mine in rows]
    stopped = [bool((column["saturated"][mine[-_LAST:]] > 0).mean() > 0.5) for mine in rows]
    others = [mean for mean, stop in zip(means, stopped, strict=True) if not stop]
    return {
        "entropy": float(column["entropy"][late].mean()),
        "by_request": means,
        "stopped": sum(stopped),
        "entropy_of_others": float(np.mean(others)) if others else None,
        "saturated": float((column["saturated"][late] > 0).mean()),
        "infeasible": float((~column["feasible"][late]).mean()),
        "temperature": float(np.exp(np.log(column["temperature"][late]).mean())),
        "reachable": _at_bound(column, (rows[n] for n in range(requests) if stopped[n])),
    }


def _at_bound(column: Any, rows: Iterable[Array]) -> float | None:
    values = [
        column["entropy"][mine[-_LAST:]][column["saturated"][mine[-_LAST:]] > 0] for mine in rows
    ]
    return float(np.concatenate(values).mean()) if values else None


def verdict(found: dict[str, Any]) -> str:
    """What a cell came to, in a word or two."""

    def held(mean: float | None) -> bool:
        return mean is not None and abs(mean / found["target"] - 1) <= TOLERANCE

    if held(found["entropy"]):
        return "held"
    if found["stopped"] == len(found["by_request"]):
        return "at the bound"
    if found["stopped"] and held(found["entropy_of_others"]):
        return f"held but for {found['stopped']} at the bound"
    return f"missed, {found['stopped']} at the bound" if found["stopped"] else "missed"


def table(cells: Sequence[dict[str, Any]]) -> Table:
    """The cells for a terminal."""
    out = Table("truncation", "target", "mean H", "off", "T", "at bound", "verdict")
    for found in cells:
        row = columns(found)
        out.add_row(
            *(row[name] for name in ("truncation", "target", "H", "off", "T", "bound", "verdict"))
        )
    return out


def markdown(cells: Sequence[dict[str, Any]]) -> str:
    """The cells as a table in Markdown."""
    rows = [columns(found) for found in cells]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def columns(found: dict[str, Any]) -> dict[str, str]:
    """One cell in words, by column."""
    cut = dict(found["truncation"])
    kind, place = cut.pop("kind"), cut.pop("place")
    settings = " ".join(f"{value:g}" for value in cut.values())

    def nats(name: str) -> str:
        return "-" if found[name] is None else f"{found[name]:.3f}"

    return {
        "truncation": kind if kind == "none" else f"{kind} {settings} {place}",
        "target": f"{found['target']:g}",
        "H": nats("entropy"),
        "off": f"{100 * (found['entropy'] / found['target'] - 1):+.1f} %",
        "T": f"{found['temperature']:.2f}",
        "bound": f"{100 * found['saturated']:.0f} %",
        "verdict": verdict(found),
        "H of those off the bound": nats("entropy_of_others"),
        "reachable by those at it": nats("reachable"),
        "too few candidates": f"{100 * found['infeasible']:.0f} %",
    }
