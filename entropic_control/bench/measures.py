"""What a finished run is measured by: every figure of the paper's table, from report and trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from entropic_control.backends.cost import CostModel, Shape, features
from entropic_control.backends.dimensions import Dimensions
from entropic_control.bench.quality import bleu, needle_figures, rouge_l, text_figures
from entropic_control.bench.statistics import Run, Segments, jain
from entropic_control.bench.workloads import Task
from entropic_control.controllers.base import Array
from entropic_control.report import Completion, Report

_PIECES = 32
"""Pieces of a run, of each kind, for the bootstrap."""

Pieces = dict[str, dict[str, list[float]]]


def measure_run(
    tasks: Sequence[Task],
    report: Report,
    dimensions: Dimensions,
    cost: CostModel,
    spell: Any,
    bound: int | None,
    target: float | None,
) -> dict[str, Any]:
    """The figures of one run: `measures` of all of it, `requests` one by one, and its `pieces`.

    Parameters
    ----------
    tasks : sequence of Task
        What was run.
    report : Report
        What came of it.
    dimensions : Dimensions
        Of the model, for operations and bytes.
    cost : CostModel
        An engine's cost model as it was before the run, for the time each request would take alone.
    spell : function
        Gives the text of token ids.
    bound : int or None
        Steps that no request may wait longer than, where the policy has a bound.
    target : float or None
        Entropy that every arm is held against, nats, whether it aims at it or not.
    """
    done = {completion.id: completion for completion in report.completions}
    requests = [_request_figures(task, done[task.request.id or ""], report, cost) for task in tasks]
    measures = {
        **_times(requests),
        **_totals(report),
        **_work(report, dimensions),
        **_fairness(requests, report, bound),
        **_quality(tasks, requests, done, spell),
        **_entropy(requests, target),
    }
    for cost_name in ("per_second", "per_teraflop"):
        measures[f"tau_true_{cost_name}"] = _true_share(measures, f"tau_{cost_name}")
    return {"measures": measures, "requests": requests, "pieces": _pieces(report, cost)}


def _request_figures(
    task: Task, done: Completion, report: Report, cost: CostModel
) -> dict[str, Any]:
    trace = report.trace.of(done.id)
    surprisal = trace["raw_surprisal"]
    truth = min(task.truth, len(surprisal))
    whole = len(done.tokens) == (task.request.max_tokens or 0)
    drawn = done.tokens[task.truth : task.truth + task.free]
    alone = float(
        cost.prefill(np.array(done.prompt_tokens), np.array(0))
        + len(done.tokens) * cost.decode(np.array(1), np.array(done.prompt_tokens))
    )
    first = done.time_to_first_token
    return {
        "id": done.id,
        "latency": done.latency,
        "time_to_first_token": first,
        "time_per_output_token": (done.latency - first) / (len(done.tokens) - 1)
        if first is not None and len(done.tokens) > 1
        else None,
        "tokens": len(done.tokens),
        "prompt_tokens": done.prompt_tokens,
        "finish_reason": done.finish_reason,
        "longest_wait": done.longest_wait,
        "alone": alone,
        # Of a text that a deadline cut off another arm may have more, or less: it cannot be compared.
        "nll": float(surprisal[:truth].mean()) if 0 < truth == task.truth else None,
        "tau": done.tau,
        "tau_true": float(trace["tau"][truth - 1]) if truth else None,
        "entropy_quarters": done.entropy_quarters,
        "drawn_nll": float(surprisal[task.truth : task.truth + task.free].mean())
        if drawn
        else None,
        "needles": needle_figures(surprisal, task.needles) if whole else [],
        **(text_figures(drawn) if drawn else {}),
    }


def _times(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    # A request that was cut off at its deadline counts with the time it was given.
    latency = _column(requests, "latency")
    first = _column(requests, "time_to_first_token")
    return {
        "latency_mean": float(latency.mean()),
        **{f"latency_p{p}": float(np.percentile(latency, p)) for p in (50, 95, 99)},
        "time_to_first_token": _mean(first),
        "time_to_first_token_p95": float(np.percentile(first, 95)) if first.size else None,
        "time_per_output_token": _mean(_column(requests, "time_per_output_token")),
        "deadlines_missed": sum(r["finish_reason"] == "deadline" for r in requests),
        "failed": sum(r["finish_reason"] == "failed" for r in requests),
    }


def _totals(report: Report) -> dict[str, Any]:
    same = (
        "total_time",
        "tokens_per_second",
        "decode_tokens_per_second",
        "kv_mean",
        "kv_peak",
        "tau",
        "overhead_percent",
        "preemptions",
    )
    return {
        **{name: report.summary[name] for name in same},
        "cost_error_percent": 100 * (report.summary["cost_error_median"] or 0.0),
    }


def _work(report: Report, dimensions: Dimensions) -> dict[str, Any]:
    """Entropic time over what it cost: seconds of the engine at work, and operations."""
    steps = report.trace.steps.columns()
    seconds = float(steps["seconds"].sum())
    flops = float(dimensions.flops(steps).sum())
    tau = report.summary["tau"]
    return {
        "engine_seconds": seconds,
        "prompt_share_percent": 100
        * float(steps["seconds"][steps["prompt_tokens"] > 0].sum())
        / seconds
        if seconds
        else 0.0,
        "flops": flops,
        "bytes": float(dimensions.traffic(steps).sum()),
        "tau_per_second": tau / seconds if seconds else 0.0,
        "tau_per_teraflop": tau / flops * 1e12 if flops else 0.0,
    }


def _fairness(
    requests: Sequence[Mapping[str, Any]], report: Report, bound: int | None
) -> dict[str, Any]:
    """The longest wait in steps, beside its bound, and Jain's index of the requests' progress.

    Progress is the time a request would take alone over the time it took.
    """
    progress = _column(requests, "alone") / np.maximum(_column(requests, "latency"), 1e-9)
    return {
        "longest_wait": report.summary["longest_wait"],
        "wait_bound": bound,
        "jain": jain(progress),
    }


def _quality(
    tasks: Sequence[Task],
    requests: Sequence[Mapping[str, Any]],
    done: Mapping[str, Completion],
    spell: Any,
) -> dict[str, Any]:
    needles = [needle for request in requests for needle in request["needles"]]
    texts, references = [], []
    for task in tasks:
        if task.free and len(task.reference):
            drawn = done[task.request.id or ""].tokens[task.truth : task.truth + task.free]
            texts.append(spell(drawn))
            references.append(spell(task.reference.tolist()))
    true = _column(requests, "tau_true")
    return {
        "nll": _mean(_column(requests, "nll")),
        "tau_true": float(true.sum()) if true.size else None,
        "needle_recall_percent": 100 * float(np.mean([n["recalled"] for n in needles]))
        if needles
        else None,
        "needle_nll": float(np.mean([n["nll"] for n in needles])) if needles else None,
        "rouge_l": rouge_l(texts, references),
        "bleu": bleu(texts, references),
        **{
            name: _mean(_column(requests, name))
            for name in (
                "drawn_nll",
                "repeated_3grams",
                "repeated_4grams",
                "distinct_1",
                "distinct_2",
            )
        },
    }


def _entropy(requests: Sequence[Mapping[str, Any]], target: float | None) -> dict[str, Any]:
    """Entropy by quarter, its drift from the first to the last, and how far it is off the target.

    The first quarter is left out of the last: a loop may take that long to settle.
    """
    rows = [request["entropy_quarters"] for request in requests if request["entropy_quarters"]]
    if not rows:
        return {}
    quarters = np.array(rows)
    figures = {f"entropy_quarter_{n + 1}": float(h) for n, h in enumerate(quarters.mean(axis=0))}
    figures["entropy_mean"] = float(quarters.mean())
    figures["entropy_drift"] = float((quarters[:, 3] - quarters[:, 0]).mean())
    if target is not None:
        off = 100 * (quarters[:, 1:] / target - 1)
        figures["off_target_percent"] = abs(float(off.mean()))
        figures["off_target_each_percent"] = float(np.abs(off.mean(axis=1)).mean())
    return figures


def _true_share(measures: Mapping[str, Any], rate: str) -> float | None:
    """A rate of all entropic time, as one of that on the forced text, which all arms share."""
    if measures["tau_true"] is None or not measures["tau"]:
        return None
    return float(measures[rate] * measures["tau_true"] / measures["tau"])


def _pieces(report: Report, cost: CostModel) -> Pieces:
    steps = report.trace.steps.columns()
    first = np.bincount(
        np.searchsorted(steps["step"], report.trace.tokens["step"]), minlength=len(steps["step"])
    )
    prompt = steps["prompt_tokens"] > 0
    expected = cost.weights @ np.array(features(*(steps[name] for name in Shape._fields)))
    columns = {
        "tokens": first,
        "seconds": steps["seconds"],
        "work": expected,
        "tau": steps["tau"],
    }
    pieces: Pieces = {}
    for kind, mask in (("decode", ~prompt), ("prompt", prompt)):
        size = int(mask.sum())
        starts = np.unique(np.linspace(0, size, min(_PIECES, size) + 1).astype(int))[:-1]
        pieces[kind] = {
            name: np.add.reduceat(column[mask].astype(float), starts).tolist() if size else []
            for name, column in columns.items()
        }
    return pieces


def run_of(cell: Mapping[str, Any]) -> Run:
    """The pieces of a stored run."""
    pieces = cell["pieces"]
    decode, prompt = (
        Segments(*(np.array(pieces[kind][name]) for name in Segments._fields))
        for kind in ("decode", "prompt")
    )
    measures = cell["measures"]
    return Run(decode, prompt, max(measures["total_time"] - measures["engine_seconds"], 0.0))


def _column(requests: Sequence[Mapping[str, Any]], name: str) -> Array:
    return np.array([r[name] for r in requests if r.get(name) is not None], float)


def _mean(column: Array) -> float | None:
    return float(column.mean()) if column.size else None
