"""What the paper claims and what this project aims at, and how a figure stands to it, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropic_control.bench.ceilings import LIMIT
from entropic_control.bench.compare import Comparisons, Results
from entropic_control.bench.paper import Cells
from entropic_control.bench.statistics import Interval, mean_ratio, paired_interval


@dataclass(frozen=True)
class Verdict:
    """One aim and what was measured."""

    workload: str
    arm: str
    measure: str
    aim: str
    value: float
    interval: Interval | None
    reached: bool
    words: str


def percent(ratio: float) -> str:
    """A ratio as a change."""
    return f"{100 * (ratio - 1):+.0f} %"


@dataclass(frozen=True)
class Claim:
    """A claim of arXiv 2603.03310, as a range of the ratio to its baseline."""

    name: str
    heading: str
    """The name over a narrow column."""
    measure: str
    low: float
    high: float
    said: str
    less_is_better: bool = False

    def verdict(self, value: float) -> str:
        """In words, by how much."""
        if self.missed(value):
            words = "not reached"
        else:
            words = "as claimed" if self.low <= value <= self.high else "beyond the claim"
        return f"{words} ({percent(value)})"

    def missed(self, value: float) -> bool:
        """Whether the ratio falls short of the range."""
        return value > self.high if self.less_is_better else value < self.low


CLAIMS = (
    Claim("latency", "latency", "latency_mean", 0.65, 0.75, "-25 to -35 %", less_is_better=True),
    Claim("throughput, end to end", "tokens/s", "tokens_per_second", 1.30, 1.45, "+30 to +45 %"),
    Claim(
        "throughput, decode steps",
        "decode\ntokens/s",
        "decode_tokens_per_second",
        1.30,
        1.45,
        "+30 to +45 %",
    ),
    Claim("d(tau)/dC per second", "dτ/dC\nper s", "tau_per_second", 1.40, 1.60, "+40 to +60 %"),
    Claim("d(tau)/dC per FLOP", "dτ/dC\nper FLOP", "tau_per_teraflop", 1.40, 1.60, "+40 to +60 %"),
    Claim(
        "d(tau)/dC, forced text",
        "dτ/dC\nforced",
        "tau_true_per_second",
        1.40,
        1.60,
        "+40 to +60 %",
    ),
)


@dataclass(frozen=True)
class Aim:
    """A bound on a measure of an arm; `compared` says whether it is of the ratio or of the figure."""

    workload: str
    arm: str
    measure: str
    bound: float
    at_least: bool
    compared: bool = True

    @property
    def text(self) -> str:
        """As a table has it."""
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"

    def judge(self, results: Results, comparisons: Comparisons) -> Verdict | None:
        """The verdict, or None where it was not measured."""
        interval = limit = None
        if self.compared:
            found = comparisons.get(self.workload, {}).get(self.arm, {}).get(self.measure)
            if found is None:
                return None
            value, interval = found.value, found.interval
            limit = self._limit(results.get(self.workload, {}), found.against)
        else:
            figure = results.get(self.workload, {}).get(self.arm, {}).get(self.measure)
            if figure is None:
                return None
            value = float(figure)
        return self.of(value, interval, limit)

    def of(
        self, value: float, interval: Interval | None = None, limit: float | None = None
    ) -> Verdict:
        """The verdict on a value, with the best that it could be where that is known."""
        reached = value >= self.bound if self.at_least else value <= self.bound
        return Verdict(
            self.workload,
            self.arm,
            self.measure,
            self.text,
            value,
            interval,
            reached,
            self._words(value, interval, limit, reached),
        )

    def _limit(self, results: Mapping[str, Mapping[str, Any]], against: str) -> float | None:
        """The best that the ratio could be, or None where that is not known."""
        measure = self.measure.removesuffix("_fair")
        best = results.get(self.arm, {}).get(measure + LIMIT)
        return None if best is None else float(best / results[against][measure])

    def _words(
        self, value: float, interval: Interval | None, limit: float | None, reached: bool
    ) -> str:
        unsure = interval is not None and interval.low <= self.bound <= interval.high
        if reached:
            return "reached, but the interval holds worse" if unsure else "reached"
        missed = f"not reached, by {abs(value - self.bound):.2g}"
        if unsure:
            missed += ", but the interval holds better"
        if limit is not None and (limit < self.bound if self.at_least else limit > self.bound):
            missed += f"; out of reach, {limit:.2f} at best"
        return missed


def _least(workload: str, bounds: dict[str, float], arm: str = "full") -> list[Aim]:
    return [Aim(workload, arm, measure, bound, True) for measure, bound in bounds.items()]


def _most(workload: str, bounds: dict[str, float], arm: str = "full") -> list[Aim]:
    return [Aim(workload, arm, measure, bound, False) for measure, bound in bounds.items()]


def _rates(decode: float, whole: float, tau: float) -> dict[str, float]:
    """Bounds on tokens/s, in decode steps and end to end, and on d(tau)/dC in either cost."""
    return {
        "decode_tokens_per_second": decode,
        "tokens_per_second": whole,
        "tau_per_second": tau,
        "tau_per_teraflop": tau,
    }


def _mixed(workload: str) -> list[Aim]:
    return [
        *_least(workload, _rates(1.8, 1.15, 1.6)),
        *_most(workload, {"latency_mean": 0.35, "latency_mean_fair": 0.65, "nll": 0.05}),
    ]


def _arrivals(workload: str) -> list[Aim]:
    return [
        *_least(workload, _rates(1.3, 1.1, 1.3)),
        *_most(workload, {"latency_mean": 0.5, "latency_mean_fair": 0.75}),
    ]


AIMS = (
    *_least("chat", _rates(0.97, 0.97, 0.97)),
    *_most("chat", {"latency_mean": 1.03, "latency_mean_fair": 1.03}),
    Aim("chat", "full", "off_target_percent", 10, False, compared=False),
    *_mixed("mixed"),
    *_mixed("mixed_two"),
    *_arrivals("arrivals_1.1"),
    *_arrivals("arrivals_mixed_1.1"),
    *_least("long", _rates(1.4, 1.1, 1.4) | {"needle_recall_percent": 0.0}),
    *_most(
        "long",
        {
            "latency_mean": 0.9,
            "latency_mean_fair": 0.9,
            "time_per_output_token": 0.7,
            "nll": 0.02,
        },
    ),
    *_least("long", {"decode_tokens_per_second": 1.7, "needle_recall_percent": -5.0}, "quarter"),
    *_most("long", {"nll": 0.08}, "quarter"),
)

_LOOPS_SHARE = 0.2
"""Repeated 4-grams under the loop, over those at a temperature of 0.5, at most."""

_COST_ERROR = 15.0
"""Median error of the cost model, percent, at most."""


def verdicts(cells: Cells, results: Results, comparisons: Comparisons) -> list[Verdict]:
    """Every aim that was measured."""
    found = [aim.judge(results, comparisons) for aim in AIMS]
    others = (_fewer_loops(cells), *_bounds(results))
    return [verdict for verdict in (*found, *others) if verdict is not None]


def _fewer_loops(cells: Cells) -> Verdict | None:
    """The loop's repeated 4-grams over those at a temperature of 0.5, all texts of all repeats."""
    loop, cold = (
        np.array(
            [text["repeated_4grams"] for cell in _runs(cells, arm) for text in cell["requests"]]
        )
        for arm in ("pi", "fixed_0.5")
    )
    if not loop.size or loop.size != cold.size or not cold.any():
        return None
    return Aim("loops", "pi", "repeated 4-grams over T = 0.5's", _LOOPS_SHARE, False).of(
        float(loop.mean() / cold.mean()), paired_interval((loop, cold), mean_ratio)
    )


def _runs(cells: Cells, arm: str) -> list[Mapping[str, Any]]:
    return [cell for (workload, of, _), cell in cells.items() if (workload, of) == ("loops", arm)]


def _bounds(results: Results) -> list[Verdict]:
    """Aims that are bounds on a figure, of every workload."""
    found = []
    for workload, by_arm in results.items():
        full = by_arm.get("full", {})
        wait, bound = full.get("longest_wait"), full.get("wait_bound")
        if wait is not None and bound is not None and workload.startswith("arrivals"):
            found.append(Aim(workload, "full", "longest wait [steps]", bound, False).of(wait))
        if full.get("cost_error_percent"):
            error = full["cost_error_percent"]
            found.append(
                Aim(workload, "full", "cost model error [%]", _COST_ERROR, False).of(error)
            )
    return found
