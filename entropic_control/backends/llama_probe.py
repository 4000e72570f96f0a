"""Run by itself in a process of its own: load a model, decode with llama.cpp, and say how far it got.

A build for another kind of CPU dies here by a signal instead of in the user's process. Each line that is
printed is a JSON object: the stage that begins, and in the end the report.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

_PROMPT = 32
"""Tokens of the prompt: enough for the routines that multiply matrices, AMX's among them."""
_DECODED = 3


def main(model: str) -> int:
    """Decode a prompt and three tokens; 0 if every logit is a number, 3 if not, 4 without a model."""
    _leave_no_core()
    _tell(stage="import")
    import llama_cpp
    from llama_cpp import llama_cpp as api

    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, None)
    api.llama_backend_init()
    built = api.llama_print_system_info().decode(errors="replace")
    _tell(stage="load", version=llama_cpp.__version__, built=built)
    loaded = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
    if not loaded:
        return 4
    wanted = api.llama_context_default_params()
    wanted.n_ctx = 256
    wanted.n_threads, wanted.n_threads_batch = (
        1,
        min(os.cpu_count() or 1, 2),
    )  # busy cores stall more
    context = api.llama_init_from_model(loaded, wanted)
    if not context:
        return 4
    size = max(int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(loaded))), 1)
    tokens = [n % size for n in range(1, _PROMPT + 1)]
    for turn in range(1 + _DECODED):
        _tell(stage="prompt" if turn == 0 else "decode")
        given = (api.llama_token * len(tokens))(*tokens)
        code = int(api.llama_decode(context, api.llama_batch_get_one(given, len(tokens))))
        logits = api.llama_get_logits_ith(context, -1)[:size] if code == 0 else [math.nan]
        if not all(map(math.isfinite, logits)):
            return 3
        tokens = [logits.index(max(logits))]
    _tell(stage="done")
    return 0


def _tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _leave_no_core() -> None:
    try:
        import resource
    except ImportError:  # Windows has none
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
