"""What no controller could better: the cost of the work alone, every saving granted in full.

A cost model gives each prompt token and each decoded token its seconds. Granted are: no more cells read
than the pruning's budget leaves, as soon as it may prune; no logits for surprisals; every decoding set
full, and each row paying for its own length. Nothing is granted that a scheduler, a pruner or a sampler
could not have a part of, so where an aim lies beyond these figures it is the aim that is out of reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from entropic_control.backends.cost import CostModel
from entropic_control.bench.workloads import Task
from entropic_control.config import Config
from entropic_control.controllers.base import Array
from entropic_control.controllers.pruning import Pruning
from entropic_control.report import Report

LIMIT = "_limit"
"""What is appended to a measure's name for the best it could be."""


class Work(NamedTuple):
    """The least seconds of each request, arrays of shape (n,)."""

    arrived: Array
    shared: Array
    """In full sets."""
    alone: Array
    """With the engine to itself: one token a step, which bounds the latency."""


def limits(
    tasks: Sequence[Task], report: Report, config: Config, cost: CostModel, slots: int
) -> dict[str, float]:
    """The best that tokens/s, d(tau)/dC per second and the mean latency of a run could have been.

    Parameters
    ----------
    tasks : sequence of Task
        What was run.
    report : Report
        Of the run: its tokens and its entropic time are given.
    config : Config
        Its pruning says how many cells stay.
    cost : CostModel
        Seconds of a step on this machine.
    slots : int
        Rows of a full set.

    Returns
    -------
    dict
        Measures named as they are in a run, with `LIMIT` after the name. Empty for configurations whose
        work cannot be counted so: those that draft tokens, or select cells instead of evicting them.
    """
    if config.pruning.selects or config.speculation.drafts:
        return {}
    work = _work(tasks, report, config.pruning, cost, slots)
    tokens = sum(len(done.tokens) for done in report.completions)
    return {
        "tokens_per_second" + LIMIT: tokens / _makespan(work),
        "tau_per_second" + LIMIT: report.summary["tau"] / float(work.shared.sum()),
        "latency_mean" + LIMIT: max(float(work.alone.mean()), _shortest_remaining(work)),
    }


def _work(
    tasks: Sequence[Task], report: Report, pruning: Pruning, cost: CostModel, slots: int
) -> Work:
    step, row, row_cell, prompt_token, prompt_read, _ = cost.weights.tolist()
    prompt, tokens = np.array([(d.prompt_tokens, len(d.tokens)) for d in report.completions]).T
    longest = int((prompt + tokens).max())
    held = np.cumsum(np.concatenate([[0], _held(pruning, longest)]))
    read = held if pruning.during_prefill else np.cumsum(np.arange(longest + 1))
    arrived = {task.request.id: task.request.arrive for task in tasks}
    prefill = prompt * prompt_token + read[prompt] * prompt_read
    later = np.maximum(tokens - 1, 0)  # the first token comes of the prompt's last logits
    decode = later * row + (held[prompt + later] - held[prompt]) * row_cell
    return Work(
        np.array([arrived[done.id] for done in report.completions]),
        shared=prefill + decode + later * step / slots,
        alone=prefill + decode + later * step,
    )


def _held(pruning: Pruning, longest: int) -> Array:
    """The fewest cells that sequences of 1 to `longest` tokens hold, shape (longest,)."""
    length = np.arange(1, longest + 1)
    if not pruning.prunes:
        return length
    least = pruning.leanest()
    budget = np.array([least.budget_blocks(int(n), 1) for n in length])
    return np.where(length < pruning.min_tokens, length, np.minimum(length, budget))


def _makespan(work: Work) -> float:
    """Seconds to the last token: what arrives from some time on cannot be begun before it."""
    order = np.argsort(work.arrived, kind="stable")
    coming = np.cumsum(work.shared[order][::-1])[::-1]
    return float(
        max((work.arrived[order] + coming).max(), (work.arrived + work.alone).max())
        - work.arrived.min()
    )


def _shortest_remaining(work: Work) -> float:
    """The mean latency of shortest remaining time first, seconds: the least of one server.

    L. Schrage, "A proof of the optimality of the shortest remaining processing time discipline",
    Operations Research 16, 1968. A step does at most its own seconds' worth of this work, so an engine
    is such a server or a slower one.
    """
    left, total, now = work.shared.copy(), 0.0, 0.0
    coming = np.sort(work.arrived)
    while (left > 0).any():
        waiting = np.flatnonzero((left > 0) & (work.arrived <= now))
        next_at = coming[coming > now].min(initial=np.inf)
        if not waiting.size:
            now = float(next_at)
            continue
        first = waiting[np.argmin(left[waiting])]
        spent = min(float(left[first]), float(next_at) - now)
        left[first] -= spent
        now += spent
        if left[first] == 0:
            total += now - float(work.arrived[first])
    return total / len(left)
