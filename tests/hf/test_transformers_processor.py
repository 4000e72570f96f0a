# ruff: noqa: E402 - imports that need torch follow the check that it is there
"""The temperature loop inside `generate`: what it holds, whom it leaves alone, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from entropic_control.backends.torch_rows import on_device, on_host
from entropic_control.backends.transformers import EntropicLogitsProcessor
from entropic_control.config import Config
from entropic_control.controllers import (
    DynamicTemperature,
    EDTTemperature,
    ExactTemperature,
    FixedTemperature,
    FullEntropy,
    MinP,
    Mirostat,
    NoTruncation,
    PITemperature,
    SlewLimit,
    TopK,
    TopKEntropy,
    TopP,
    Truncation,
)
from entropic_control.controllers.measurement import measure as measure_in_numpy
from entropic_control.controllers.temperature import Command
from entropic_control.errors import CapabilityError, ConfigError, LogitsError

PI = PITemperature(target=1.5, kp=0.3, ki=0.06, v_min=2.0)
VOCAB, END, PAD = 300, 2, 0


@pytest.fixture(scope="module")
def tiny() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=PAD,
        initializer_range=0.4,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def smollm2(converted: Path) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    return model.eval(), tokenizer


def prompts(rows: int = 3, length: int = 5) -> dict[str, Any]:
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB, (rows, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generated(model: Any, processor: Any = None, seed: int = 7, **settings: Any) -> Any:
    torch.manual_seed(seed)
    own = processor.arguments if processor else {"do_sample": True, "top_k": 0}
    settings = {**prompts(), "max_new_tokens": 12, **own, **settings}
    return model.generate(**settings)


# -- on a real model --------------------------------------------------------------------------------


def test_each_row_is_held_to_its_own_target(smollm2: Any) -> None:
    """Prompts of different lengths, padded on the left."""
    model, tokenizer = smollm2
    targets = [0.8, 1.2, 1.6, 2.2]
    texts = [
        "Write a story about a lighthouse.",
        "List ten animals and what they eat.",
        "Explain how rain forms.",
        "Describe a long journey by train through the mountains in winter, and whom you met on it.",
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    processor = EntropicLogitsProcessor(PI, targets=targets)
    torch.manual_seed(0)
    out = model.generate(**inputs, **processor.arguments, max_new_tokens=300, min_new_tokens=300)
    trace, new = processor.trace, out[:, inputs["input_ids"].shape[1] :].numpy()
    for row, target in enumerate(targets):
        mine = trace["request"] == row
        assert mine.sum() == 300
        assert set(trace["target"][mine]) == {target}
        assert trace["entropy"][mine].mean() == pytest.approx(target, rel=0.15)
        assert trace["token_id"][mine].tolist() == [*new[row, :-1], -1]


def test_switched_off_it_is_plain_generate(smollm2: Any) -> None:
    model, tokenizer = smollm2
    inputs = tokenizer(["The sea was", "A clock that"], return_tensors="pt", padding=True)
    processor = EntropicLogitsProcessor(FixedTemperature(temperature=1.0))
    plain = generated(model, **inputs, max_new_tokens=40)
    assert torch.equal(generated(model, processor, **inputs, max_new_tokens=40), plain)


# -- readings ---------------------------------------------------------------------------------------


class OddOnes(Truncation):
    """A truncation that only numpy knows."""

    kind: str = "odd_ones"

    def keep(self, row: Any, of: Any) -> Any:
        return (np.arange(row.size) % 2 == 1) & np.isfinite(row)


TRUNCATIONS = [
    NoTruncation(),
    *(TopK(k=20, place=place) for place in ("before", "after")),
    *(TopP(p=0.8, place=place) for place in ("before", "after")),
    *(MinP(p=0.05, place=place) for place in ("before", "after")),
    *(OddOnes(place=place) for place in ("before", "after")),
]


@pytest.mark.parametrize("measure", [on_device, on_host], ids=lambda m: m.__name__)
@pytest.mark.parametrize("limit", [None, 4.0])
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=lambda t: f"{t.kind}-{t.place}")
def test_readings_are_those_of_the_numpy_measurement(
    truncation: Any, limit: float | None, measure: Any
) -> None:
    torch.manual_seed(3)
    z = torch.randn(5, 1000) * 3
    z[1, 100:] = -torch.inf
    z[2, :] = -torch.inf
    z[2, 5] = 1.0
    z[4, :7] = 4.0  # ties at the top
    temperature = np.array([0.7, 1.0, 1.3, 0.0, 2.0])
    command = Command(temperature, None if limit is None else np.full(5, limit))
    ours = measure(z, command, truncation)
    theirs = measure_in_numpy(z.numpy(), command, FullEntropy(), truncation)
    for name, expected in theirs.reading._asdict().items():
        actual = getattr(ours.reading, name)
        if name == "distribution":
            assert actual is expected
        elif name != "raw_surprisal":
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, err_msg=name)
    kept = [np.arange(1000) if s.tokens is None else s.tokens for s in theirs.supports]
    for row, tokens in enumerate(kept):
        alive = np.intersect1d(tokens, np.flatnonzero(z[row].numpy() > -np.inf))
        if temperature[row] > 0:
            assert torch.isfinite(ours.scores[row]).nonzero()[:, 0].tolist() == alive.tolist()
        drawn = torch.tensor([int(tokens[0]) if r == row else 0 for r in range(5)])
        expected = theirs.supports[row].surprisal(int(tokens[0]))
        assert ours.surprisal(drawn)[row] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    # What is drawn from is what was measured last.
    p = ours.scores.double().softmax(-1)
    h = -(p * p.clamp(min=1e-300).log()).sum(-1)
    np.testing.assert_allclose(h, ours.reading.realized_entropy, rtol=1e-5, atol=1e-5)


CONTROLLERS = [
    PI,
    SlewLimit(inner=PI),
    ExactTemperature(target=1.0, bounds=(0.01, 5.0)),
    EDTTemperature(),
    DynamicTemperature(),
    Mirostat(target=1.5),
]


@pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda controller: controller.kind)
@pytest.mark.parametrize("truncation", [NoTruncation(), TopK(k=50)], ids=lambda t: t.kind)
def test_the_loop_is_the_controllers_own(tiny: Any, controller: Any, truncation: Any) -> None:
    """Replaying the raw logits through numpy gives the same temperatures and readings."""
    config = Config(temperature=controller, truncation=truncation)
    processor = EntropicLogitsProcessor(config)
    out = generated(
        tiny, processor, output_logits=True, return_dict_in_generate=True, min_new_tokens=12
    )
    tokens = out.sequences[:, 5:].numpy()
    trace, state = processor.trace, controller.init(3)
    for step, logits in enumerate(out.logits):
        z = logits.numpy().copy()
        z[:, END] = -np.inf  # min_new_tokens
        seen = np.where(
            [truncation.keep(row, None) if truncation.kind == "none" else _top(row) for row in z],
            z,
            -np.inf,
        ).astype(np.float32)
        command = controller.command(state, seen) if controller.reads_logits else None
        measured = measure_in_numpy(
            z, command or controller.command(state), FullEntropy(), truncation
        )
        reading = measured.completed(tokens[:, step])
        mine = trace["step"] == step
        for name in ("temperature", "entropy", "varentropy", "raw_entropy", "realized_entropy"):
            np.testing.assert_allclose(
                trace[name][mine], getattr(reading, name), rtol=2e-4, atol=2e-4, err_msg=name
            )
        _, state = controller.update(state, reading)


def _top(row: Any, k: int = 50) -> Any:
    return row >= np.sort(row)[-k]


# -- rows -------------------------------------------------------------------------------------------


def test_rows_that_have_ended_move_nothing(tiny: Any) -> None:
    ids = prompts()["input_ids"]
    seen: list[Any] = []

    def ends_row_1(input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] == 8:
            scores[1] = -torch.inf
            scores[1, END] = 0.0
        return scores

    processor = EntropicLogitsProcessor(PI)

    def watch(input_ids: Any, scores: Any) -> Any:
        seen.append(processor.state)
        return scores

    out = generated(
        tiny, processor, logits_processor=[ends_row_1, watch, processor], min_new_tokens=4
    )
    assert out[1, 8] == END
    counts = np.bincount(processor.trace["request"])
    assert counts[1] == 4
    lengths = [len(row[5:]) for row in out.tolist()]
    assert max(counts) == max(lengths)
    ended = [state.log_temperature[1] for state in seen[5:]]
    assert len(set(ended)) == 1
    assert len({state.log_temperature[0] for state in seen[5:]}) > 1
    assert torch.equal(out[:, :5], ids)


def test_padding_on_the_left_changes_nothing(tiny: Any) -> None:
    alone, padded = EntropicLogitsProcessor(PI), EntropicLogitsProcessor(PI)
    inputs = {name: tensor[:1] for name, tensor in prompts().items()}
    fill = torch.full((1, 3), PAD)
    longer = {
        "input_ids": torch.cat([fill, inputs["input_ids"]], -1),
        "attention_mask": torch.cat([fill * 0, inputs["attention_mask"]], -1),
    }
    text = generated(tiny, alone, **inputs)
    assert torch.equal(generated(tiny, padded, **longer)[:, 3:], text)
    for name, column in alone.trace.items():
        np.testing.assert_allclose(padded.trace[name], column, atol=1e-4, err_msg=name)


def test_each_generate_starts_afresh(tiny: Any) -> None:
    processor = EntropicLogitsProcessor(PI)
    first = generated(tiny, processor)
    trace = processor.trace
    assert torch.equal(generated(tiny, processor), first)
    for name, column in processor.trace.items():
        np.testing.assert_array_equal(column, trace[name], name)
    generated(tiny, processor, input_ids=first, attention_mask=torch.ones_like(first))
    assert processor.trace["temperature"][:3] == pytest.approx(PI.start)
    more = {name: tensor.repeat(2, 1) for name, tensor in prompts().items()}
    generated(tiny, processor, **more)
    assert len(processor.state.target) == 6


def test_several_texts_a_prompt(tiny: Any) -> None:
    processor = EntropicLogitsProcessor(PI, targets=[1, 2, 1, 2, 1, 2])
    assert len(generated(tiny, processor, num_return_sequences=2)) == 6
    assert processor.state.target.tolist() == [1, 2] * 3
    with pytest.raises(ConfigError, match="a number or 3 of them"):
        generated(tiny, processor)


def test_settings_of_the_rows_own(tiny: Any) -> None:
    settings = {"temperature": [0.5, 1.0, 2.0]}
    processor = EntropicLogitsProcessor(FixedTemperature(), overrides=settings)
    generated(tiny, processor)
    assert processor.trace["temperature"][:3].tolist() == [0.5, 1.0, 2.0]


def test_half_precision_by_hand() -> None:
    """In a loop of one's own scores may be in half precision, and nothing is known of the caller."""
    torch.manual_seed(0)
    processor = EntropicLogitsProcessor(PI)
    ids, scores = torch.zeros(2, 3, dtype=torch.long), torch.randn(2, 500)
    out = processor(ids, scores.bfloat16())
    assert out.dtype == torch.bfloat16
    processor(torch.zeros(2, 4, dtype=torch.long), scores.half())
    assert processor.trace["token"].tolist() == [0, 0, 1, 1]
    processor(torch.zeros(2, 4, dtype=torch.long), scores)
    assert processor.trace["token"].tolist() == [0, 0]


