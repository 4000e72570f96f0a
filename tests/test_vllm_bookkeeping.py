"""The vLLM adapters without vLLM: recorded batch updates, hand-made slots, settings of requests.

`data/vllm_batch_updates.json` is what vLLM 0.32 told a V1 logits processor while eight requests (one of
them two samples of one prompt) ran in six seats with prompts in chunks of 64 tokens and 10 KV blocks, so
that requests were preempted and came back. `tests/vllm/record.py` records it anew.
"""

from __future__ import annotations

import json
import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from entropic_control.backends.vllm import adapters, compat
from entropic_control.backends.vllm.adapters import ProcessorV1, ProcessorV2
from entropic_control.backends.vllm.bookkeeping import PARKED, Book
from entropic_control.backends.vllm.config import KEY, Settings
from entropic_control.backends.vllm.own import Own
from entropic_control.config import Config
from entropic_control.controllers import (
    FixedTemperature,
    PITemperature,
    SlewLimit,
)
from entropic_control.controllers.base import Array
from entropic_control.controllers.signals import reading
from entropic_control.controllers.softmax import moments
from entropic_control.errors import CapabilityError, ConfigError, ControllerFault

RECORDED = Path(__file__).parent / "data" / "vllm_batch_updates.json"
VOCAB = 300


class Tensor(np.ndarray):
    """As much of a CPU tensor as the adapters use."""

    device = SimpleNamespace(type="cpu")

    def detach(self) -> Tensor:
        return self

    def numpy(self) -> Array:
        return np.asarray(self)

    def new_tensor(self, values: Array) -> Tensor:
        return np.asarray(values).view(Tensor)

    def mul_(self, factor: Array) -> Tensor:
        self *= factor
        return self


def params(temperature: float = 1.0, **extra: Any) -> Any:
    return SimpleNamespace(temperature=temperature, extra_args=extra)


def vllm_config(config: Config | None = None, **changes: Any) -> Any:
    settings = {KEY: Settings.of(config).model_dump(mode="json")} if config else {}
    return SimpleNamespace(additional_config=settings, speculative_config=None, **changes)


def logits_of(request: int, token: int) -> Array:
    """What the model says of a request after so many of its tokens, whatever its neighbours."""
    random = np.random.default_rng([request, token])
    return (random.standard_normal(VOCAB) * random.uniform(1, 4)).astype(np.float32)


def alone(request: int, tokens: int, controller: PITemperature, target: float) -> list[float]:
    """The temperatures of a request that runs by itself."""
    state = controller.init(1, target=target)
    out = []
    for token in range(tokens):
        t = float(controller.command(state).temperature[0])
        out.append(t)
        at = moments(logits_of(request, token), t)
        _, state = controller.update(state, reading(at.entropy, at.varentropy, live=VOCAB))
    return out


# -- the recorded run -------------------------------------------------------------------------------


class Replay:
    """A recorded run, played to a processor with logits that depend on request and token alone."""

    def __init__(self, tagged: bool) -> None:
        self.steps = json.loads(RECORDED.read_text())
        self.tagged = tagged
        self.outputs: dict[int, list[int]] = {}
        self.settings: dict[int, tuple[dict[str, Any], float]] = {}
        self.temperatures: dict[int, list[float]] = {}
        self.resumed: set[int] = set()
        self.discarded = 0

    def run(self, processor: ProcessorV1) -> None:
        seats: dict[int, int] = {}
        for step, after in pairwise(self.steps):
            update = self._update(step)
            processor.update_state(update)
            self._follow(seats, step)
            count = step.get("rows", 0)
            emitted = after["emitted"]
            logits = np.stack(
                [logits_of(seats[row], len(self.outputs[seats[row]])) for row in range(count)]
            ).view(Tensor)
            before = logits.copy()
            processor.apply(logits)
            for row in range(count):
                request = seats[row]
                scale = float(logits[row, 0] / before[row, 0])
                new = emitted[request] - len(self.outputs[request])
                self.discarded += not new
                if new:
                    self.temperatures[request].append(self.settings[request][1] / scale)
                    self.outputs[request].append(0)

    def _update(self, step: dict[str, Any]) -> Any:
        if "added" not in step:
            return None
        added = []
        for row, request, length, extra, temperature in step["added"]:
            self.settings.setdefault(request, (extra, temperature))
            self.temperatures.setdefault(request, [])
            output = self.outputs.setdefault(request, [])
            assert len(output) == length
            if length:
                self.resumed.add(request)
            if self.tagged:  # as under our scheduler, with an engine that makes new lists
                output = self.outputs[request] = list(output)
                extra = {**extra, compat.TAG: f"request#{request}"}
            added.append(
                (row, SimpleNamespace(temperature=temperature, extra_args=extra), [], output)
            )
        moved = [(a, b, SimpleNamespace(name=name)) for a, b, name in step["moved"]]
        return SimpleNamespace(removed=step["removed"], added=added, moved=moved)

    def _follow(self, seats: dict[int, int], step: dict[str, Any]) -> None:
        for row in step.get("removed", []):
            seats.pop(row, None)
        seats.update({row: request for row, request, *_ in step.get("added", [])})
        for source, target, name in step.get("moved", []):
            moved, displaced = seats.pop(source, None), seats.pop(target, None)
            if moved is not None:
                seats[target] = moved
            if name == "SWAP" and displaced is not None:
                seats[source] = displaced


