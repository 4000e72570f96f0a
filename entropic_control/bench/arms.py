"""The arms of a comparison: configurations that differ by parts, run through the same engine."""

from __future__ import annotations

from entropic_control.backends import LlamaCppConfig
from entropic_control.config import Config
from entropic_control.controllers import (
    DynamicTemperature,
    EDTTemperature,
    EntropicPruning,
    ExactTemperature,
    FirstCome,
    FixedTemperature,
    Mirostat,
    NoPruning,
    PITemperature,
    RoundRobin,
    TemperatureController,
)

DENSE = ("baseline", "fair")
"""The arms without control: what servers do, and round robin."""

LOOPS = ("sampling", "scheduling", "pruning")
"""The arms with one loop each; `full` has all three."""

_COLD = 0.7
"""Temperature of the arms without a temperature loop, usual for chat models of this size."""


def default_config() -> Config:
    """All three loops, as in examples/quickstart.yaml, on the weights that every arm runs fastest on."""
    return Config(
        backend=LlamaCppConfig(weights="q8_0"),
        temperature=PITemperature(target=1.75),
        pruning=EntropicPruning(during_prefill=True),
    )


def dense(config: Config) -> Config:
    """The dense baseline on the same engine: chunked prefill, running rows first, fixed temperature."""
    return config.replace(
        temperature=FixedTemperature(temperature=_COLD),
        priority=FirstCome(),
        pruning=NoPruning(),
    )


def arms_of(config: Config) -> dict[str, Config]:
    """Every arm by name, made from the configuration under test."""
    base = dense(config)
    arms = {
        "baseline": base,
        "fair": base.replace(priority=RoundRobin()),
        "sampling": base.replace(temperature=config.temperature),
        "scheduling": base.replace(priority=config.priority),
        "pruning": base.replace(pruning=config.pruning),
        "full": config,
    }
    if config.pruning.prunes:
        arms["quarter"] = config.replace(pruning=config.pruning.replace(budget=0.25))
    return {**arms, **{name: base.replace(temperature=t) for name, t in _rivals(config).items()}}


def _rivals(config: Config) -> dict[str, TemperatureController]:
    """The temperature loop under test and its rivals, aimed at the same entropy where they have an aim."""
    loop = config.temperature
    target = float(getattr(loop, "target", 1.5))
    return {
        "fixed_0.5": FixedTemperature(temperature=0.5),
        "fixed_0.7": FixedTemperature(temperature=_COLD),
        "fixed_1.0": FixedTemperature(temperature=1.0),
        "pi": loop,
        "exact": ExactTemperature(target=target),
        "dynatemp": DynamicTemperature(temperature=_COLD, range=0.5),
        "edt": EDTTemperature(temperature=1.0, theta=1.0),
        "mirostat": Mirostat(target=target),
    }
