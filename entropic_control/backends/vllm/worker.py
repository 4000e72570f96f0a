# mypy: allow-subclassing-any
"""vLLM's worker, with the entropies of each step beside its tokens."""

from __future__ import annotations

from typing import Any

from entropic_control.backends.vllm import compat
from entropic_control.backends.vllm.adapters import at_work
from entropic_control.backends.vllm.config import Settings
from entropic_control.backends.vllm.retention import retention

Base = compat.worker_base()
AsyncBase = compat.async_output_base()


class EntropicWorker(Base):  # type: ignore[misc, valid-type]
    """The platform's worker; what it hands to the scheduler carries readings as `entropic`."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = Settings.found_in(vllm_config.additional_config)
        if settings and retention(settings, vllm_config.cache_config.block_size):
            compat.use_cpu_attention(f"{__package__}.pruned_attention.PrunedBackend")
        super().__init__(vllm_config, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own, with the readings."""
        output = super().sample_tokens(*args, **kwargs)
        adapter = at_work(self.vllm_config)
        if adapter is None or output is None:
            return output
        if isinstance(output, AsyncBase):
            return Carrying(output, adapter.take_readings())
        return with_readings(output, adapter.take_readings()())


class Carrying(AsyncBase):  # type: ignore[misc, valid-type]
    """An asynchronous output that gets its readings when it is waited for."""

    def __init__(self, inner: Any, readings: Any) -> None:
        self._inner = inner
        self._readings = readings

    def get_output(self) -> Any:
        """Wait for the step."""
        return with_readings(self._inner.get_output(), self._readings())


def with_readings(output: Any, readings: dict[Any, tuple[float, ...]]) -> Any:
    """`output` with the readings, by the names that the scheduler gave the requests."""
    if readings:
        output.entropic = {key: value for key, value in readings.items() if isinstance(key, str)}
    return output
