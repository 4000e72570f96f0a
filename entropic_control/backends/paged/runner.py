"""Running a model on the chunks of a step: layout, forward, and what is read off its logits."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from entropic_control.backends.base import Attention, Chunk, Forward
from entropic_control.backends.paged.attention import STEP, PagedCache
from entropic_control.backends.paged.graphs import DecodeGraphs, Record
from entropic_control.backends.paged.pool import Table
from entropic_control.backends.paged.step import Row, Step
from entropic_control.controllers.base import Array
from entropic_control.kernels._torch import torch


class Runner:
    """A model over a paged cache.

    Parameters
    ----------
    model
        A causal model of transformers whose attention is ours.
    cache : PagedCache
        The pool as the model sees it.
    record : function, optional
        Records decode steps to repeat them, see `graphs`; without it every step runs as it comes.
    """

    def __init__(self, model: Any, cache: PagedCache, record: Record | None = None) -> None:
        self._model = model
        self._cache = cache
        self.device = next(model.parameters()).device
        # transformers renamed the keyword.
        named = inspect.signature(model.forward).parameters
        self._keyword = "cache" if "cache" in named else "past_key_values"
        self._graphs = None if record is None else DecodeGraphs(self._forward, self.device, record)

    def __call__(
        self, chunks: Sequence[Chunk], tables: Sequence[Table], *, resident: bool
    ) -> Forward:
        """Run chunks whose tables have room for them.

        Parameters
        ----------
        resident : bool
            Whether the logits stay on the device.
        """
        # Decoding rows first, as a step wants them.
        order = sorted(range(len(chunks)), key=lambda at: len(chunks[at].tokens) > 1)
        rows = [_row(chunks[at], tables[at]) for at in order]
        score = any(chunk.score and len(chunk.tokens) == 1 for chunk in chunks)
        wanted = [chunks[at].wanted for at in order]
        logits, step = self._logits(rows, wanted, score=score)
        parts = dict(zip(order, logits.split([len(part) for part in wanted]), strict=True))
        sampled = [
            row
            for at, chunk in enumerate(chunks)
            for row in parts[at][len(parts[at]) - chunk.outputs :]
        ]
        surprisal = [
            None if chunk.following is None else _surprisals(parts[at], chunk)
            for at, chunk in enumerate(chunks)
        ]
        looked: list[Attention | None] = []
        if score:
            masses = dict(zip(order, zip(rows, step.masses(), strict=False), strict=False))
            looked = [
                Attention(masses[at][0].numbers.copy(), masses[at][1])
                if chunk.score and at in masses
                else None
                for at, chunk in enumerate(chunks)
            ]
        return Forward(sampled if resident else _on_host(sampled), surprisal, 0.0, looked)

    def _logits(
        self, rows: Sequence[Row], wanted: Sequence[Array], *, score: bool
    ) -> tuple[Any, Step]:
        """Logits of the wanted tokens of each row, one after the other, and the step that ran."""
        decodes = all(
            len(row.tokens) == len(part) == 1 for row, part in zip(rows, wanted, strict=True)
        )
        if self._graphs is not None and decodes:
            recorded = self._graphs(rows, score=score)
            if recorded is not None:
                return recorded
        step = Step(rows, self.device, score=score)
        begins = np.cumsum([0, *(len(row.tokens) for row in rows[:-1])])
        places = np.concatenate([a + part for a, part in zip(begins, wanted, strict=True)])
        keep = None if decodes else torch.from_numpy(places).to(self.device)
        return self._forward(step, keep), step

    def _forward(self, step: Step, keep: Any = None) -> Any:
        """Logits of the tokens `keep`, shape (kept, vocab); of all without it."""
        step.begin()
        self._cache.step = step
        try:
            with torch.no_grad():
                out = self._model(
                    input_ids=step.tokens[None],
                    position_ids=step.positions[None],
                    use_cache=True,
                    logits_to_keep=0 if keep is None else keep,
                    **{self._keyword: self._cache, STEP: self._cache},
                )
        finally:
            self._cache.step = None
        return out.logits[0]


def _row(chunk: Chunk, table: Table) -> Row:
    if chunk.attend is None or len(chunk.tokens) > 1:
        return Row(table, chunk.tokens)
    # The block of the token itself is always among them.
    chosen = np.isin(table.numbers, [*chunk.attend, table.numbers[-1]])
    return Row(table, chunk.tokens, None if chosen.all() else chosen)


def _surprisals(logits: Any, chunk: Chunk) -> Array | None:
    """-ln p at T = 1 of what follows in a chunk, nats; NaN where a row is no distribution."""
    assert chunk.following is not None
    following = chunk.following[chunk.asked].astype(np.int64)
    tokens = torch.from_numpy(following).to(logits.device)
    z = logits[: len(following)].float()
    nats = z.logsumexp(-1) - z.gather(-1, tokens[:, None])[:, 0]
    out: Array = nats.double().cpu().numpy()
    return chunk.answered(np.where(np.isfinite(out), out, np.nan))


def _on_host(rows: Sequence[Any]) -> list[Array]:
    """Logits as arrays that may be written to."""
    if not rows:
        return []
    if rows[0].device.type == "cpu":
        return [row.float().numpy() for row in rows]
    return list(torch.stack(list(rows)).float().cpu().numpy())
