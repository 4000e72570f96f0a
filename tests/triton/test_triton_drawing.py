"""Sampling where the logits live gives the tokens, readings and states of the numpy path."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from families import backend, engine, model_of, prompt, requests, tokens_of, torch

from entropic_control.backends.paged.drawing import joined
from entropic_control.config import Config
from entropic_control.controllers import (
    EntropicPruning,
    ExactTemperature,
    FixedTemperature,
    MinP,
    NoTruncation,
    PITemperature,
    SlewLimit,
    TopK,
    TopKEntropy,
    TopP,
)
from entropic_control.drawing import fits
from entropic_control.errors import EngineClosed

PROMPTS = [prompt(20 + 11 * n, n) for n in range(4)]
COLUMNS = (
    "temperature", "commanded", "entropy", "varentropy", "raw_entropy", "realized_entropy", "lower",
    "upper", "tail_mass", "live", "surprisal", "raw_surprisal", "target", "saturated", "feasible", "tau",
)  # fmt: skip


def traced(sampling: str, mode: str = "reference", **parts: Any) -> tuple[Any, Any, Any]:
    run = engine(backend(sampling=sampling, kernels=mode), **parts)
    report = run.run(requests(*PROMPTS, tokens=25, min_tokens=3, seed=11))
    return tokens_of(report), run.trace.tokens, run


@pytest.mark.parametrize(
    "parts",
    [
        {"temperature": PITemperature(target=3.0)},
        {"temperature": PITemperature(target=5.5, schedule="none", filter=0.5)},
        {"temperature": PITemperature(target=3.0), "truncation": TopK(k=30)},
        {"temperature": PITemperature(target=3.0), "truncation": TopP(p=0.9, place="after")},
        {"temperature": FixedTemperature(temperature=0.7), "truncation": MinP(p=0.1)},
        {"temperature": FixedTemperature(temperature=0.0)},
    ],
    ids=lambda parts: " ".join(p.kind for p in parts.values()),
)
def test_the_device_path_equals_the_numpy_path(parts: dict[str, Any]) -> None:
    tokens, host, _ = traced("host", **parts)
    drawn, device, run = traced("device", **parts)
    assert run._loops._device is not None
    assert drawn == tokens
    for name in COLUMNS:
        np.testing.assert_allclose(
            device[name].astype(float), host[name].astype(float), rtol=2e-4, atol=2e-5, err_msg=name
        )


def test_the_interpreter_draws_the_same() -> None:
    pytest.importorskip("triton")
    from entropic_control.kernels import _triton

    if not _triton.INTERPRETED:
        pytest.skip("triton was imported before these tests could set TRITON_INTERPRET=1")
    parts = {"temperature": PITemperature(target=3.0), "truncation": TopK(k=30)}

    def few(sampling: str, mode: str) -> list[list[int]]:
        run = engine(backend(sampling=sampling, kernels=mode, attention="gathered"), **parts)
        return tokens_of(run.run(requests(*PROMPTS[:2], tokens=4)))

    assert few("device", "interpreter") == few("host", "reference")


def test_pruning_sees_the_same_surprisals() -> None:
    parts = {
        "temperature": PITemperature(target=3.0),
        "pruning": EntropicPruning(budget=0.5, min_tokens=32, sinks=1, recent=1),
    }
    tokens, host, _ = traced("host", **parts)
    drawn, device, _ = traced("device", **parts)
    assert drawn == tokens
    assert (device["cells"] == host["cells"]).all()


@pytest.mark.parametrize(
    ("parts", "fit"),
    [
        ({}, True),
        ({"temperature": FixedTemperature()}, True),
        ({"truncation": NoTruncation()}, True),
        ({"temperature": ExactTemperature(target=1.0)}, False),
        ({"temperature": SlewLimit(inner=PITemperature())}, False),
        ({"estimator": TopKEntropy()}, False),
    ],
)
def test_other_controllers_run_on_the_host(parts: dict[str, Any], fit: bool) -> None:
    assert fits(Config(**parts)) == fit
    run = engine(backend(sampling="device"), **parts)
    assert (run._loops._device is not None) == fit
    assert len(tokens_of(run.run(requests(PROMPTS[0], tokens=3)))[0]) == 3


def test_a_dry_run_stays_on_the_host() -> None:
    from entropic_control.engine import Engine

    on = backend(sampling="device")
    run = Engine(Config(temperature=PITemperature()), on, dry_run=True)
    assert tokens_of(run.run(requests(PROMPTS[0], tokens=3)))


@pytest.mark.parametrize("order", ["device first", "dry run first", "in turn"])
def test_engines_on_one_backend_do_not_change_each_other(order: str) -> None:
    """Where a step leaves its logits belongs to the step: not to the backend, nor to the last engine."""
    from entropic_control.engine import Engine

    parts: dict[str, Any] = {"temperature": PITemperature(), "truncation": MinP(p=0.1)}
    alone = [
        tokens_of(Engine(Config(**parts), backend(sampling="device"), dry_run=dry).run(work()))
        for dry in (False, True)
    ]
    on = backend(sampling="device")
    dry = order == "dry run first"
    made = [Engine(Config(**parts), on, dry_run=flag) for flag in (dry, not dry)]
    turns = (0, 1, 0, 1) if order == "in turn" else (0, 1)
    for turn in turns:
        run = made[turn]
        assert tokens_of(run.run(work())) == alone[run.dry_run]


def work() -> Any:
    return requests(PROMPTS[0], tokens=5)


def test_rows_that_lie_together_are_not_copied() -> None:
    block = torch.arange(40.0).view(4, 10)
    rows = [block[1], block[2]]
    assert joined(rows).data_ptr() == rows[0].data_ptr()
    assert torch.equal(joined(rows), block[1:3])
    apart = [block[0], block[2]]
    assert torch.equal(joined(apart), block[[0, 2]])


def test_an_invalid_row_moves_nothing() -> None:
    on = backend(sampling="device")
    from entropic_control.backends.base import Draw

    z = torch.randn(3, 512)
    z[1, 4] = float("nan")
    state = np.stack(PITemperature(target=3.0).init(3))
    drawn = on.draw(list(z), Draw([1, 2, 3], [0, 0, 0], np.ones(3), PITemperature(), state))
    assert drawn.tokens[1] == -1
    assert drawn.reading.valid.tolist() == [True, False, True]
    assert drawn.state is not None
    np.testing.assert_array_equal(drawn.state[:, 1], state[:, 1].astype(np.float32))
    assert np.isnan(drawn.reading.raw_surprisal[1])


def test_a_forced_token_is_taken_on_the_device_too() -> None:
    run = engine(backend(sampling="device"), temperature=PITemperature(target=3.0))
    free, forced = requests(*PROMPTS[:2], tokens=6, seed=11)
    report = run.run([free, forced.replace(forced=(7, -1, 9))])
    told = tokens_of(report)[1]
    assert (told[0], told[2]) == (7, 9)
    assert np.isfinite(run.trace.tokens["raw_surprisal"]).all()


def test_a_closed_backend_refuses_typed_and_a_dropped_one_is_gone() -> None:
    on = backend(sampling="device")
    other = backend(copy.deepcopy(model_of("llama")), sampling="device")
    run = engine(on, temperature=PITemperature(target=3.0))
    run.run(work())
    made = on.fingerprint
    assert made == other.fingerprint
    with torch.no_grad():
        weight = next(other._model.parameters())
        weight += 1.0
    del other.__dict__["fingerprint"]
    assert other.fingerprint != made
    on.close()
    on.close()
    for use in (on.room, on.now, lambda: on.ends, lambda: on.encode([5]), lambda: on.fingerprint):
        with pytest.raises(EngineClosed, match="the backend was closed"):
            use()
    with pytest.raises(EngineClosed):
        run.run(work())
    run = engine(other, temperature=PITemperature(target=3.0))
    run.run(work())
    gone = weakref.ref(other)
    gc.collect()
    gc.disable()
    try:
        del other, run, weight
        assert gone() is None
    finally:
        gc.enable()
