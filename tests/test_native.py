"""llama.cpp built for another CPU: found in a process of its own, said in words, built anew."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from entropic_control import doctor
from entropic_control.backends import native, native_build
from entropic_control.backends.cpu import Cpu, this_cpu
from entropic_control.backends.models import DEFAULT, locate
from entropic_control.backends.native import Outcome
from entropic_control.doctor import Findings, repair

ROOT = Path(__file__).parents[1]
SIGNALS = ["SIGILL", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGTRAP", "SIGKILL", "SIGSYS"]

# The names of llama-cpp-python that a probe calls; `llama_decode` ends as a test wants it to.
STUB = """
import ctypes, os, signal
LLAMA = 1
llama_token = ctypes.c_int32
class Any:
    pass
def llama_log_callback(f): return f
def llama_log_set(*a): pass
def llama_backend_init(): pass
def llama_print_system_info(): return b"CPU : AVX = 1 | AVX2 = 1 | AMX_INT8 = 1 | AVX512 = 0 | "
def llama_model_default_params(): return Any()
def llama_context_default_params(): return Any()
def llama_model_load_from_file(*a): return {model}
def llama_init_from_model(*a): return 1
def llama_model_get_vocab(m): return 1
def llama_vocab_n_tokens(v): return 10
def llama_batch_get_one(tokens, n): return tokens
def llama_decode(c, batch):
    {decode}
    return 0
