"""Saving a running engine and taking its requests up again."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import configured, events_of, ids, ledgers_are_true, reasons, simulated, tokens_of

from entropic_control import Engine, Request, restore
from entropic_control.backends import SimulatedConfig
from entropic_control.backends.models import digest
from entropic_control.controllers import EntropicPruning, PITemperature, SlewLimit
from entropic_control.errors import StateError

PRUNE = EntropicPruning(budget=64, sinks=1, recent=2, min_tokens=64, gate=2.5)
SMALL: dict[str, Any] = {"slots": 2, "cells": 260, "vocab": 64, "context": 256}


def requests() -> list[Request]:
    return [
        Request(
            id=f"r{n}",
            prompt=[1 + (n + m) % 60 for m in range(70 + 9 * n)],
            max_tokens=50,
            seed=n,
            stop=("w7 w",),
            temperature={"target": 0.8 + 0.3 * n},
        )
        for n in range(5)
    ]


@pytest.mark.parametrize(
    "temperature",
    [
        PITemperature(),
        SlewLimit(inner=PITemperature(), rate=0.02),
    ],
    ids=lambda t: t.kind,
)
@pytest.mark.parametrize("after", [0, 1, 30, 90])
def test_the_rest_equals_the_uninterrupted_run(
    tmp_path: Path, temperature: Any, after: int
) -> None:
    config = configured(SMALL, temperature=temperature, pruning=PRUNE)
    work = requests()
    if temperature.kind == "slew":
        work = [request.replace(temperature={}) for request in work]
    whole = Engine(config)
    expected = tokens_of(whole.run(work))
    engine = Engine(config)
    engine.submit_all(work)
    for _ in range(after):
        engine.step()
    engine.save(tmp_path / "state")
    before = tokens_of(engine.report())
    again = restore(tmp_path / "state")
    assert {w.id for w in again.unfinished} | set(before) == set(expected)
    while not again.idle:
        again.step()
        ledgers_are_true(again)
    report = again.report()
    assert before | tokens_of(report) == expected
    texts = {done.id: done.text for done in whole.report().completions}
    for done in report.completions:
        assert done.text == texts[done.id]
        mine, full = again.trace.of(done.id), whole.trace.of(done.id)
        size = len(mine["entropy"])
        for column in (
            "temperature",
            "commanded",
            "entropy",
            "surprisal",
            "tau",
            "token",
            "target",
        ):
            np.testing.assert_array_equal(mine[column], full[column][-size:], column)
    if after == 30:
        # What the moment of saving is there for: some were pruned, preempted, waiting, done.
        assert events_of(engine, "pruned")
        assert any(w.slot is None for w in engine.unfinished)
        assert any(w.slot is not None for w in engine.unfinished)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    expected = tokens_of(simulated(SMALL, pruning=PRUNE).run(requests()))
    engine = simulated(SMALL, pruning=PRUNE)
    engine.submit_all(requests())
    while not engine.idle:
        engine.step()
        engine.save(tmp_path / "state")
    assert tokens_of(engine.report()) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]
    assert restore(tmp_path / "state").idle


def test_times_and_deadlines_go_on(tmp_path: Path) -> None:
    engine = simulated({"slots": 1})
    engine.submit_all(
        [
            Request(id="runs", prompt=ids(5), max_tokens=500, deadline=1.0),
            Request(id="late", prompt=ids(5), max_tokens=3, arrive=3.0),
        ]
    )
    while engine.backend.now() < 0.5:
        engine.step()
    engine.save(tmp_path / "state")
    again = restore(tmp_path / "state")
    report = again.run()
    assert reasons(report) == {"runs": "deadline", "late": "length"}
    runs, late = report.completions
    assert runs.latency == pytest.approx(1.0, abs=0.03)
    assert runs.time_to_first_token is not None
    assert 0 < runs.time_to_first_token < 0.2
    assert late.latency < 0.2
    assert again.trace.of("late")["time"][0] > 2.4


def test_requests_can_follow_those_taken_up(tmp_path: Path) -> None:
    engine = simulated()
    engine.submit_all([ids(5), ids(6), ids(7)])
    engine.cancel("0")
    engine.step()
    engine.save(tmp_path / "state")
    again = restore(tmp_path / "state")
    assert [work.id for work in again.unfinished] == ["1", "2"]
    assert again.submit(ids(5)) == "3"
    assert len(again.run().completions) == 3


def test_a_dry_run_stays_one(tmp_path: Path) -> None:
    engine = Engine(configured(), dry_run=True)
    engine.submit(Request(id="a", prompt=ids(5), max_tokens=60))
    for _ in range(10):
        engine.step()
    engine.save(tmp_path / "state")
    again = restore(tmp_path / "state")
    assert again.dry_run
    again.run()
    assert np.all(again.trace.of("a")["temperature"] == 0.7)


# -- files that are none ------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    engine = simulated(SMALL, pruning=PRUNE)
    engine.submit_all(requests()[:2])
    while not all(work.tokens for work in engine.unfinished):
        engine.step()
    assert len(engine.unfinished) == 2
    engine.save(tmp_path / "good")
    return tmp_path / "good"


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def head(data: Any) -> Any:
    return np.frombuffer(json.dumps(data).encode(), np.uint8)


class Trap:
    """Unpickling it would leave a mark."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("trapped"),)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a state at all",
        b"PK\x03\x04",
        npy(np.zeros(3)),
        pickle.dumps({"format": 1}),
        npz(a=np.zeros(3)),
        npz(head=np.frombuffer(b"{", np.uint8)),
        npz(head=np.frombuffer(b"\xff\xfe", np.uint8)),
        npz(head=head([1, 2])),
        npz(head=head({})),
        npz(head=head({"format": 2})),
        npz(head=head({"format": 99, "config": {}})),
        npz(head=np.array([Trap()], dtype=object)),
    ],
    ids=str,
)
def test_a_foreign_file_is_refused(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(StateError, match="foreign"):
        restore(path)
    assert not (tmp_path / "trapped").exists(), "something was unpickled"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="gone"):
        restore(tmp_path / "gone")
    with pytest.raises(StateError):
        restore(tmp_path)


