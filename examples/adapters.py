"""The temperature loop in other libraries: `python examples/adapters.py [llama_cpp | transformers MODEL]`.

The same controller holds the entropy of what llama-cpp-python or transformers draws. The first needs
``pip install 'entropic-control[demo]'``; the second ``pip install 'entropic-control[gpu]' accelerate``
and the name or the directory of a model.
"""

from __future__ import annotations

import sys

from entropic_control.controllers import PITemperature

controller = PITemperature(target=1.5, kp=0.3, ki=0.06, v_min=2.0)
prompt = "The keeper of the lighthouse woke before dawn, and when she looked out at the sea"


def with_llama_cpp() -> None:
    from llama_cpp import Llama

    from entropic_control.backends.llama_cpp import entropic_logits_processor
    from entropic_control.backends.models import DEFAULT, resolve

    llm = Llama(str(resolve(DEFAULT)), n_ctx=1024, verbose=False)
    processor = entropic_logits_processor(controller)
    answer = llm.create_completion(prompt, max_tokens=200, seed=1, **processor.arguments)
    print(prompt + answer["choices"][0]["text"])
    trace = processor.trace
    print(f"\n{len(trace['token'])} tokens at {trace['entropy'].mean():.2f} nats, target 1.5")


def with_transformers(name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    from entropic_control.backends.transformers import EntropicLogitsProcessor

    model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    targets = [0.8, 2.0]
    processor = EntropicLogitsProcessor(controller, targets=targets)
    inputs = tokenizer([prompt] * 2, return_tensors="pt")
    set_seed(0)
    model.generate(**inputs, **processor.arguments, max_new_tokens=200)
    trace = processor.trace
    for row, target in enumerate(targets):
        mine = trace["request"] == row
        print(
            f"row {row}: {mine.sum()} tokens at {trace['entropy'][mine].mean():.2f} nats, {target=}"
        )


if __name__ == "__main__":
    library, *rest = sys.argv[1:] or ["llama_cpp"]
    if library == "transformers" and len(rest) == 1:
        with_transformers(rest[0])
    elif library == "llama_cpp" and not rest:
        with_llama_cpp()
    else:
        sys.exit(__doc__)
