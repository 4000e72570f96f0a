"""The frontier as a picture: what each rule loses of the text going on, against the facts it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from entropic_control.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "osD^vP"


def frontier_plot(figures: dict[str, Any]) -> Figure:
    """Needle recall against added NLL, a marker for each budget; top left is best.

    Parameters
    ----------
    figures : dict
        What `run_frontier` returned.
    """
    figure = new_figure((7, 4.5))
    axes = figure.subplots()
    dense = figures["arms"]["dense at 1"]
    axes.axhline(dense["needle_recall"], color="black", ls="--", lw=1, label="dense")
    arms = [name.split(" at ") for name in figures["arms"] if name != "dense at 1"]
    rules = list(dict.fromkeys(rule for rule, _ in arms))
    budgets = list(dict.fromkeys(budget for _, budget in arms))
    for colour, rule in enumerate(rules):
        mine = [figures["arms"][f"{rule} at {budget}"] for budget in budgets]
        x = [figure["continuation_nll_delta"] for figure in mine]
        y = [figure["needle_recall"] for figure in mine]
        axes.plot(x, y, color=f"C{colour}", lw=1, label=rule)
        for place, marker in enumerate(_MARKERS[: len(budgets)]):
            axes.errorbar(
                x[place],
                y[place],
                xerr=mine[place]["continuation_error"],
                color=f"C{colour}",
                marker=marker,
                capsize=2,
            )
    shapes = ", ".join(f"{m} {b}" for m, b in zip(_MARKERS, budgets, strict=False))
    axes.set(
        xlabel=f"added NLL of the true continuation [nats/token] (markers by budget: {shapes})",
        ylabel="needle recall",
        ylim=(-0.03, 1.03),
    )
    axes.legend(fontsize="small")
    return figure
