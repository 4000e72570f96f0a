"""The table in words: JSON for programs, Markdown for the documentation, a summary for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from entropic_control.bench.aims import CLAIMS, Claim, Verdict, percent, verdicts
from entropic_control.bench.ceilings import LIMIT
from entropic_control.bench.compare import (
    Comparisons,
    Excess,
    Results,
    comparisons_of,
    results_of,
    super_additivity,
)
from entropic_control.bench.paper import Cells
from entropic_control.bench.quality import missing_overlap
from entropic_control.bench.statistics import Interval
from entropic_control.bench.workloads import WORKLOADS

ROWS = {
    "latency_mean": ("latency, mean [s]", ".2f"),
    "latency_mean" + LIMIT: ("at best: latency, mean [s]", ".2f"),
    "latency_p50": ("latency, p50 [s]", ".2f"),
    "latency_p95": ("latency, p95 [s]", ".2f"),
    "latency_p99": ("latency, p99 [s]", ".2f"),
    "time_to_first_token": ("time to first token [s]", ".2f"),
    "time_per_output_token": ("time per output token [s]", ".3f"),
    "total_time": ("total time [s]", ".1f"),
    "tokens_per_second": ("tokens/s, end to end", ".1f"),
    "tokens_per_second" + LIMIT: ("at best: tokens/s, end to end", ".1f"),
    "decode_tokens_per_second": ("tokens/s, decode steps", ".1f"),
    "prompt_share_percent": ("time in steps with prompts [%]", ".0f"),
    "kv_mean": ("KV cells, mean", ".0f"),
    "kv_peak": ("KV cells, peak", ".0f"),
    "flops": ("operations", ".3g"),
    "bytes": ("bytes moved", ".3g"),
    "tau": ("tau [nats]", ".0f"),
    "tau_per_second": ("d(tau)/dC per second [nats/s]", ".2f"),
    "tau_per_second" + LIMIT: ("at best: d(tau)/dC per second [nats/s]", ".2f"),
    "tau_per_teraflop": ("d(tau)/dC per FLOP [nats/TFLOP]", ".1f"),
    "tau_true": ("tau, forced text [nats]", ".0f"),
    "tau_true_per_second": ("d(tau)/dC per second, forced text [nats/s]", ".2f"),
    "tau_true_per_teraflop": ("d(tau)/dC per FLOP, forced text [nats/TFLOP]", ".1f"),
    "overhead_percent": ("control overhead [%]", ".1f"),
    "cost_error_percent": ("cost model error, median [%]", ".1f"),
    "longest_wait": ("longest wait [steps]", ".0f"),
    "wait_bound": ("proven bound of the wait [steps]", ".0f"),
    "jain": ("Jain index of progress", ".2f"),
    "deadlines_missed": ("deadlines missed", ".0f"),
    "nll": ("NLL of the true text [nats/token]", ".3f"),
    "needle_recall_percent": ("needle tokens recalled [%]", ".1f"),
    "needle_nll": ("NLL of needles [nats/token]", ".3f"),
    "rouge_l": ("ROUGE-L [%]", ".1f"),
    "bleu": ("BLEU [%]", ".1f"),
    "entropy_mean": ("entropy, mean [nats]", ".2f"),
    "entropy_quarter_1": ("entropy, first quarter [nats]", ".2f"),
    "entropy_quarter_4": ("entropy, last quarter [nats]", ".2f"),
    "entropy_drift": ("entropy drift [nats]", "+.2f"),
    "off_target_percent": ("off target, average [%]", ".1f"),
    "off_target_each_percent": ("off target, single texts [%]", ".1f"),
    "drawn_nll": ("NLL of the drawn text, T = 1 [nats/token]", ".2f"),
    "repeated_3grams": ("repeated 3-grams", ".3f"),
    "repeated_4grams": ("repeated 4-grams", ".3f"),
    "distinct_1": ("distinct-1", ".3f"),
    "distinct_2": ("distinct-2", ".3f"),
}
"""What the tables show of each measure: its name and its format."""

_PREFILL_DOMINATES = 50.0


def summary_of(cells: Cells, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was found, as JSON holds it.

    Returns
    -------
    dict
        `results[workload][arm][measure]`, medians; `ratios[workload][measure]`, of the full arm over
        the better dense one (`latency_mean` over first-come, `latency_mean_fair` over round robin);
        `comparisons[workload][arm][measure]` with intervals; `claims`, `aims`, `super_additivity`.
    """
    results, comparisons = results_of(cells), comparisons_of(cells)
    return {
        "manifest": dict(manifest),
        "results": results,
        "ratios": {
            workload: {measure: found.value for measure, found in arms["full"].items()}
            for workload, arms in comparisons.items()
            if "full" in arms
        },
        "comparisons": {
            workload: {
                arm: {measure: _compared(found) for measure, found in measures.items()}
                for arm, measures in arms.items()
            }
            for workload, arms in comparisons.items()
        },
        "claims": [
            dict(zip(("workload", "claim", "paper", "ratio", "verdict"), row, strict=True))
            for row in _claims(comparisons)
        ],
        "aims": [
            {**vars(verdict), "interval": _listed(verdict.interval)}
            for verdict in verdicts(cells, results, comparisons)
        ],
        "super_additivity": {
            workload: {
                measure: {
                    "gains_percent": excess.gains,
                    "excess_percent": excess.excess,
                    "interval": _listed(excess.interval),
                    "verdict": excess.verdict,
                }
                for measure, excess in found.items()
            }
            for workload in results
            if (found := super_additivity(cells, workload))
        },
        "needles": _needles(cells),
        "missing": {
            measure: f"pip install {package}" for measure, package in missing_overlap().items()
        },
    }