def test_a_truncated_file_is_refused_wherever_it_ends(saved: Path) -> None:
    whole = saved.read_bytes()
    for share in np.linspace(0, 1, 23)[:-1]:
        saved.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(StateError):
            restore(saved)


def test_a_flipped_byte_is_found_or_harmless(saved: Path) -> None:
    whole = saved.read_bytes()
    expected = tokens_of(restore(saved).run())
    refused = 0
    for at in range(40, len(whole), len(whole) // 40):
        saved.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        try:
            again = restore(saved)
        except StateError:
            refused += 1
        else:  # zip metadata that nobody reads
            assert tokens_of(again.run()) == expected
    assert refused > 20


@pytest.mark.parametrize("part", ["prompt", "ledger/held", "temperature/0", "pruning/0"])
def test_a_missing_part_is_refused(saved: Path, part: str) -> None:
    with np.load(saved) as file:
        arrays = {name: file[name] for name in file.files if name != f"1/{part}"}
    assert len(arrays) > 10
    with saved.open("wb") as stream:
        np.savez(stream, **arrays)
    with pytest.raises(StateError, match="damaged"):
        restore(saved)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 5},
        {"request": {"prompt": 5}},
        {"request": {"unknown": 5}},
        {"limit": None, "tau": None, "age": None},
    ],
)
def test_a_damaged_description_is_refused(saved: Path, change: dict[str, Any]) -> None:
    with np.load(saved) as file:
        arrays = {name: file[name] for name in file.files}
    described = json.loads(arrays["head"].tobytes())
    described["requests"][0].update(change)
    arrays["head"] = head(described)
    with saved.open("wb") as stream:
        np.savez(stream, **arrays)
    with pytest.raises(StateError, match="damaged"):
        restore(saved)


