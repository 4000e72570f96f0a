"""The registry: which class a `kind` names, and kinds from other distributions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from entropic_control.controllers import (
    FixedTemperature,
    FullEntropy,
    PITemperature,
    TemperatureController,
    kinds,
)
from entropic_control.controllers.base import Strict
from entropic_control.controllers.kinds import KindOf

ROOT = Path(__file__).parents[2]


class Holder(Strict):
    temperature: Annotated[TemperatureController, KindOf("temperature")]


def held(value: Any) -> Any:
    return Holder.model_validate({"temperature": value}).temperature


def test_a_kind_is_named_by_a_mapping_a_word_or_an_object() -> None:
    assert held({"kind": "fixed", "temperature": 0.2}) == FixedTemperature(temperature=0.2)
    assert held("pi") == PITemperature()
    own = PITemperature(target=2.0)
    assert held(own) is own


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"kind": "fixd"}, "unknown temperature kind 'fixd'; did you mean 'fixed'?"),
        ("nonsense", "unknown temperature kind 'nonsense' (known: dynatemp, edt, exact"),
        ({"temperature": 1.0}, "unknown temperature kind '(none given)'"),
        (3.0, "unknown temperature kind '3.0'"),
        (None, "unknown temperature kind 'None'"),
        (FullEntropy(), "unknown temperature kind 'full'"),
        ({"kind": "pi", "targt": 1.0}, "unknown key 'targt'; did you mean 'target'?"),
        ({"kind": "pi", "target": -1.0}, "greater than 0"),
    ],
)
def test_a_refusal_lists_what_exists(value: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        held(value)
    assert message in str(caught.value)


def test_a_class_is_known_as_soon_as_it_is_defined() -> None:
    class Warm(FixedTemperature):
        kind: Literal["warm_for_this_test"] = "warm_for_this_test"  # type: ignore[assignment]
        temperature: float = Field(1.5, ge=0)

    try:
        assert held("warm_for_this_test") == Warm()
        assert "warm_for_this_test" in kinds.kinds_of("temperature")
    finally:
        del kinds._registry["temperature"]["warm_for_this_test"]


def test_a_subclass_that_keeps_its_parents_kind_does_not_replace_it() -> None:
    class Louder(FixedTemperature):
        pass

    assert kinds.kinds_of("temperature")["fixed"] is FixedTemperature
    assert type(held("fixed")) is FixedTemperature


def test_the_json_schema_knows_every_kind() -> None:
    schema = Holder.model_json_schema()["properties"]["temperature"]
    found = {one["properties"]["kind"]["const"] for one in schema["oneOf"]}
    assert found == set(kinds.kinds_of("temperature"))
    assert schema["discriminator"] == {"propertyName": "kind"}
    # Wrappers hold their own family; the schema names the kinds below and ends there.
    (slew,) = (one for one in schema["oneOf"] if one["title"] == "SlewLimit")
    inner = slew["properties"]["inner"]["properties"]["kind"]
    assert set(inner["enum"]) == found


def distribution(at: Path, name: str, module: str, points: str) -> None:
    (at / f"{name}.py").write_text(module)
    info = at / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )


LUKEWARM = """
from typing import Literal
from entropic_control.controllers import FixedTemperature

class Lukewarm(FixedTemperature):
    kind: Literal["lukewarm"] = "lukewarm"
"""
LOOK_UP = """
import warnings
warnings.simplefilter("always")
from entropic_control.controllers import SlewLimit
print(type(SlewLimit(inner={"kind": "lukewarm", "temperature": 0.9}).inner).__module__)
"""


def test_other_distributions_offer_kinds_by_entry_points(tmp_path: Path) -> None:
    points = "[entropic_control.controllers]\nlukewarm = ec_lukewarm:Lukewarm\n"
    distribution(tmp_path, "ec_lukewarm", LUKEWARM, points)
    found = run(LOOK_UP, tmp_path)
    assert (found.stdout.strip(), found.stderr) == ("ec_lukewarm", "")


def test_a_broken_distribution_is_a_warning_and_hides_no_other(tmp_path: Path) -> None:
    points = "[entropic_control.controllers]\n{0} = {0}\n"
    distribution(
        tmp_path, "ec_broken", "raise OSError('no such device')", points.format("ec_broken")
    )
    distribution(tmp_path, "ec_lukewarm", LUKEWARM, points.format("ec_lukewarm"))
    found = run(LOOK_UP, tmp_path)
    assert found.stdout.strip() == "ec_lukewarm"
    assert "entry point 'ec_broken' of entropic_control.controllers failed" in found.stderr
    assert "no such device" in found.stderr
    # Without them the kind does not exist.
    assert "unknown temperature kind 'lukewarm'" in run(LOOK_UP, tmp_path / "none").stderr