def _compared(found: Any) -> dict[str, Any]:
    return {"value": found.value, "against": found.against, "interval": _listed(found.interval)}


def _listed(interval: Interval | None) -> list[float] | None:
    return None if interval is None else list(interval)


def _claims(comparisons: Comparisons) -> list[tuple[str, str, str, float, str]]:
    return [
        (workload, claim.name, claim.said, found.value, claim.verdict(found.value))
        for workload, arms in comparisons.items()
        for claim in CLAIMS
        if (found := arms.get("full", {}).get(claim.measure)) is not None
    ]


def _needles(cells: Cells) -> dict[str, list[dict[str, Any]]]:
    """Recall over depth and length, by arm, of the first repeat of the long prompts."""
    return {
        arm: [
            {"length": request["prompt_tokens"], **needle}
            for request in cell["requests"]
            for needle in request["needles"]
        ]
        for (workload, arm, repeat), cell in cells.items()
        if workload == "long" and repeat == 0
    }


# -- in a terminal ------------------------------------------------------------------------------------


def tables(cells: Cells) -> list[Table]:
    """The claims and the aims with what was measured."""
    results, comparisons = results_of(cells), comparisons_of(cells)
    claims = Table(
        title="full over dense, beside the paper's claims (* as claimed or beyond)",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    claims.add_column("workload\n\npaper:", no_wrap=True)
    for claim in CLAIMS:
        low, high = claim.said.split(" to ")
        claims.add_column(f"{claim.heading}\n{low} to\n{high}", justify="right")
    for workload, arms in comparisons.items():
        found = [(claim, arms.get("full", {}).get(claim.measure)) for claim in CLAIMS]
        if any(f is not None for _, f in found):
            claims.add_row(
                workload, *("" if f is None else _change(claim, f.value) for claim, f in found)
            )
    aims = _folding("workload", "measure", "aim", "measured", "verdict")
    for verdict in verdicts(cells, results, comparisons):
        workload, arm, *rest = _aim_row(verdict)
        aims.add_row(workload if arm == "full" else f"{workload}, {arm}", *rest)
    return [claims, aims]


def _change(claim: Claim, value: float) -> str:
    return percent(value) + ("" if claim.missed(value) else " *")


def _folding(*columns: str) -> Table:
    """A table that breaks long words in a narrow terminal instead of cutting them off."""
    table = Table()
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _aim_row(verdict: Verdict) -> tuple[str, ...]:
    label = verdict.measure.removesuffix("_fair")
    name = ROWS.get(label, (verdict.measure, ""))[0].split(" [")[0]
    if verdict.measure.endswith("_fair"):
        name += ", over round robin"
    figure = _figure(verdict.value) + _spread(verdict.interval)
    return verdict.workload, verdict.arm, name, verdict.aim, figure, verdict.words


# -- in Markdown --------------------------------------------------------------------------------------


def markdown(cells: Cells, manifest: Mapping[str, Any], command: str) -> str:
    """The page `docs/evidence.md`."""
    results, comparisons = results_of(cells), comparisons_of(cells)
    parts = [
        "# The evidence",
        f"Made on {manifest['made']} by `{command}` with version {manifest['version']} on "
        f"{manifest['machine']}, backend {_backend(manifest)}."
        + (
            " A quick run: small sizes and rough figures, beside aims that are meant for the full ones."
            if manifest["quick"]
            else ""
        ),
        "![ratios of every arm to the dense baseline, beside the paper's claims](evidence.png)",
        _METHOD,
        *_section("Against the paper's claims", _claims_table(comparisons)),
        *_section("Against the aims of this project", _aims_table(cells, results, comparisons)),
        *_prefill_remark(results),
        *_together(cells, results),
        *_needle_section(cells),
        "## Every figure",
    ]
    for workload, arms in results.items():
        parts += [f"### {workload}: {WORKLOADS[workload].about}", _figures_table(arms)]
        if workload in comparisons:
            parts.append(_ratios_table(comparisons[workload]))
    for measure, package in missing_overlap().items():
        parts.append(f"{measure} was not measured: `pip install {package}`.")
    return "\n\n".join(parts) + "\n"


def _backend(manifest: Mapping[str, Any]) -> str:
    weights = manifest["config"]["backend"].get("weights", "file")
    rounded = "" if weights == "file" else f", all arms on weights rounded to {weights}"
    return f"{manifest['backend']}{rounded}"


_METHOD = """\
The arms are configurations of one engine that differ by parts; they alternate in one process, each run
with a fresh engine. *baseline* is first come, first served, *fair* is round robin; both are dense, with
chunked prefill, running rows first, temperature 0.7. *sampling*, *scheduling* and *pruning* add one loop
to the baseline, *full* has all three, *quarter* is *full* with a quarter of the KV cache. Ratios are
over the better of the two dense arms in that measure, except latency, which is shown over each. In
brackets: 95 % bootstrap intervals, over the requests for latencies and likelihoods, over the seconds that
pieces of the run took for rates. Where a text is forced (teacher forcing through the engine, as it really
prunes), all arms pass through the same tokens. Entropic time counts entropies at T = 1. Operations and
bytes are those of the cost model. *At best* is what this cost model, fitted to the machine before the run,
leaves if every saving is granted in full: no cell attended to beyond the pruning's budget, no logits for
surprisals, every decoding set full and each row paying for its own length. An aim beyond it is said to be
out of reach."""


def _section(title: str, table: str) -> list[str]:
    return [f"## {title}", table] if table else []


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])