# -- what is refused --------------------------------------------------------------------------------

REFUSED = {
    "greedy": ({"do_sample": False}, "pass do_sample=True"),
    "beams": ({"num_beams": 2, "do_sample": False}, "pass num_beams=1"),
    "sampled beams": ({"num_beams": 2}, "pass num_beams=1"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens"),
    "temperature": ({"temperature": 0.7}, "pass temperature=1.0"),
    "transformers' default top-k": ({"top_k": 50}, "pass top_k=0"),
    "top-p": ({"top_p": 0.9}, "pass top_p=1.0"),
    "min-p": ({"min_p": 0.1}, "leave min_p out"),
    "typical": ({"typical_p": 0.5}, "leave that one out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_the_draw_is_not_of_what_was_measured(tiny: Any, name: str) -> None:
    settings, words = REFUSED[name]
    processor = EntropicLogitsProcessor(PI)
    one = {key: tensor[:1] for key, tensor in prompts().items()}
    with pytest.raises(CapabilityError, match=words):
        generated(tiny, processor, **one, **settings)
    assert len(processor.trace["token"]) == 0
    generated(tiny, processor)
    assert len(processor.trace["token"]) > 0


def test_an_assistant_is_refused(tiny: Any) -> None:
    one = {key: tensor[:1] for key, tensor in prompts().items()}
    with pytest.raises(CapabilityError, match="leave the assistant"):
        generated(tiny, EntropicLogitsProcessor(PI), **one, assistant_model=tiny)


def test_a_processor_behind_is_refused_and_normalizing_is_not(tiny: Any) -> None:
    processor = EntropicLogitsProcessor(PI)
    other = transformers.MinPLogitsWarper(0.1)
    with pytest.raises(CapabilityError, match="MinPLogitsWarper comes behind"):
        generated(tiny, processor, logits_processor=[processor, other])
    generated(tiny, processor, logits_processor=[other, processor], renormalize_logits=True)
    assert processor.trace["live"].max() < VOCAB


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("truncation", [NoTruncation(), TopP(), OddOnes()], ids=lambda t: t.kind)
def test_a_row_that_is_no_distribution(tiny: Any, value: float, truncation: Any) -> None:
    """transformers would draw from it: an error without a name, and on a GPU the end of the process."""
    states: list[Any] = []
    processor = EntropicLogitsProcessor(Config(temperature=PI, truncation=truncation))

    def spoil(input_ids: Any, scores: Any) -> Any:
        states.append(processor.state)
        if input_ids.shape[1] == 9:
            scores[2, slice(None) if value < 0 else 7] = value
        return scores

    settings = {"logits_processor": [spoil, processor], "min_new_tokens": 12}
    with pytest.raises(LogitsError, match=r"row 2.*token 4 has no usable distribution"):
        generated(tiny, processor, **settings)
    assert np.bincount(processor.trace["request"]).tolist() == [4, 4, 4]
    assert (processor.trace["token_id"] >= 0).all()
    assert processor.state.log_temperature[0] != states[4].log_temperature[0]


def test_bad_settings_are_refused_at_once() -> None:
    for source, own, words in [
        (PI, {"targets": [1.0, -1.0]}, "greater than 0"),
        (PI, {"overrides": {"kp": 1.0}}, "no per-request setting 'kp'"),
        (FixedTemperature(), {"targets": 1.0}, "no per-request setting 'target'"),
        ("nowhere.yaml", {}, "nowhere.yaml"),
    ]:
        with pytest.raises(ConfigError, match=words):
            EntropicLogitsProcessor(source, **own)
    with pytest.raises(CapabilityError, match="set estimator to 'full'"):
        EntropicLogitsProcessor(Config(temperature=PI, estimator=TopKEntropy()))
