"""torch, or an error that says how to get it."""

from __future__ import annotations

from entropic_control.errors import CapabilityError

__all__ = ["TorchMissing", "torch"]


class TorchMissing(CapabilityError, ImportError):
    """A kernel module was imported where torch is not installed."""


try:
    import torch
except ImportError as error:
    raise TorchMissing("the kernels need torch: pip install 'entropic-control[gpu]'") from error
