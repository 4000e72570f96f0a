"""What the tests look at: vLLM runs, each in a process of its own, with a JSON of figures as the result.

`python scenarios.py NAME OUT.json`; the model's directory comes in ENTROPIC_VLLM_MODEL.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from statistics import mean, median
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
)

from vllm import LLM, SamplingParams

from entropic_control import load_config
from entropic_control.backends.vllm import arguments
from entropic_control.backends.vllm.adapters import at_work

MODEL = os.environ.get("ENTROPIC_VLLM_MODEL", "build/vllm/smollm2")
BACKEND = {"kind": "vllm"}
PI = {"kind": "pi", "target": 1.5, "kp": 0.3, "ki": 0.06, "v_min": 2.0}
PROMPTS = (
    "Write a long story about a lighthouse keeper.",
    "Tell me about the history of Rome.",
    "Describe a market in a small town.",
    "Write a letter to an old friend.",
    "Explain how a bicycle stays upright.",
    "Write a report on the weather of the last week.",
    "Describe your favourite room.",
    "Tell a fairy tale with a fox in it.",
)


def engine(config: Any = None, **options: Any) -> LLM:
    given = arguments(load_config(config)) if config is not None else {}
    defaults = {"max_model_len": 1024, "max_num_seqs": 16, "enable_prefix_caching": False}
    return LLM(
        MODEL,
        enforce_eager=True,
        seed=0,
        distributed_executor_backend="uni",
        **{**defaults, **given, **options},
    )


def chats(llm: LLM, *prompts: str) -> list[str]:
    turn = llm.get_tokenizer().apply_chat_template
    return [
        turn([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in prompts
    ]


def sampling(
    tokens: int, seed: int | None = None, temperature: float = 1.0, **extra: Any
) -> SamplingParams:
    """Seeded only where prompts come whole: the CPU build fails on seeds where they come in chunks."""
    return SamplingParams(
        temperature=temperature,
        max_tokens=tokens,
        ignore_eos=True,
        seed=seed,
        extra_args=extra or None,
    )


def scheduler(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def tokens_of(outputs: Any) -> list[list[int]]:
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def record(llm: LLM) -> dict[str, list[tuple[float, ...]]]:
    """From now on, every reading that the scheduler is handed, by request."""
    readings: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    from entropic_control.backends.vllm.scheduler import _emitted as emitted

    own = scheduler(llm)
    update = own.update_from_output

    def recording(asked: Any, output: Any) -> Any:
        for id, reading in emitted(output).items():
            readings[id.partition("-")[0]].append(reading)
        return update(asked, output)

    own.update_from_output = recording
    return readings


def targets() -> dict[str, Any]:
    """Requests with targets of their own, the configured one, or none, in one batch."""
    llm = engine({"backend": BACKEND, "temperature": PI})
    readings = record(llm)
    own = [1.0, 1.5, 2.0, 2.5]
    params = [sampling(300, seed=n, target=target) for n, target in enumerate(own)]
    params += [sampling(300, seed=4, temperature=0.4)]
    params += [sampling(300, seed=5, enabled=False), sampling(300, seed=6, temperature=0.0)]
    llm.generate(chats(llm, *PROMPTS[:7]), params, use_tqdm=False)
    return {
        request: {
            "tokens": len(rows),
            "entropy": sum(row[1] for row in rows) / len(rows),
            "temperature": sum(row[2] for row in rows) / len(rows),
            "target": None if rows[-1][3] != rows[-1][3] else rows[-1][3],
        }
        for request, rows in readings.items()
    }


def _plain_batch(llm: LLM) -> list[list[int]]:
    params = [sampling(60, seed=n, temperature=0.8) for n in range(4)]
    params += [sampling(60, temperature=0.0) for _ in range(2)]
    return tokens_of(llm.generate(chats(llm, *PROMPTS[:6]), params, use_tqdm=False))


def plain() -> dict[str, Any]:
    """vLLM by itself. Our entry point is installed, so that the processor is loaded and must rest."""
    llm = engine()
    loaded = scheduler(llm).vllm_config
    return {"tokens": _plain_batch(llm), "processor": at_work(loaded) is not None}


def off() -> dict[str, Any]:
    """The whole plug-in with control off for every request."""
    llm = engine({"backend": BACKEND, "temperature": PI, "priority": "first_come"})
    generate = llm.generate

    def disabled(prompts: Any, params: list[SamplingParams], **options: Any) -> Any:
        for one in params:
            one.extra_args = {"enabled": False}
        return generate(prompts, params, **options)

    llm.generate = disabled  # type: ignore[method-assign]
    return {"tokens": _plain_batch(llm)}


def preemption() -> dict[str, Any]:
    """A KV pool too small for all, prompts in chunks, and two samples of one prompt."""
    trace = Path(sys.argv[2]).with_suffix(".jsonl")
    trace.unlink(missing_ok=True)
    llm = engine(
        {"backend": {**BACKEND, "trace": str(trace)}, "temperature": PI},
        max_model_len=384,
        max_num_batched_tokens=64,
        block_size=32,
        num_gpu_blocks_override=24,
    )
    readings = record(llm)
    book = at_work(scheduler(llm).vllm_config).book  # type: ignore[union-attr]
    params = [sampling(180, target=1.0 + 0.25 * n) for n in range(5)]
    params += [
        SamplingParams(n=2, max_tokens=150, ignore_eos=True, extra_args={"target": 1.5}),
    ]
    prompts = chats(llm, *PROMPTS[:5], "The history of the city is long. " * 12)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    book.settle()
    seats = [*book._seats.values(), *book._parked.values()]
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    return {
        "tokens": sorted(len(tokens) for tokens in tokens_of(outputs)),
        "updates": sorted(seat.updates for seat in seats),
        "targets": sorted(seat.target for seat in seats),
        "readings": sorted(len(rows) for rows in readings.values()),
        "entropies": {k: sum(r[1] for r in v) / len(v) / v[-1][3] for k, v in readings.items()},
        "preemptions": sum(event["event"] == "preempted" for event in events),
        "events": [event for event in events if event["event"] != "admitted"][:3],
        "distinct": len({tuple(tokens) for tokens in tokens_of(outputs)}),
    }


LONG = "The council met again to speak about the harbour, the bridge and the market. "


def _mixed(config: Any, **options: Any) -> dict[str, Any]:
    """Long prompts with long answers ahead of short questions, all there from the start."""
    llm = engine(config, max_num_seqs=3, max_num_batched_tokens=256, **options)
    llm.generate(chats(llm, PROMPTS[0]), sampling(8), use_tqdm=False)  # warm
    jobs = [(LONG * 30, 80)] * 3 + [(PROMPTS[n % 8], 24) for n in range(9)]
    own, work = scheduler(llm), [0]
    schedule = own.schedule

    def counting(*args: Any) -> Any:
        out = schedule(*args)
        work.append(work[-1] + out.total_num_scheduled_tokens)
        return out

    own.schedule = counting
    began = time.monotonic()
    for number, (prompt, tokens) in enumerate(jobs):
        llm.llm_engine.add_request(str(number), chats(llm, prompt)[0], sampling(tokens))
    done: dict[str, tuple[float, int]] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = (time.monotonic() - began, work[-1])
    seconds, tokens_run = zip(*done.values(), strict=True)
    return {
        "requests": len(done),
        "seconds": mean(seconds),
        "work": mean(tokens_run),
        "longest": max(tokens_run),
    }


def mixed_fcfs() -> dict[str, Any]:
    """vLLM's own first-come scheduler."""
    return _mixed(None)