def _claims_table(comparisons: Comparisons) -> str:
    rows = [
        (workload, name, said, f"{value:.2f}", words)
        for workload, name, said, value, words in _claims(comparisons)
    ]
    return _grid(("workload", "claim", "paper", "ratio, full over dense", "verdict"), rows)


def _aims_table(cells: Cells, results: Results, comparisons: Comparisons) -> str:
    rows = [_aim_row(verdict) for verdict in verdicts(cells, results, comparisons)]
    return _grid(("workload", "arm", "measure", "aim", "measured", "verdict"), rows)


def _prefill_remark(results: Results) -> list[str]:
    shares = {
        workload: arms["full"]["prompt_share_percent"]
        for workload, arms in results.items()
        if arms.get("full", {}).get("prompt_share_percent", 0) > _PREFILL_DOMINATES
    }
    if not shares:
        return []
    named = ", ".join(f"{workload} ({share:.0f} %)" for workload, share in shares.items())
    return [f"Prefill dominates, and bounds what decoding faster can save end to end, in: {named}."]


def _together(cells: Cells, results: Results) -> list[str]:
    parts = []
    for workload in results:
        found = super_additivity(cells, workload)
        if found:
            parts += [f"### {workload}", _excess_table(found)]
    if not parts:
        return []
    intro = (
        "The paper claims that the three loops gain more together than the sum of what each gains "
        "alone. Gains in percent over the baseline; the excess is full less the sum, in percent points."
    )
    return ["## Is the whole more than its parts?", intro, *parts]


