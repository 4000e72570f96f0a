# mypy: allow-subclassing-any
"""The logits processor that vLLM loads, by entry point or by name, under either model runner."""

from __future__ import annotations

from typing import Any

from entropic_control.backends.vllm import compat
from entropic_control.backends.vllm.adapters import ProcessorV1, ProcessorV2
from entropic_control.backends.vllm.own import Own


class EntropicLogitsProcessor(*compat.logits_processor_bases()):  # type: ignore[misc]
    """Holds the entropy of requests near their targets.

    Settings come from `additional_config`; without them, as where vLLM merely finds the installed entry
    point, a request is controlled only if it sets a `target` or `enabled` for itself. Loaded twice, by
    entry point and by name, it works once. Instances are of `ProcessorV1` or `ProcessorV2`: vLLM gives
    the first a device and whether memory is pinned, the second the states of its requests.
    """

    def __new__(cls, vllm_config: Any, *place: Any) -> Any:
        return (ProcessorV1 if len(place) == 2 else ProcessorV2)(vllm_config, *place)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse bad settings when a request comes in; vLLM's server answers with a 400."""
        Own.read(sampling_params.extra_args)