def llama_get_logits_ith(c, i): return [{logit}] * 10
"""


def install(place: Path, decode: str = "pass", logit: str = "0.5", model: int = 1) -> None:
    """Put a stand-in for llama-cpp-python into a directory that is to come first on the path."""
    package = place / "llama_cpp"
    (package / "lib").mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("__version__ = '0.0.1'\n")
    source = STUB.format(decode=decode, logit=logit, model=model)
    (package / "llama_cpp.py").write_text(source)
    (package / "lib" / "libllama.so").write_text(source)


def dies_by(name: str) -> str:
    return f"os.kill(os.getpid(), signal.{name})"


def run(place: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a directory first on its path, and with a cache in it."""
    own = {"PYTHONPATH": os.pathsep.join([str(place), str(ROOT)]), "COLUMNS": "400"}
    cache = {"ENTROPIC_CACHE": str(place / "cache")}
    kept = {k: v for k, v in os.environ.items() if k not in ("CMAKE_ARGS", native.SWITCH)}
    return subprocess.run(
        [sys.executable, "-P", *command],
        capture_output=True,
        text=True,
        timeout=120,
        env={**kept, **own, **cache, **environment},
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "any.gguf"
    path.write_bytes(b"GGUF")
    return path


# -- the probe --------------------------------------------------------------------------------------


def child(*lines: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(["import json, os, signal, sys, time", *lines])]


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("stage", ["import", "load", "prompt", "decode", "done"])
def test_death_by_a_signal_is_told_in_words(name: str, stage: str, model: Path) -> None:
    tell = f"print(json.dumps(dict(stage={stage!r}, built='CPU : AVX = 1')), flush=True)"
    outcome = native.probe(model, command=child(tell, dies_by(name)))
    assert outcome.kind == "signal"
    assert not outcome.works
    assert outcome.is_the_build
    assert f"died by {name} {native._STAGES[stage]}: it " in outcome.words
    assert outcome.built == "CPU : AVX = 1"


def test_a_signal_told_by_a_shell_is_one_too(model: Path) -> None:
    assert "died by SIGSEGV" in native.probe(model, command=child("sys.exit(139)")).words


@pytest.mark.parametrize(
    ("lines", "kind", "words"),
    [
        (["time.sleep(60)"], "timeout", "did not end within 1 s; it was last seen before it began"),
        (["sys.exit(3)"], "wrong", "gave logits that are no numbers"),
        (["sys.exit(4)"], "model", "could not load the model"),
        (["raise OSError('libgomp.so.1: none')"], "failed", "exit code 1: OSError: libgomp.so.1"),
        (["sys.exit(0)"], "failed", "ended before it began without a word"),
        (["print('{cut'); sys.exit(7)"], "failed", "with exit code 7: it gave no reason"),
    ],
)
def test_every_other_bad_end_is_told_in_words(
    lines: list[str], kind: str, words: str, model: Path
) -> None:
    outcome = native.probe(model, seconds=1.0, command=child(*lines))
    assert outcome.kind == kind
    assert words in outcome.words
    assert not outcome.works


def test_a_python_that_is_not_there_is_told_in_words(model: Path) -> None:
    outcome = native.probe(model, command=["/no/such/python"])
    assert outcome.kind == "failed"
    assert "could not be started" in outcome.words


@pytest.mark.llama
def test_the_library_that_is_here_decodes() -> None:
    pytest.importorskip("llama_cpp")
    path = locate(DEFAULT)
    if path is None:
        pytest.skip("needs the default model")
    outcome = native.probe(path)
    assert outcome.works, outcome
    assert outcome.version
    assert "CPU" in (outcome.built or "")
    unfit = native.probe(Path(__file__))
    assert unfit.kind == "model"
    assert not unfit.is_the_build


def test_a_shared_library_that_really_traps(tmp_path: Path) -> None:
    """Not Python's signal but the CPU's, before a line of the library's own has run."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a compiler")
    pytest.importorskip("llama_cpp")
    source = "__attribute__((constructor)) static void run(void) { __builtin_trap(); }"
    target = tmp_path / "libllama.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(target)]
    subprocess.run(command, input=source.encode(), check=True)
    done = run(tmp_path, "-c", OPEN, LLAMA_CPP_LIB_PATH=str(tmp_path))
    assert done.returncode == 0, done
    name = "SIGILL" if this_cpu().is_x86 else "SIG"
    assert "CapabilityError: llama.cpp, as it was built, does not run on this CPU" in done.stdout
    assert f"died by {name}" in done.stdout
    assert "while the library was loaded" in done.stdout


# -- opening the backend ----------------------------------------------------------------------------

OPEN = """
from entropic_control import load
from entropic_control.errors import EntropicError
try:
    load({})
except EntropicError as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("name", ["SIGILL", "SIGSEGV", "SIGABRT"])
def test_opening_a_wrong_build_is_an_error_and_no_signal(name: str, tmp_path: Path) -> None:
    if locate(DEFAULT) is None:
        pytest.skip("needs the default model")
    install(tmp_path, dies_by(name))
    done = run(tmp_path, "-c", OPEN)
    assert done.returncode == 0, done
    assert done.stdout.startswith("CapabilityError: ")
    assert f"died by {name} in llama_decode" in done.stdout
    assert "`entropic doctor --fix`" in done.stdout
    assert not list((tmp_path / "cache").rglob("*"))


ASSURE = """
import subprocess, sys
from entropic_control.backends import native
from entropic_control.errors import EntropicError
started = []
plain = subprocess.run
subprocess.run = lambda *a, **k: started.append(a) or plain(*a, **k)
for _ in range(3):
    try:
        native.assure("smollm2-135m-instruct")
    except EntropicError as error:
        print("refused")
print("probes", len(started))
"""


def test_a_good_library_is_probed_once_and_again_when_it_changes(tmp_path: Path) -> None:
    if locate(DEFAULT) is None:
        pytest.skip("needs the default model")
    install(tmp_path)
    assert run(tmp_path, "-c", ASSURE).stdout == "probes 1\n"
    assert run(tmp_path, "-c", ASSURE).stdout == "probes 0\n"  # another process remembers
    install(tmp_path, dies_by("SIGILL"))  # the wheel changes
    assert run(tmp_path, "-c", ASSURE).stdout.count("refused") == 3
    assert run(tmp_path, "-c", ASSURE, ENTROPIC_PROBE="off").stdout == "probes 0\n"
    install(tmp_path)
    assert run(tmp_path, "-c", ASSURE).stdout in ("probes 0\n", "probes 1\n")


def test_without_a_cache_that_can_be_written_it_is_probed_once_a_process(tmp_path: Path) -> None:
    if locate(DEFAULT) is None:
        pytest.skip("needs the default model")
    install(tmp_path)
    (tmp_path / "file").write_text("")
    for _ in range(2):
        done = run(tmp_path, "-c", ASSURE, ENTROPIC_CACHE=str(tmp_path / "file" / "below"))
        assert done.stdout == "probes 1\n", done


def test_another_cpu_is_another_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path)
    here = native.fingerprint(tmp_path / "llama_cpp" / "lib")
    assert native.fingerprint(tmp_path / "llama_cpp" / "lib") == here
    cpu = this_cpu()
    for other in (
        cpu._replace(flags=cpu.flags ^ {"amx_tile"}),
        cpu._replace(name="another"),
        cpu._replace(machine="arm64"),
    ):
        monkeypatch.setattr(native, "this_cpu", lambda other=other: other)
        assert native.fingerprint(tmp_path / "llama_cpp" / "lib") != here


