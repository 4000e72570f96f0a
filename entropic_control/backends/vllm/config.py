"""The vLLM section of a configuration, and what of a configuration travels to vLLM's processes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import ValidationError

from entropic_control.backends.base import Backend, BackendConfig
from entropic_control.backends.vllm.own import GAINS
from entropic_control.controllers.base import Strict
from entropic_control.controllers.kinds import KindOf
from entropic_control.controllers.priority.base import Priority
from entropic_control.controllers.pruning.base import Pruning
from entropic_control.controllers.temperature.base import TemperatureController
from entropic_control.errors import CapabilityError, ConfigError

KEY = "entropic"
"""Where the settings lie in vLLM's `additional_config`."""


class VllmConfig(BackendConfig):
    """vLLM, which runs its own decode loop: see `entropic vllm-args`.

    Parameters
    ----------
    async_scheduling : bool
        Whether vLLM schedules a step while the one before still runs. Only on platforms where vLLM
        does so (not on CPU); the scheduler then knows each entropy one step later.
    voluntary_preemption : bool
        Whether a running request gives its seat to a waiting one that must or should go first. The
        preempted one is prefilled again when it comes back.
    prune : bool
        Experimental, CPU attention only: drop the KV blocks that the pruning controller leaves out.
    trace : str or None
        JSONL file for the scheduler's decisions.
    cost_model : {"measured"}
        vLLM puts its steps together by itself, so that fixed costs would promise nothing here.
    """

    kind: Literal["vllm"] = "vllm"
    async_scheduling: bool = False
    voluntary_preemption: bool = False
    prune: bool = False
    trace: str | None = None
    cost_model: Literal["measured"] = "measured"

    @property
    def preempts(self) -> bool:
        """Whether an overdue request gets a running one's seat."""
        return self.voluntary_preemption

    @property
    def request_ranges(self) -> dict[str, tuple[float, float]]:
        """The gains a request may set for itself, least and most."""
        return dict(GAINS)

    def open(self) -> Backend:
        raise CapabilityError(
            "vLLM runs its own decode loop, so this configuration is handed to it: "
            "LLM(model, **entropic_control.backends.vllm.arguments(config)), or "
            "vllm serve MODEL $(entropic vllm-args CONFIG)"
        )


class HasControllers(Protocol):
    """A configuration, as far as vLLM is concerned."""

    @property
    def backend(self) -> Any: ...

    @property
    def temperature(self) -> Any: ...

    @property
    def truncation(self) -> Any: ...

    @property
    def estimator(self) -> Any: ...

    @property
    def priority(self) -> Any: ...

    @property
    def pruning(self) -> Any: ...


class Settings(Strict):
    """What vLLM's processes need of a configuration."""

    backend: VllmConfig = VllmConfig()
    temperature: Annotated[TemperatureController, KindOf("temperature")]
    priority: Annotated[Priority, KindOf("priority")]
    pruning: Annotated[Pruning, KindOf("pruning")]

    @classmethod
    def of(cls, config: HasControllers) -> Self:
        """The settings of a configuration; a backend section of another kind counts as the defaults.

        Raises
        ------
        CapabilityError
            If the configuration asks for what vLLM's plug-in points cannot give.
        """
        _check_controllable(config)
        backend = config.backend if isinstance(config.backend, VllmConfig) else VllmConfig()
        return cls(
            backend=backend,
            temperature=config.temperature,
            priority=config.priority,
            pruning=config.pruning,
        )

    @classmethod
    def found_in(cls, additional_config: Any) -> Self | None:
        """The settings in vLLM's `additional_config`, or None if there are none.

        Raises
        ------
        ConfigError
            If they are no settings.
        """
        if not isinstance(additional_config, dict) or KEY not in additional_config:
            return None
        try:
            return cls.model_validate(additional_config[KEY])
        except ValidationError as error:
            raise ConfigError(f"additional_config[{KEY!r}] cannot be used: {error}") from None

    @property
    def reads_entropies(self) -> bool:
        """Whether the priority controller learns from readings, so that every request is measured."""
        return bool(self.priority.init(1))


def _check_controllable(config: HasControllers) -> None:
    temperature = config.temperature
    if (
        temperature.reads_logits
        or temperature.command(temperature.init(1)).max_surprisal is not None
    ):
        raise CapabilityError(
            f"temperature '{temperature.kind}' needs each row of logits on the host, or cuts tokens by "
            f"surprisal; inside vLLM use 'pi', 'fixed', or a 'slew' limit around one of them"
        )
    if config.truncation.kind != "none":
        raise CapabilityError(
            f"truncation '{config.truncation.kind}' cannot run inside vLLM, which truncates by each "
            f"request's own top_k, top_p and min_p, after the temperature: set truncation to 'none'"
        )
    if config.estimator.kind != "full":
        raise CapabilityError(
            f"estimator '{config.estimator.kind}' cannot run inside vLLM, where the whole row is read "
            f"on the device: set estimator to 'full'"
        )
