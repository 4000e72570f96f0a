"""Record what vLLM tells a V1 logits processor: `python record.py OUT.json`.

Prompts in chunks, two samples of one prompt, and a KV pool small enough for preemptions. One entry a step:
the tokens emitted so far by request, what was removed, added and moved, and the rows of logits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from scenarios import engine
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor

steps: list[dict[str, Any]] = []
outputs: list[list[int]] = []
"""The output lists in order of first appearance: a request's place in it is its number."""


class Recorder(LogitsProcessor):
    def __init__(self, *_: Any) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        step: dict[str, Any] = {"emitted": [len(output) for output in outputs]}
        if batch_update is not None:
            step["removed"] = list(batch_update.removed)
            step["added"] = [
                [row, number(output), len(output), params.extra_args or {}, params.temperature]
                for row, params, _, output in batch_update.added
            ]
            step["moved"] = [[a, b, direction.name] for a, b, direction in batch_update.moved]
        steps.append(step)

    def apply(self, logits: Any) -> Any:
        steps[-1]["rows"] = logits.shape[0]
        return logits


def number(output: list[int]) -> int:
    known = next((n for n, one in enumerate(outputs) if one is output), None)
    if known is None:
        outputs.append(output)
        return len(outputs) - 1
    return known


def sampling(tokens: int, temperature: float = 1.0, samples: int = 1, **extra: Any) -> Any:
    return SamplingParams(
        temperature=temperature,
        n=samples,
        max_tokens=tokens,
        ignore_eos=True,
        extra_args=extra or None,
    )


def main() -> None:
    llm = engine(
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        block_size=32,
        num_gpu_blocks_override=10,
        logits_processors=[Recorder],
    )
    requests = {
        "The history of the city is long and varied. " * 12: sampling(30, target=1.0),
        "Hello there": sampling(90, target=2.0, kp=0.06),
        "Once upon a time": sampling(70, samples=2, target=1.5),
        "In the beginning": sampling(60, enabled=False),
        "Water boils at": sampling(80, temperature=0.0, target=1.0),
        "def f(n):": sampling(25),
        "1 2 3 4": sampling(110, temperature=0.5, target=0.7),
    }
    llm.generate(list(requests), list(requests.values()), use_tqdm=False)
    steps.append({"emitted": [len(output) for output in outputs]})
    Path(sys.argv[1]).write_text(json.dumps(steps, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