# -- the plain build --------------------------------------------------------------------------------

V3 = frozenset(["sse4_2", "avx", "avx2", "fma", "f16c", "bmi2"])
XEON = V3 | {"avx512f", "avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"}


@pytest.mark.parametrize(
    ("cpu", "on", "off"),
    [
        (Cpu("x86_64", "Xeon", XEON), {"GGML_AVX2", "GGML_FMA"}, {"GGML_AMX_TILE", "GGML_AVX512"}),
        (Cpu("AMD64", "EPYC", V3), {"GGML_AVX2", "GGML_BMI2"}, {"GGML_AVX512", "GGML_NATIVE"}),
        (Cpu("x86_64", "?", frozenset()), {"GGML_AVX2", "GGML_F16C"}, {"GGML_AMX_INT8"}),
        (Cpu("x86_64", "old", V3 - {"avx2", "bmi2"}), {"GGML_AVX"}, {"GGML_AVX2", "GGML_BMI2"}),
        (Cpu("aarch64", "N1", frozenset({"asimd", "asimddp"})), set(), {"GGML_NATIVE"}),
        (Cpu("riscv64", "?", frozenset()), set(), {"GGML_NATIVE"}),
    ],
)
def test_the_plain_set_holds_what_every_cpu_of_the_kind_has(
    cpu: Cpu, on: set[str], off: set[str]
) -> None:
    options = native_build.plain_options(cpu)
    assert {options[name] for name in on} <= {"ON"}
    assert {options[name] for name in off} == {"OFF"}
    assert not any(value == "ON" for name, value in options.items() if "AMX" in name)


@pytest.mark.parametrize(
    ("flags", "arch"), [("asimd asimddp i8mm sve", "armv8.2-a+dotprod"), ("asimd", "armv8-a")]
)
def test_arm_has_a_plain_set_of_its_own(flags: str, arch: str) -> None:
    options = native_build.plain_options(Cpu("aarch64", "arm", frozenset(flags.split())))
    assert options == {"GGML_NATIVE": "OFF", "GGML_CPU_ARM_ARCH": arch}


def test_the_rebuild_neither_reads_nor_writes_pips_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_NATIVE=ON -DGGML_CUDA=ON")
    build = native_build.plain_rebuild(Cpu("x86_64", "Xeon", XEON))
    for option in ("--no-cache-dir", "--force-reinstall", "--no-deps", "--no-binary"):
        assert option in build.command
    own, _, plain = build.environment["CMAKE_ARGS"].partition(" -DGGML_CUDA=ON ")
    assert own == "-DGGML_NATIVE=ON"
    assert "-DGGML_NATIVE=OFF" in plain  # the last one counts


def found(kind: Any, words: str) -> Findings:
    cpu = Cpu("x86_64", "A Xeon", XEON)
    return Findings(cpu, "/lib", "/model", True, Outcome(kind, words))


WELL, DEAD = found("well", "decoded"), found("signal", "died by SIGSEGV in llama_decode")


