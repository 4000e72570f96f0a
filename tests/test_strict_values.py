"""Values are what they say: no true for 1, no "5" for 5, no key twice, no line that ends elsewhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_control import Config, Request, json_lines, load_config
from entropic_control.cli import read_prompts
from entropic_control.config import dump_config
from entropic_control.controllers import PITemperature
from entropic_control.controllers.kinds import families, kinds_of
from entropic_control.errors import ConfigError
from entropic_control.yaml_files import dump_yaml, parse_yaml

# -- numbers, words and switches --------------------------------------------------------------------


def numeric_fields() -> list[tuple[str, str, str]]:
    """Every field of every kind whose default is a number, and no switch."""
    found = []
    for family in sorted(set(families()) & set(Config.model_fields)):
        for kind, cls in kinds_of(family).items():
            if not cls.__module__.startswith("entropic_control."):
                continue
            for name, field in cls.model_fields.items():
                if isinstance(field.default, int | float) and not isinstance(field.default, bool):
                    found.append((family, kind, name))
    return found


@pytest.mark.parametrize(("family", "kind", "name"), numeric_fields())
def test_a_number_is_neither_a_switch_nor_a_word(family: str, kind: str, name: str) -> None:
    for wrong in (True, False, "1", "0.5", "", [1]):
        with pytest.raises(ConfigError, match=name):
            load_config({family: {"kind": kind, name: wrong}})


@pytest.mark.parametrize("wrong", [True, False, "5", "1e3", 1.5, None, [5], {}])
@pytest.mark.parametrize("name", ["max_tokens", "seed"])
def test_generation_is_strict(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        load_config({"generation": {name: wrong}})


@pytest.mark.parametrize("wrong", [1, 0, "yes", "true", None, 1.0])
def test_a_switch_is_true_or_false(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="chat"):
        load_config({"backend": {"kind": "llama_cpp", "chat": wrong}})


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": True},
        {"max_tokens": "5"},
        {"min_tokens": False},
        {"seed": True},
        {"seed": "1"},
        {"deadline": "2"},
        {"deadline": True},
        {"arrive": True},
        {"ignore_eos": 1},
        {"ignore_eos": "true"},
        {"stop": [1]},
        {"temperature": {"target": True}},
        {"temperature": {"target": "1"}},
        {"forced": [True]},
        {"forced": ["1"]},
        {"prompt": [True]},
        {"prompt": ["5"]},
        {"id": 5},
    ],
    ids=str,
)
def test_requests_are_strict(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Request.model_validate({"prompt": "x", **fields})


@pytest.mark.parametrize("wrong", [True, "1", [True], np.array([True]), "x", None])
def test_per_request_settings_are_strict(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="target"):
        PITemperature().init(1, target=wrong)


def test_integers_are_numbers_and_so_are_numpys() -> None:
    assert PITemperature(target=2).target == 2.0
    assert PITemperature(target=np.float32(1.5)).target == 1.5  # type: ignore[arg-type]
    request = Request(prompt=list(np.arange(3)), max_tokens=np.int64(4))  # type: ignore[arg-type]
    assert (request.prompt, request.max_tokens) == ([0, 1, 2], 4)
    assert PITemperature().init(2, target=np.array([1, 2])) is not None


@pytest.mark.parametrize(
    "part", [{"kind": ["pi"]}, {"kind": None}, {"kind": {}}, {"kind": 3}, {}, 3]
)
@pytest.mark.parametrize("family", sorted(set(families()) & set(Config.model_fields)))
def test_a_kind_is_a_word(family: str, part: Any) -> None:
    with pytest.raises(ConfigError, match=f"{family}: unknown {family} kind"):
        load_config({family: part})


# -- keys -------------------------------------------------------------------------------------------

TWICE = [
    ("generation: {seed: 1}\ntemperature: pi\ngeneration: {seed: 2}", "generation", "line 3"),
    ("temperature: {kind: pi, target: 1, target: 2}", "target", "line 1"),
    ("temperature:\n  kind: slew\n  inner:\n    kind: pi\n    kind: pi", "kind", "line 5"),
    ("generation:\n  seed: 1\n  'seed': 1", "seed", "line 3"),
]


@pytest.mark.parametrize(("text", "key", "line"), TWICE)
def test_a_key_that_is_there_twice_is_named(tmp_path: Path, text: str, key: str, line: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"the key '{key}' is there twice") as caught:
        load_config(path)
    assert line in str(caught.value)


NAMES = st.text("abcxyz", min_size=1, max_size=3)


@given(st.lists(st.tuples(NAMES, st.integers()), min_size=1, max_size=5), st.integers(0, 3))
def test_keys_are_found_twice_at_any_depth(pairs: list[tuple[str, int]], depth: int) -> None:
    inner = "{" + ", ".join(f'"{key}": {value}' for key, value in pairs) + "}"
    text = '[{"in": ' * depth + inner + "}]" * depth
    twice = len({key for key, _ in pairs}) < len(pairs)
    for read in (json_lines.parse, lambda text: parse_yaml(text, "x")):
        if twice:
            with pytest.raises(ValueError, match="is there twice"):
                read(text)
        else:
            assert read(text) == json.loads(text)


def test_json_files_and_prompts_refuse_them_too(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"generation": {"seed": 1, "seed": 2}}')
    with pytest.raises(ConfigError, match="'seed' is there twice"):
        load_config(path)
    path.write_text('"ok"\n{"prompt": "a", "prompt": "b"}')
    with pytest.raises(ConfigError, match=r"run.json:2: .*'prompt' is there twice"):
        read_prompts(path)


# -- YAML is plain data -----------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(
        ["1e3", "1:30", "2020-01-01", "yes", "null", "~", "=", "<<", "0x1", "1_0", "010"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_what_is_dumped_is_read_back(data: Any) -> None:
    back = parse_yaml(dump_yaml(data), "x")
    assert back == data
    assert json.dumps(back) == json.dumps(data)  # true is not 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("5", 5),
        ("1.", 1.0),
        ("-.5", -0.5),
        ("0x10", 16),
        ("1_000", 1000),
        ("off", False),
    ],
)
def test_numbers_are_read(text: str, value: Any) -> None:
    assert parse_yaml(f"a: {text}", "x") == {"a": value}


@pytest.mark.parametrize(
    "text",
    [
        "2020-01-01", "1:30", "010", "!!binary aGk=", "!!timestamp 2020-01-01", "!!set {a}",
        "!!omap [a: 1]", "!!python/none x", "!!int x", "&x [*x]", "!mine 3", "[" * 3000, "9" * 5000,
        "=", "{1: 2}", "{[1]: 2}",
    ],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_anything_else_is_refused_with_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"generation: {{seed: {text}}}")
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load_config(path)
    with pytest.raises(ConfigError):
        load_config({}, settings=[f"generation.seed={text}"])


def test_aliases_are_read_and_bombs_are_not(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("generation: &g {seed: 3}\nbackend: {kind: simulated, <<: *g}")
    assert load_config(path).backend.seed == 3  # type: ignore[attr-defined]
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    path.write_text("\n".join(levels))
    with pytest.raises(ConfigError, match="comes to more than"):
        load_config(path)


# -- lines ------------------------------------------------------------------------------------------

SEPARATORS = "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e\r"


@given(st.lists(st.text(st.sampled_from(SEPARATORS + "ab\ufeff\n"), min_size=1), min_size=1))
def test_a_line_ends_at_a_line_feed_and_nowhere_else(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("lines") / "prompts.jsonl"
    for mark in (b"", b"\xef\xbb\xbf"):
        for end in ("\n", "\r\n"):
            # Control characters below U+0020 are escaped in JSON; the others may stand as they are.
            text = end.join(json.dumps({"prompt": p}, ensure_ascii=False) for p in prompts)
            path.write_bytes(mark + text.encode() + end.encode())
            assert [request.prompt for request in read_prompts(path)] == prompts


@pytest.mark.parametrize("name", ["run.yaml", "run.json"])
def test_a_byte_order_mark_is_skipped(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b'\xef\xbb\xbf{"generation": {"seed": 4}}')
    assert load_config(path).generation.seed == 4


# -- numbers that JSON does not know ------------------------------------------------------------------


@given(
    st.recursive(
        st.floats() | st.text(max_size=3), lambda i: st.lists(i) | st.dictionaries(NAMES, i)
    )
)
def test_what_is_written_is_json_by_the_standard(value: Any) -> None:
    text = json_lines.dumps(value)
    json_lines.parse(text)  # refuses Infinity and NaN


@given(st.floats())
def test_numbers_come_back(value: float) -> None:
    back = json_lines.number(json_lines.parse(json_lines.dumps(value)))
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_infinities_in_a_trace_come_back(tmp_path: Path) -> None:
    from engines import ids, simulated

    from entropic_control.trace import Trace, read_table

    engine = simulated()
    engine.run([Request(id="Infinity\u2028", prompt=ids(5), max_tokens=3)])
    columns = {**engine.trace.named(), "surprisal": np.array([np.inf, -np.inf, np.nan])}
    trace = Trace()
    trace.adopt(columns, {}, [{"time": 0.0, "worth": np.inf}], 0.0)
    trace.write(tmp_path)
    for path in tmp_path.iterdir():
        assert "Infinity," not in path.read_text().replace('"Infinity"', "")
    back = read_table(tmp_path, "trace")
    np.testing.assert_array_equal(back["surprisal"], columns["surprisal"])
    assert set(back["request"].tolist()) == {"Infinity\u2028"}


def test_a_configuration_dumps_to_what_is_read() -> None:
    config = load_config(
        {"temperature": {"kind": "pi", "kp": 1e-7}, "generation": {"stop": ["1e3", "no"]}}
    )
    assert load_config(parse_yaml(dump_config(config), "x")) == config
