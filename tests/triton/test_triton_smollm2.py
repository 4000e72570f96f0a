"""The default model: converted from its GGUF file, the same text and statistics as on llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import engine, generated, requests, tokens_of
from scipy.stats import ttest_ind

from entropic_control.backends import TritonConfig
from entropic_control.backends.base import Chunk
from entropic_control.bench.prompts import SHORT
from entropic_control.controllers import FixedTemperature, PITemperature

PROMPT = "Say hello in French, and explain the word."
TEXT = "The naïve café — 東京 tower 🙂 of 1958 is 333 metres high.\n\tdef f(x): return x\n" * 3


@pytest.fixture(scope="module")
def on(smollm2: Path) -> Any:
    config = TritonConfig(
        model=str(smollm2), slots=8, context=1024, device="cpu", kernels="reference"
    )
    opened = config.open()
    yield opened
    opened.close()


def test_greedy_tokens_equal_generate(on: Any) -> None:
    tokens = on.encode(PROMPT).tolist()
    found = tokens_of(engine(on).run(requests(tokens, tokens=24)))
    expected = generated(on._model, tokens, 24)
    ends = [at for at, token in enumerate(expected) if on.is_end(token)]
    assert found[0] == expected[: ends[0] + 1 if ends else None]


def test_pieces_spell_the_text(on: Any) -> None:
    tokens = on._text._ids(TEXT, add=False, parse=True)
    assert b"".join(on.piece(int(token)) for token in tokens).decode() == TEXT
    assert on.piece(int(on.ends[0])) == b""
    assert b"You are a helpful AI assistant" in b"".join(map(on.piece, on.encode("Hi").tolist()))


def test_the_conversion_is_kept(smollm2: Path) -> None:
    assert (smollm2 / "model.safetensors").stat().st_size > 200e6
    assert [path.name for path in smollm2.parent.iterdir()] == [smollm2.name]


@pytest.fixture(scope="module")
def llama(on: Any) -> Any:
    pytest.importorskip(
        "llama_cpp", reason="the comparison with llama.cpp needs it: pip install llama-cpp-python"
    )
    from entropic_control.backends import LlamaCppConfig

    opened = LlamaCppConfig(slots=8, context=1024, threads=1).open()
    yield opened
    opened.close()


def test_both_engines_make_the_same_tokens_of_a_prompt(on: Any, llama: Any) -> None:
    for text in (PROMPT, TEXT, "", "  two  spaces", [{"role": "user", "content": "Hi"}]):
        assert on.encode(text).tolist() == llama.encode(text).tolist()
    for token in range(0, 49_152, 97):
        assert on.piece(token) == llama.piece(token)
    # llama.cpp ends at whatever is named like an end; transformers where the model says so.
    assert {2} <= set(on.ends.tolist()) <= set(llama.ends.tolist())


def test_both_engines_are_surprised_by_the_same_text(on: Any, llama: Any) -> None:
    """Token by token: llama.cpp quantises activations, so a little apart, and not more on average."""
    tokens = llama.encode(SHORT[0] + " " + TEXT)
    chunk = Chunk(0, 0, tokens, True, tokens[1:])
    a, b = (engine.forward([chunk]).surprisal[0] for engine in (on, llama))
    for engine_ in (on, llama):
        engine_.release(0)
    assert np.abs(a - b).mean() < 0.2
    assert abs((a - b).mean()) < 0.05
    assert np.corrcoef(a, b)[0, 1] > 0.99


def test_both_engines_give_statistically_equal_entropy_traces(on: Any, llama: Any) -> None:
    """Means by request: they differ less than the seeds do, and another temperature does show."""

    def means(backend: Any, temperature: float) -> Any:
        run = engine(backend, temperature=FixedTemperature(temperature=temperature))
        rows = [backend.encode(text).tolist() for text in SHORT]
        run.run(requests(*rows, tokens=48, min_tokens=48))
        trace = run.trace.tokens
        return np.array([trace["entropy"][trace["request"] == n].mean() for n in range(len(SHORT))])

    ours, theirs, warmer = means(on, 0.8), means(llama, 0.8), means(on, 1.3)
    assert ttest_ind(ours, theirs).pvalue > 0.05
    assert ttest_ind(theirs, warmer).pvalue < 0.001


def test_the_loop_holds_the_same_entropy_on_both(on: Any, llama: Any) -> None:
    def held(backend: Any) -> float:
        loop = PITemperature(target=1.5, kp=0.3, ki=0.06, v_min=2.0)
        run = engine(backend, temperature=loop)
        rows = [backend.encode(text).tolist() for text in SHORT[:4]]
        run.run(requests(*rows, tokens=80, min_tokens=80))
        trace = run.trace.tokens
        return float(trace["entropy"][trace["token"] >= 30].mean())

    assert abs(held(on) - held(llama)) < 0.35
