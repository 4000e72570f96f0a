"""Configurations: what is read, what is refused and in which words, and what the schema says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from entropic_control import Config, load, load_config
from entropic_control.backends import LlamaCppConfig, SimulatedConfig
from entropic_control.config import dump_config
from entropic_control.controllers import (
    EntropicPruning,
    FixedTemperature,
    PITemperature,
    SlewLimit,
    TopP,
)
from entropic_control.controllers.kinds import families, kinds_of
from entropic_control.errors import ConfigError

EXAMPLES = Path(__file__).parents[1] / "examples"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_load(path: Path) -> None:
    config = load_config(path)
    assert load_config(yaml.safe_load(dump_config(config))) == config
    assert load(path, backend="simulated").backend.capabilities.name == "simulated"


def test_a_file_is_the_controllers(tmp_path: Path) -> None:
    config = load_config(
        written(
            tmp_path,
            "backend: simulated\n"
            "temperature:\n  kind: slew\n  rate: 0.1\n  inner: {kind: pi, target: 1.5}\n"
            "truncation: {kind: top_p, p: 0.9, place: after}\n"
            "generation: {max_tokens: 9, stop: ['###']}\n",
        )
    )
    assert config.backend == SimulatedConfig()
    assert config.temperature == SlewLimit(inner=PITemperature(target=1.5), rate=0.1)
    assert config.truncation == TopP(p=0.9, place="after")
    assert (config.generation.max_tokens, config.generation.stop) == (9, ("###",))
    assert config.pruning == EntropicPruning()


def test_json_is_read_like_yaml_and_nothing_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"temperature": {"kind": "fixed", "temperature": 0.5}}))
    assert load_config(path).temperature == FixedTemperature(temperature=0.5)
    assert load_config(written(tmp_path, "")) == load_config({}) == Config()


def test_dump_and_load_are_inverse() -> None:
    for family in sorted(set(families()) & set(Config.model_fields)):
        for kind in kinds_of(family):
            if kind in ("slew", "calibrated"):
                continue
            config = load_config({family: kind})
            assert getattr(config, family).kind == kind
            assert load_config(yaml.safe_load(dump_config(config))) == config
    nested = load_config(
        {
            "temperature": {
                "kind": "slew",
                "rate": 0.2,
                "inner": {"kind": "mirostat", "target": 2},
            },
            "estimator": {"kind": "calibrated", "temperature": 1.3, "inner": {"kind": "top_k"}},
            "pruning": {"kind": "sliding_window", "budget": 512},
        }
    )
    again = load_config(yaml.safe_load(dump_config(nested)))
    assert again == nested
    assert isinstance(again.pruning.budget, int)  # a count of tokens, not a fraction


def test_a_configuration_is_frozen() -> None:
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.temperature = FixedTemperature()  # type: ignore[misc]
    assert config.replace(temperature="fixed").temperature == FixedTemperature()
    assert config.temperature == PITemperature()


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("temprature: pi", ["(top): unknown key 'temprature'; did you mean 'temperature'?"]),
        (
            "temperature: {kind: pi, targt: 2}",
            ["temperature: unknown key 'targt'; did you mean 'target'?", "v_min"],
        ),
        ("temperature: pii", ["unknown temperature kind 'pii'; did you mean 'pi'?", "mirostat"]),
        ("backend: {kind: vlm}", ["backend: unknown backend kind 'vlm'", "llama_cpp, simulated"]),
        ("pruning: {budget: 0.5}", ["pruning: unknown pruning kind '(none given)'"]),
        ("priority: 5", ["priority: unknown priority kind '5'", "round_robin"]),
        ("pruning: {kind: entropic, budget: 64}", ["a budget of 64 tokens cannot hold 1 sink"]),
        ("pruning: {kind: entropic, budget: 1.5}", ["a fraction above 1"]),
        ("temperature: {kind: pi, target: -1}", ["temperature.target: ", "greater than 0"]),
        ("temperature: {kind: pi, target: .nan}", ["temperature.target: ", "finite"]),
        ("temperature: {kind: pi, bounds: [2, 1]}", ["bounds must be 0 < low < high, not 2, 1"]),
        ("generation: {max_tokens: 0}", ["generation.max_tokens: "]),
        ("generation: {max_token: 4}", ["generation: unknown key 'max_token'", "max_tokens"]),
        (
            "temperature: {kind: slew, rate: 1, inner: {kind: pi, kq: 1}}",
            ["temperature.inner: unknown key 'kq'"],
        ),
        (
            "backend: {kind: llama_cpp, context: 1}\ngeneration: {seed: x}",
            ["backend.context: ", "generation.seed: "],
        ),
    ],
)
def test_a_fault_is_named_with_its_path_and_what_is_known(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path} cannot be used:\n")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not valid YAML"),
        ("- pi\n- fixed", "must hold a mapping, not list"),
        ("just words", "must hold a mapping, not str"),
        ("a: !!python/object/apply:os.mkdir [made]", "not valid YAML"),
        ("a: !!python/name:os.system", "not valid YAML"),
        ("a: !!python/object/new:builtins.bytearray [4]", "not valid YAML"),
    ],
)
def test_yaml_is_data_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, text))
    with pytest.raises(ConfigError):
        load_config({}, settings=[f"temperature.target={text}"])
    assert not (tmp_path / "made").exists()


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration at .*gone\.yaml"):
        load_config(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "binary")


# -- settings and engines by word ---------------------------------------------------------------------


def test_settings_change_single_values() -> None:
    source: dict[str, Any] = {"temperature": "pi", "backend": "simulated"}
    config = load_config(
        source,
        settings=[
            "temperature.target=1.5",
            "temperature.bounds=[0.3, 1.2]",
            "pruning.budget=0.25",
            "pruning.gate=null",
            "backend.slots=3",
            "generation.stop=['a', 'b']",
            "priority=round_robin",
        ],
    )
    assert config.temperature == PITemperature(target=1.5, bounds=(0.3, 1.2))
    assert config.pruning == EntropicPruning(budget=0.25, gate=None)
    assert config.backend == SimulatedConfig(slots=3)
    assert config.generation.stop == ("a", "b")
    assert config.priority.kind == "round_robin"
    assert source == {"temperature": "pi", "backend": "simulated"}


def test_a_setting_of_a_kind_drops_the_keys_of_the_other() -> None:
    source = {"temperature": {"kind": "pi", "target": 3.0}}
    changed = load_config(
        source, settings=["temperature.kind=fixed", "temperature.temperature=0.2"]
    )
    assert changed.temperature == FixedTemperature(temperature=0.2)
    same = load_config(source, settings=["temperature.kind=pi", "temperature.kp=0.3"])
    assert same.temperature == PITemperature(target=3.0, kp=0.3)


def test_settings_reach_into_wrappers() -> None:
    source = {"temperature": {"kind": "slew", "rate": 0.1, "inner": "pi"}}
    changed = load_config(source, settings=["temperature.inner.target=2.5"])
    assert changed.temperature == SlewLimit(inner=PITemperature(target=2.5), rate=0.1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("temperature.target", "not of the form part.key=value"),
        ("=3", "not of the form part.key=value"),
        ("temperature..target=3", "not of the form part.key=value"),
        ("temperature.target=[", "temperature.target="),
        ("temperature.target.low=3", "'target' holds no keys"),
        ("temperature.targt=3", "did you mean 'target'"),
        ("temprature.target=3", "did you mean 'temperature'"),
    ],
)
def test_a_wrong_setting_is_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({}, settings=[setting])


def test_engines_are_swapped_by_word() -> None:
    source = {"backend": {"kind": "llama_cpp", "slots": 3}, "temperature": "fixed"}
    assert load_config(source).backend == LlamaCppConfig(slots=3)
    swapped = load_config(source, backend="simulated", settings=["backend.slots=5"])
    assert swapped.backend == SimulatedConfig(slots=5)
    assert swapped.temperature == FixedTemperature()
    # The same word keeps the settings.
    assert load_config(source, backend="llama_cpp").backend == LlamaCppConfig(slots=3)
    with pytest.raises(ConfigError, match=r"unknown backend kind 'vlm'.*known: llama_cpp"):
        load_config(source, backend="vlm")


# -- schema -----------------------------------------------------------------------------------------


def test_the_schema_knows_every_part_and_kind() -> None:
    schema = Config.model_json_schema()
    json.dumps(schema)
    assert set(schema["properties"]) == set(Config.model_fields)
    assert schema["additionalProperties"] is False
    for family in set(families()) & set(schema["properties"]):
        kinds = {
            one["properties"]["kind"]["const"] for one in schema["properties"][family]["oneOf"]
        }
        assert kinds == set(kinds_of(family))


def test_every_kind_says_what_it_is_and_what_it_takes() -> None:
    for family in families():
        for kind, cls in kinds_of(family).items():
            about = (cls.__doc__ or "").strip().splitlines()
            assert about, (family, kind)
            assert len(about[0]) > 10
