"""Ahead-of-time compilation of every kernel: registers and spills for each architecture, no GPU needed.

Run it as ``python -m entropic_control.kernels.aot [--arch 80 90 100] [--json FILE]`` in a process
without TRITON_INTERPRET; it exits with 1 if a kernel spills or does not compile.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from entropic_control.errors import CapabilityError
from entropic_control.kernels import _triton
from entropic_control.kernels._triton import triton

ARCHITECTURES = (80, 90, 100)


class Variant(NamedTuple):
    """One specialisation of a kernel, as a launcher would ask for it."""

    name: str
    kernel: Any
    types: dict[str, str]
    """Triton types of the run-time arguments."""
    constants: dict[str, Any]
    """Compile-time arguments."""
    options: dict[str, int]


class Resources(NamedTuple):
    """What the assembler says of a compiled kernel."""

    name: str
    arch: int
    registers: int
    spill_bytes: int
    shared_bytes: int


def variants() -> Iterator[Variant]:
    """Every kernel, in the shapes that matter."""
    from entropic_control.kernels import control_sample, entropy

    tiles = {"TILES": 32, "RUNS": 16, "NT": 32}
    for dtype in ("fp32", "bf16"):
        rows = {"logits": f"*{dtype}", "temperature_of": "*fp32", "out": "*fp32",
                "live_out": "*i32", "valid_out": "*i1", "stats": "*fp32", "tickets": "*i32",
                "vocab": "i32", "stride": "i32", "rows": "i32"}  # fmt: skip
        yield Variant(f"entropy {dtype}", entropy.entropy_kernel, rows, {**tiles, "RAW": True},
                      {"num_warps": entropy.WARPS})  # fmt: skip
        sampling = {
            **rows, "seeds": "*i64", "steps": "*i64", "token_out": "*i32", "runs": "*fp32",
            **dict.fromkeys(("kp", "ki", "smoothing", "low", "high", "v_min"), "fp32"),
        }  # fmt: skip
        for control, truncate in ((False, False), (True, False), (True, True)):
            pointers = {"state": control, "next_state": control, "truncation": truncate}
            yield Variant(
                f"control_sample {dtype}{' pi' * control}{' truncated' * truncate}",
                control_sample.control_sample_kernel,
                {**sampling, **{name: "*fp32" for name, used in pointers.items() if used}},
                {**tiles, "NR": 512, "CONTROL": control, "SCHEDULE": True, "TRUNCATE": truncate,
                 "RAW": True, **{name: None for name, used in pointers.items() if not used}},
                {"num_warps": control_sample.WARPS},
            )  # fmt: skip


def compile_variant(variant: Variant, arch: int) -> Resources:
    """Compile for compute capability `arch` (90 is 9.0) and read the assembler's report.

    Raises
    ------
    CapabilityError
        Without Triton, or in a process whose kernels are interpreted.
    """
    if not _triton.AVAILABLE or _triton.INTERPRETED:
        raise CapabilityError("compiling needs triton, imported without TRITON_INTERPRET")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    types = {n: "constexpr" if n in variant.constants else variant.types[n] for n in names}
    # Addresses from torch's allocator are multiples of 16, which lets loads be vectorised.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if types[name].startswith("*") or name in ("vocab", "stride")
    }
    source = ASTSource(
        fn=variant.kernel, signature=types, constexprs=variant.constants, attrs=aligned
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=variant.options)
    registers, spilled = _assemble(compiled.asm["ptx"])
    return Resources(variant.name, arch, registers, spilled, int(compiled.metadata.shared))


def _assemble(ptx: str) -> tuple[int, int]:
    """Registers and bytes spilled (stores and loads) by ptxas."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    found = re.search(r"\.target (\w+)", ptx)
    target = found[1] if found else ""
    blackwell = tools / "ptxas-blackwell"
    tool = blackwell if target >= "sm_100" and len(target) > 5 and blackwell.exists() else tools / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        report = subprocess.run(
            [str(tool), "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", report))
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    return registers, spilled


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if anything spills."""
    parser = argparse.ArgumentParser(prog="entropic_control.kernels.aot", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--only", default="", help="compile only kernels whose name holds this")
    parser.add_argument("--json", type=Path, help="write the table here too")
    options = parser.parse_args(arguments)
    table = []
    for variant in variants():
        if options.only in variant.name:
            for arch in options.arch:
                line = compile_variant(variant, arch)
                table.append(line._asdict())
                print(f"{line.name:42} sm_{arch:<4} {line.registers:4} registers "
                      f"{line.spill_bytes:4} bytes spilled {line.shared_bytes:7} shared", flush=True)  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))
    return int(any(line["spill_bytes"] for line in table))


if __name__ == "__main__":
    sys.exit(main())
