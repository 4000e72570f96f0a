"""llama.cpp's own samplers, through llama-cpp-python, on the logits of our backend."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from entropic_control.backends.base import Backend, Chunk
from entropic_control.bench.quality import text_figures
from entropic_control.controllers.base import Array
from entropic_control.controllers.softmax import moments, surprisal
from entropic_control.report import quarters

Chain = Callable[[Any, int], list[Any]]
"""Makes the samplers of a chain, from llama.cpp's functions and a seed."""

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


def dynatemp(temperature: float, spread: float) -> Chain:
    """Dynamic temperature, then a draw."""

    def chain(api: Any, seed: int) -> list[Any]:
        return [
            api.llama_sampler_init_temp_ext(temperature, spread, 1.0),
            api.llama_sampler_init_dist(seed),
        ]

    return chain


def mirostat(target: float, rate: float) -> Chain:
    """Mirostat v2, which draws by itself; llama.cpp counts its target in bits."""

    def chain(api: Any, seed: int) -> list[Any]:
        return [api.llama_sampler_init_mirostat_v2(seed, target / np.log(2), rate)]

    return chain


class NativeSampler:
    """One sequence's chain of llama.cpp samplers."""

    def __init__(self, chain: Chain, seed: int, vocab: int) -> None:
        from llama_cpp import llama_cpp as api

        self._api = api
        self._chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        for sampler in chain(api, seed):
            api.llama_sampler_chain_add(self._chain, sampler)
        self._table = np.zeros(vocab, _CANDIDATE)

    def draw(self, row: Array) -> tuple[int, float]:
        """A token for a row of logits, and the entropy of what it was drawn from, nats."""
        api, table = self._api, self._table
        table["id"], table["logit"], table["p"] = np.arange(len(row)), row, 0.0
        data = ctypes.cast(table.ctypes.data, ctypes.POINTER(api.llama_token_data))
        candidates = api.llama_token_data_array(data, len(row), -1, False)
        api.llama_sampler_apply(self._chain, ctypes.byref(candidates))
        token = int(candidates.data[candidates.selected].id)
        api.llama_sampler_accept(self._chain, token)
        # A sampler may put the candidates it left elsewhere, so they are read where it says.
        left = (ctypes.c_char * (candidates.size * _CANDIDATE.itemsize)).from_address(
            ctypes.addressof(candidates.data.contents)
        )
        p = np.frombuffer(left, _CANDIDATE)["p"].astype(np.float64)
        p = p[p > 0] / p.sum()
        return token, float(-(p * np.log(p)).sum())

    def close(self) -> None:
        """Free the chain and its samplers."""
        self._api.llama_sampler_free(self._chain)


def run_native(
    backend: Backend, prompts: Sequence[Array], tokens: int, chain: Chain, target: float
) -> dict[str, Any]:
    """Decode prompts together, each with a chain of its own; the figures are those of `bench paper`."""
    vocab = backend.capabilities.vocab
    samplers = [NativeSampler(chain, 7 + n, vocab) for n in range(len(prompts))]
    texts: list[list[int]] = [[] for _ in prompts]
    entropy: list[list[float]] = [[] for _ in prompts]
    nll: list[float] = []
    began = time.perf_counter()

    def take(slot: int, row: Array) -> None:
        row[backend.ends] = -np.inf  # every text has its full length, as in the other arms
        token, nats = samplers[slot].draw(row)
        texts[slot].append(token)
        entropy[slot].append(nats)
        nll.append(surprisal(row, moments(row, 1.0), token))

    for slot, prompt in enumerate(prompts):
        take(slot, backend.forward([Chunk(slot, 0, prompt, True)]).logits[0])
    for step in range(tokens - 1):
        chunks = [
            Chunk(slot, len(prompt) + step, np.array(texts[slot][-1:], np.int32), True)
            for slot, prompt in enumerate(prompts)
        ]
        for slot, row in enumerate(backend.forward(chunks).logits):
            take(slot, row)
    seconds = time.perf_counter() - began
    for slot, sampler in enumerate(samplers):
        sampler.close()
        backend.release(slot)
    return {
        **sampler_figures(texts, np.array(entropy), target),
        "drawn_nll": float(np.mean(nll)),
        "tokens_per_second": tokens * len(prompts) / seconds,
    }


def sampler_figures(
    texts: Sequence[Sequence[int]], entropy: Array, target: float
) -> dict[str, float]:
    """Regulation, drift and loops of texts; `entropy`, nats, has shape (texts, tokens)."""
    parts = np.array([quarters(row) for row in entropy])
    counted = [text_figures(text) for text in texts]
    off = 100 * (parts[:, 1:] / target - 1)
    return {
        "entropy_mean": float(parts.mean()),
        "entropy_drift": float((parts[:, 3] - parts[:, 0]).mean()),
        "off_target_percent": abs(float(off.mean())),
        "off_target_each_percent": float(np.abs(off.mean(axis=1)).mean()),
        **{name: float(np.mean([c[name] for c in counted])) for name in counted[0]},
    }