@pytest.mark.parametrize("tagged", [False, True], ids=["by its list", "by its name"])
def test_every_request_of_the_recorded_run_ends_as_if_it_had_run_alone(tagged: bool) -> None:
    default = PITemperature(target=1.2)
    replay = Replay(tagged)
    replay.run(ProcessorV1(vllm_config(Config(temperature=default)), "cpu", False))
    assert replay.discarded >= 2  # rows of prompts that were not complete
    assert replay.resumed
    for request, (extra, temperature) in replay.settings.items():
        own = Own.read(extra)
        got = replay.temperatures[request]
        if own.enabled is False or temperature == 0:
            assert got == [temperature] * len(got)
            continue
        controller = default.replace(kp=own.kp) if own.kp is not None else default
        wanted = alone(request, len(got), controller, own.target or default.target)
        np.testing.assert_allclose(got, wanted, rtol=1e-4)


def test_the_replay_notices_a_state_that_moved_on_a_discarded_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from entropic_control.backends.vllm.bookkeeping import Seat

    monkeypatch.setattr(Seat, "emitted", True)
    replay = Replay(False)
    replay.run(ProcessorV1(vllm_config(Config()), "cpu", False))
    default = Config().temperature
    assert isinstance(default, PITemperature)
    apart = [
        request
        for request, (extra, temperature) in replay.settings.items()
        if temperature and (own := Own.read(extra)).enabled is not False and own.kp is None
        if not np.allclose(
            replay.temperatures[request],
            alone(
                request, len(replay.temperatures[request]), default, own.target or default.target
            ),
            rtol=1e-4,
        )
    ]
    assert apart


# -- the book ---------------------------------------------------------------------------------------


def book(**changes: Any) -> Book:
    return Book(PITemperature(), **{"enabled": True, "observe": False, **changes})


def test_a_row_that_changes_hands_starts_clean() -> None:
    seats = book()
    first: list[int] = []
    seats.enter(0, "a", Own(), first)
    seats.measured([0], lambda: reading(5.0))
    first.append(1)
    seats.enter(0, "b", Own(), [])
    assert seats.temperatures([0]) == pytest.approx(0.7)
    seats.enter(1, "a", Own(), first)
    assert seats.temperatures([1])[0] < 0.7


def test_whoever_another_moves_onto_has_left_and_may_come_back() -> None:
    seats = book()
    seats.enter(0, "a", Own(target=2.0), [])
    seats.enter(1, "b", Own(target=3.0), [])
    seats.move(1, 0)
    assert seats.rows(2) == [0]
    assert seats.at(0).target == 3.0
    seats.enter(1, "a", Own(), [])
    assert seats.at(1).target == 2.0
    seats.move(0, 1, swap=True)
    assert [seats.at(row).target for row in (0, 1)] == [2.0, 3.0]
    seats.move(5, 0)  # a request that nobody looks at
    assert seats.rows(9) == [1]


def test_an_invalid_row_moves_nothing() -> None:
    seats, tokens = book(), [0]
    seats.enter(0, "a", Own(), tokens)
    seats.measured([0], lambda: reading(np.nan, valid=False))
    tokens.append(1)
    assert seats.temperatures([0]) == pytest.approx(0.7)


