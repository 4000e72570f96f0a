"""The keys and values of a paged cache, by layer, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from entropic_control.backends.paged.pool import BLOCK
from entropic_control.controllers.base import Array
from entropic_control.errors import CapabilityError, ModelError
from entropic_control.kernels._torch import torch
from entropic_control.kernels.dispatch import Mode
from entropic_control.kernels.kv_cache import copy_blocks


class Pools(NamedTuple):
    """One layer's keys and values, each of shape (blocks, 16, KV heads, head size)."""

    keys: Any
    values: Any


class Storage:
    """Pools that are made when a layer first writes: only then is its shape known for certain.

    Parameters
    ----------
    layers : int
        Attention layers of the model.
    blocks : int
        Blocks of each pool.
    mode : str
        Which implementation of the kernels; see `kernels.dispatch.Mode`.
    """

    def __init__(self, layers: int, blocks: int, mode: Mode) -> None:
        self.blocks = blocks
        self._mode = mode
        self._layers: list[Pools | None] = [None] * layers

    def __getitem__(self, layer: int) -> Pools:
        pools = self._layers[layer]
        if pools is None:
            raise CapabilityError(
                f"layer {layer} attends without keys and values of its own, which is not supported"
            )
        return pools

    @property
    def missing(self) -> list[int]:
        """Layers that never wrote."""
        return [layer for layer, pools in enumerate(self._layers) if pools is None]

    def made(self, layer: int, keys: Any, values: Any) -> Pools:
        """The pools of a layer, made to hold keys and values of shape (tokens, KV heads, head size)."""
        pools = self._layers[layer]
        if pools is None:
            pools = self._layers[layer] = self._make(keys, values)
        return pools

    def _make(self, keys: Any, values: Any) -> Pools:
        if keys.shape != values.shape:
            raise CapabilityError(
                f"keys of size {keys.shape[-1]} with values of size {values.shape[-1]} are not supported"
            )
        shape = (self.blocks, BLOCK, *keys.shape[1:])
        try:
            return Pools(
                *(torch.zeros(shape, dtype=x.dtype, device=x.device) for x in (keys, values))
            )
        except (RuntimeError, MemoryError) as error:
            size = (
                self.blocks * BLOCK * keys[0].numel() * keys.element_size() * 2 * len(self._layers)
            )
            raise ModelError(
                f"the KV cache of {self.blocks * BLOCK} tokens takes {size / 2**30:.1f} GiB, which the "
                f"device does not have: set backend.cells, backend.slots or backend.context lower"
            ) from error

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, in all layers."""
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            flat = [pool for pools in self._layers if pools is not None for pool in pools]
            copy_blocks(flat, sources, targets, mode=self._mode)

    def take(self, blocks: Sequence[int]) -> list[Array]:
        """The content of blocks as bytes, one array a pool."""
        at = self._index(blocks)
        return [_bytes(pool[at]) for pools in self._layers if pools is not None for pool in pools]

    def put(self, blocks: Sequence[int], contents: Sequence[Array]) -> None:
        """Write back what `take` gave.

        Raises
        ------
        ValueError
            If it does not fit these pools.
        """
        flat = [pool for pools in self._layers if pools is not None for pool in pools]
        shapes = [(len(blocks), *pool.shape[1:]) for pool in flat]
        sizes = [
            int(np.prod(shape)) * pool.element_size()
            for shape, pool in zip(shapes, flat, strict=True)
        ]
        if [content.nbytes for content in contents] != sizes:
            raise ValueError("the saved keys and values are of another model or size")
        at = self._index(blocks)
        for pool, shape, content in zip(flat, shapes, contents, strict=True):
            data = torch.from_numpy(content.copy()).view(pool.dtype).view(shape)
            pool[at] = data.to(pool.device)

    def _index(self, blocks: Sequence[int]) -> Any:
        device = next(pools.keys.device for pools in self._layers if pools is not None)
        return torch.tensor(list(blocks), dtype=torch.int64, device=device)


def _bytes(tensor: Any) -> Array:
    flat: Array = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return flat
