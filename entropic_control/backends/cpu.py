"""Which CPU this is, and what it can do."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import NamedTuple

_ABOUT = Path("/proc/cpuinfo")
_NAMES = ("model name", "Model", "CPU part", "Processor")
_ABILITIES = ("flags", "Features")


class Cpu(NamedTuple):
    """A kind of CPU, as the system tells it."""

    machine: str
    """The architecture: x86_64, arm64, ..."""
    name: str
    flags: frozenset[str]
    """Its instruction sets, by Linux's names; empty where the system does not tell."""

    @property
    def is_x86(self) -> bool:
        return self.machine.lower() in ("x86_64", "amd64")

    @property
    def is_arm(self) -> bool:
        return self.machine.lower() in ("arm64", "aarch64")


def this_cpu() -> Cpu:
    """The CPU that this process runs on."""
    machine = platform.machine()
    try:
        about = _first_core(_ABOUT)
    except OSError:
        return Cpu(machine, _name_on_macos() or platform.processor() or machine, frozenset())
    name = next((about[key] for key in _NAMES if about.get(key)), machine)
    flags = next((about[key] for key in _ABILITIES if about.get(key)), "")
    return Cpu(machine, name, frozenset(flags.split()))


def _first_core(path: Path) -> dict[str, str]:
    """What /proc/cpuinfo says of the first core; there may be hundreds, all alike."""
    about: dict[str, str] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.strip() and about:
                break
            key, _, value = line.partition(":")
            about[key.strip()] = value.strip()
    return about


def _name_on_macos() -> str:
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
