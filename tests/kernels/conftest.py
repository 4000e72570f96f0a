"""Kernels run in Triton's interpreter, on one thread, with every output poisoned beforehand."""

from __future__ import annotations

import os

# Triton reads it when its functions are decorated, so before anything imports it.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

MISSING = "needs torch and triton: pip install 'entropic-control[gpu]' -c constraints-gpu.txt"


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter computes what a mask discards afterwards.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.*")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds garbage that no kernel computes, so that an element left unwritten shows."""
    torch = pytest.importorskip("torch", reason=MISSING)
    pytest.importorskip("triton", reason=MISSING)
    from entropic_control.kernels import _triton

    if not _triton.INTERPRETED:
        pytest.skip("triton was imported before these tests could set TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    empty, empty_like = torch.empty, torch.empty_like

    def spoiled(tensor):
        return tensor.fill_((tensor.dtype.is_floating_point and 12345.0) or 77)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: spoiled(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: spoiled(empty_like(*a, **k)))
