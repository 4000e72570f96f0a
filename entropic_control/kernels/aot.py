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

_ALIGNED = frozenset({
    "vocab", "stride", "query_row", "query_token", "query_head", "key_block", "key_token", "key_head",
    "value_block", "value_token", "value_head", "key_pool_block", "key_pool_token", "key_pool_head",
    "value_pool_block", "value_pool_token", "value_pool_head",
})  # fmt: skip
"""Sizes and strides that are multiples of 16 for real models; Triton would see so at the launch."""


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
    for dtype in ("fp32", "bf16"):
        yield from _row_variants(f"{dtype} 131072", dtype, {"TILES": 32, "RUNS": 16, "NT": 32}, 512)
    single = {"TILES": 256, "RUNS": 4, "NT": 256}
    for variant in _row_variants("fp32 262144, one row", "fp32", single, 1024):
        yield with_ones(variant, "rows", "k")
    for dtype in ("fp32", "bf16"):
        yield from _attention_variants(dtype)
    for variant in (v for v in _attention_variants("fp16") if "64x3" in v.name):
        yield with_ones(variant, "window", "width", "each", "splits", "table_row", "count_row")
    from entropic_control.kernels import kv_cache

    pools = ("keys", "values", "key_pool", "value_pool")
    strides = [f"{side}_{axis}" for side in ("key", "value") for axis in ("token", "head")]
    strides += [f"{pool}_{axis}" for pool in pools[2:] for axis in ("block", "token", "head")]
    yield Variant(
        "write_kv bf16",
        kv_cache.write_kernel,
        {**dict.fromkeys(pools, "*bf16"), "slots": "*i64", "capacity": "i32", "block": "i32",
         **dict.fromkeys(strides, "i32")},
        {"HEADS": 8, "HEADS_PAD": 8, "SIZE": 128, "SIZE_PAD": 128},
        {"num_warps": kv_cache.WARPS},
    )  # fmt: skip
    yield Variant(
        "copy_blocks bf16",
        kv_cache.copy_kernel,
        {"pool": "*bf16", "sources": "*i64", "targets": "*i64", "size": "i32", "stride": "i32"},
        {"CHUNK": kv_cache.CHUNK},
        {"num_warps": kv_cache.WARPS},
    )


def with_ones(variant: Variant, *names: str) -> Variant:
    """The variant that Triton makes where these integers are 1: it turns them into constants."""
    ones = dict.fromkeys((name for name in names if name in variant.kernel.arg_names), 1)
    return variant._replace(name=f"{variant.name}, ones", constants={**variant.constants, **ones})


def _row_variants(
    name: str, dtype: str, tiles: dict[str, int], padded_runs: int
) -> Iterator[Variant]:
    from entropic_control.kernels import control_sample, entropy, top_k

    rows = {
        "logits": f"*{dtype}", "temperature_of": "*fp32", "out": "*fp32", "live_out": "*i32",
        "valid_out": "*i1", "stats": "*fp32", "tickets": "*i32",
        **dict.fromkeys(("vocab", "stride", "rows", "k"), "i32"),
    }  # fmt: skip
    yield Variant(
        f"entropy {name}", entropy.entropy_kernel, rows, {**tiles, "RAW": True},
        entropy.OPTIONS,
    )  # fmt: skip
    yield Variant(f"top_k {name}", top_k.top_k_kernel, rows, tiles, top_k.OPTIONS)
    sampling = {
        **rows, "seeds": "*i64", "steps": "*i64", "token_out": "*i32", "runs": "*fp32",
        **dict.fromkeys(("kp", "ki", "smoothing", "low", "high", "v_min"), "fp32"),
    }  # fmt: skip
    for control, place in ((False, ""), (True, ""), (True, "before"), (True, "after")):
        truncate = bool(place)
        used = {"state": control, "next_state": control, "truncation": truncate}
        yield Variant(
            f"control_sample {name}{' pi' * control}{' truncated ' * truncate}{place}",
            control_sample.control_sample_kernel,
            {**sampling, **{pointer: "*fp32" for pointer, wanted in used.items() if wanted}},
            {**tiles, "NR": padded_runs, "CONTROL": control, "SCHEDULE": True, "TRUNCATE": truncate,
             "BEFORE": place == "before", "RAW": True,
             **{pointer: None for pointer, wanted in used.items() if not wanted}},
            control_sample.options(tiles["RUNS"], truncate),
        )  # fmt: skip


def _attention_variants(dtype: str) -> Iterator[Variant]:
    from entropic_control.kernels import paged_attention, paged_prefill

    integers = (
        "window", "width", "each", "splits", "query_row", "query_token", "query_head", "key_block",
        "key_token", "key_head", "value_block", "value_token", "value_head", "table_row",
        "table_head", "count_row", "count_head",
    )  # fmt: skip
    types = {
        **dict.fromkeys(("queries", "keys", "values", "output"), f"*{dtype}"),
        **dict.fromkeys(("table", "counts", "lengths", "offsets", "starts"), "*i32"),
        **dict.fromkeys(("parts", "part_stats", "masses", "log_norms"), "*fp32"),
        **dict.fromkeys(integers, "i32"), "scale": "fp32",
    }  # fmt: skip
    warps = {"num_warps": paged_attention.WARPS}
    for size, group, window in ((64, 3, False), (128, 4, False), (256, 4, True)):
        name = f"{dtype} {size}x{group}{' window' * window}"
        shape = {"HEADS": 8 * group, "GROUP": group, "SIZE": size, "SIZE_PAD": size}
        blocks = {**shape, "BLOCK": 16, "TOGETHER": 4 if size <= 128 else 2,
                  "WINDOW": window, "UPCAST": False, **({} if window else {"starts": None})}  # fmt: skip
        yield Variant(
            f"paged_attention {name}", paged_attention.attend_kernel, types,
            {**blocks, "GROUP_PAD": 16}, warps,
        )  # fmt: skip
        yield Variant(
            f"paged_attention combine {name}", paged_attention.combine_kernel, types,
            {**shape, "SPLITS_PAD": 32, "WIDTH_STEP": 1024}, warps,
        )  # fmt: skip
        lines = {"GROUP_PAD": 4, "AT_ONCE": 4 if size > 128 or dtype == "fp32" else 16}
        yield Variant(
            f"paged_prefill {name}",
            paged_prefill.prefill_kernel,
            types,
            {**blocks, **lines},
            {"num_warps": paged_prefill.warps(4 * lines["AT_ONCE"])},
        )


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
        if types[name].startswith("*") or (name in _ALIGNED and types[name] == "i32")
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
    tool = (
        blackwell
        if target >= "sm_100" and len(target) > 5 and blackwell.exists()
        else tools / "ptxas"
    )
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
                print(
                    f"{line.name:48} sm_{arch:<4} {line.registers:4} registers "
                    f"{line.spill_bytes:4} bytes spilled {line.shared_bytes:7} shared",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))
    return int(any(line["spill_bytes"] for line in table))


if __name__ == "__main__":
    sys.exit(main())
