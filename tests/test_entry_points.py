"""A backend from another distribution: found by its entry point, run by the same engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

MODULE = '''
from typing import Literal
from entropic_control.backends import SimulatedConfig
from entropic_control.backends.simulated import Simulated


class EchoConfig(SimulatedConfig):
    """Says one token for ever."""

    kind: Literal["echo"] = "echo"
    token: int = 7

    def open(self):
        return Echo(self)


class Echo(Simulated):
    def _row(self, text):
        row = super()._row(text)
        row[:] = -300.0
        row[self.config.token] = 0.0
        return row
'''
RUN = """
from entropic_control import load, load_config
engine = load({"backend": {"kind": "echo", "token": 9}}, settings=["backend.slots=2"])
report = engine.run(["Hi"])
print(type(engine.backend).__module__, set(report.completions[0].tokens))
print(type(load_config({}, backend="echo").backend).__name__)
from entropic_control.cli import main
main(["kinds", "--json"])
"""


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )


def test_a_backend_of_another_distribution_runs(tmp_path: Path) -> None:
    (tmp_path / "ec_echo.py").write_text(MODULE)
    info = tmp_path / "ec_echo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ec_echo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[entropic_control.backends]\necho = ec_echo:EchoConfig\n"
    )
    found = run(RUN, tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[:2] == ["ec_echo {9}", "EchoConfig"]
    assert '"echo": "Says one token for ever."' in found.stdout
    missing = run(RUN, tmp_path / "none")
    assert "unknown backend kind 'echo' (known: llama_cpp, simulated, triton)" in missing.stderr
