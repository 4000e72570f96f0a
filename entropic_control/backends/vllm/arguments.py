"""What vLLM must be given to run under a configuration."""

from __future__ import annotations

import json
from typing import Any

from entropic_control.backends.vllm import compat
from entropic_control.backends.vllm.config import KEY, HasControllers, Settings
from entropic_control.backends.vllm.retention import retention
from entropic_control.errors import ConfigError

_HERE = "entropic_control.backends.vllm"
PROCESSOR = f"{_HERE}.processor:EntropicLogitsProcessor"

PRUNED_BLOCK = 32
"""Tokens in a KV block where blocks are pruned: the smallest that vLLM's CPU attention takes."""


def arguments(config: HasControllers) -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM`, or for its engine arguments.

    Parameters
    ----------
    config : Config
        As `entropic_control.load_config` gives it.

    Raises
    ------
    CapabilityError
        If the configuration asks for what cannot be had inside vLLM; the message says what to set.

    Notes
    -----
    On a version of vLLM whose insides are not known the scheduler and pruning are left out, with a
    warning; the temperature loop rests on documented interfaces alone.
    """
    settings = Settings.of(config)
    given: dict[str, Any] = {"additional_config": {KEY: settings.model_dump(mode="json")}}
    if not compat.entry_point_installed(PROCESSOR):
        given["logits_processors"] = [PROCESSOR]
    if not compat.warn_of_unknown_version():
        return given
    prefix = "EntropicAsync" if settings.backend.async_scheduling else "Entropic"
    given |= {
        "scheduler_cls": f"{_HERE}.scheduler.{prefix}Scheduler",
        "scheduling_policy": "priority",
        "async_scheduling": settings.backend.async_scheduling,
        "worker_cls": f"{_HERE}.worker.EntropicWorker",
    }
    if retention(settings, PRUNED_BLOCK) is not None:
        given |= {"enable_prefix_caching": False, "block_size": PRUNED_BLOCK}
    return given


def serve_arguments(config: HasControllers) -> str:
    """The same for the command line of `vllm serve`.

    The shell splits `vllm serve MODEL $(entropic vllm-args CONFIG)` at spaces, so that no argument may
    hold one.

    Raises
    ------
    ConfigError
        If a value of the configuration holds a space.
    """
    words: list[str] = []
    for name, value in arguments(config).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            words += [f"--{flag}", json.dumps(value, separators=(",", ":"))]
        elif isinstance(value, list):
            words += [f"--{flag}", *value]
        else:
            words += [f"--{flag}", str(value)]
    spaced = next((word for word in words if len(word.split()) > 1), None)
    if spaced is not None:
        raise ConfigError(
            f"a space in a value would part it in two on vLLM's command line: {spaced[:200]}"
        )
    return " ".join(words)
