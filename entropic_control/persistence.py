"""Saving the unfinished requests of an engine, and taking them up again. Arrays and JSON, no pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from entropic_control.config import load_config, plain
from entropic_control.controllers.base import Array
from entropic_control.errors import StateError
from entropic_control.request import Request
from entropic_control.sequence import Sequence

if TYPE_CHECKING:
    from entropic_control.backends.base import Backend
    from entropic_control.engine import Engine

FORMAT = 3
STATES = ("temperature", "priority", "pruning", "speculation")
"""The controllers whose states are saved."""
FITTING = ("name", "vocab", "context", "block")
"""What a backend must have in common with the one that a state was saved on."""


def save(engine: Engine, path: Path) -> None:
    """Write the unfinished requests of `engine` to `path`, replacing it only when all is written."""
    works = engine.unfinished
    now = engine.backend.now()
    head = {
        "format": FORMAT,
        "backend": _fitting(engine.backend),
        "config": plain(engine.config),
        "dry_run": engine.dry_run,
        "requests": [_describe(work, now) for work in works],
    }
    arrays = {"head": np.frombuffer(json.dumps(head).encode(), np.uint8)}
    for index, work in enumerate(works):
        for name, value in _arrays(engine, work).items():
            arrays[f"{index}/{name}"] = value
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    partial.replace(path)


def restore(path: str | Path, backend: Backend | None = None) -> Engine:
    """An engine that goes on where `Engine.save` was called.

    Parameters
    ----------
    path : path
        The file that was saved.
    backend : Backend, optional
        An open engine of the same model and size; by default the saved configuration's is opened.

    Raises
    ------
    StateError
        If the file is no saved state, or does not fit the backend.
    """
    from entropic_control.engine import Engine

    arrays, head = _read(Path(path))
    engine = Engine(load_config(head["config"]), backend, dry_run=head["dry_run"])
    try:
        here = _fitting(engine.backend)
        if here != head["backend"]:
            raise StateError(
                f"{str(path)!r} was saved on {head['backend']}, and this backend is {here}"
            )
        for index, described in enumerate(head["requests"]):
            own = {
                name.split("/", 1)[1]: value
                for name, value in arrays.items()
                if name.startswith(f"{index}/")
            }
            engine.adopt(_rebuild(engine, described, own))
    except Exception as error:
        if backend is None:
            engine.close()
        if isinstance(error, (KeyError, ValueError, IndexError, TypeError)):
            raise StateError(f"{str(path)!r} is damaged: {error!r}") from error
        raise
    return engine


def _read(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays of a saved state, and what is told about them."""
    try:
        # Opened as the zip file it is: `numpy.load` would also take a bare array or a pickle.
        with path.open("rb") as stream, np.lib.npyio.NpzFile(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        head = json.loads(arrays["head"].tobytes())
        form = head["format"]
        complete = {"backend", "config", "dry_run", "requests"} <= head.keys()
    except Exception as error:  # a damaged archive fails in any way it likes
        raise StateError(f"{str(path)!r} is not a saved engine state: {error}") from error
    if form != FORMAT or not complete:
        raise StateError(f"{str(path)!r} has format {form!r}, not {FORMAT}, or lacks a part")
    return arrays, head


def _fitting(backend: Backend) -> dict[str, Any]:
    about = {name: getattr(backend.capabilities, name) for name in FITTING}
    # Another distribution's backend may have none.
    return {**about, "model": getattr(backend, "fingerprint", None)}


def _describe(work: Sequence, now: float) -> dict[str, Any]:
    return {
        "request": work.request.model_dump(mode="json"),
        "limit": work.limit,
        "tokens": work.tokens,
        "prunable": work.prunable,
        "raw_entropy": None if np.isnan(work.raw_entropy) else work.raw_entropy,
        "tau": work.tau,
        "age": now - work.arrived,
        "first_token": None if work.first_token is None else now - work.first_token,
        "preemptions": work.preemptions,
    }


def _arrays(engine: Engine, work: Sequence) -> dict[str, Array]:
    data = work.swapped
    if work.slot is not None and work.ledger.length:
        data = engine.backend.save(work.slot)
    arrays = {f"ledger/{name}": value for name, value in work.ledger.export().items()}
    arrays["prompt"] = work.prompt
    if data is not None:
        arrays["kv"] = np.frombuffer(data, np.uint8)
    for family in STATES:
        for place, leaf in enumerate(_leaves(getattr(work, family))):
            arrays[f"{family}/{place}"] = leaf
    return arrays


def _rebuild(engine: Engine, described: dict[str, Any], arrays: dict[str, Array]) -> Sequence:
    request = Request.model_validate(described["request"])
    work = engine.prepare(request, arrays["prompt"])
    work.limit = described["limit"]
    work.tokens = list(described["tokens"])
    work.prunable = described["prunable"]
    entropy = described["raw_entropy"]
    work.raw_entropy = float("nan") if entropy is None else entropy
    work.tau = described["tau"]
    now = engine.backend.now()
    work.arrived = now - described["age"]
    since = described["first_token"]
    work.first_token = None if since is None else now - since
    work.preemptions = described["preemptions"]
    for token in work.tokens:
        work.text.feed(engine.backend.piece(token))
    work.ledger.adopt({name: arrays[f"ledger/{name}"] for name in work.ledger.export()})
    if "kv" in arrays:
        work.swapped = arrays["kv"].tobytes()
    for family in STATES:
        leaves = iter(
            arrays[f"{family}/{place}"] for place in range(len(_leaves(getattr(work, family))))
        )
        setattr(work, family, _filled(getattr(work, family), leaves))
    return work


def _leaves(state: Any) -> list[Array]:
    return [
        leaf for part in state for leaf in (_leaves(part) if isinstance(part, tuple) else [part])
    ]


def _filled(state: Any, leaves: Any) -> Any:
    return type(state)(
        *(_filled(part, leaves) if isinstance(part, tuple) else next(leaves) for part in state)
    )
