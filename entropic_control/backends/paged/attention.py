"""transformers' attention and cache interfaces over the paged pool.

A model calls `Cache.update` with each layer's new keys and values, then its attention function by the
name that `set_attn_implementation` was given. The cache is not handed to the function, so that the
step reaches it as an extra keyword of the forward, which models pass on. No mask is registered for
the name: then transformers builds none.
"""

from __future__ import annotations

from typing import Any, Protocol

from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from entropic_control.backends.paged.step import Step
from entropic_control.backends.paged.storage import Pools, Storage
from entropic_control.errors import CapabilityError
from entropic_control.kernels._torch import torch
from entropic_control.kernels.dispatch import Mode
from entropic_control.kernels.kv_cache import write_kv
from entropic_control.kernels.paged_attention import paged_attention
from entropic_control.kernels.paged_prefill import paged_prefill

NAME = "entropic_paged"
STEP = "entropic_step"
"""The keyword of a model's forward that carries the step."""

_UNSUPPORTED = {
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "position_bias": "position biases",
}


class Attend(Protocol):
    """How keys and values come into the pool, and attention is computed over it."""

    def write(self, pools: Pools, keys: Any, values: Any, cells: Any) -> None:
        """Store keys and values, shape (tokens, KV heads, head size), in cells of shape (tokens,)."""

    def __call__(
        self, query: Any, pools: Pools, step: Step, scale: float | None, window: int | None
    ) -> Any:
        """Attention of all tokens of a step, shape (tokens, heads, head size)."""


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Writes a layer's keys and values into the pool; reading is the attention function's."""

    is_sliding = False

    def __init__(self, layer: int, cache: PagedCache) -> None:
        super().__init__()
        self._layer = layer
        self._cache = cache

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """The pool makes itself when it is first written to."""

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        cache = self._cache
        assert cache.step is not None
        keys, values = (x[0].transpose(0, 1) for x in (key_states, value_states))
        pools = cache.storage.made(self._layer, keys, values)
        cache.attend.write(pools, keys, values, cache.step.cells)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any) -> tuple[Any, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class PagedCache(Cache):  # type: ignore[misc]
    """The paged pool as transformers sees it."""

    def __init__(self, layers: int, storage: Storage, attend: Attend) -> None:
        self.storage = storage
        self.attend = attend
        self.step: Step | None = None
        """The step at work."""
        super().__init__(layers=[PagedLayer(layer, self) for layer in range(layers)])


def attention(
    module: Any,
    query: Any,
    *_: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Any, None]:
    """Attention over the pool, in the form that transformers' models call.

    Parameters
    ----------
    module
        The attention layer.
    query : torch.Tensor, shape (1, heads, tokens, head size)

    Returns
    -------
    output : torch.Tensor, shape (1, tokens, heads, head size)
    None
        In place of attention weights.
    """
    cache = others.get(STEP)
    if cache is None or cache.step is None:
        raise CapabilityError(
            f"{type(module).__name__} does not hand its forward's keywords on to its attention, so the "
            f"paged cache cannot be reached"
        )
    for name, what in _UNSUPPORTED.items():
        if others.get(name) is not None:
            raise CapabilityError(f"{what} are not supported by the paged attention kernels")
    if not getattr(module, "is_causal", True):
        raise CapabilityError(f"{type(module).__name__} is not causal: it cannot decode")
    pools = cache.storage[module.layer_idx]
    out = cache.attend(query[0].transpose(0, 1), pools, cache.step, scaling, sliding_window)
    return out[None], None


AttentionInterface.register(NAME, attention)


class Kernels:
    """Attention by the launchers of `entropic_control.kernels`: no keys or values are gathered.

    Parameters
    ----------
    mode : str
        Which implementation; see `kernels.dispatch.Mode`.
    """

    def __init__(self, mode: Mode) -> None:
        self._mode = mode

    def write(self, pools: Pools, keys: Any, values: Any, cells: Any) -> None:
        write_kv(keys, values, *pools, cells, mode=self._mode)

    def __call__(
        self, query: Any, pools: Pools, step: Step, scale: float | None, window: int | None
    ) -> Any:
        split = len(query) - sum(len(row.tokens) for row in step.prefill.rows)
        parts = []
        if split:
            parts.append(self.decode(query[:split], pools, step, scale, window))
        if step.prefill.rows:
            part = step.prefill
            parts.append(
                paged_prefill(
                    query[split:], *pools, part.lists.table, part.lists.counts, part.lists.lengths,
                    part.offsets, part.longest, starts=part.starts, scale=scale, window=window,
                    mode=self._mode,
                )
            )  # fmt: skip
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def decode(
        self, query: Any, pools: Pools, step: Step, scale: float | None, window: int | None
    ) -> Any:
        """The decoding rows alone; adds their masses to the step where they are wanted."""
        part = step.decode
        # A window sees nothing old, so its masses cannot say what old blocks are worth.
        score = step.mass is not None and window is None
        attended = paged_attention(
            query, *pools, part.lists.table, part.lists.counts, part.lists.lengths,
            starts=part.starts, scale=scale, window=window, masses=score, mode=self._mode,
        )  # fmt: skip
        if score:
            step.add_mass(attended.masses)
        return attended.output


class Gathered:
    """torch's own attention over gathered keys and values: on CPUs faster than plain-torch kernels.

    Masses still come from the launchers.
    """

    def __init__(self, mode: Mode) -> None:
        self._kernels = Kernels(mode)

    def write(self, pools: Pools, keys: Any, values: Any, cells: Any) -> None:
        for pool, new in zip(pools, (keys, values), strict=True):
            pool.flatten(0, 1).index_copy_(0, cells, new)

    def __call__(
        self, query: Any, pools: Pools, step: Step, scale: float | None, window: int | None
    ) -> Any:
        parts = []
        at = step.decoding
        if at and step.mass is not None:
            parts.append(self._kernels.decode(query[:at], pools, step, scale, window))
        elif at:
            parts.append(self._decode(query[:at], pools, step, scale, window))
        for row, chunk in enumerate(step.prefill.rows):
            size = len(chunk.tokens)
            parts.append(self._chunk(query[at : at + size], pools, step, row, scale, window))
            at += size
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(
        self, query: Any, pools: Pools, step: Step, scale: float | None, window: int | None
    ) -> Any:
        index = step.decode.gather
        rows, heads, size = query.shape
        k, v = (
            pool.flatten(0, 1).index_select(0, index.view(-1)).view(*index.shape, *pool.shape[2:])
            for pool in pools
        )
        kv_heads = k.shape[2]
        # The query heads of a KV head as tokens of one head: nothing is repeated.
        out = torch.nn.functional.scaled_dot_product_attention(
            query.reshape(rows, kv_heads, heads // kv_heads, size),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=step.decode.decode_mask(window),
            scale=scale,
        )
        return out.reshape(rows, heads, size)

    def _chunk(
        self,
        query: Any,
        pools: Pools,
        step: Step,
        row: int,
        scale: float | None,
        window: int | None,
    ) -> Any:
        cells = step.prefill.cells(row)
        k, v = (pool.flatten(0, 1).index_select(0, cells).transpose(0, 1)[None] for pool in pools)
        mask = step.prefill.chunk_mask(row, window)
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None], k, v, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
