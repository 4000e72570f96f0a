"""What a run came to: completions, one summary, one table."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from entropic_control import json_lines
from entropic_control.controllers.base import Array
from entropic_control.sequence import Sequence
from entropic_control.trace import Format, Trace


@dataclass(frozen=True, slots=True)
class Completion:
    """One request, done. Times in seconds, entropies and tau in nats."""

    id: str
    text: str
    tokens: list[int]
    prompt_tokens: int
    finish_reason: str
    error: str | None
    latency: float
    """From arrival to the last token."""
    time_to_first_token: float | None
    entropy_quarters: list[float]
    """Mean entropy of each quarter of the generated tokens, at the temperature in force."""
    entropy: float | None
    """Mean over the generated tokens, of what they were drawn from."""
    target: float | None
    temperature_range: tuple[float, float] | None
    saturated: float
    """Share of the tokens drawn at a temperature bound."""
    infeasible: float
    """Share of the tokens whose candidates were too few for the target at any temperature."""
    reachable: float | None
    """Mean entropy that the upper bound allows, to first order in ln T; None if it was never reached."""
    repeated_4grams: float
    """Share of the 4-grams of tokens that occurred before."""
    tau: float
    longest_wait: int
    """Steps between two services, at most."""
    preemptions: int

    @classmethod
    def read(cls, data: dict[str, Any]) -> Completion:
        """The completion of a line that was written of one."""
        spread = data["temperature_range"]
        return cls(**{**data, "temperature_range": None if spread is None else tuple(spread)})


@dataclass(frozen=True, slots=True)
class Report:
    """The completions of a run with its summary and trace."""

    completions: list[Completion]
    summary: dict[str, Any]
    trace: Trace

    @classmethod
    def of(
        cls,
        works: Seq[Sequence],
        trace: Trace,
        backend: str,
        before: Seq[Completion] = (),
        start: float | None = None,
    ) -> Report:
        """The report of the sequences that are done.

        Parameters
        ----------
        works : sequence of Sequence
            Those done.
        trace : Trace
            The whole run's.
        backend : str
            Its name.
        before : sequence of Completion
            What an earlier part of the run completed.
        start : float, optional
            When that part began, on this part's clock, seconds.
        """
        own = [completion_of(w, trace) for w in sorted(works, key=lambda w: w.number)]
        completions = [*before, *own]
        return cls(completions, _summary(works, completions, trace, backend, start), trace)

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in _rows(self.summary)]
        return "\n".join(lines)

    def __rich__(self) -> Table:
        return comparison({"": self.summary})

    def save(self, directory: str | Path, format: Format = "jsonl") -> None:
        """Write summary.json, completions.jsonl and the trace to a run directory."""
        directory = Path(directory)
        self.trace.write(directory, format)
        with (directory / "completions.jsonl").open("w", encoding="utf-8") as file:
            json_lines.write_lines(file, map(asdict, self.completions))
        write_json(directory / "summary.json", self.summary)


def write_json(path: Path, data: Any) -> None:
    """Write readable JSON."""
    path.write_text(json_lines.dumps(data, indent=2) + "\n", encoding="utf-8")


def comparison(summaries: dict[str, dict[str, Any]]) -> Table:
    """One table with a column for each summary, by the name of its arm."""
    table = Table(title=None, header_style="bold")
    table.add_column("measure")
    for arm in summaries:
        table.add_column(arm or "value", justify="right")
    columns = [dict(_rows(summary)) for summary in summaries.values()]
    for measure in columns[0]:
        table.add_row(escape(measure), *(column.get(measure, "") for column in columns))
    return table


def repeated(tokens: Seq[int], n: int = 4) -> float:
    """Share of the n-grams of `tokens` that occurred before in it; 0 for fewer than n tokens."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def quarters(values: Array) -> list[float]:
    """Means of the four quarters; empty for fewer than four values."""
    return [float(part.mean()) for part in np.array_split(values, 4)] if len(values) >= 4 else []


def completion_of(work: Sequence, trace: Trace) -> Completion:
    """What a finished sequence came to."""
    mine = trace.tokens["request"] == work.number
    temperature, target = trace.tokens["temperature"][mine], trace.tokens["target"][mine]
    entropy = trace.tokens["entropy"][mine]
    aimed = target[~np.isnan(target)]
    return Completion(
        id=work.id,
        text=work.text.text,
        tokens=list(work.tokens),
        prompt_tokens=len(work.prompt),
        finish_reason=work.reason or "",
        error=None if work.error is None else str(work.error),
        latency=(work.finished or work.arrived) - work.arrived,
        time_to_first_token=None if work.first_token is None else work.first_token - work.arrived,
        entropy_quarters=quarters(entropy),
        entropy=_mean(entropy),
        target=float(aimed[-1]) if aimed.size else None,
        temperature_range=(float(temperature.min()), float(temperature.max()))
        if temperature.size
        else None,
        saturated=_mean(trace.tokens["saturated"][mine] != 0) or 0.0,
        infeasible=_mean(~trace.tokens["feasible"][mine]) or 0.0,
        reachable=_reachable(trace, mine),
        repeated_4grams=repeated(work.tokens),
        tau=work.tau,
        longest_wait=work.longest_wait,
        preemptions=work.preemptions,
    )


