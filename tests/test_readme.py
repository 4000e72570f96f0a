"""The README's code runs, block after block, and its commands are ones that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from entropic_control import load_config
from entropic_control.cli import _parser, main
from entropic_control.controllers.kinds import kinds_of

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


class Model:
    """Stands for a model of a library, and notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def generate(self, *_: Any, **settings: Any) -> None:
        self.asked.append(settings)

    create_completion = generate


def test_the_python_code_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    rng = np.random.default_rng(0)
    model, llm = Model(), Model()
    space: dict[str, Any] = {
        "__name__": "readme",
        "my_model": lambda *_: rng.normal(size=(1, 50)),
        "model": model,
        "llm": llm,
        "inputs": {},
        "prompt": "hi",
    }
    ran = 0
    for block in blocks("python"):
        # As its comment says, that engine needs no model.
        code = block.replace('.yaml")  # or', '.yaml", backend="simulated")  # or')
        needed = [name for name in ("vllm", "transformers") if name in code]
        if any(not _is_there(name) for name in needed):
            continue
        exec(compile(code, "README.md", "exec", dont_inherit=True), space)
        ran += 1
    assert ran >= 3
    assert len(space["report"].completions) == 2
    assert space["report"].completions[0].text
    assert len(capsys.readouterr().out) > 500
    assert 0.1 <= float(space["pi"].command(space["state"]).temperature[0]) <= 2.0
    assert kinds_of("temperature")["cooling"] is space["Cooling"]
    with space["engine"] as engine:
        assert engine.idle


def _is_there(name: str) -> bool:
    module = {"transformers": "torch"}.get(name, name)
    try:
        return bool(getattr(__import__(module), "__file__", None))
    except ImportError:
        return False


def test_the_processors_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The half of its block that needs no torch."""
    monkeypatch.chdir(ROOT)
    block = next(b for b in blocks("python") if "entropic_logits_processor" in b)
    code = block[block.index("from entropic_control.backends.llama_cpp") :]
    from entropic_control.controllers import PITemperature

    llm = Model()
    exec(code, {"PITemperature": PITemperature, "llm": llm, "prompt": "hi"})
    assert set(llm.asked[0]) == {"max_tokens", "logits_processor", "stopping_criteria"}


def test_measure_is_the_function_and_its_old_module_still_imports() -> None:
    from entropic_control.controllers.measure import measure as old  # type: ignore[import-not-found]

    from entropic_control.controllers import measure
    from entropic_control.controllers.measurement import measure as new

    assert measure is old is new


def commands() -> list[list[str]]:
    """The `entropic` commands of the console blocks; one line may list several."""
    found = []
    for block in blocks("console"):
        for line in block.splitlines():
            if not line.startswith("$ entropic"):
                continue
            first, *others = re.sub(r"\s+#.*", "", line[2:]).split(" · ")
            words = shlex.split(first)[1:]
            found.append(words)
            for other in others:
                more = shlex.split(other)
                nested = words[0] == "bench" and more[0] != "entropic"
                found.append(["bench", *more] if nested else more[1:])
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_is_one(words: list[str]) -> None:
    assert _parser().parse_args(words).run


def test_there_are_commands() -> None:
    named = {words[0] for words in commands()}
    assert {
        "run",
        "plot",
        "kinds",
        "schema",
        "models",
        "certify",
        "identify",
        "tune",
        "bench",
    } <= named


@pytest.mark.parametrize(
    "words", [w for w in commands() if w[0] in ("run", "kinds", "schema", "models")], ids=" ".join
)
def test_the_quick_commands_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in ("examples",):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    extra = ["--set", "generation.max_tokens=3", "--quiet"] if words[0] == "run" else []
    if words[0] == "run" and "--backend" not in words:
        extra += ["--backend", "simulated"]
    if words[:2] == ["run", "--resume"]:
        return
    assert main([*words, *extra]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_configuration_is_one(block: str) -> None:
    data = yaml.safe_load(block)
    assert load_config(data, backend="simulated")
