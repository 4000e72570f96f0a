"""The table as a picture: what each arm makes of its baseline, beside what the paper claims."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from entropic_control.bench.aims import CLAIMS
from entropic_control.bench.compare import comparisons_of
from entropic_control.bench.paper import Cells
from entropic_control.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN = {
    "latency_mean": "mean latency over first come",
    "tokens_per_second": "tokens/s, end to end",
    "decode_tokens_per_second": "tokens/s, decode steps",
    "tau_per_second": "d(tau)/dC per second",
}

_COLOURS = {
    "sampling": "#c9a227",
    "scheduling": "#4c8bf5",
    "pruning": "#3aa676",
    "full": "#222222",
    "quarter": "#8a8a8a",
}


def paper_plot(cells: Cells) -> Figure:
    """Ratios of every arm to the dense baseline, by workload, with the paper's claims as bands."""
    comparisons = comparisons_of(cells)
    figure = new_figure((12, 7.5))
    for axes, (measure, title) in zip(figure.subplots(2, 2).ravel(), _SHOWN.items(), strict=True):
        _bars(axes, comparisons, measure)
        claim = next(claim for claim in CLAIMS if claim.measure == measure)
        axes.axhspan(claim.low, claim.high, color="#e8743b", alpha=0.22, zorder=0)
        axes.axhline(1.0, color="black", lw=0.8)
        axes.set_title(title)
        axes.set_ylabel("ratio to dense")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    from matplotlib.patches import Patch

    handles.append(Patch(color="#e8743b", alpha=0.22))
    figure.legend(handles, [*labels, "the paper's claim"], loc="outside lower center", ncols=6)
    return figure


def _bars(axes: Axes, comparisons: Any, measure: str) -> None:
    workloads = [w for w, arms in comparisons.items() if any(measure in f for f in arms.values())]
    arms = [arm for arm in _COLOURS if any(arm in comparisons[w] for w in workloads)]
    width = 0.8 / max(len(arms), 1)
    for number, arm in enumerate(arms):
        found = [comparisons[w].get(arm, {}).get(measure) for w in workloads]
        places = np.arange(len(workloads)) + (number - (len(arms) - 1) / 2) * width
        shown = [(place, one) for place, one in zip(places, found, strict=True) if one is not None]
        values = np.array([one.value for _, one in shown])
        spread = np.array([one.interval or (one.value, one.value) for _, one in shown]).reshape(
            -1, 2
        )
        axes.bar(
            [place for place, _ in shown],
            values,
            width,
            color=_COLOURS[arm],
            label=arm,
            yerr=np.abs(spread - values[:, None]).T,
            error_kw={"lw": 0.8, "ecolor": "#777777"},
        )
    axes.set_xticks(np.arange(len(workloads)), [w.replace("_", "\n") for w in workloads])