def mixed_priority() -> dict[str, Any]:
    """vLLM's own priority scheduler, nobody having said anything about priorities."""
    return _mixed(None, scheduling_policy="priority")


def mixed_entropic() -> dict[str, Any]:
    """The entropic index, at the same fixed temperature as the others."""
    fixed = {"kind": "fixed", "temperature": 1.0}
    return _mixed({"backend": BACKEND, "temperature": fixed})


def _pruned(pruning: dict[str, Any] | None) -> dict[str, Any]:
    config: dict[str, Any] = {"backend": BACKEND, "temperature": PI, "priority": "first_come"}
    if pruning is not None:
        config |= {"backend": {**BACKEND, "prune": True}, "pruning": pruning}
    llm = engine(config, block_size=32, num_gpu_blocks_override=128)
    own, usage = scheduler(llm), [0.0]
    schedule = own.schedule

    def watched(*args: Any) -> Any:
        out = schedule(*args)
        usage.append(own.kv_cache_manager.usage)
        return out

    own.schedule = watched
    params = [sampling(640, temperature=0.0) for _ in range(3)]
    outputs = llm.generate(chats(llm, *PROMPTS[:3]), params, use_tqdm=False)
    return {
        "tokens": tokens_of(outputs),
        "peak": max(usage),
        "left": own.kv_cache_manager.usage,
    }


WINDOW = {"kind": "sliding_window", "min_tokens": 0, "sinks": 1, "recent": 4, "slack": 0.0}


def unpruned() -> dict[str, Any]:
    """Nothing pruned."""
    return _pruned(None)


def pruned_full() -> dict[str, Any]:
    """Pruning at work, with a budget for everything."""
    return _pruned({**WINDOW, "budget": 100_000})


def pruned_half() -> dict[str, Any]:
    """Half of the tokens kept."""
    return _pruned({**WINDOW, "budget": 0.5})


