"""The same work on llama.cpp's own C++ server, and with its own samplers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import numpy as np
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table

from entropic_control.backends import LlamaCppConfig
from entropic_control.bench.arms import arms_of
from entropic_control.bench.native_samplers import dynatemp, mirostat, run_native, sampler_figures
from entropic_control.bench.paper import sized_backend
from entropic_control.bench.paper_report import ROWS
from entropic_control.bench.workloads import FULL, QUICK, WORKLOADS, Setting, Sizes, Task, Workload
from entropic_control.config import Config
from entropic_control.controllers.base import Array
from entropic_control.engine import Engine
from entropic_control.errors import CapabilityError
from entropic_control.progress import follow

SERVER = "llama.cpp server"
SHARED = ("chat", "mixed")
"""Workloads that the server runs too."""

_MEASURES = (
    "latency_mean",
    "latency_p95",
    "time_to_first_token",
    "tokens_per_second",
    "total_time",
)
_SAMPLER_MEASURES = (
    "entropy_mean",
    "off_target_percent",
    "off_target_each_percent",
    "entropy_drift",
    "repeated_4grams",
    "distinct_2",
    "drawn_nll",
)
_AIMS = {"chat": ("tokens_per_second", ">=", 0.97), "mixed": ("latency_mean", "<=", 0.35)}
"""Of the full arm over the server."""


def run_peers(config: Config, bar: Progress, *, quick: bool = False) -> dict[str, Any]:
    """Run the peers and this engine in turn.

    Returns
    -------
    dict
        `results[workload][arm][measure]`, `ratios[workload][measure]` of the full arm over the server,
        and `missing`: the peers that are not installed, with what to install.

    Raises
    ------
    CapabilityError
        If the backend is not llama.cpp: its server and samplers are the peers of no other.
    """
    if not isinstance(config.backend, LlamaCppConfig):
        raise CapabilityError(
            f"the peers run llama.cpp models: use backend 'llama_cpp', not '{config.backend.kind}'"
        )
    sizes = QUICK if quick else FULL
    missing = {}
    if find_spec("xllamacpp") is None:
        missing[SERVER] = "pip install 'entropic-control[peers]' (the package xllamacpp)"
    results: dict[str, dict[str, Any]] = {}
    for name in SHARED:
        results[name] = _shared(config, WORKLOADS[name], sizes, bar, with_server=not missing)
    results["samplers"] = _samplers(config, sizes, bar)
    ratios = {
        name: {
            measure: arms["full"][measure] / arms[SERVER][measure]
            for measure in _MEASURES
            if arms["full"][measure] and arms[SERVER][measure]
        }
        for name, arms in results.items()
        if SERVER in arms
    }
    return {"results": results, "ratios": ratios, "missing": missing}


def _shared(
    config: Config, workload: Workload, sizes: Sizes, bar: Progress, *, with_server: bool
) -> dict[str, Any]:
    backend = sized_backend(config, workload.context(sizes), sizes.slots)
    with Engine(config.replace(backend=backend)) as engine:
        tasks = workload.tasks(Setting(engine.backend, sizes))
        prompts = [engine.backend.encode(task.request.prompt).tolist() for task in tasks]
    arms: dict[str, Any] = {}
    if with_server:
        task = bar.add_task(f"{workload.name}, {SERVER}", total=len(tasks))
        bar.refresh()
        arms[SERVER] = serve(backend, prompts, [t.request.max_tokens or 0 for t in tasks])
        bar.update(task, completed=len(tasks))
    for arm in ("baseline", "full"):
        chosen = arms_of(config)[arm].replace(backend=backend)
        summary = _run(chosen, tasks, bar, f"{workload.name}, {arm}").summary
        arms[arm] = {measure: summary[measure] for measure in _MEASURES}
    return arms


def _run(config: Config, tasks: Sequence[Task], bar: Progress, label: str) -> Any:
    with Engine(config) as engine:
        follow(engine, [task.request for task in tasks], bar, label)
        return engine.report()


def serve(
    backend: LlamaCppConfig, prompts: Sequence[Sequence[int]], tokens: Sequence[int]
) -> dict[str, float]:
    """Figures of llama.cpp's server on token prompts that all arrive at once.

    It runs in this process with as many slots, tokens of context and a step, and threads as the
    backend, and without flash attention, as is faster on a CPU (see `LlamaCppConfig`).
    """
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(backend.file())
    parameters.n_parallel = backend.slots
    parameters.n_ctx = backend.slots * backend.context
    parameters.n_batch = parameters.n_ubatch = backend.step_tokens
    parameters.kv_unified = False
    parameters.cache_ram_mib = 0
    parameters.verbosity = -1
    kinds = xllamacpp.llama_flash_attn_type
    parameters.flash_attn_type = (
        kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if backend.flash_attention
        else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    if backend.threads:
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = backend.threads
    server = xllamacpp.Server(parameters)
    began = time.perf_counter()

    def ask(number: int) -> tuple[float, float]:
        first: list[float] = []

        def heard(_: Any) -> None:
            if not first:
                first.append(time.perf_counter() - began)

        server.handle_completions(
            {
                "prompt": list(prompts[number]),
                "n_predict": tokens[number],
                "temperature": 0.7,
                "seed": 7 + number,
                "ignore_eos": True,
                "cache_prompt": False,
                "stream": True,
            },
            heard,
        )
        return first[0] if first else float("nan"), time.perf_counter() - began

    with ThreadPoolExecutor(len(prompts)) as pool:
        times = np.array(list(pool.map(ask, range(len(prompts)))))
    firsts, latencies = times.T
    total = float(latencies.max())
    return {
        "latency_mean": float(latencies.mean()),
        "latency_p95": float(np.percentile(latencies, 95)),
        "time_to_first_token": float(firsts.mean()),
        "tokens_per_second": sum(tokens) / total,
        "total_time": total,
    }


def _samplers(config: Config, sizes: Sizes, bar: Progress) -> dict[str, Any]:
    """The temperature workload with llama.cpp's samplers, and with the controllers they rival."""
    workload = WORKLOADS["temperature"]
    backend = sized_backend(config, workload.context(sizes), sizes.slots)
    target = float(getattr(config.temperature, "target", 1.5))
    chains = {
        "llama.cpp dynatemp": dynatemp(0.7, 0.5),
        "llama.cpp mirostat": mirostat(target, 0.1),
    }
    figures: dict[str, Any] = {}
    with Engine(config.replace(backend=backend)) as engine:
        opened = engine.backend
        tasks = workload.tasks(Setting(opened, sizes))
        prompts: list[Array] = [opened.encode(task.request.prompt) for task in tasks]
        for name, chain in chains.items():
            task = bar.add_task(f"temperature, {name}", total=1)
            bar.refresh()
            figures[name] = run_native(opened, prompts, sizes.ablation_tokens, chain, target)
            bar.update(task, completed=1)
    for arm in ("dynatemp", "mirostat", "pi"):
        report = _run(
            arms_of(config)[arm].replace(backend=backend), tasks, bar, f"temperature, {arm}"
        )
        figures[arm] = _sampled(report, target)
    return figures


