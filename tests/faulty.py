"""Controllers whose methods go wrong at one request, and what becomes of the others."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np
from engines import ledgers_are_true

from entropic_control import Engine, Request
from entropic_control.controllers.base import Controller
from entropic_control.controllers.estimators import Estimator
from entropic_control.controllers.priority import Priority
from entropic_control.controllers.pruning import Blocks, Pruning
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.speculation import Speculation
from entropic_control.controllers.temperature import TemperatureController
from entropic_control.controllers.truncation import Truncation
from entropic_control.errors import RequestError

MARK = 1.25
"""The temperature of the request at fault, which no other has."""
FIRST, LONG = 7, 170
"""Its first token, and a length that it alone reaches."""
FAMILIES = (TemperatureController, Priority, Pruning, Speculation, Estimator, Truncation)
NEVER_RUN = {"linearize", "leanest", "track"}
"""Methods for proofs and wrappers; no step calls them."""


def hooks_of(family: type[Controller]) -> list[str]:
    """The methods that a family's base class declares for its members."""
    own = vars(family)
    return [
        name
        for name, value in own.items()
        if inspect.isfunction(value) and not name.startswith("_") and name not in NEVER_RUN
    ]


def _raise(_: Any) -> Any:
    raise RuntimeError("out of order")


def _slow(value: Any) -> Any:
    time.sleep(1e-3)
    return value


def _each(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def spoil(value: Any) -> Any:
        if isinstance(value, tuple):
            parts = [spoil(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return change(value)

    return spoil


def _filled(number: float) -> Callable[[Any], Any]:
    def change(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return np.full(value.shape, number)
        return number

    return _each(change)


FAULTS: dict[str, Callable[[Any], Any]] = {
    "raises": _raise,
    "nan": _filled(np.nan),
    "inf": _filled(np.inf),
    "-inf": _filled(-np.inf),
    "negative": _filled(-1.0),
    "negative integers": _each(lambda v: np.full(v.shape, -1) if isinstance(v, np.ndarray) else -1),
    "one more row": _each(
        lambda v: (
            np.append(v, v[-1:]) if isinstance(v, np.ndarray) and v.ndim == 1 and v.size else [v]
        )
    ),
    "a column": _each(lambda v: v[:, None] if isinstance(v, np.ndarray) else np.array([[v]])),
    "empty": _each(lambda v: v[:0] if isinstance(v, np.ndarray) else np.zeros(0)),
    "objects": _each(lambda v: np.array(["x"] * np.size(v), object)),
    "all wrong": lambda _: "nonsense",
    "none": lambda _: None,
    "slow": _slow,
}
HARMLESS = {"slow"}


def concerns(args: Any) -> bool | None:
    """Whether the arguments of a method hold the request at fault; None if they do not tell."""
    told: list[bool] = []
    for value in args:
        if isinstance(value, Reading):
            told.append(bool((value.temperature == MARK).any()))
        elif isinstance(value, Blocks):
            told.append(value.length >= LONG)
        elif isinstance(value, np.ndarray) and value.dtype == np.int32 and value.size:
            told.append(bool(value[0] == FIRST))
        elif hasattr(value, "temperature"):
            told.append(bool(np.any(value.temperature == MARK)))
        elif isinstance(value, int) and not isinstance(value, bool):
            told.append(value >= LONG)
    return any(told) if told else None


class Spoiled:
    """A controller one method of which goes wrong from its n-th call on, if the call concerns `FIRST`.

    Parameters
    ----------
    controller : Controller
        What is spoiled; `controller` is the copy that goes wrong.
    hook, fault : str
        Which method, and how.
    after : int
        Calls that still go well.
    """

    def __init__(self, controller: Controller, hook: str, fault: str, after: int = 0) -> None:
        self.aimed = True
        """Whether every call told whom it concerns."""
        self.spoiled = 0
        original = getattr(type(controller), hook)

        @wraps(original)
        def method(it: Any, *args: Any, **settings: Any) -> Any:
            value = original(it, *args, **settings)
            aims = settings.get("temperature") == MARK or concerns(args)
            self.aimed = self.aimed and aims is not None
            if aims is False:
                return value
            self.spoiled += 1
            return FAULTS[fault](value) if self.spoiled > after else value

        broken = type("Broken", (type(controller),), {hook: method, "__module__": __name__})
        self.controller = broken.model_construct(**dict(controller))


def requests(tokens: int = 14, longest: int = LONG) -> Iterator[Request]:
    """Three requests and, second of them, one that is told by its temperature, length and first token."""
    for number, length in enumerate((40, longest, 70, 25)):
        own: dict[str, float] = {"temperature": MARK if number == 1 else 0.9}
        ids = [11 + (number * 37 + n * n) % 90 for n in range(8)] * (length // 8 + 1)
        prompt = [FIRST if number == 1 else 8, *ids[: length - 1]]
        yield Request(
            id="victim" if number == 1 else f"r{number}",
            prompt=prompt,
            max_tokens=tokens,
            seed=number,
            temperature=own,
        )


def finished(engine: Engine, own: list[Request], most: int = 2000) -> dict[str, Any]:
    """Run to the end, with the ledgers checked after every step; the completed sequences by id."""
    engine.submit_all(own)
    for _ in range(most):
        if engine.idle:
            break
        engine.step()
        ledgers_are_true(engine)
        taken = [work.slot for work in engine.unfinished if work.slot is not None]
        assert engine._seats.free + len(taken) == engine.backend.capabilities.slots
    assert engine.idle, "no end in sight"
    str(engine.report())
    return {work.id: work for work in engine.done}


def check(done: dict[str, Any], undisturbed: dict[str, Any], spoiled: Spoiled, fault: str) -> None:
    """Nobody else is hurt, and what failed says by whose fault."""
    assert done.keys() == undisturbed.keys()
    for name, work in done.items():
        whole = undisturbed[name].tokens
        if work.reason == "failed":
            assert fault not in HARMLESS
            assert isinstance(work.error, RequestError), repr(work.error)
            assert work.tokens == whole[: len(work.tokens)]
            if spoiled.aimed:
                assert name == "victim"
        elif name == "victim" and fault not in HARMLESS:
            pass  # a value that could be used: its text may be another
        elif spoiled.aimed or fault in {"raises", "slow"}:
            assert work.tokens == whole