def test_another_backend_is_refused_and_left_open(saved: Path) -> None:
    closed: list[bool] = []
    other = SimulatedConfig(**{**SMALL, "vocab": 65}).open()
    other.close = lambda: closed.append(True)  # type: ignore[method-assign]
    with pytest.raises(StateError, match=r"was saved on .*'vocab': 64.*'vocab': 65"):
        restore(saved, other)
    assert not closed
    same = SimulatedConfig(**SMALL).open()
    assert restore(saved, same).backend is same


def test_a_smaller_engine_of_the_same_model_goes_on(saved: Path) -> None:
    single = SimulatedConfig(**{**SMALL, "slots": 1}).open()
    assert tokens_of(restore(saved, single).run()) == tokens_of(restore(saved).run())


def test_the_file_holds_arrays_and_json_only(saved: Path) -> None:
    with zipfile.ZipFile(saved) as file:
        assert all(name.endswith(".npy") for name in file.namelist())
    with np.load(saved, allow_pickle=False) as file:
        assert all(file[name].dtype != object for name in file.files)
        assert json.loads(file["head"].tobytes())["requests"][0]["request"]["id"] == "r0"


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_prompt_saved_half_read_is_surveyed_as_before(tmp_path: Path, share: float) -> None:
    pruning = PRUNE.replace(measured=share, numbers=0.0, window=0.1, during_prefill=True)
    backend = {**SMALL, "vocab": 512, "step_tokens": 16, "block": 1}

    def begun() -> Engine:
        engine = simulated(backend, pruning=pruning)
        engine.submit(Request(id="a", prompt=ids(150), max_tokens=20))
        for _ in range(4):
            engine.step()
        return engine

    whole, cut = begun(), begun()
    assert whole.unfinished[0].prompt_left > 32
    cut.save(tmp_path / "state")
    again = restore(tmp_path / "state")
    while not whole.idle:
        ledgers = [engine.unfinished[0].ledger.export() for engine in (whole, again)]
        for name, values in ledgers[0].items():
            np.testing.assert_array_equal(values, ledgers[1][name])
        whole.step()
        again.step()
    assert tokens_of(again.report()) == tokens_of(whole.report())
    measured = again.trace.steps["measured"].sum()
    assert measured == whole.trace.steps["measured"][4:].sum()
    assert (measured > 0) == (share > 0)


# -- models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "fits"),
    [
        ({"seed": 1}, False),
        ({"sharpness": 2.5}, False),
        ({"drift": 0.0}, False),
        ({"end": -2.0}, False),
        ({"slots": 4, "cells": None}, True),  # the same model, in another place
        ({"seconds_per_row": 1e-3}, True),
        ({"can_fork": False}, True),
    ],
)
def test_a_state_goes_on_with_its_own_model_alone(
    other: dict[str, Any], fits: bool, tmp_path: Path
) -> None:
    engine = simulated(SMALL)
    engine.submit_all(requests())
    engine.step()
    engine.save(tmp_path / "state")
    backend = SimulatedConfig(**{**SMALL, **other}).open()
    if fits:
        assert not restore(tmp_path / "state", backend).idle
        return
    with pytest.raises(StateError, match=r"was saved on .*'model'"):
        restore(tmp_path / "state", backend)
    backend.encode("it is still open")


def test_files_of_models_are_told_apart(tmp_path: Path) -> None:
    """By the head, by the size, and by weights far behind it: a tuning changes those alone."""
    whole = bytearray(np.random.default_rng(0).bytes(9 << 20))
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    known = {digest(path)}
    (tmp_path / "copy.gguf").write_bytes(whole)
    assert digest(tmp_path / "copy.gguf") in known
    tuned = bytearray(whole)
    tuned[6 << 20 :: 997] = b"x" * len(tuned[6 << 20 :: 997])
    for changed in (whole[:-1], whole + b"x", b"x" + whole[1:], whole[:-1] + b"x", tuned):
        path.write_bytes(changed)
        known.add(digest(path))
    assert len(known) == 6
    path.write_bytes(b"GGUF")
    assert digest(path)