def _sampled(report: Any, target: float) -> dict[str, float]:
    """The figures of our own arms, with the entropy of what was drawn from, as the peers report it."""
    texts = [completion.tokens for completion in report.completions]
    traces = [report.trace.of(completion.id) for completion in report.completions]
    entropy = np.array([trace["realized_entropy"] for trace in traces])
    nll = np.mean([trace["raw_surprisal"].mean() for trace in traces])
    return {
        **sampler_figures(texts, entropy, target),
        "drawn_nll": float(nll),
        "tokens_per_second": report.summary["tokens_per_second"],
    }


def tables(summary: Mapping[str, Any]) -> list[Table]:
    """The results for the terminal."""
    shared = [_table(workload, summary["results"][workload], _MEASURES) for workload in SHARED]
    samplers = _table("temperature", summary["results"]["samplers"], _SAMPLER_MEASURES)
    aims = Table("workload", "full over the server", "aim", "measured", "verdict")
    for workload, (measure, sense, bound) in _AIMS.items():
        value = summary["ratios"].get(workload, {}).get(measure)
        if value is not None:
            reached = value >= bound if sense == ">=" else value <= bound
            words = "reached" if reached else f"not reached, by {abs(value - bound):.2g}"
            aims.add_row(
                workload, escape(ROWS[measure][0]), f"{sense} {bound:g}", f"{value:.2f}", words
            )
    return [*shared, aims, samplers]


def _table(title: str, arms: Mapping[str, Any], measures: Sequence[str]) -> Table:
    table = Table(title, *(Column(arm, justify="right") for arm in arms))
    for measure in measures:
        name, form = ROWS[measure]
        table.add_row(escape(name), *(f"{figures[measure]:{form}}" for figures in arms.values()))
    return table
