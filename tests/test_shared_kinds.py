"""Classes that share a kind: kept as they are, or refused, and never swapped in silence."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import pytest

from entropic_control import Config, load, load_config
from entropic_control.config import dump_config
from entropic_control.controllers import FirstCome, FixedTemperature, PITemperature, TopK
from entropic_control.controllers.kinds import families, kinds_of
from entropic_control.errors import ConfigError


class MyPI(PITemperature):
    """Keeps the kind of its parent."""

    def update(self, state: Any, reading: Any) -> Any:
        return super().update(state, reading)


class MyFixed(FixedTemperature):
    """Keeps the kind of its parent."""


class MyOrder(FirstCome):
    """Keeps the kind of its parent."""


class MyTopK(TopK):
    """Keeps the kind of its parent."""


PARTS = {
    "temperature": MyPI(target=1.25),
    "priority": MyOrder(),
    "truncation": MyTopK(k=7),
}


@pytest.mark.parametrize("family", PARTS)
def test_a_subclass_that_keeps_its_parents_kind_is_kept(family: str) -> None:
    part = PARTS[family]

    def kept(config: Config) -> bool:
        found = getattr(config, family)
        return type(found) is type(part) and found == part

    config = Config.model_validate({"backend": "simulated", family: part})
    for loaded in (load_config(config), load_config({"backend": "simulated", family: part})):
        assert kept(loaded)
    with load(config) as engine:
        assert kept(engine.config)
    changed = load_config(config, settings=["generation.seed=5"])
    assert kept(changed)
    assert kept(load_config(config, backend="simulated", settings=["backend.slots=2"]))


@pytest.mark.parametrize("family", PARTS)
def test_what_a_file_cannot_name_is_not_written(family: str, tmp_path: Path) -> None:
    config = Config.model_validate({"backend": "simulated", family: PARTS[family]})
    with pytest.raises(ConfigError, match="give the class a kind of its own"):
        dump_config(config)
    with load(config) as engine:
        engine.submit([5, 6])
        with pytest.raises(ConfigError, match="keeps the kind of its parent"):
            engine.save(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


def test_a_setting_of_such_a_part_is_refused() -> None:
    config = Config(temperature=MyPI(target=1.25))
    with pytest.raises(ConfigError, match="a kind of its own"):
        load_config(config, settings=["temperature.target=2"])
    changed = load_config(config, settings=["temperature=fixed"])
    assert type(changed.temperature) is FixedTemperature


@pytest.mark.parametrize("family", sorted(set(families()) & set(Config.model_fields)))
def test_a_kind_of_this_package_is_not_taken(family: str) -> None:
    for kind, cls in kinds_of(family).items():
        if not cls.__module__.startswith("entropic_control."):
            continue
        other = next(c for c in kinds_of(family).values() if not issubclass(c, cls))
        with pytest.raises(ConfigError, match=f"{family} kind '{kind}'.*give it another kind"):
            type("Mine", (other,), {"__annotations__": {"kind": Literal[kind]}, "kind": kind})
        assert kinds_of(family)[kind] is cls


def defined(name: str, temperature: float) -> Any:
    namespace = {
        "__annotations__": {"kind": Literal["of_a_cell"]},
        "kind": "of_a_cell",
        "__doc__": "A controller of a notebook.",
        "__module__": "a_notebook",
        "__qualname__": name,
        "start_at": temperature,
    }
    namespace["__annotations__"]["start_at"] = float
    return type(name, (FixedTemperature,), namespace)


def test_a_cell_that_runs_again_defines_its_kind_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = defined("Cell", 1.0)
        old = Config(temperature=first())
        again = defined("Cell", 2.0)
    assert type(load_config({"temperature": "of_a_cell"}).temperature) is again
    assert type(load_config(old).temperature) is first
    with pytest.warns(UserWarning, match="takes its place"):
        other = defined("Other", 3.0)
    assert kinds_of("temperature")["of_a_cell"] is other
