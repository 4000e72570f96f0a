"""Imports run down only: what each floor of the package may know."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import entropic_control

PACKAGE = Path(entropic_control.__file__).parent
HEAVY = ("torch", "llama_cpp", "triton", "transformers", "vllm", "matplotlib", "control")
FILES = ("entropic_control.json_lines", "entropic_control.yaml_files")
"""How files are read: they know errors and each other."""
GROUND = ("entropic_control.errors", "entropic_control.controllers", "entropic_control.kernels")
POLICIES = ("temperature", "priority", "pruning", "speculation", "truncation", "calibration")


def imported(source: str) -> Iterator[str]:
    """Every module a source names in an import, late ones and names of packages included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def controllers_may_not(name: str) -> bool:
    if within(name, ("entropic_control",)):
        return not within(name, ("entropic_control.errors", "entropic_control.controllers"))
    return within(name, HEAVY)


def kernels_may_not(name: str) -> bool:
    return within(name, ("entropic_control",)) and not within(name, GROUND)


def backends_may_not(name: str) -> bool:
    """A backend knows signals and the types its protocol is written in, no policy."""
    if within(name, tuple(f"entropic_control.controllers.{policy}" for policy in POLICIES)):
        *_, package, module, _ = name.split(".")
        return (package, module) not in [(policy, "base") for policy in POLICIES]
    if name.removeprefix("entropic_control.controllers.")[:1].isupper():
        return True  # a class from the package's front door, which loads every policy
    here = (*GROUND, *FILES, "entropic_control.backends")
    return within(name, ("entropic_control",)) and not within(name, here)


def files_may_not(name: str) -> bool:
    return within(name, ("entropic_control",)) and not within(
        name, ("entropic_control.errors", *FILES)
    )


def proofs_may_not(name: str) -> bool:
    here = (*GROUND, *FILES, "entropic_control.proofs")
    return within(name, ("entropic_control",)) and not within(name, here)


FLOORS = {
    "controllers": controllers_may_not,
    "kernels": kernels_may_not,
    "backends": backends_may_not,
    "proofs": proofs_may_not,
}


@pytest.mark.parametrize("name", FILES)
def test_reading_files_knows_nothing_above(name: str) -> None:
    source = (PACKAGE / f"{name.rpartition('.')[2]}.py").read_text()
    assert not {found for found in imported(source) if files_may_not(found)}


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_run_down_only(floor: str) -> None:
    files = sorted((PACKAGE / floor).rglob("*.py"))
    assert files
    wrong = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in files
        for name in imported(path.read_text())
        if FLOORS[floor](name)
    }
    assert not wrong


@pytest.mark.parametrize(
    ("floor", "source", "allowed"),
    [
        ("controllers", "import torch", False),
        ("controllers", "def f():\n    from torch.nn import Linear", False),
        ("controllers", "import llama_cpp.llama as l", False),
        ("controllers", "from entropic_control.engine import Engine", False),
        ("controllers", "from entropic_control import backends", False),
        ("controllers", "import entropic_control.backends", False),
        ("controllers", "from entropic_control.errors import ConfigError", True),
        ("controllers", "from scipy.optimize import minimize_scalar", True),
        ("controllers", "import numba", True),  # it compiles numpy code; but late, see below
        ("kernels", "from entropic_control.backends.base import Backend", False),
        ("kernels", "from entropic_control.controllers.sampling import uniform", True),
        ("backends", "from entropic_control.controllers.temperature.pi import PIState", False),
        ("backends", "from entropic_control.controllers.temperature import PITemperature", False),
        ("backends", "from entropic_control.controllers import PITemperature", False),
        ("backends", "from entropic_control.controllers.truncation import TopK", False),
        ("backends", "from entropic_control.controllers.priority.base import Cost", True),
        ("backends", "from entropic_control.controllers.signals import Reading", True),
        ("backends", "from entropic_control.engine import Engine", False),
        ("proofs", "from entropic_control.backends.simulated import Simulated", False),
        ("proofs", "from entropic_control.controllers.temperature import PITemperature", True),
    ],
)
def test_the_check_itself_can_fail(floor: str, source: str, allowed: bool) -> None:
    assert any(map(FLOORS[floor], imported(source))) != allowed


def test_importing_the_controllers_loads_nothing_heavy() -> None:
    code = "import sys, entropic_control.controllers; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    ).stdout.split()
    assert "entropic_control.controllers.temperature.slew" in loaded
    assert not {"scipy", "numba", *HEAVY} & {name.partition(".")[0] for name in loaded}
