"""The best that a run could have been: never bettered, and worked out by hand where that can be done."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_control.backends import SimulatedConfig
from entropic_control.backends.cost import CostModel, Weights
from entropic_control.bench.aims import Aim
from entropic_control.bench.arms import default_config
from entropic_control.bench.ceilings import LIMIT, Work, _makespan, _shortest_remaining, limits
from entropic_control.bench.compare import Compared
from entropic_control.bench.paper import Paper
from entropic_control.bench.statistics import Interval
from entropic_control.bench.workloads import Task
from entropic_control.controllers import NgramSpeculation, NoPruning, SlidingWindow
from entropic_control.engine import Engine
from entropic_control.progress import progress_bar
from entropic_control.request import Request

CONFIG = default_config().replace(backend=SimulatedConfig())


def test_no_arm_is_better_than_its_limit_where_the_costs_are_exact(tmp_path: Path) -> None:
    names = ["chat", "mixed", "arrivals_1.1", "long"]
    paper = Paper(CONFIG, tmp_path, quick=True, workloads=names)
    with progress_bar(True) as bar:
        paper.run(bar)
    cells = paper.done()
    assert {workload for workload, _, _ in cells} == set(names)
    for key, cell in cells.items():
        measures = cell["measures"]
        for measure in ("tokens_per_second", "tau_per_second"):
            assert measures[measure] <= 1.01 * measures[measure + LIMIT], (key, measure)
        assert measures["latency_mean"] >= 0.99 * measures["latency_mean" + LIMIT], key


def test_one_dense_request_alone_is_at_its_limit() -> None:
    weights = Weights(0.01, 0.002, 1e-6, 0.003, 1e-7, 0.001)
    names = SimulatedConfig.model_fields
    seconds = {f"seconds_per_{name}": value for name, value in weights._asdict().items()}
    plant = SimulatedConfig(
        slots=1, step_tokens=64, **{k: v for k, v in seconds.items() if k in names}
    )
    config = CONFIG.replace(backend=plant, pruning=NoPruning())
    task = Task(Request(id="one", prompt=[1] * 300, max_tokens=40, ignore_eos=True))
    with Engine(config) as engine:
        report = engine.run([task.request])
    found = limits([task], report, config, CostModel(weights), 1)
    assert found["latency_mean" + LIMIT] == pytest.approx(report.summary["latency_mean"], rel=0.01)
    assert found["tokens_per_second" + LIMIT] == pytest.approx(
        report.summary["tokens_per_second"], rel=0.01
    )


def test_a_smaller_budget_raises_the_limit_and_pruning_while_reading_most() -> None:
    task = Task(Request(id="one", prompt=[1] * 3000, max_tokens=8, ignore_eos=True))
    with Engine(CONFIG.replace(pruning=NoPruning())) as engine:
        report = engine.run([task.request])
    cost = engine.backend.cost
    found = [
        limits([task], report, CONFIG.replace(pruning=pruning), cost, 8)["tau_per_second" + LIMIT]
        for pruning in (
            NoPruning(),
            SlidingWindow(budget=0.5),
            SlidingWindow(budget=0.5, during_prefill=True),
            SlidingWindow(budget=0.25, during_prefill=True),
        )
    ]
    assert found == sorted(set(found))


def test_what_drafts_tokens_has_no_limit_of_this_kind() -> None:
    config = CONFIG.replace(speculation=NgramSpeculation())
    with Engine(config.replace(speculation=CONFIG.speculation)) as engine:
        report = engine.run(["A few words."])
        assert limits([], report, config, engine.backend.cost, 8) == {}


# -- by hand ------------------------------------------------------------------------------------------


def work(*requests: tuple[float, float]) -> Work:
    arrived, seconds = np.array(requests, float).T
    return Work(arrived, seconds, seconds)


def test_the_shorter_goes_first_and_breaks_in() -> None:
    # The long one starts, is broken into at 1 for two seconds, and ends at 12.
    assert _shortest_remaining(work((0, 10), (1, 2))) == pytest.approx((12 + 2) / 2)
    # It is nearly done at 9, so that the new one waits a second.
    assert _shortest_remaining(work((0, 10), (9, 2))) == pytest.approx((10 + 3) / 2)


def test_what_comes_late_cannot_be_done_early() -> None:
    assert _makespan(work((0, 1), (5, 2))) == 7
    assert _makespan(work((0, 9), (5, 2))) == 11
    assert _makespan(work((3, 9), (5, 2))) == 11  # from the first arrival


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.floats(0.01, 20)),
        min_size=1,
        max_size=8,
    )
)
def test_no_order_has_a_lower_mean_latency(requests: list[tuple[float, float]]) -> None:
    one, least = work(*requests), _shortest_remaining(work(*requests))
    assert least >= float(one.shared.mean()) - 1e-6
    now, total = 0.0, 0.0
    for arrived, seconds in sorted(requests):  # first come, first served
        now = max(now, arrived) + seconds
        total += now - arrived
    assert least <= total / len(requests) + 1e-6


# -- in words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (13.0, "not reached, by 0.2"),
        (11.5, "not reached, by 0.2; out of reach, 1.15 at best"),
    ],
)
def test_a_verdict_says_when_the_aim_is_out_of_reach(limit: float, words: str) -> None:
    results = {
        "long": {
            "baseline": {"tau_per_second": 10.0},
            "full": {"tau_per_second": 11.0, "tau_per_second" + LIMIT: limit},
        }
    }
    compared = {"long": {"full": {"tau_per_second": Compared(1.1, "baseline", Interval(1.0, 1.2))}}}
    verdict = Aim("long", "full", "tau_per_second", 1.3, True).judge(results, compared)
    assert verdict is not None
    assert verdict.words == words