@pytest.mark.parametrize(
    ("before", "code", "after", "built", "said"),
    [
        (WELL, 0, WELL, False, ""),
        (DEAD, 0, WELL, True, "The new build runs."),
        (DEAD, 1, WELL, True, "The build failed with exit code 1. By hand: CMAKE_ARGS="),
        (DEAD, 0, found("signal", "died by SIGILL"), True, "either: it died by SIGILL"),
        (found("timeout", "did not end"), 0, WELL, True, "The new build runs."),
        (found("missing", "llama-cpp-python is missing"), 0, WELL, False, ""),
        (found("model", "could not load the model"), 0, WELL, False, ""),
    ],
)
def test_what_dies_is_built_anew_once(
    before: Findings, code: int, after: Findings, built: bool, said: str
) -> None:
    commands, words = [], list[str]()

    def runner(command: Any, environment: Any) -> int:
        commands.append((command, environment))
        return code

    result = repair(before, words.append, run=runner, look=lambda: after)
    assert len(commands) == built
    assert said in " ".join(words)
    assert result is (after if built and not code else before)
    if built:
        assert "A Xeon" in words[0]
        assert "-DGGML_AMX_TILE=OFF" in commands[0][1]["CMAKE_ARGS"]


def test_a_library_that_was_named_by_hand_is_not_built_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(native.PLACE, "/opt/llama")
    words: list[str] = []
    assert repair(DEAD, words.append, run=lambda *_: 1 // 0, look=lambda: WELL) is DEAD
    assert words == []
    assert "unset it" in doctor.remedy(DEAD.outcome, DEAD.cpu)


PIP = """
import os, pathlib, sys
place = pathlib.Path(__file__).parent
(place / "asked").write_text(" ".join(sys.argv[1:]) + " | " + os.environ["CMAKE_ARGS"])
for path in (place / "llama_cpp").rglob("*l*.*"):
    path.write_text(path.read_text().replace({old!r}, {new!r}))
"""


@pytest.mark.parametrize(("again", "code"), [("pass", 0), (dies_by("SIGILL"), 2)])
def test_doctor_repairs_or_says_what_died(again: str, code: int, tmp_path: Path) -> None:
    """The command itself, with a pip whose new build runs, or dies otherwise."""
    if locate(DEFAULT) is None:
        pytest.skip("needs the default model")
    install(tmp_path, dies_by("SIGSEGV"))
    (tmp_path / "pip.py").write_text(PIP.format(old=dies_by("SIGSEGV"), new=again))
    doctor_command = ("-m", "entropic_control.cli", "doctor")
    sick = run(tmp_path, *doctor_command)
    assert sick.returncode == 2
    assert "died by SIGSEGV in llama_decode" in sick.stdout
    assert "entropic doctor --fix" in sick.stderr
    fixed = run(tmp_path, *doctor_command, "--fix", "--if-changed")
    assert fixed.returncode == code, fixed
    asked = (tmp_path / "asked").read_text()
    assert "install" in asked
    assert "--no-cache-dir" in asked
    assert "-DGGML_NATIVE=OFF" in asked
    assert "Traceback" not in fixed.stderr
    if code:
        assert "does not run on this CPU" in fixed.stderr
        assert "either: it died by SIGILL" in fixed.stderr
        return
    assert "The new build runs." in fixed.stderr
    quiet = run(tmp_path, *doctor_command, "--fix", "--if-changed")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    told = json.loads(run(tmp_path, *doctor_command, "--json").stdout)
    assert told["works"]
    assert told["probe"]["version"] == "0.0.1"
    assert told["cpu"]["machine"] == platform.machine()
    assert told["remedy"] is None


def test_what_the_library_was_built_for_is_shown() -> None:
    built = "CPU : SSE3 = 1 | AVX = 1 | AMX_INT8 = 0 | AVX512 = 1 | REPACK = 1 | "
    rows = found("well", "decoded")._replace(outcome=Outcome("well", "decoded", built=built)).rows()
    assert rows["built for"] == "SSE3 AVX AVX512 REPACK"
    assert "amx_tile" in rows["it has"]
    assert doctor.remedy(DEAD.outcome, DEAD.cpu).startswith("`entropic doctor --fix`")
