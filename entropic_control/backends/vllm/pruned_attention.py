# mypy: allow-subclassing-any
"""Attention on the CPU that skips pruned blocks: shorter block tables, true positions."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from entropic_control.backends.vllm import compat
from entropic_control.backends.vllm.config import Settings
from entropic_control.backends.vllm.retention import Retention, retention

BackendBase, BuilderBase = compat.cpu_attention_bases()


class PrunedBuilder(BuilderBase):  # type: ignore[misc, valid-type]
    """Leaves the dropped blocks of decoding rows out of what attention reads.

    Keys are stored with their positions in them, so that the rest can be read as if it were whole.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = Settings.found_in(self.vllm_config.additional_config)
        self._retention = retention(settings, self.block_size) if settings else None

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """vLLM's own metadata, of the shortened tables."""
        if self._retention is not None:
            common_attn_metadata = self._shortened(common_attn_metadata, self._retention)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _shortened(self, common: Any, retention: Retention) -> Any:
        table, lengths = common.block_table_tensor, common.seq_lens
        queries = common.query_start_loc_cpu.diff().tolist()
        shorter = {
            row: dropped
            for row, (length, query) in enumerate(zip(lengths.tolist(), queries, strict=False))
            if query == 1 and len(dropped := retention.dropped(length))
        }
        if not shorter:
            return common
        table, lengths = table.clone(), lengths.clone()
        for row, dropped in shorter.items():
            own = table[row].numpy()
            kept = np.delete(own[: -(-int(lengths[row]) // self.block_size)], dropped)
            own[: len(kept)] = kept
            lengths[row] -= len(dropped) * self.block_size
        return dataclasses.replace(
            common,
            block_table_tensor=table,
            seq_lens=lengths,
            max_seq_len=int(lengths.max()),
        )


class PrunedBackend(BackendBase):  # type: ignore[misc, valid-type]
    """vLLM's CPU attention with that builder."""

    @staticmethod
    def get_builder_cls() -> Any:
        return PrunedBuilder
