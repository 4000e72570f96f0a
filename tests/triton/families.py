# ruff: noqa: E402 - imports that need torch follow the check that it is there
"""Small random models of every family, and engines over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest

MISSING = "needs torch, triton and transformers: pip install 'entropic-control[gpu]'"
torch = pytest.importorskip("torch", reason=MISSING)
transformers = pytest.importorskip("transformers", reason=MISSING)

from entropic_control.backends import TritonConfig
from entropic_control.backends.triton import Triton
from entropic_control.config import Config
from entropic_control.controllers import FirstCome, FixedTemperature, NoPruning
from entropic_control.engine import Engine
from entropic_control.request import Request

VOCAB = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
EXPERTS = {"num_experts_per_tok": 2}


def _configurations() -> dict[str, tuple[str, Any]]:
    t = transformers
    return {
        "llama": ("LlamaForCausalLM", t.LlamaConfig(**SHAPE)),
        "qwen3": ("Qwen3ForCausalLM", t.Qwen3Config(**SHAPE)),
        # Five of its six layers slide over 24 tokens.
        "gemma3": (
            "Gemma3ForCausalLM",
            t.Gemma3TextConfig(**{**SHAPE, "num_hidden_layers": 6}, sliding_window=24),
        ),
        "mixtral": (
            "MixtralForCausalLM",
            t.MixtralConfig(**SHAPE, **EXPERTS, num_local_experts=4, sliding_window=None),
        ),
        "qwen3_moe": (
            "Qwen3MoeForCausalLM",
            t.Qwen3MoeConfig(
                **SHAPE, **EXPERTS, num_experts=4, moe_intermediate_size=64, decoder_sparse_step=1
            ),
        ),
    }


FAMILIES = ("llama", "qwen3", "gemma3", "mixtral", "qwen3_moe")


@lru_cache
def model_of(family: str) -> Any:
    """A random model; the same for every test. It ends no text by itself."""
    torch.manual_seed(0)
    name, configuration = _configurations()[family]
    model = getattr(transformers, name)(configuration).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt(length: int, start: int = 1) -> list[int]:
    """Token ids."""
    return [3 + (start * 7919 + n * 31 + n * n) % (VOCAB - 3) for n in range(length)]


@contextmanager
def plain(model: Any, attention: str = "sdpa") -> Iterator[Any]:
    """The model with transformers' own attention; backends on it get theirs back afterwards."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        with torch.no_grad():
            yield model
    finally:
        model.set_attn_implementation(before)


def generated(model: Any, tokens: list[int], count: int) -> list[int]:
    """What transformers' own `generate` continues with, greedily."""
    given = torch.tensor([tokens])
    with plain(model):
        out = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    continuation: list[int] = out[0, len(tokens) :].tolist()
    return continuation


def backend(model: Any = "llama", tokenizer: Any = None, **settings: Any) -> Triton:
    """A backend over a family's model, in plain torch unless told otherwise."""
    if isinstance(model, str):
        model = model_of(model)
    settings = {"slots": 4, "context": 512, "kernels": "reference", "device": "cpu", **settings}
    return Triton(TritonConfig(**settings), model, tokenizer)


def engine(on: Triton, **parts: Any) -> Engine:
    """An engine: greedy, dense and first come, first served unless told otherwise."""
    plain: dict[str, Any] = {
        "temperature": FixedTemperature(temperature=0.0),
        "priority": FirstCome(),
        "pruning": NoPruning(),
    }
    return Engine(Config(**{**plain, **parts}), on)


def requests(*prompts: list[int], tokens: int = 12, **settings: Any) -> list[Request]:
    return [Request(prompt=p, max_tokens=tokens, **settings) for p in prompts]


def tokens_of(report: Any) -> list[list[int]]:
    """The generated tokens, in the order of submission."""
    assert not [done.error for done in report.completions if done.error]
    return [done.tokens for done in sorted(report.completions, key=lambda done: int(done.id))]