def test_of_requests_that_left_only_the_last_are_kept() -> None:
    seats = book()
    for number in range(PARKED + 1):
        seats.enter(0, number, Own(target=2.0), [])
    seats.leave(0)
    seats.enter(0, 0, Own(target=3.0), [])
    assert seats.at(0).target == 3.0
    seats.enter(0, PARKED, Own(target=3.0), [])
    assert seats.at(0).target == 2.0


def test_who_is_looked_at() -> None:
    off = book(enabled=False)
    assert not off.enter(0, "a", Own(), [])
    assert off.enter(0, "b", Own(target=1.0), [])
    assert off.enter(0, "c", Own(enabled=True), [])
    assert not book().enter(0, "d", Own(enabled=False), [])
    assert not book().enter(0, "e", Own(target=1.0), [], 0.0)
    watching = book(observe=True)
    assert watching.enter(0, "f", Own(enabled=False), [])
    assert watching.temperatures([0]) == 1.0


def test_gains_of_its_own_reach_through_a_wrapper() -> None:
    slew = SlewLimit(inner=PITemperature(), rate=0.05)
    own = Own(kp=0.4, target=2.0)
    controller = own.controller(slew)
    assert isinstance(controller, SlewLimit)
    assert controller.inner == PITemperature(kp=0.4)
    assert own.overrides(controller) == {"target": 2.0}
    assert own.controller(FixedTemperature()) == FixedTemperature()
    assert own.overrides(FixedTemperature()) == {}


