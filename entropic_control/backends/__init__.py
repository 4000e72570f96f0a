"""Adapters to engines. Importing one imports no engine: that happens when it is opened."""

from entropic_control.backends.base import Backend, BackendConfig, Capabilities, Chunk, Forward
from entropic_control.backends.llama_cpp import LlamaCppConfig
from entropic_control.backends.simulated import SimulatedConfig
from entropic_control.backends.triton import TritonConfig

__all__ = [
    "Backend",
    "BackendConfig",
    "Capabilities",
    "Chunk",
    "Forward",
    "LlamaCppConfig",
    "SimulatedConfig",
    "TritonConfig",
]
