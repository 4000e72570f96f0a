"""What the paper claims and what this project aims at, and how a figure stands to it, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from entropic_control.bench.ceilings import LIMIT
from entropic_control.bench.compare import Comparisons, Results
from entropic_control.bench.statistics import Interval


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


@dataclass(frozen=True)
class Claim:
    """A claim of arXiv 2603.03310, as a range of the ratio to its baseline."""

    name: str
    measure: str
    low: float
    high: float
    said: str
    less_is_better: bool = False

    def verdict(self, value: float) -> str:
        """In words, by how much."""
        change = f"{100 * (value - 1):+.0f} %"
        better = value < self.low if self.less_is_better else value > self.high
        if better:
            return f"beyond the claim ({change})"
        if self.low <= value <= self.high:
            return f"as claimed ({change})"
        return f"not reached ({change})"


CLAIMS = (
    Claim("latency", "latency_mean", 0.65, 0.75, "-25 to -35 %", less_is_better=True),
    Claim("throughput, end to end", "tokens_per_second", 1.30, 1.45, "+30 to +45 %"),
    Claim("throughput, decode steps", "decode_tokens_per_second", 1.30, 1.45, "+30 to +45 %"),
    Claim("d(tau)/dC per second", "tau_per_second", 1.40, 1.60, "+40 to +60 %"),
    Claim("d(tau)/dC per FLOP", "tau_per_teraflop", 1.40, 1.60, "+40 to +60 %"),
    Claim("d(tau)/dC, forced text", "tau_true_per_second", 1.40, 1.60, "+40 to +60 %"),
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


def _mixed(workload: str) -> list[Aim]:
    return [
        *_least(
            workload,
            {
                "decode_tokens_per_second": 1.8,
                "tokens_per_second": 1.15,
                "tau_per_second": 1.6,
                "tau_per_teraflop": 1.6,
            },
        ),
        *_most(workload, {"latency_mean": 0.35, "latency_mean_fair": 0.65, "nll": 0.05}),
    ]


def _arrivals(workload: str) -> list[Aim]:
    return [
        *_least(
            workload,
            {
                "decode_tokens_per_second": 1.3,
                "tokens_per_second": 1.1,
                "tau_per_second": 1.3,
                "tau_per_teraflop": 1.3,
            },
        ),
        *_most(workload, {"latency_mean": 0.5, "latency_mean_fair": 0.75}),
    ]


AIMS = (
    *_least(
        "chat",
        {
            "decode_tokens_per_second": 0.97,
            "tokens_per_second": 0.97,
            "tau_per_second": 0.97,
            "tau_per_teraflop": 0.97,
        },
    ),
    *_most("chat", {"latency_mean": 1.03, "latency_mean_fair": 1.03}),
    Aim("chat", "full", "off_target_percent", 10, False, compared=False),
    *_mixed("mixed"),
    *_mixed("mixed_two"),
    *_arrivals("arrivals_1.1"),
    *_arrivals("arrivals_mixed_1.1"),
    *_least(
        "long",
        {
            "decode_tokens_per_second": 1.4,
            "tokens_per_second": 1.1,
            "tau_per_second": 1.4,
            "tau_per_teraflop": 1.4,
            "needle_recall_percent": 0.0,
        },
    ),
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


def verdicts(results: Results, comparisons: Comparisons) -> list[Verdict]:
    """Every aim that was measured."""
    found = [aim.judge(results, comparisons) for aim in AIMS]
    return [verdict for verdict in (*found, *_others(results)) if verdict is not None]


def _others(results: Results) -> list[Verdict]:
    """Aims that are no plain bound on one figure."""
    found = []
    arms = results.get("temperature", {})
    cold = arms.get("fixed_0.5", {}).get("repeated_4grams")
    loop = arms.get("pi", {}).get("repeated_4grams")
    if cold and loop is not None:
        share = loop / cold
        found.append(
            Verdict(
                "temperature",
                "pi",
                "repeated 4-grams over T = 0.5's",
                f"<= {_LOOPS_SHARE:g}",
                share,
                None,
                share <= _LOOPS_SHARE,
                "reached"
                if share <= _LOOPS_SHARE
                else f"not reached, by {share - _LOOPS_SHARE:.2g}",
            )
        )
    for workload, by_arm in results.items():
        full = by_arm.get("full", {})
        wait, bound = full.get("longest_wait"), full.get("wait_bound")
        if wait is not None and bound is not None and workload.startswith("arrivals"):
            found.append(_bounded(workload, "longest wait [steps]", wait, bound))
        if full.get("cost_error_percent"):
            error = full["cost_error_percent"]
            found.append(_bounded(workload, "cost model error [%]", error, _COST_ERROR))
    return found


def _bounded(workload: str, measure: str, value: float, bound: float) -> Verdict:
    reached = value <= bound
    words = "reached" if reached else f"not reached, by {value - bound:.2g}"
    return Verdict(workload, "full", measure, f"<= {bound:g}", value, None, reached, words)