def _mean(values: Array) -> float | None:
    """The mean of what is a number; None for nothing."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def _reachable(trace: Trace, mine: Array) -> float | None:
    """The mean entropy had every token been drawn at the upper temperature bound, nats.

    To first order H rises by V for each unit of ln T, and never above ln of the candidates. Tokens drawn
    at the bound count as they were measured; where it was never reached, nothing is known of it.
    """
    columns = ("entropy", "varentropy", "temperature", "commanded", "live", "saturated")
    entropy, varentropy, temperature, commanded, live, saturated = (
        trace.tokens[column][mine] for column in columns
    )
    if not np.any(saturated > 0):
        return None
    hotter = np.log(commanded[saturated > 0].max() / np.maximum(temperature, 1e-6))
    return _mean(np.minimum(entropy + varentropy * hotter, np.log(np.maximum(live, 1))))


def _summary(
    works: Seq[Sequence],
    completions: Seq[Completion],
    trace: Trace,
    backend: str,
    began: float | None,
) -> dict[str, Any]:
    steps = trace.steps
    done = [c for c in completions if c.finish_reason not in ("failed", "cancelled")]
    latencies = np.array([c.latency for c in done]) if done else np.zeros(1)
    firsts = [c.time_to_first_token for c in done if c.time_to_first_token is not None]
    start = min((w.arrived for w in works), default=0.0) if began is None else began
    total = max((w.finished or start for w in works), default=start) - start
    seconds, forward = steps["seconds"], steps["forward"]
    tokens = sum(len(c.tokens) for c in completions)
    alone = (steps["rows"] > 0) & (steps["prompt_tokens"] == 0)
    decode_seconds = float(seconds[alone].sum())
    error = np.abs(steps["predicted"] - forward)[forward > 0] / forward[forward > 0]
    tau = sum(c.tau for c in completions)
    ranges = [c.temperature_range for c in done if c.temperature_range]
    means = [c.entropy_quarters for c in done if c.entropy_quarters]
    return {
        "backend": backend,
        "requests": len(completions),
        "failed": sum(c.finish_reason == "failed" for c in completions),
        "prompt_tokens": sum(c.prompt_tokens for c in completions),
        "tokens": tokens,
        "total_time": total,
        "tokens_per_second": tokens / total if total else 0.0,
        "decode_tokens_per_second": float((steps["rows"] + steps["accepted"])[alone].sum())
        / decode_seconds
        if decode_seconds
        else 0.0,
        "latency_mean": float(latencies.mean()),
        **{f"latency_p{p}": float(np.percentile(latencies, p)) for p in (50, 95, 99)},
        "time_to_first_token": float(np.mean(firsts)) if firsts else None,
        "kv_peak": int(steps["cells"].max(initial=0)),
        "kv_mean": float(np.average(steps["cells"], weights=seconds)) if seconds.sum() else 0.0,
        "entropy_quarters": np.mean(means, axis=0).tolist() if means else [],
        **_held(done),
        "temperature_range": [min(a for a, _ in ranges), max(b for _, b in ranges)]
        if ranges
        else None,
        "repeated_4grams": float(np.mean([c.repeated_4grams for c in done])) if done else 0.0,
        "tau": tau,
        "tau_per_second": tau / total if total else 0.0,
        "overhead_percent": 100 * float(1 - forward.sum() / seconds.sum())
        if seconds.sum()
        else 0.0,
        "cost_error_median": float(np.median(error)) if error.size else None,
        "drafted": int(steps["drafted"].sum()),
        "accepted": int(steps["accepted"].sum()),
        "preemptions": sum(c.preemptions for c in completions),
        "longest_wait": max((c.longest_wait for c in completions), default=0),
    }


def _held(done: Seq[Completion]) -> dict[str, float | None]:
    """How the entropy came out beside its target, means over the completions that have one."""

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None

    return {
        "entropy": mean(c.entropy for c in done),
        "target": mean(c.target for c in done),
        "saturated": mean(c.saturated for c in done),
        "infeasible": mean(c.infeasible for c in done),
        "reachable": mean(c.reachable for c in done),
    }


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    s = summary

    def seconds(name: str) -> str:
        return "-" if s[name] is None else f"{s[name]:.2f} s"

    def nats(name: str) -> str:
        return "-" if s[name] is None else f"{s[name]:.2f}"

    def percent(name: str) -> str:
        return "-" if s[name] is None else f"{100 * s[name]:.1f} %"

    spread = s["temperature_range"]
    return [
        ("requests (failed)", f"{s['requests']} ({s['failed']})"),
        ("tokens, prompt + generated", f"{s['prompt_tokens']} + {s['tokens']}"),
        ("total time", seconds("total_time")),
        ("tokens/s, end to end", f"{s['tokens_per_second']:.1f}"),
        ("tokens/s, decode steps", f"{s['decode_tokens_per_second']:.1f}"),
        ("latency, mean", seconds("latency_mean")),
        ("latency, p95", seconds("latency_p95")),
        ("time to first token, mean", seconds("time_to_first_token")),
        ("KV cells held, peak", f"{s['kv_peak']}"),
        ("entropy, mean (target) [nats]", f"{nats('entropy')} ({nats('target')})"),
        ("entropy by quarter [nats]", " ".join(f"{h:.2f}" for h in s["entropy_quarters"]) or "-"),
        ("temperature, range", f"{spread[0]:.2f} to {spread[1]:.2f}" if spread else "-"),
        ("tokens at a temperature bound", percent("saturated")),
        ("tokens with too few candidates", percent("infeasible")),
        ("entropy reachable there [nats]", nats("reachable")),
        ("drafts accepted", _share(s["accepted"], s["drafted"])),
        ("repeated 4-grams", f"{100 * s['repeated_4grams']:.1f} %"),
        ("entropic time tau [nats]", f"{s['tau']:.0f}"),
        ("d(tau)/dC [nats/s]", f"{s['tau_per_second']:.2f}"),
        ("control overhead", f"{s['overhead_percent']:.1f} % of step time"),
    ]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.0f} %)" if whole else "-"
