"""The plug-in inside vLLM's engine: targets, equality, preemption, order, pruning, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Scenario = Callable[..., dict[str, Any]]
Note = Callable[[str, object], None]

pytestmark = pytest.mark.timeout(900)  # a test may need three engines, and the machine may be busy


def test_each_request_is_held_to_its_own_target(scenario: Scenario) -> None:
    requests = scenario("targets")
    assert [requests[str(n)]["target"] for n in range(7)] == [1.0, 1.5, 2.0, 2.5, 1.5, None, None]
    for request in requests.values():
        assert request["tokens"] == 300
        if request["target"] is not None:
            assert request["entropy"] == pytest.approx(request["target"], rel=0.15)
        else:
            assert request["temperature"] == 1.0  # measured, as the index wants, and left alone


def test_with_control_off_tokens_are_those_of_the_plain_engine(scenario: Scenario) -> None:
    plain = scenario("plain")
    assert plain["processor"]
    assert scenario("off")["tokens"] == plain["tokens"]


def test_preemption_loses_no_state(scenario: Scenario) -> None:
    run = scenario("preemption")
    assert run["preemptions"] >= 1
    assert run["tokens"] == [150, 150, 180, 180, 180, 180, 180]
    assert run["updates"] == run["tokens"]  # each state saw each emitted token, once
    assert run["readings"] == run["tokens"]
    assert run["targets"] == [1.0, 1.25, 1.5, 1.5, 1.5, 1.75, 2.0]
    assert run["distinct"] == 7
    ratios = list(run["entropies"].values())  # to the target, over fewer tokens than above
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, rel=0.15)
    assert all({"reason", "step", "request"} <= event.keys() for event in run["events"])


def test_a_running_request_gives_way_where_that_is_wanted(scenario: Scenario) -> None:
    run = scenario("voluntary")
    assert list(run["finished"].items()) == [("short", 20), ("long", 200)]
    assert run["updates"] == [20, 200]
    assert run["events"] == [
        ["admitted", "long"],
        ["gave way", "long"],
        ["admitted", "short"],
        ["resumed", "long"],
    ]
    assert run["why"][0]


def test_a_mixed_batch_is_done_sooner(scenario: Scenario, record_property: Note) -> None:
    first, priority, entropic = (
        scenario(f"mixed_{name}") for name in ("fcfs", "priority", "entropic")
    )
    for name, run in (("first-come", first), ("priority", priority), ("entropic", entropic)):
        seconds, work = (run[of] / first[of] for of in ("seconds", "work"))
        record_property(
            "figure",
            f"mixed batch, {name}: mean latency {run['seconds']:.2f} s, {seconds:.2f} of first-come, "
            f"{work:.2f} in tokens of work",
        )
    assert entropic["requests"] == first["requests"] == 12
    # In tokens that the engine ran until a request was done: a busy machine does not change those.
    assert entropic["work"] <= 0.7 * first["work"]
    assert entropic["work"] <= 0.7 * priority["work"]
    assert entropic["longest"] <= 1.05 * first["longest"]


def test_the_asynchronous_scheduler_keeps_order_with_steps_in_flight(scenario: Scenario) -> None:
    run = scenario("asynchronous")
    assert run["tokens"] == {"long": 20, "middle": 20, "short": 20, "other": 20}
    assert run["finished"][-1] == "long"  # which came first
    assert set(run["heard"].values()) <= {2.0}


@pytest.mark.xdist_group("pruning")
def test_a_full_budget_changes_no_token(scenario: Scenario) -> None:
    assert scenario("pruned_full")["tokens"] == scenario("unpruned")["tokens"]


@pytest.mark.xdist_group("pruning")
def test_half_a_budget_frees_blocks(scenario: Scenario, record_property: Note) -> None:
    half, whole = scenario("pruned_half"), scenario("unpruned")
    share = half["peak"] / whole["peak"]
    record_property("figure", f"peak KV use with 50 % pruning: {share:.2f} of unpruned")
    assert half["peak"] <= 0.6 * whole["peak"]
    assert half["left"] == whole["left"] == 0
    assert [len(tokens) for tokens in half["tokens"]] == [640] * 3
    assert half["tokens"] != whole["tokens"]


def test_throughput_with_the_loop_on(scenario: Scenario, record_property: Note) -> None:
    run = scenario("throughput")
    for batch, speed in run.items():
        record_property(
            "figure",
            f"batch {batch}: {speed['on']:.0f} tokens/s with the loop, {speed['off']:.0f} without, "
            f"ratio {speed['ratio']:.3f}",
        )
    assert all(speed["ratio"] > 0.9 for speed in run.values())  # 0.97 on a quiet machine


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("speculation", "speculative decoding"),
        ("asynchronous", "async_scheduling"),
        ("prefix caching", "enable_prefix_caching=False"),
    ],
)
def test_what_cannot_be_had_is_refused_at_the_start(
    scenario: Scenario, case: str, said: str
) -> None:
    assert said in scenario("refused", case)["said"]