# -- settings of a request --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "fault"),
    [
        ({"target": -1}, "target cannot be -1"),
        ({"target": "warm"}, "target must be a number"),
        ({"target": float("nan")}, "target must be finite"),
        ({"target": [1.0]}, "target must be a number"),
        ({"target": True}, "target must be a number"),
        ({"kp": -0.1}, "kp cannot be"),
        ({"kp": 50}, "kp cannot be 50: a request may set 0 to"),
        ({"ki": 0}, "ki cannot be"),
        ({"enabled": "maybe"}, "enabled must be true or false"),
        ({"enabled": []}, "enabled must be true or false"),
        ({"targt": 1.0}, "did you mean 'target'"),
    ],
)
def test_a_bad_setting_is_refused(extra: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        Own.read(extra)


def test_good_settings_and_those_of_others() -> None:
    assert Own.read(None) == Own()
    assert Own.read({"kv_transfer_params": {}, "session_id": "x", compat.TAG: "a#1"}) == Own()
    # The server's schema turns true into 1, and form data into text.
    assert Own.read({"target": "1.5", "kp": 0, "enabled": 1}) == Own(True, 1.5, 0.0)
    assert Own.read({"enabled": "False"}) == Own(enabled=False)


# -- version 2 of the interface ---------------------------------------------------------------------


def context(slots: list[int], lengths: list[int]) -> Any:
    return SimpleNamespace(
        idx_mapping_np=np.array(slots), seq_lens_upper_bound_np=np.array(lengths)
    )


def test_slots_of_version_2() -> None:
    default = PITemperature(target=1.2)
    states = SimpleNamespace(prefill_len=SimpleNamespace(np=np.array([3, 9, 4, 0])))
    processor = ProcessorV2(vllm_config(Config(temperature=default)), states)
    name = {"a": "a#1", "b": "b#2"}
    assert processor.add_request(2, params(0.5, target=1.0, **{compat.TAG: name["a"]}))
    assert processor.add_request(1, params(**{compat.TAG: name["b"]}))
    got: dict[str, list[float]] = {"a": [], "b": []}
    token = {"a": 0, "b": 0}

    def step(rows: list[tuple[str, int, int]]) -> None:
        """Requests with their slots and lengths, in the order of the step's rows."""
        processor.apply_staged_writes()
        logits = np.stack([logits_of(ord(r), token[r]) for r, _, _ in rows]).view(Tensor)
        before = logits.copy()
        processor.apply(logits, context([s for _, s, _ in rows], [n for *_, n in rows]))
        for row, (request, slot, length) in enumerate(rows):
            if length >= states.prefill_len.np[slot]:
                asked = 0.5 if request == "a" else 1.0
                got[request].append(asked * float(before[row, 0] / logits[row, 0]))
                token[request] += 1

    step([("a", 2, 4), ("b", 1, 5)])  # b's prompt of nine is not complete
    step([("b", 1, 9), ("a", 2, 5)])
    for n in range(3):
        step([("a", 2, 6 + n), ("b", 1, 10 + n)])
    # a is preempted and comes back in another slot, its five tokens part of what is prefilled
    states.prefill_len.np[0] = 9
    assert processor.add_request(0, params(0.5, target=1.0, **{compat.TAG: name["a"]}))
    step([("a", 0, 6), ("b", 1, 13)])
    step([("a", 0, 9), ("b", 1, 14)])
    np.testing.assert_allclose(got["a"], alone(ord("a"), len(got["a"]), default, 1.0), rtol=1e-4)
    np.testing.assert_allclose(got["b"], alone(ord("b"), len(got["b"]), default, 1.2), rtol=1e-4)


# -- both -------------------------------------------------------------------------------------------


def test_loaded_twice_it_works_once() -> None:
    shared = vllm_config(Config())
    first, second = ProcessorV1(shared, "cpu", False), ProcessorV1(shared, "cpu", False)
    update = SimpleNamespace(removed=[], added=[(0, params(), [], [])], moved=[])
    logits = logits_of(0, 0)[None].view(Tensor)
    once = logits.copy()
    for processor in (first, second):
        processor.update_state(update)
    first.apply(once)
    np.testing.assert_array_equal(second.apply(once.copy()), once)
    assert not np.array_equal(once, logits)
    assert adapters.at_work(shared) is first


def test_without_settings_nothing_is_touched_unless_asked_for() -> None:
    plain = ProcessorV1(vllm_config(), "cpu", False)
    update = SimpleNamespace(
        removed=[], added=[(0, params(), [], []), (1, params(target=2.0), [], [])], moved=[]
    )
    plain.update_state(update)
    logits = np.stack([logits_of(0, 0), logits_of(1, 0)]).view(Tensor)
    before = logits.copy()
    plain.apply(logits)
    np.testing.assert_array_equal(logits[0], before[0])
    assert not np.array_equal(logits[1], before[1])


@pytest.mark.parametrize("processor", [ProcessorV1, ProcessorV2])
def test_speculative_decoding_is_refused_with_the_reason(processor: Any) -> None:
    speculating = vllm_config(Config())
    speculating.speculative_config = SimpleNamespace()
    place = ["cpu", False] if processor is ProcessorV1 else [None]
    with pytest.raises(CapabilityError, match="speculative decoding"):
        processor(speculating, *place)
    speculating.additional_config = {}  # merely installed: it rests, and vLLM speculates
    assert processor(speculating, *place).idle


@pytest.mark.parametrize(
    ("hook", "bad"),
    [("command", bad) for bad in (np.nan, np.inf, -1.0, "raises", "shape")]
    + [("update", "raises"), ("update", "shape")],
)
def test_a_request_whose_controller_fails_is_let_go_and_its_neighbours_are_not(
    hook: str, bad: Any
) -> None:
    original = getattr(PITemperature, hook)

    def broken(self: Any, state: Any, *args: Any) -> Any:
        value = original(self, state, *args)
        theirs = state.target == 2.5
        if not theirs.any():
            return value
        if bad == "raises":
            raise RuntimeError("out of order")
        if hook == "update":
            return np.ones(9), value[1]
        odd = np.ones(9) if bad == "shape" else np.where(theirs, bad, value.temperature)
        return value._replace(temperature=odd)

    kind = type("Broken", (PITemperature,), {hook: broken, "__module__": __name__})
    controller = kind()
    book = Book(controller, enabled=True, observe=False)
    for row, target in enumerate((1.0, 2.5, 1.5)):
        book.enter(row, f"r{row}", Own(target=target), None)
    rows = [0, 1, 2]
    taken: list[list[float]] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for token in range(5):
            t = book.temperatures(rows)
            taken.append(t.tolist())
            at = [moments(logits_of(row, token), float(t[row])) for row in rows]
            entropy, spread = (
                np.array([m.entropy for m in at]),
                np.array([m.varentropy for m in at]),
            )
            book.measured(rows, lambda h=entropy, v=spread: reading(h, v, live=VOCAB))
        book.settle()
    for row, target in ((0, 1.0), (2, 1.5)):
        assert [t[row] for t in taken] == alone(row, 5, PITemperature(), target)
    assert np.isfinite(taken).all()
    assert len(warned) == 1
    assert isinstance(book.at(1).error, ControllerFault)
    assert taken[-1][1] == 1.0
