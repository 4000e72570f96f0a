"""The top floor: what importing the package loads, and that it works where engines are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import entropic_control
from entropic_control.errors import CapabilityError

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "triton", "llama_cpp", "transformers", "vllm", "matplotlib", "control", "pyarrow"}
LINKS = ("backends", "controllers", "kernels", "proofs")


def loaded_by(code: str) -> set[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules, file=sys.stderr)"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return {name.partition(".")[0] for name in done.stderr.split()}


def test_case_24_importing_the_package_is_light() -> None:
    """Case 24: no engine, no plots, no numbers even, until something is used."""
    loaded = loaded_by("import entropic_control")
    assert "entropic_control" in loaded
    assert not loaded & (HEAVY | {"numpy", "scipy", "pydantic"})


@pytest.mark.parametrize(
    "code",
    [
        "from entropic_control import Config, Engine, Request, Report, load, load_config, restore",
        "import entropic_control.backends",
        "import entropic_control.cli, entropic_control.plots, entropic_control.trace",
        "from entropic_control import load; load({}, backend='simulated').run(['Hi'])",
        "from entropic_control.cli import main; main(['kinds', '--json'])",
    ],
)
def test_case_24_nothing_heavy_is_loaded_until_it_is_used(code: str) -> None:
    """Case 24: the simulated backend and the command line need no engine."""
    assert not loaded_by(code) & HEAVY


def test_case_24_a_missing_engine_is_a_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 24: without llama-cpp-python everything imports, and opening says what to install."""
    from entropic_control.backends import llama_cpp

    llama_cpp._library.cache_clear()
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    try:
        with pytest.raises(CapabilityError, match=r"pip install 'entropic-control\[llama\]'"):
            entropic_control.load({})
    finally:
        llama_cpp._library.cache_clear()


def test_every_public_name_exists() -> None:
    for name in entropic_control.__all__:
        assert getattr(entropic_control, name) is not None
        assert name in dir(entropic_control)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _: Any = entropic_control.nonsense


@pytest.mark.parametrize("name", LINKS)
def test_the_parts_are_one_step_from_the_root(name: str) -> None:
    link = ROOT / name
    if not link.is_symlink():
        pytest.skip("not a checkout")
    assert link.resolve() == ROOT / "entropic_control" / name


def test_the_package_is_typed() -> None:
    assert (Path(entropic_control.__file__).parent / "py.typed").is_file()
