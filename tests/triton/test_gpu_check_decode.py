"""What can be tested of the GPU check's decode steps without a GPU: its checks, its work, its table."""

from __future__ import annotations

import time
from typing import Any

import pytest
from families import torch

from entropic_control.bench.gpu_check import (
    SHAPES,
    TINY,
    Decode,
    decode_table,
    decodes,
    model_checks,
)
from entropic_control.kernels.gpu_check import flexible

CPU = torch.device("cpu")


def test_the_model_checks_pass_on_plain_torch() -> None:
    found = list(model_checks(CPU, "reference"))
    assert len(found) == 4
    assert [check for check in found if not check.passed] == []


def test_every_decode_step_is_timed_or_listed() -> None:
    plan = [(256, 2, keep) for keep in (1.0, 0.5, 0.25)]
    found: list[Any] = list(decodes(TINY, CPU, torch.float32, plan, time.monotonic(), "reference"))
    assert [(d.context, d.rows, d.keep) for d in found] == plan
    assert all(d.tokens_per_second > 0 for d in found)
    late = list(decodes(TINY, CPU, torch.float32, plan, time.monotonic() - 1e4, "reference"))
    assert [
        text.endswith("left out, the time is up") for text in late if isinstance(text, str)
    ] == [True] * 3


def test_what_does_not_fit_is_listed() -> None:
    plan = [(1 << 50, 2, 1.0)]
    (found,) = decodes(TINY, CPU, torch.float32, plan, time.monotonic(), "reference")
    assert isinstance(found, str)
    assert "left out" in found


def test_the_shapes_are_llamas() -> None:
    """Parameters, without making any: 1.24e9 with tied embeddings is 1.50e9 untied; 8.03e9."""
    sizes = []
    for shape in SHAPES:
        model = shape.model("meta", torch.bfloat16)
        sizes.append(sum(parameter.numel() for parameter in model.parameters()) / 1e9)
    assert sizes == [pytest.approx(1.50, abs=0.01), pytest.approx(8.03, abs=0.01)]


def test_the_table_compares_with_dense() -> None:
    text = decode_table(
        [
            Decode("8B", 8192, 16, 1.0, 400.0, 0.01),
            Decode("8B", 8192, 16, 0.25, 800.0, 0.012),
            "x: out",
        ]
    )
    assert "0.50" in text
    assert "1.2%" in text
    assert "x: out" in text


def test_flex_attention_is_the_same_attention() -> None:
    q, k, v = torch.randn(2, 4, 1, 16), *torch.randn(2, 2, 2, 40, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(flexible(q, k, v), expected, atol=1e-5, rtol=1e-5)
