"""What vLLM cuts off a request's distribution after the temperature, as truncations of ours."""

from __future__ import annotations

from typing import Any

from entropic_control.controllers.kinds import kinds_of

Cuts = tuple[Any, ...]
"""Truncations of one request, in the order in which they are made, each on what the one before it left."""


def cuts_of(params: Any) -> Cuts:
    """The cuts of a request's sampling parameters: min_p, then top_k, then top_p, as vLLM makes them."""
    asked: list[tuple[str, dict[str, Any]]] = []
    if getattr(params, "min_p", None):
        asked.append(("min_p", {"p": float(params.min_p)}))
    if (getattr(params, "top_k", None) or 0) > 0:
        asked.append(("top_k", {"k": int(params.top_k)}))
    top_p = getattr(params, "top_p", None)
    if top_p is not None and top_p < 1:
        asked.append(("top_p", {"p": float(top_p)}))
    known: dict[str, Any] = dict(kinds_of("truncation")) if asked else {}
    return tuple(known[kind](place="after", **settings) for kind, settings in asked)
