"""Models and tokenizers for the paged cache: from a directory, hf://owner/repo, or a GGUF file.

A GGUF file is dequantised once, and kept as safetensors in the user's cache directory: converting
SmolLM2-135M takes about 20 s, loading the result less than one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from entropic_control.backends import conversion, models
from entropic_control.errors import CapabilityError, ModelError
from entropic_control.kernels._torch import torch

try:
    import transformers
except ImportError as error:
    raise CapabilityError(
        "the triton backend needs transformers: pip install 'entropic-control[gpu]'"
    ) from error

INSTALL = "pip install 'entropic-control[gpu]'"


class Loaded(NamedTuple):
    """A model on its device, and its tokenizer if it has one."""

    model: Any
    tokenizer: Any


def load(name: str, device: Any, dtype: Any = None, tokenizer: str | None = None) -> Loaded:
    """Load a causal language model and its tokenizer.

    Parameters
    ----------
    name : str
        A known name, a directory that `save_pretrained` wrote, a GGUF file, or hf://owner/repo.
    device : torch.device
        Where it goes.
    dtype : torch.dtype, optional
        Of the weights; by default float32 on the CPU and the checkpoint's own elsewhere.
    tokenizer : str, optional
        Where the tokenizer is, if not with the model.

    Raises
    ------
    ModelError
        The model is missing, unreadable, no causal language model, or its tokenizer is another's.
    """
    source = located(name)
    model = _load_model(source, name, dtype or (torch.float32 if device.type == "cpu" else "auto"))
    place = _tokenizer_place(tokenizer) if tokenizer else source
    found = _load_tokenizer(place, asked=tokenizer is not None)
    check_tokenizer(model, found)
    try:
        return Loaded(model.to(device).eval(), found)
    except torch.cuda.OutOfMemoryError as error:
        size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
        raise ModelError(
            f"model {name!r} takes {size:.1f} GiB, which {device} does not have"
        ) from error


def digest(model: Any) -> str:
    """Tells models apart by the names, shapes, types and some values of their weights."""
    known = hashlib.sha256()
    for name, weight in model.named_parameters():
        known.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().reshape(-1)
        known.update(flat[:: max(len(flat) // 16, 1)].float().cpu().numpy().tobytes())
    return known.hexdigest()[:16]


def located(name: str) -> str:
    """What transformers loads for a model name: a directory, or the id of a repository.

    Raises
    ------
    ModelError
        With what to install or where to look.
    """
    if name.startswith("hf://") and not name.endswith(".gguf"):
        parts = name.removeprefix("hf://").split("/")
        if len(parts) != 2 or not all(parts):
            raise ModelError(f"{name!r} is not of the form hf://owner/repo")
        return "/".join(parts)
    path = Path(name).expanduser()
    if name not in models.KNOWN and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{name!r} holds no config.json: give a directory of transformers' format"
            )
        return str(path)
    if name not in models.KNOWN and not name.startswith("hf://") and not path.exists():
        raise ModelError(
            f"no model at {name!r}: give a directory of transformers' format, hf://owner/repo, a GGUF "
            f"file, or one of {', '.join(models.KNOWN)}"
        )
    return str(converted(models.resolve(name)))


def converted(gguf: Path) -> Path:
    """The directory that holds a GGUF file's model as safetensors; made if it is not there yet."""
    return conversion.converted(gguf, _convert)


def _convert(gguf: Path, target: Path) -> None:
    from transformers.utils.quantization_config import GgufConfig

    place = {"gguf_file": gguf.name}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **place)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            **place,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    except ImportError as error:
        raise CapabilityError(
            f"reading a GGUF file needs {error.name or 'gguf'}: {INSTALL}"
        ) from error
    except Exception as error:  # transformers raises whatever its readers do
        raise ModelError(f"transformers could not read {str(gguf)!r}: {error}") from error
    # It is no quantised model any more.
    model.config.__dict__.pop("quantization_config", None)
    model.is_quantized, model.hf_quantizer = False, None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _load_model(source: str, name: str, dtype: Any) -> Any:
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, output_loading_info=True
        )
    except ImportError as error:
        raise CapabilityError(f"model {name!r} needs {error.name}: {INSTALL}") from error
    except Exception as error:  # of many kinds: missing files, unknown architectures, no network
        raise ModelError(f"transformers could not load model {name!r}: {error}") from error
    missing = sorted(info["missing_keys"])
    head = model.get_output_embeddings()
    heads = {key for key, parameter in model.named_parameters() if _belongs(head, parameter)}
    if head is None or heads & set(missing):
        raise ModelError(
            f"model {name!r} has no language-modelling head: its checkpoint holds only the base model"
        )
    if missing:
        raise ModelError(f"model {name!r} lacks weights: {', '.join(missing[:5])}")
    return model


def _belongs(module: Any, parameter: Any) -> bool:
    return module is not None and any(parameter is own for own in module.parameters())


def _tokenizer_place(name: str) -> str:
    path = Path(name).expanduser()
    return str(path) if path.is_dir() else located(name)  # it need not hold a model besides


def _load_tokenizer(source: str, *, asked: bool) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(source)
    except Exception as error:
        if asked:
            raise ModelError(f"there is no tokenizer at {source!r}: {error}") from error
        return None  # prompts of token ids need none


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer that knows tokens the model does not.

    Raises
    ------
    ModelError
        With both sizes.
    """
    known = model.get_input_embeddings().weight.shape[0]
    if tokenizer is not None and len(tokenizer) > known:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {known}: they do not belong "
            f"together"
        )
