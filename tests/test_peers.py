"""The peers: llama.cpp's samplers against ours, and what is said where one is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from entropic_control.backends import LlamaCppConfig
from entropic_control.bench import native_samplers, peers
from entropic_control.bench.arms import default_config
from entropic_control.bench.workloads import Sizes
from entropic_control.cli import main
from entropic_control.controllers import DynamicTemperature
from entropic_control.controllers.softmax import moments
from entropic_control.progress import progress_bar

TINY = Sizes(
    slots=2, chat_prompts=2, chat_tokens=6, mixed_long=300, mixed_tokens=(4, 2), ablation_prompts=2,
    ablation_tokens=8,
)  # fmt: skip


def test_the_peers_are_those_of_llama_cpp_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", "--backend", "simulated"]) == 2
    assert "use backend 'llama_cpp', not 'simulated'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.llama
def test_llama_cpp_dynatemp_has_the_entropy_of_ours() -> None:
    """Same logits, same settings: the distribution drawn from has the same entropy."""
    pytest.importorskip("llama_cpp")
    row = np.random.default_rng(0).normal(0, 3, 512).astype(np.float32)
    sampler = native_samplers.NativeSampler(native_samplers.dynatemp(0.7, 0.5), 1, 512)
    _, entropy = sampler.draw(row)
    ours = DynamicTemperature(temperature=0.7, range=0.5)
    temperature = ours.command(ours.init(1), row[None]).temperature[0]
    assert entropy == pytest.approx(moments(row, float(temperature)).entropy, rel=1e-3)
    sampler.close()


@pytest.mark.llama
def test_llama_cpp_mirostat_holds_the_surprisal_it_is_given() -> None:
    pytest.importorskip("llama_cpp")
    rng = np.random.default_rng(0)
    sampler = native_samplers.NativeSampler(native_samplers.mirostat(1.5, 0.1), 1, 512)
    tail = [sampler.draw(rng.normal(0, 3, 512).astype(np.float32))[1] for _ in range(400)][200:]
    assert np.mean(tail) == pytest.approx(1.5, abs=0.3)
    sampler.close()


@pytest.mark.llama
def test_a_missing_server_is_said_and_the_rest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llama_cpp")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    monkeypatch.setattr(peers, "QUICK", TINY)
    arguments = ["bench", "peers", "--quick", "--out", str(tmp_path), "--set", "backend.threads=1"]
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert "pip install 'entropic-control[peers]'" in " ".join(said.err.split())
    assert "llama.cpp mirostat" in said.out
    assert (tmp_path / "peers.json").is_file()


@pytest.mark.llama
def test_the_server_does_the_same_work() -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("xllamacpp")
    config = default_config().replace(backend=LlamaCppConfig(threads=1))
    with pytest.MonkeyPatch.context() as patch, progress_bar(True) as bar:
        patch.setattr(peers, "QUICK", TINY)
        summary = peers.run_peers(config, bar, quick=True)
    assert summary["missing"] == {}
    for workload in peers.SHARED:
        arms = summary["results"][workload]
        assert arms[peers.SERVER]["latency_mean"] <= arms[peers.SERVER]["total_time"]
        assert arms[peers.SERVER]["tokens_per_second"] > 0
        assert set(summary["ratios"][workload]) >= {"latency_mean", "tokens_per_second"}