def _excess_table(found: Mapping[str, Excess]) -> str:
    rows = [
        (
            ROWS[measure][0].split(" [")[0],
            *(f"{gain:+.0f}" for gain in excess.gains.values()),
            f"{excess.excess:+.0f}{_spread(excess.interval, '+.0f')}",
            excess.verdict,
        )
        for measure, excess in found.items()
    ]
    arms = next(iter(found.values())).gains
    return _grid(("gain [%] in", *arms, "excess", "verdict"), rows)


def _needle_section(cells: Cells) -> list[str]:
    needles = _needles(cells)
    if not any(needles.values()):
        return []
    lengths = sorted({needle["length"] for found in needles.values() for needle in found})
    rows = []
    for arm, found in needles.items():
        of = {length: [n["recalled"] for n in found if n["length"] == length] for length in lengths}
        rows.append((f"{arm}, by length", *(_percent(of[length]) for length in lengths)))
    thirds = ("first third", "middle", "last third")
    depths = [
        (
            arm,
            *(
                _percent([n["recalled"] for n in found if int(3 * n["depth"]) == third])
                for third in range(3)
            ),
        )
        for arm, found in needles.items()
    ]
    return [
        "## Hidden facts, by prompt length and by depth",
        "Five-digit codes hidden in the prompts of *long*, asked for after it: tokens recalled, percent.",
        _grid(("arm", *(f"{length} tokens" for length in lengths)), rows),
        _grid(("arm", *thirds), depths),
    ]


def _percent(shares: Sequence[float]) -> str:
    return f"{100 * sum(shares) / len(shares):.0f}" if shares else ""


def _figures_table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        (label, *(_formatted(figures.get(measure), spec) for figures in arms.values()))
        for measure, (label, spec) in ROWS.items()
        if any(figures.get(measure) is not None for figures in arms.values())
    ]
    return _grid(("measure", *arms), rows)


def _ratios_table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    measures = list(dict.fromkeys(measure for found in arms.values() for measure in found))
    rows = []
    for measure in measures:
        label = ROWS.get(measure.removesuffix("_fair"), (measure, ""))[0].split(" [")[0]
        against = next(found[measure].against for found in arms.values() if measure in found)
        cells = (
            _figure(found[measure].value) + _spread(found[measure].interval)
            if measure in found
            else ""
            for found in arms.values()
        )
        rows.append((f"{label}, over {against}", *cells))
    return _grid(("ratio, or difference of quality", *arms), rows)


def _formatted(value: Any, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _figure(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 0.1 else f"{value:.2f}"


def _spread(interval: Interval | None, spec: str = ".2f") -> str:
    return "" if interval is None else f" [{interval.low:{spec}}, {interval.high:{spec}}]"
