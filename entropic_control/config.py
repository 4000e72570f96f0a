"""One configuration: which engine, which model, which controllers. The file is the controllers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic_core import PydanticSerializationError

from entropic_control.backends import BackendConfig, LlamaCppConfig
from entropic_control.controllers import (
    EntropicPriority,
    EntropicPruning,
    Estimator,
    FullEntropy,
    NoSpeculation,
    NoTruncation,
    PITemperature,
    Priority,
    Pruning,
    Speculation,
    TemperatureController,
    Truncation,
)
from entropic_control.controllers.base import Strict
from entropic_control.controllers.kinds import KindOf, fields_of
from entropic_control.errors import ConfigError
from entropic_control.yaml_files import dump_yaml, parse_yaml, read_data


class Generation(Strict):
    """Defaults of requests.

    Parameters
    ----------
    max_tokens : int
        Tokens to generate at most.
    seed : int
        Seed of the run; a request without a seed of its own takes seed + its number.
    stop : list of str
        Texts that end the generation.
    """

    max_tokens: int = Field(256, ge=1)
    seed: int = 0
    stop: tuple[str, ...] = ()


class Config(Strict):
    """Everything a run needs. Each part is chosen by its `kind`; see `entropic kinds`."""

    backend: Annotated[BackendConfig, KindOf("backend")] = LlamaCppConfig()
    temperature: Annotated[TemperatureController, KindOf("temperature")] = PITemperature()
    truncation: Annotated[Truncation, KindOf("truncation")] = NoTruncation()
    estimator: Annotated[Estimator, KindOf("estimator")] = FullEntropy()
    priority: Annotated[Priority, KindOf("priority")] = EntropicPriority()
    pruning: Annotated[Pruning, KindOf("pruning")] = EntropicPruning()
    speculation: Annotated[Speculation, KindOf("speculation")] = NoSpeculation()
    generation: Generation = Generation()


def load_config(
    source: str | Path | dict[str, Any] | Config,
    *,
    backend: str | None = None,
    settings: Sequence[str] = (),
) -> Config:
    """Read and check a configuration.

    Parameters
    ----------
    source : path, dict or Config
        A YAML or JSON file, or what one would hold.
    backend : str, optional
        A backend kind to run on instead, with that kind's defaults.
    settings : sequence of str
        Changes such as "temperature.target=1.5"; values are read as YAML.

    Raises
    ------
    ConfigError
        With the path of every fault in the file and what is known there.
    """
    if isinstance(source, Config):
        data, name = dict(source), "configuration"
    elif isinstance(source, dict):
        data, name = deepcopy(source), "configuration"
    else:
        data, name = _read(Path(source)), str(source)
    if backend is not None and _kind(data.get("backend")) != backend:
        data["backend"] = {"kind": backend}
    for setting in settings:
        _apply(data, setting)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(describe(error, name)) from None


def dump_config(config: Config) -> str:
    """The configuration as YAML.

    Raises
    ------
    ConfigError
        As `plain` does.
    """
    return dump_yaml(plain(config))


def plain(config: Config) -> dict[str, Any]:
    """The configuration as plain data, which gives it again.

    Raises
    ------
    ConfigError
        If no data can: if one of its parts is of a class that keeps its parent's kind.
    """
    try:
        return config.model_dump(mode="json")
    except PydanticSerializationError as error:
        raise ConfigError(str(error).rpartition("ConfigError: ")[2]) from None


def describe(error: ValidationError, name: str) -> str:
    """A validation error in words: one line a fault, with its path."""
    lines = [
        f"  {'.'.join(map(str, fault['loc'])) or '(top)'}: {fault['msg'].removeprefix('Value error, ')}"
        for fault in error.errors()
    ]
    return "\n".join([f"{name} cannot be used:", *lines])


def _kind(part: Any) -> Any:
    if isinstance(part, dict):
        return part.get("kind")
    return getattr(part, "kind", part)


def _read(path: Path) -> dict[str, Any]:
    data = read_data(path)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{str(path)!r} must hold a mapping, not {type(data).__name__}")
    return data


def _apply(data: dict[str, Any], setting: str) -> None:
    path, found, text = setting.partition("=")
    keys = path.strip().split(".")
    if not found or not all(keys):
        raise ConfigError(f"setting {setting!r} is not of the form part.key=value")
    value = parse_yaml(text, f"setting {setting!r}")
    place = data
    for key in keys[:-1]:
        inner = place.get(key)
        if isinstance(inner, str):  # `temperature: pi` is short for {kind: pi}
            inner = {"kind": inner}
        elif isinstance(inner, Strict):
            inner = fields_of(inner)
        elif inner is None and key in Config.model_fields and place is data:
            inner = _default(key)
        elif inner is None:
            inner = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"setting {setting!r}: {key!r} holds no keys")
        place[key] = inner
        place = inner
    if keys[-1] == "kind" and place.get("kind") != value:
        place.clear()  # the keys of another kind would be unknown to this one
    place[keys[-1]] = value


def _default(part: str) -> Any:
    return Config.model_fields[part].get_default().model_dump(mode="json")