def throughput() -> dict[str, Any]:
    """Tokens/s with the loop on and off, in turns, in one engine."""
    llm = engine({"backend": BACKEND, "temperature": PI, "priority": "first_come"})
    out = {}
    for batch in (8, 16):
        prompts = chats(llm, *(PROMPTS * 2)[:batch])
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(7):
            for enabled in (True, False) if turn % 2 else (False, True):
                params = [sampling(24, seed=n, enabled=enabled) for n in range(batch)]
                began = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                if turn:  # the first of them warms up
                    seconds[enabled].append(time.perf_counter() - began)
        out[str(batch)] = {
            "ratio": median(b / a for a, b in zip(seconds[True], seconds[False], strict=True)),
            "on": 24 * batch / median(seconds[True]),
            "off": 24 * batch / median(seconds[False]),
        }
    return out


def voluntary() -> dict[str, Any]:
    """One seat, taken by a long request when a short one comes."""
    trace = Path(sys.argv[2]).with_suffix(".jsonl")
    trace.unlink(missing_ok=True)
    backend = {**BACKEND, "voluntary_preemption": True, "trace": str(trace)}
    priority = {"kind": "entropic", "patience": 30}
    llm = engine({"backend": backend, "temperature": PI, "priority": priority}, max_num_seqs=1)
    book = at_work(scheduler(llm).vllm_config).book  # type: ignore[union-attr]
    add, step = llm.llm_engine.add_request, llm.llm_engine.step
    prompts = chats(llm, *PROMPTS[:2])
    add("long", prompts[0], sampling(200))
    for _ in range(20):
        step()
    add("short", prompts[1], sampling(20))
    finished = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in step():
            if output.finished:
                finished[output.request_id] = len(output.outputs[0].token_ids)
    book.settle()
    seats = [*book._seats.values(), *book._parked.values()]
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    return {
        "finished": finished,
        "updates": sorted(seat.updates for seat in seats),
        "events": [(event["event"], event["request"].partition("-")[0]) for event in events],
        "why": [event["reason"] for event in events if event["event"] == "gave way"],
    }


def asynchronous() -> dict[str, Any]:
    """The asynchronous scheduler, two steps in flight, with a worker that is played: the CPU has none."""
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from entropic_control.backends.vllm.scheduler import EntropicAsyncScheduler
    from entropic_control.backends.vllm.worker import Carrying

    llm = engine({"backend": BACKEND}, max_num_seqs=2)
    own = scheduler(llm)
    own.vllm_config.scheduler_config.async_scheduling = True
    config = [own.vllm_config, own.kv_cache_config, own.structured_output_manager]
    twin = EntropicAsyncScheduler(*config, own.block_size, own.hash_block_size)
    prompts = {"long": 600, "middle": 60, "short": 10, "other": 12}
    for name, length in prompts.items():
        twin.add_request(Request(name, [1] * length, sampling(20, target=1.0), None))
    own_names = {
        id: r.sampling_params.extra_args["entropic_request"] for id, r in twin.requests.items()
    }
    flying: deque[Any] = deque()
    finished: list[str] = []
    tokens: dict[str, int] = defaultdict(int)

    def played(asked: Any) -> Any:
        ids = list(asked.num_scheduled_tokens)
        output = ModelRunnerOutput(ids, {id: row for row, id in enumerate(ids)})
        output.sampled_token_ids = [[] if id in asked.partial else [5] for id in ids]
        readings = {own_names[id]: (2.0, 1.0, 0.7, 1.0) for id in ids}

        class Inner:
            def get_output(self) -> Any:
                return output

        return Carrying(Inner(), lambda: readings).get_output()

    for _ in range(400):
        asked = twin.schedule()
        asked.partial = {
            id for id in asked.num_scheduled_tokens if twin.requests[id].is_prefill_chunk
        }
        flying.append(asked)
        if len(flying) == 2 or not asked.num_scheduled_tokens:
            oldest = flying.popleft()
            for outputs in twin.update_from_output(oldest, played(oldest)).values():
                for one in outputs.outputs:
                    tokens[one.request_id] += len(one.new_token_ids)
                    if one.finish_reason is not None:
                        finished.append(one.request_id)
        if not twin.requests:
            break
    heard = {id: float(state.entropy[0]) for id, state in twin._ranking._states.items()}
    return {"finished": finished, "tokens": tokens, "heard": heard, "steps": twin.current_step}


def refused() -> dict[str, Any]:
    """What cannot be had, each with what was said."""
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    asynchronous = {**BACKEND, "async_scheduling": True}
    window = {"backend": {**BACKEND, "prune": True}, "pruning": WINDOW}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "speculation": ({"backend": BACKEND}, {"speculative_config": speculation}),
        "asynchronous": ({"backend": asynchronous}, {}),
        "prefix caching": (window, {"enable_prefix_caching": True}),
    }
    name = sys.argv[3]
    config, options = cases[name]
    try:
        engine(config, **options)
    except Exception as error:  # noqa: BLE001 (whatever vLLM wraps it in)
        return {"said": f"{type(error).__name__}: {error}"}
    return {"said": ""}


if __name__ == "__main__":
    result = globals()[sys.argv[1]]()
    Path(sys.argv[2]).write_text(json.dumps(result))
