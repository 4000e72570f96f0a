"""Runs of the real vLLM; `make test-vllm` makes the environment they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MISSING = "needs vLLM and a converted model: make test-vllm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    model = os.environ.get("ENTROPIC_VLLM_MODEL")
    if find_spec("vllm") is not None and model and Path(model, "config.json").exists():
        return
    if os.environ.get("ENTROPIC_VLLM_MODEL"):
        raise pytest.UsageError(
            f"vLLM or the model {model!r} is missing, and these tests were asked for"
        )
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=MISSING))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the tests measured; as properties, because workers' output is not shown."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "figure" and report.when == "call":
                terminalreporter.write_line(str(value))


@pytest.fixture(scope="session")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The result of a scenario, run once in a process of its own."""
    results: dict[tuple[str, ...], dict[str, Any]] = {}
    where = tmp_path_factory.mktemp("vllm")

    def run(*name: str) -> dict[str, Any]:
        if name not in results:
            out = where / ("-".join(name).replace(" ", "_") + ".json")
            done = subprocess.run(
                [sys.executable, str(HERE / "scenarios.py"), name[0], str(out), *name[1:]],
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            results[name] = json.loads(out.read_text())
        return results[name]

    return run
