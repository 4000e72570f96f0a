"""Building llama.cpp anew for any CPU of a kind, where the build that is there does not run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from entropic_control.backends.cpu import Cpu

_PLAIN = {
    "GGML_SSE42": "sse4_2",
    "GGML_AVX": "avx",
    "GGML_AVX2": "avx2",
    "GGML_FMA": "fma",
    "GGML_F16C": "f16c",
    "GGML_BMI2": "bmi2",
}
"""x86-64-v3: the options of ggml and what Linux calls the instruction sets."""

_OFF = (
    "GGML_AVX_VNNI",
    "GGML_AVX512",
    "GGML_AVX512_VBMI",
    "GGML_AVX512_VNNI",
    "GGML_AVX512_BF16",
    "GGML_AMX_TILE",
    "GGML_AMX_INT8",
    "GGML_AMX_BF16",
)
"""What CPUs of one kind have or lack, and what virtual machines show and then forbid."""

Run = Callable[[Sequence[str], Mapping[str, str]], int]
"""Runs a command with additions to the environment; gives its exit code."""


class Rebuild(NamedTuple):
    """A command that builds the library anew."""

    command: tuple[str, ...]
    environment: dict[str, str]
    """To be set besides."""

    def __str__(self) -> str:
        settings = " ".join(f'{name}="{value}"' for name, value in self.environment.items())
        return f"{settings} {' '.join(self.command)}"


def plain_options(cpu: Cpu) -> dict[str, str]:
    """ggml's build options for the plain set of instructions: x86-64-v3, or ARMv8 with its dot product.

    What the CPU is known to lack even of those is left out.
    """
    options = {"GGML_NATIVE": "OFF"}
    if cpu.is_x86:
        for option, name in _PLAIN.items():
            options[option] = "ON" if not cpu.flags or name in cpu.flags else "OFF"
        options |= dict.fromkeys(_OFF, "OFF")
    elif cpu.is_arm and cpu.flags:  # elsewhere the compiler's own default is plain
        options["GGML_CPU_ARM_ARCH"] = "armv8.2-a+dotprod" if "asimddp" in cpu.flags else "armv8-a"
    return options


def plain_rebuild(cpu: Cpu) -> Rebuild:
    """How to build llama-cpp-python with the plain set, its version kept.

    pip's cache is neither read, since it may hold the build that died, nor written.
    """
    try:
        wanted = f"llama-cpp-python=={version('llama-cpp-python')}"
    except PackageNotFoundError:
        wanted = "llama-cpp-python"
    pip = ["--no-cache-dir", "--force-reinstall", "--no-deps", "--no-binary", "llama-cpp-python"]
    own = os.environ.get(
        "CMAKE_ARGS", ""
    ).split()  # such as a GPU's; of two settings the last counts
    plain = [f"-D{option}={value}" for option, value in plain_options(cpu).items()]
    return Rebuild(
        (sys.executable, "-m", "pip", "install", "--quiet", *pip, wanted),
        {"CMAKE_ARGS": " ".join([*own, *plain])},
    )


def run_here(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command with its output on this process's own."""
    try:
        return subprocess.run(command, env={**os.environ, **environment}).returncode
    except OSError:
        return 127
