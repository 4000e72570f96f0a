"""The control loops inside vLLM, which schedules, batches and scales out by itself.

Unlike the other backends this one has no engine of ours on top: vLLM keeps its own decode loop and
calls the controllers through its plug-in points. Importing this package imports neither vLLM nor torch.

=================  ==============================================================================
`arguments`        what `LLM(...)` or `vllm serve` must be given for a configuration
`processor`        the logits processor: temperature loop, for both of vLLM's model runners
`scheduler`        the schedulers: priority index and aging over vLLM's queues
`worker`           the worker that carries entropies from the processor to the scheduler
`retention`        which KV blocks stay (experimental), and `pruned_attention`, which skips the rest
`compat`           everything of vLLM that is not public, with the versions it was checked on
=================  ==============================================================================
"""

from entropic_control.backends.vllm.arguments import arguments, serve_arguments
from entropic_control.backends.vllm.config import VllmConfig

__all__ = ["VllmConfig", "arguments", "serve_arguments"]
