# ruff: noqa: E402 - imports that need torch follow the check that it is there
"""Which implementation runs, and what happens where torch, triton or a GPU are missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from entropic_control.errors import CapabilityError

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from entropic_control.kernels import _triton
from entropic_control.kernels.dispatch import KernelInputError, check, power_of_two, resolve

pytestmark = pytest.mark.kernels
CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def run(code: str, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_automatic_choice_falls_back(monkeypatch):
    assert resolve("auto", CPU) == "interpreter"
    assert resolve("auto", CUDA) == "reference"  # the process interprets
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    assert resolve("auto", CPU) == "reference"
    assert resolve("auto", CUDA) == "compiled"
    monkeypatch.setattr(_triton, "AVAILABLE", False)
    assert resolve("auto", CPU) == resolve("auto", CUDA) == "reference"


def test_explicit_choice_fails_loudly(monkeypatch):
    with pytest.raises(CapabilityError, match="not on a CUDA device"):
        resolve("compiled", CPU)
    with pytest.raises(CapabilityError, match="TRITON_INTERPRET"):
        resolve("compiled", CUDA)
    with pytest.raises(CapabilityError, match="not on the CPU"):
        resolve("interpreter", CUDA)
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    with pytest.raises(CapabilityError, match="before triton"):
        resolve("interpreter", CPU)
    monkeypatch.setattr(_triton, "AVAILABLE", False)
    for mode in ("compiled", "interpreter"):
        with pytest.raises(CapabilityError, match="not installed"):
            resolve(mode, CPU)
    with pytest.raises(KernelInputError, match="known: auto"):
        resolve("gpu", CPU)


def test_every_check_names_the_argument():
    good = torch.zeros(2, 3)
    check("x", good, (None, 3), (torch.float32,), good)
    for match, arguments in {
        "x must be a torch tensor": ([1], (None,), (torch.float32,)),
        r"x must have shape \(any, 4\)": (good, (None, 4), (torch.float32,)),
        "x must be torch.int32 or torch.int64, not": (good, (2, 3), (torch.int32, torch.int64)),
        "x is on cpu": (good, (2, 3), (torch.float32,), torch.zeros(1, device="meta")),
        "x must be contiguous": (good[:, :2], (2, 2), (torch.float32,)),
    }.items():
        with pytest.raises(KernelInputError, match=match):
            check("x", *arguments)


def test_power_of_two():
    assert [power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 1023, 1024, 1025)] == [
        1,
        1,
        2,
        4,
        4,
        8,
        1024,
        1024,
        2048,
    ]


BLOCK = "import sys; sys.modules.update(dict.fromkeys({names!r}))\n"


def test_the_package_imports_without_torch_and_triton():
    code = BLOCK.format(names=("torch", "triton")) + (
        "import entropic_control.kernels\n"
        "try:\n"
        "    import entropic_control.kernels.entropy\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    assert run(code) == "TorchMissing the kernels need torch: pip install 'entropic-control[gpu]'"


def test_kernels_run_as_references_without_triton():
    code = BLOCK.format(names=("triton",)) + (
        "import torch\n"
        "from entropic_control.kernels.control_sample import control_sample\n"
        "from entropic_control.kernels.paged_prefill import paged_prefill\n"
        "from entropic_control.kernels import kv_cache, top_k\n"
        "from entropic_control.kernels.entropy import entropy\n"
        "print(entropy(torch.zeros(1, 8)).entropy.exp().round().item())\n"
        "zero = torch.zeros(1, dtype=torch.int64)\n"
        "print(control_sample(torch.tensor([[0., 9e9]]), zero, zero, temperature=1.0).token.item())\n"
    )
    assert run(code).split() == ["8.0", "1"]


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, entropic_control.kernels\n"
        "print([name for name in ('torch', 'triton') if name in sys.modules])"
    )
    assert run(code) == "[]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can be reached here")
def test_gpu_check_says_that_there_is_no_gpu():
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "entropic_control.bench.gpu_check"],
        env=clean,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "no CUDA GPU can be reached" in done.stderr
    assert done.stdout == ""
