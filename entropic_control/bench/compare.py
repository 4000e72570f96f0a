"""From stored runs to the table: medians, ratios with intervals, and whether the whole beats its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from entropic_control.bench.arms import DENSE, LOOPS
from entropic_control.bench.measures import run_of
from entropic_control.bench.paper import Cells
from entropic_control.bench.statistics import (
    RATES,
    Interval,
    mean_difference,
    mean_ratio,
    paired_interval,
    rate_interval,
    ratio,
)
from entropic_control.controllers.base import Array

LESS_IS_BETTER = (
    "latency_mean",
    "latency_p95",
    "latency_p99",
    "time_to_first_token",
    "time_per_output_token",
    "kv_mean",
    "kv_peak",
    "flops",
    "bytes",
)
MORE_IS_BETTER = (
    "tokens_per_second",
    "decode_tokens_per_second",
    "tau_per_second",
    "tau_true_per_second",
    "tau_per_teraflop",
    "tau_true_per_teraflop",
    "jain",
)
DIFFERENCES = ("nll", "needle_recall_percent", "needle_nll", "rouge_l", "bleu")
PER_REQUEST = ("latency_mean", "time_to_first_token", "time_per_output_token")
PER_NEEDLE = {"needle_recall_percent": ("recalled", 100.0), "needle_nll": ("nll", 1.0)}
"""What each is of a single needle, and its unit."""


class Compared(NamedTuple):
    """An arm beside a dense one."""

    value: float
    """Ratio, or difference for a measure of quality."""
    against: str
    interval: Interval | None


Results = dict[str, dict[str, dict[str, Any]]]
Comparisons = dict[str, dict[str, dict[str, Compared]]]


def results_of(cells: Cells) -> Results:
    """Medians over the repeats: workload, arm, measure."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for (workload, arm, _), cell in cells.items():
        runs.setdefault(workload, {}).setdefault(arm, []).append(cell["measures"])
    return {
        workload: {arm: _medians(measures) for arm, measures in arms.items()}
        for workload, arms in runs.items()
    }


def _medians(measures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: median(values)
        if (values := [m[name] for m in measures if m[name] is not None])
        else None
        for name in measures[0]
    }


def comparisons_of(cells: Cells) -> Comparisons:
    """Every arm of every workload beside the dense arms."""
    results = results_of(cells)
    return {
        workload: {
            arm: _compare(cells, workload, arm, results[workload])
            for arm in arms
            if arm not in DENSE
        }
        for workload, arms in results.items()
        if any(arm in DENSE for arm in arms)
    }


def _compare(
    cells: Cells, workload: str, arm: str, results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Compared]:
    found: dict[str, Compared] = {}
    dense = [name for name in DENSE if name in results]

    def compare(measure: str, against: str, key: str) -> None:
        pairs = _pairs(cells, workload, arm, against)
        quality = measure in DIFFERENCES
        of = [_of(a, b, measure, quality) for a, b in pairs]
        values = [value for value in of if value is not None]
        if values:
            interval = _interval(pairs, measure)
            found[key] = Compared(median(values), against, interval)

    for measure in (*LESS_IS_BETTER, *MORE_IS_BETTER, *DIFFERENCES):
        known = [name for name in dense if results[name].get(measure) is not None]
        if not known:
            continue
        if measure == "latency_mean":
            for name in known:  # the paper's is against round robin, what servers do is first come
                compare(measure, name, measure if name == DENSE[0] else f"{measure}_{name}")
            continue
        best = max if measure in MORE_IS_BETTER else min
        quality = measure in DIFFERENCES
        against = known[0] if quality else best(known, key=lambda n: results[n][measure])
        compare(measure, against, measure)
    return found


