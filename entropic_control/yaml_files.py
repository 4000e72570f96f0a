"""YAML and JSON as configurations are read: plain data, every key once, nothing guessed.

Numbers are those of YAML 1.2: `1e-3` is one, `1:30` and `2020-01-01` are none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from entropic_control.errors import ConfigError
from entropic_control.json_lines import parse

_MOST = 10_000
"""Values that a file may come to, when its aliases are written out."""


def read_data(path: Path) -> Any:
    """What a YAML or JSON file holds: mappings with text as keys, lists, text, numbers, true, false, null.

    Raises
    ------
    ConfigError
        If it cannot be read, has a key twice, or holds anything else; with the line where it is known.
    """
    name = repr(str(path))
    try:
        text = path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except FileNotFoundError:
        raise ConfigError(f"no configuration at {name}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from None
    if path.suffix.lower() != ".json":
        return parse_yaml(text, name)
    try:
        return parse(text) if text.strip() else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from None


def parse_yaml(text: str, name: str) -> Any:
    """What a YAML text holds; `name` stands for it in errors.

    Raises
    ------
    ConfigError
        As `read_data` does.
    """
    try:
        data = yaml.load(text, _Loader)
        _size(data, "", {}, name)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {error}") from None
    except (ValueError, RecursionError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name} is not valid YAML: {error}") from None
    return data


def dump_yaml(data: Any) -> str:
    """Plain data as YAML that `parse_yaml` gives back."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False))


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with every key once and the numbers of YAML 1.2."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is there twice", key.start_mark
                    )
                seen.add(str(key.value))
        return dict(super().construct_mapping(node, deep))


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """PyYAML's, without dates, and with other numbers."""
    number = {_INT, _FLOAT, "tag:yaml.org,2002:timestamp"}
    return {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in number]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    """Quotes what either PyYAML or this module's loader would take for something else than text."""


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_Loader.yaml_implicit_resolvers = _resolvers()
_Loader.add_implicit_resolver(
    _INT, re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)\Z"), list("-+0123456789")
)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        _FLOAT,
        re.compile(
            r"([-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
            r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z"
        ),
        list("-+0123456789."),
    )


def _size(data: Any, path: str, known: dict[int, int], name: str) -> int:
    """Values in some data with its aliases written out, if all of them are plain."""
    if data is None or isinstance(data, bool | int | float | str):
        return 1
    where = path.removeprefix(".") or "the top"
    if not isinstance(data, dict | list):
        raise ConfigError(f"{name}: {where} is a {type(data).__name__}, which no setting takes")
    if id(data) not in known:
        known[id(data)] = _MOST + 1  # until it is counted: it may hold itself
        total = 1
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            if isinstance(data, dict) and not isinstance(key, str):
                raise ConfigError(f"{name}: the key {key!r} in {where} is not text")
            total += _size(value, f"{path}.{key}", known, name)
        known[id(data)] = total
    if known[id(data)] > _MOST:
        raise ConfigError(f"{name}: {where} comes to more than {_MOST} values, or holds itself")
    return known[id(data)]
