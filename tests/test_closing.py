"""After `close`, and without it: every use is a typed error, and nothing stays in memory."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropic_control import Engine, Request, load
from entropic_control.backends import Backend, Chunk, LlamaCppConfig, SimulatedConfig
from entropic_control.backends.llama_cpp import LlamaCpp
from entropic_control.backends.models import DEFAULT, locate
from entropic_control.backends.simulated import Simulated
from entropic_control.backends.triton import Triton
from entropic_control.config import Config
from entropic_control.errors import EngineClosed
from entropic_control.weakly import weakly

ROOT = Path(__file__).parents[1]
CONFIGS: dict[str, Any] = {
    "simulated": SimulatedConfig(slots=2),
    "llama_cpp": LlamaCppConfig(slots=2, context=256, step_tokens=32, threads=1),
}
CLASSES: dict[str, type] = {"simulated": Simulated, "llama_cpp": LlamaCpp, "triton": Triton}

needs_model = pytest.mark.skipif(locate(DEFAULT) is None, reason="needs the default model")
KINDS = ["simulated", pytest.param("llama_cpp", marks=[pytest.mark.llama, needs_model])]


def opened(kind: str) -> Backend:
    if kind == "llama_cpp":
        pytest.importorskip("llama_cpp")
    backend: Backend = CONFIGS[kind].open()
    return backend


# -- use after close --------------------------------------------------------------------------------

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "encode": ("hi",),
    "piece": (5,),
    "is_end": (5,),
    "forward": ([Chunk(0, 0, np.array([5], np.int32), True)],),
    "evict": (0, 0, 1),
    "rollback": (0, 0),
    "fork": (0, 1, 1),
    "restore": (0, b""),
    "sleep": (0.0,),
    "room": (),
    "now": (),
}


def public(cls: type) -> Iterator[tuple[str, bool]]:
    """Names of the public methods and properties of a class, and whether each is a method."""
    for name in sorted(set(dir(cls)) - {"close"}):
        if not name.startswith("_"):
            yield name, callable(inspect.getattr_static(cls, name))


def ask(backend: Backend, name: str, arguments: tuple[Any, ...] | None) -> Any:
    value = getattr(backend, name)
    return value if arguments is None else value(*arguments)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_every_use_of_a_closed_backend_is_a_typed_error(kind: str, used: bool) -> None:
    backend = opened(kind)
    if used:  # what was looked up before must not be answered from memory
        backend.forward([Chunk(0, 0, backend.encode("hi there"), True)])
        assert [backend.piece(5), backend.is_end(5), backend.ends, backend.length(0)]
    backend.close()
    names = dict(public(CLASSES[kind]))
    assert set(ARGUMENTS) <= set(names)
    for name, method in names.items():
        with pytest.raises(EngineClosed, match=f"{name}: the backend was closed"):
            ask(backend, name, ARGUMENTS.get(name, (0,)) if method else None)
    backend.close()
    backend.close()
    assert backend.capabilities.name == kind
    assert isinstance(backend, CLASSES[kind])


def test_an_open_backend_pays_nothing_for_it() -> None:
    first, second = opened("simulated"), opened("simulated")
    first.close()
    assert type(second) is Simulated
    assert second.encode("still open").size == 2


@pytest.mark.llama
@needs_model
def test_logits_that_were_taken_outlive_their_backend() -> None:
    backend: Any = opened("llama_cpp")
    row = backend.forward([Chunk(0, 0, backend.encode("hi"), True)]).logits[0]
    kept = row.copy()
    native = weakref.ref(backend._native)
    backend.close()
    del backend
    np.testing.assert_array_equal(row, kept)
    assert native() is not None
    del row
    assert native() is None


USES: dict[str, Callable[[Engine, Any], Any]] = {
    "submit": lambda engine, _: engine.submit("hi"),
    "submit_all": lambda engine, _: engine.submit_all(["hi"]),
    "run": lambda engine, _: engine.run(["hi"]),
    "run nothing": lambda engine, _: engine.run(),
    "stream": lambda engine, _: next(engine.stream(["hi"])),
    "stream nothing": lambda engine, _: list(engine.stream()),
    "a stream made before": lambda _, early: next(early),
    "step": lambda engine, _: engine.step(),
    "save": lambda engine, _: engine.save("/never/written"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_every_use_of_a_closed_engine_is_a_typed_error(kind: str, busy: bool) -> None:
    engine = Engine(Config(backend=CONFIGS[kind]), opened(kind))
    early = engine.stream([Request(prompt="hi", max_tokens=3)])
    if busy:
        engine.submit(Request(prompt="hello", max_tokens=5))
        engine.step()
        next(early)
    engine.close()
    for name, use in USES.items():
        with pytest.raises(EngineClosed):
            pytest.fail(f"{name} gave {use(engine, early)}")
        if name == "a stream made before":
            early = engine.stream(["hi"])
    engine.close()
    engine.cancel("0")  # a late cancel does nothing
    assert engine.report().summary


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_of_an_engine_left_by_with(kind: str) -> None:
    opened(kind).close()
    with load(Config(backend=CONFIGS[kind])) as engine:
        events = engine.stream(["hi"])
    with pytest.raises(EngineClosed, match="load another one"):
        next(events)


# -- dropped without close --------------------------------------------------------------------------


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("work", ["opened", "at work", "done", "cancelled"])
def test_a_dropped_engine_is_gone_at_once(kind: str, work: str, no_collector: None) -> None:
    """Without the garbage collector: it counts objects, and would let hundreds of megabytes lie."""
    engine = Engine(Config(backend=CONFIGS[kind]), opened(kind))
    backend = weakref.ref(engine.backend)
    if work != "opened":
        engine.submit_all([Request(prompt="hi there", max_tokens=4) for _ in range(3)])
        engine.step()
    if work == "cancelled":
        engine.cancel("1")
    if work in ("done", "cancelled"):
        engine.run()
    report = engine.report()
    del engine
    assert backend() is None
    assert report.summary


CHILD = """
import gc, os, sys
from pathlib import Path
from entropic_control import Request, load
if sys.argv[1] == "off":
    gc.disable()
config = {"backend": {"kind": "llama_cpp", "slots": 2, "context": 2048, "threads": 1}}
def megabytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
kept = []
for _ in range(6):
    engine = load(config)
    engine.run([Request(prompt="hi", max_tokens=2)])
    if sys.argv[2] == "ring":
        engine.ring = engine  # as a notebook's traceback makes one
    del engine
    kept.append(megabytes())
print(*kept)
"""


@pytest.mark.llama
@needs_model
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize(("collector", "ring"), [("on", "no"), ("off", "no"), ("off", "ring")])
def test_dropped_engines_leave_no_memory_behind(collector: str, ring: str) -> None:
    pytest.importorskip("llama_cpp")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, collector, ring],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        cwd=ROOT,
    )
    sizes = [float(word) for word in done.stdout.split()]
    assert sizes[-1] - sizes[1] < 40, sizes  # four engines, of 110 MB and more each


def test_what_is_called_weakly_is_not_kept_alive() -> None:
    class Thing:
        def name(self, suffix: str = "") -> str:
            return f"thing{suffix}"

    thing = Thing()
    call, gone = weakly(thing.name), weakref.ref(thing)
    assert call(suffix="!") == "thing!"
    del thing
    assert gone() is None
    with pytest.raises(ReferenceError, match="is gone"):
        call()
    assert weakly(len) is len