def _pairs(
    cells: Cells, workload: str, arm: str, against: str
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    repeats = sorted(r for w, a, r in cells if (w, a) == (workload, arm))
    return [
        (cells[workload, arm, r], cells[workload, against, r])
        for r in repeats
        if (workload, against, r) in cells
    ]


def _of(a: Mapping[str, Any], b: Mapping[str, Any], measure: str, difference: bool) -> float | None:
    if measure == "nll":
        one, other = (column.mean() if column.size else None for column in _paired([(a, b)], "nll"))
    else:
        one, other = a["measures"].get(measure), b["measures"].get(measure)
    if one is None or other is None:
        return None
    if difference:
        return float(one - other)
    return float(one / other) if other else None


def _interval(
    pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], measure: str
) -> Interval | None:
    if measure in PER_REQUEST:
        name = "latency" if measure == "latency_mean" else measure
        return _requests_interval(pairs, name, mean_ratio)
    if measure == "nll":
        return _requests_interval(pairs, measure, mean_difference)
    if measure in PER_NEEDLE:
        return _needles_interval(pairs, *PER_NEEDLE[measure])
    if measure in RATES:
        one, other = pairs[0]  # of several repeats the first: their spread is beside it anyway
        return rate_interval([run_of(one), run_of(other)], RATES[measure], ratio)
    return None


def _requests_interval(
    pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], name: str, statistic: Any
) -> Interval | None:
    return paired_interval(_paired(pairs, name), statistic)


def _paired(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], name: str
) -> tuple[Array, Array]:
    """A figure of the same requests in both arms; those that lack it in one are left out of both."""
    both = [
        (a[name], b[name])
        for one, other in pairs
        for a, b in zip(one["requests"], other["requests"], strict=True)
        if a[name] is not None and b[name] is not None
    ]
    one, other = np.array(both, float).reshape(-1, 2).T
    return one, other


def _needles_interval(
    pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], name: str, unit: float
) -> Interval | None:
    """Needles are paired by request and order, which all arms share."""

    def column(arm: int) -> Array:
        requests = (request for pair in pairs for request in pair[arm]["requests"])
        return np.array([unit * needle[name] for one in requests for needle in one["needles"]])

    return paired_interval([column(0), column(1)], mean_difference)


class Excess(NamedTuple):
    """What the three loops gain together beyond the sum of what each gains alone, in percent points."""

    gains: dict[str, float]
    """Percent, of each arm over first come, first served."""
    excess: float
    interval: Interval | None

    @property
    def verdict(self) -> str:
        """In words."""
        if self.interval is not None and self.interval.low <= 0 <= self.interval.high:
            return "not told apart from the sum"
        return "more than the sum" if self.excess > 0 else "less than the sum"


def super_additivity(cells: Cells, workload: str) -> dict[str, Excess]:
    """The paper's claim that the full arm gains more than the single loops together.

    For latency the gain is the share that it falls by, for rates the share that they rise by.
    """
    arms = (DENSE[0], *LOOPS, "full")
    runs = [cells.get((workload, arm, 0)) for arm in arms]
    if any(run is None for run in runs):
        return {}
    cell = [run for run in runs if run is not None]
    found = {}
    for measure in ("latency_mean", *RATES):
        values = np.array([run["measures"][measure] for run in cell], float)
        if not np.all(values > 0):
            continue
        sign = -1.0 if measure == "latency_mean" else 1.0
        gains = dict(
            zip(arms[1:], (100 * sign * (values[1:] / values[0] - 1)).tolist(), strict=True)
        )
        if measure == "latency_mean":
            columns = [np.array([r["latency"] for r in run["requests"]]) for run in cell]
            interval = paired_interval(columns, _latency_excess)
        else:
            interval = rate_interval([run_of(run) for run in cell], RATES[measure], _rate_excess)
        excess = gains["full"] - sum(gains[arm] for arm in LOOPS)
        found[measure] = Excess(gains, excess, interval)
    return found


def _rate_excess(base: Array, *arms: Array) -> Array:
    *single, full = (100 * (arm / base - 1) for arm in arms)
    return np.asarray(full - sum(single))


def _latency_excess(*columns: Array) -> Array:
    return -_rate_excess(*(column.mean(-1) for column in columns))
