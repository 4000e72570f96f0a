"""The demo: one mixed batch, decoded first come, first served, and under entropic control."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.progress import Progress

from entropic_control.bench.prompts import SHORT, long_text, request
from entropic_control.config import Config, dump_config
from entropic_control.controllers import FirstCome, FixedTemperature, NoPruning
from entropic_control.engine import Engine
from entropic_control.progress import follow
from entropic_control.report import Report, write_json
from entropic_control.request import Request


class Workload(NamedTuple):
    """What the demo decodes."""

    long: tuple[int, ...] = (4000, 2500)
    """Prompt tokens of the long requests; they arrive first and third."""
    short: int = 6
    tokens: int = 640
    """Tokens that every request generates."""
    seed: int = 7


def baseline_of(config: Config, temperature: float = 0.7) -> Config:
    """First come, first served, dense, fixed temperature, on the same engine."""
    return config.replace(
        temperature=FixedTemperature(temperature=temperature),
        priority=FirstCome(),
        pruning=NoPruning(),
    )


def requests_of(workload: Workload, engine: Engine) -> list[Request]:
    """The requests, in order of arrival."""
    tokens, seed = workload.tokens, workload.seed
    short = [
        request(f"short {n + 1}", SHORT[n % len(SHORT)], tokens, seed + n)
        for n in range(workload.short)
    ]
    long = [
        request(f"long {n + 1}", long_text(engine.backend, size, n), tokens, seed + 100 + n)
        for n, size in enumerate(workload.long)
    ]
    for n, one in enumerate(long):
        short.insert(2 * n, one)
    return short


def run_demo(
    config: Config,
    out: Path,
    bar: Progress,
    *,
    workload: Workload | None = None,
    repeats: int = 1,
) -> dict[str, Any]:
    """Run both arms in turn, write the run directory, and return its summary.

    Parameters
    ----------
    config : Config
        The configuration under test; the baseline is made from it.
    out : path
        Run directory: summary.json, and a directory with the last trace of each arm.
    repeats : int
        How often each arm runs; figures and ratios are medians over the repeats.
    """
    workload = workload or Workload()
    arms = {"baseline": baseline_of(config), "entropic": config}
    reports: dict[str, list[Report]] = {arm: [] for arm in arms}
    for turn in range(repeats):
        for arm, its_config in arms.items():
            with Engine(its_config) as engine:
                label = arm if repeats == 1 else f"{arm} {turn + 1}/{repeats}"
                follow(engine, requests_of(workload, engine), bar, label)
                reports[arm].append(engine.report())
            reports[arm][-1].save(out / arm)
            (out / arm / "config.yaml").write_text(dump_config(its_config), encoding="utf-8")
    summary = summarise(reports)
    summary["workload"] = workload._asdict()
    summary["made"] = time.strftime("%Y-%m-%d")
    write_json(out / "summary.json", summary)
    return summary


def summarise(reports: dict[str, list[Report]]) -> dict[str, Any]:
    """Medians of each arm, ratios of paired runs, and the regulation of the entropy."""
    arms = {arm: _median_of([report.summary for report in its]) for arm, its in reports.items()}
    pairs = list(zip(reports["baseline"], reports["entropic"], strict=True))
    ratios = {
        name: median(b.summary[name] / a.summary[name] for a, b in pairs)
        for name in (
            "latency_mean",
            "total_time",
            "decode_tokens_per_second",
            "tokens_per_second",
            "tau_per_second",
        )
    }
    last = {arm: its[-1] for arm, its in reports.items()}
    target = last["entropic"].completions[0].target
    baseline, controlled = (_quarters(last[arm]) for arm in ("baseline", "entropic"))
    entropy: dict[str, Any] = {
        "target": target,
        "quarters": controlled,
        "baseline_quarters": baseline,
    }
    if target and controlled and baseline:
        entropy["deviation"] = _deviation(controlled, target)
        entropy["baseline_deviation"] = _deviation(baseline, target)
    return {
        "arms": arms,
        "ratios": ratios,
        "entropy": entropy,
        "overhead_percent": arms["entropic"]["overhead_percent"],
    }


def _quarters(report: Report) -> dict[str, list[float]]:
    return {c.id: c.entropy_quarters for c in report.completions if len(c.tokens) >= 300}


def _deviation(quarters: dict[str, list[float]], target: float) -> dict[str, float]:
    """How far the last three quarters are from the target, as shares of it."""
    columns = list(zip(*quarters.values(), strict=True))[1:]
    average = [abs(sum(column) / len(column) / target - 1) for column in columns]
    single = [abs(h / target - 1) for column in columns for h in column]
    return {"average_worst_quarter": max(average), "single_worst": max(single)}


def _median_of(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = summaries[-1]
    return {
        name: median(s[name] for s in summaries) if isinstance(value, float) else value
        for name, value in first.items()
    }
