"""What vLLM cuts off a request's distribution after the temperature, as truncations of ours."""

from __future__ import annotations

from typing import Any

from entropic_control.controllers.truncation import MinP, TopK, TopP, Truncation

Cuts = tuple[Truncation, ...]
"""Of one request, in the order in which they are made, each on what the one before it left."""


def cuts_of(params: Any) -> Cuts:
    """The cuts of a request's sampling parameters: min_p, then top_k, then top_p, as vLLM makes them."""
    cuts: list[Truncation] = []
    if getattr(params, "min_p", None):
        cuts.append(MinP(p=float(params.min_p), place="after"))
    if (getattr(params, "top_k", None) or 0) > 0:
        cuts.append(TopK(k=int(params.top_k), place="after"))
    top_p = getattr(params, "top_p", None)
    if top_p is not None and top_p < 1:
        cuts.append(TopP(p=float(top_p), place="after"))
    return tuple(cuts)
