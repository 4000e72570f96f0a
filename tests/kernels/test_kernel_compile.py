"""Every kernel compiles for the architectures in use, and none of them spills registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(900)]


ARCHITECTURES = ("80", "90", "100")


def test_no_kernel_spills(tmp_path, capsys):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    table = tmp_path / "table.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "entropic_control.kernels.aot",
            "--arch",
            *ARCHITECTURES,
            "--json",
            str(table),
        ],
        env=environment,
        capture_output=True,
        text=True,
    )
    with capsys.disabled():
        print("\n" + done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads(table.read_text())
    assert {line["arch"] for line in lines} == set(map(int, ARCHITECTURES))
    assert all(line["spill_bytes"] == 0 and 0 < line["registers"] <= 255 for line in lines)
    kernels = (
        "entropy",
        "top_k",
        "control_sample",
        "paged_attention",
        "paged_prefill",
        "write_kv",
        "copy_blocks",
    )
    assert all(any(line["name"].startswith(name) for line in lines) for name in kernels)
