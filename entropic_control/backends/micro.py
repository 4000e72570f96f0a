"""The temperature loop by itself, for libraries that hand over logits and keep the rest to themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike
from pydantic import ValidationError

from entropic_control.controllers.base import Array, Rows, Strict, unknown_name
from entropic_control.controllers.estimators import Estimator
from entropic_control.controllers.kinds import KindOf, families
from entropic_control.controllers.measurement import truncated_before
from entropic_control.controllers.signals import Reading
from entropic_control.controllers.temperature.base import Command, TemperatureController
from entropic_control.errors import ConfigError
from entropic_control.yaml_files import read_data

Source = Any
"""A temperature controller, a `Config`, what a configuration file holds, or the path of one."""

COLUMNS = (
    "step",
    "request",
    "token",
    "token_id",
    "temperature",
    "commanded",
    "entropy",
    "varentropy",
    "raw_entropy",
    "realized_entropy",
    "lower",
    "upper",
    "tail_mass",
    "live",
    "surprisal",
    "target",
    "saturated",
    "feasible",
)
"""What the trace holds, by the names and in the units of an engine's own trace."""


class Micro(Strict):
    """The parts of a configuration that say what a token is drawn from."""

    temperature: Annotated[TemperatureController, KindOf("temperature")]
    truncation: Annotated[Any, KindOf("truncation")]
    estimator: Annotated[Estimator, KindOf("estimator")]


_DEFAULTS: dict[str, Any] = {"temperature": "pi", "truncation": "none", "estimator": "full"}


def micro_of(source: Source) -> Micro:
    """The parts that `source` gives, and the defaults of a `Config` for the others.

    Raises
    ------
    ConfigError
        If there is no such file, or it holds what no configuration does.
    """
    if isinstance(source, (str, Path)):
        return _validated(_read(Path(source)), str(source))
    if isinstance(source, TemperatureController):
        return _validated({"temperature": source}, "the controller")
    if isinstance(source, Mapping):
        return _validated(dict(source), "the configuration")
    try:
        return Micro(**{name: getattr(source, name) for name in _DEFAULTS})
    except (AttributeError, ValidationError):
        raise ConfigError(
            "give a temperature controller, a Config, a mapping or the path of a YAML file, not "
            f"{type(source).__name__}"
        ) from None


def _read(path: Path) -> dict[str, Any]:
    data = read_data(path)
    if data is not None and not isinstance(data, dict):
        raise ConfigError(f"{str(path)!r} must hold a mapping, not {type(data).__name__}")
    return data or {}


def _validated(data: dict[str, Any], name: str) -> Micro:
    known = {*families(), "generation"}
    for key in data:
        if key not in known:
            raise ConfigError(f"{name} cannot be used: {unknown_name('key', key, known)}")
    try:
        return Micro(**{key: data.get(key, default) for key, default in _DEFAULTS.items()})
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"{name} cannot be used: {'; '.join(faults)}") from None


class MicroLoop:
    """Rows under a temperature controller, from their first token on.

    A step is `command`, `observe` and, as soon as the tokens are known, `settle`.

    Parameters
    ----------
    source : TemperatureController, Config, mapping or path
        Controller, truncation and estimator.
    overrides : mapping
        Settings of the rows' own, such as {"target": [1.0, 1.5]}.

    Raises
    ------
    ConfigError
        If the source cannot be used, or a setting is unknown or out of range.
    """

    def __init__(self, source: Source, overrides: Mapping[str, ArrayLike]) -> None:
        self.parts = micro_of(source)
        self._overrides = dict(overrides)
        self.start(max((np.size(value) for value in self._overrides.values()), default=1))

    def start(self, rows: int) -> None:
        """Forget everything and begin `rows` sequences."""
        self.state: Any = self.parts.temperature.init(rows, **self._overrides)
        self.counts: Array = np.zeros(rows, np.int64)
        """Tokens that each row has drawn."""
        self._step = 0
        self._reading: Reading | None = None
        self._blocks: list[dict[str, Array]] = []

    def command(self, logits: Rows | None = None) -> Command:
        """What to draw the next tokens under; `logits` for kinds that read them."""
        controller = self.parts.temperature
        if not controller.reads_logits:
            return controller.command(self.state)
        assert logits is not None
        return controller.command(self.state, truncated_before(logits, self.parts.truncation))

    def observe(self, reading: Reading) -> None:
        """Take in what the next tokens are drawn from; rows that are not `valid` draw none."""
        self._reading = reading
        rows = np.flatnonzero(reading.valid)
        unknown = np.full(len(rows), np.nan)
        targets = self.parts.temperature.targets(self.state)
        block = {name: getattr(reading, name)[rows] for name in COLUMNS if hasattr(reading, name)}
        self._blocks.append(
            block
            | {
                "step": np.full(len(rows), self._step),
                "request": rows,
                "token": self.counts[rows],
                "token_id": np.full(len(rows), -1),
                "commanded": unknown,
                "target": unknown if targets is None else targets[rows],
                "saturated": self.parts.temperature.saturated(self.state)[rows],
                "feasible": self.parts.temperature.feasible(self.state, reading.live)[rows],
            }
        )
        self._step += 1

    def settle(self, tokens: Array, surprisal: Array) -> None:
        """Move the rows that drew a token.

        Parameters
        ----------
        tokens : array, shape (rows,)
            What was drawn from the distributions last observed.
        surprisal : array, shape (rows,)
            -ln p of each, nats.
        """
        assert self._reading is not None
        reading = self._reading._replace(surprisal=surprisal)
        rows = np.flatnonzero(reading.valid)
        commanded, self.state = self.parts.temperature.update(self.state, reading)
        self.counts = self.counts + reading.valid
        self._blocks[-1] |= {
            "token_id": np.asarray(tokens)[rows],
            "surprisal": surprisal[rows],
            "commanded": commanded[rows],
            "saturated": self.parts.temperature.saturated(self.state)[rows],
        }

    @property
    def trace(self) -> dict[str, Array]:
        """The columns of every token drawn since `start`, as `identify` and the plots read them."""
        blocks = self._blocks or [dict.fromkeys(COLUMNS, np.zeros(0))]
        return {name: np.concatenate([block[name] for block in blocks]) for name in COLUMNS}
