"""The workloads of the paper's table: what each asks of an engine, from seeds, without a download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from entropic_control.backends.base import Backend
from entropic_control.bench.prompts import SHORT
from entropic_control.bench.texts import Library
from entropic_control.controllers.base import Array
from entropic_control.request import Request

CHAT = (
    *SHORT,
    "Compare trains and aeroplanes as ways to travel.",
    "Tell a fable about a fox and a clock.",
    "Describe how a letter finds its way to an address.",
    "Plan a simple dinner for four guests.",
    "Explain what makes a good question.",
    "Write the diary of a gardener in spring.",
    "What would a museum of sounds exhibit?",
    "Argue for and against living in a big city.",
)

DOORS = ("red", "green", "blue", "white", "black", "yellow")


class Needle(NamedTuple):
    """A fact hidden in a prompt and asked for later, by a forced question and its answer."""

    depth: float
    """Where in the prompt it stands, 0 to 1."""
    start: int
    """First generated token of the answer."""
    stop: int


class Task(NamedTuple):
    """A request, and what is known about the right answer.

    The first `truth` tokens are forced: the true continuation of the prompt. The next `free` are drawn,
    and `reference` holds what would have followed. Then come the questions for the needles, forced.
    """

    request: Request
    truth: int = 0
    free: int = 0
    reference: Array = np.zeros(0, np.int32)
    needles: tuple[Needle, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """How much of everything; all lengths in tokens."""

    slots: int = 8
    chat_prompts: int = 16
    chat_tokens: int = 256
    mixed_long: int = 6000
    mixed_short: tuple[int, int] = (40, 100)
    mixed_tokens: tuple[int, int] = (48, 112)
    """Forced and free."""
    long_prompts: tuple[int, ...] = (2048, 2048, 2048, 2048, 2048, 2560, 3072, 4096)
    long_tokens: tuple[int, int] = (128, 48)
    needles: int = 3
    single: int = 7900
    arrivals: int = 18
    arrival_prompts: tuple[int, ...] = (48, 96, 128, 192, 400, 1600)
    arrival_tokens: tuple[int, int] = (32, 128)
    drift_prompts: int = 4
    drift_tokens: int = 2000
    ablation_prompts: int = 8
    ablation_tokens: int = 320
    loop_texts: int = 48


FULL = Sizes()
QUICK = Sizes(
    slots=4,
    chat_prompts=4,
    chat_tokens=48,
    mixed_long=1100,
    mixed_tokens=(16, 32),
    long_prompts=(1056, 528),
    long_tokens=(24, 8),
    needles=1,
    single=1100,
    arrivals=8,
    arrival_prompts=(32, 64, 256),
    arrival_tokens=(16, 32),
    drift_prompts=2,
    drift_tokens=160,
    ablation_prompts=4,
    ablation_tokens=48,
    loop_texts=8,
)


class Setting(NamedTuple):
    """What a workload is made for."""

    backend: Backend
    """Open, and reading text as it is."""
    sizes: Sizes
    rate: float = 1.0
    """Requests that arrive in a second, where they arrive one by one."""


@dataclass(frozen=True)
class Workload:
    """A named set of tasks."""

    name: str
    about: str
    tasks: Callable[[Setting], list[Task]]
    arms: tuple[str, ...]
    context: Callable[[Sizes], int]
    """Tokens the longest sequence reaches."""
    repeats: int = 1
    quick: bool = True
    """Whether a quick table has it without being asked."""
    load: float | None = None
    """Arrivals as a share of what the engine can serve; None if all are there at the start."""


_ROOM = 256
"""Tokens that a chat template and the questions may add."""


def _chat(setting: Setting) -> list[Task]:
    return _chats(setting.sizes.chat_prompts, setting.sizes.chat_tokens)


def _drift(setting: Setting) -> list[Task]:
    return _chats(setting.sizes.drift_prompts, setting.sizes.drift_tokens)


def _ablation(setting: Setting) -> list[Task]:
    return _chats(setting.sizes.ablation_prompts, setting.sizes.ablation_tokens)


def _loops(setting: Setting) -> list[Task]:
    return _chats(setting.sizes.loop_texts, setting.sizes.ablation_tokens)


def _chats(count: int, tokens: int) -> list[Task]:
    return [
        Task(
            Request(
                id=f"chat {n + 1}",
                prompt=[{"role": "user", "content": CHAT[n % len(CHAT)]}],
                max_tokens=tokens,
                min_tokens=tokens,
                seed=7 + n,
            ),
            free=tokens,
        )
        for n in range(count)
    ]


def _mixed(long: int) -> Callable[[Setting], list[Task]]:
    def tasks(setting: Setting) -> list[Task]:
        sizes = setting.sizes
        library, rng = Library(setting.backend), np.random.default_rng(11)
        prompts = [sizes.mixed_long] * long
        prompts += rng.integers(*sizes.mixed_short, sizes.slots - long).tolist()
        return [
            _continue(library, n, n, length, *sizes.mixed_tokens)
            for n, length in enumerate(prompts)
        ]

    return tasks


def _long(setting: Setting) -> list[Task]:
    library, rng = Library(setting.backend), np.random.default_rng(13)
    return [
        _with_needles(library, n, length, setting.sizes, rng)
        for n, length in enumerate(setting.sizes.long_prompts)
    ]


def _single(setting: Setting) -> list[Task]:
    sizes = setting.sizes
    return [_continue(Library(setting.backend), 0, 0, sizes.single, *sizes.long_tokens)]


Lengths = Callable[[Sizes], Array]
"""Prompt tokens of the requests that arrive, shape (arrivals,)."""


def _spread_lengths(sizes: Sizes) -> Array:
    return np.resize(sizes.arrival_prompts, sizes.arrivals)


def _mixed_lengths(sizes: Sizes) -> Array:
    """As in the mixed workload: of a full set of slots one is very long and the others are short."""
    lengths = np.random.default_rng(19).integers(*sizes.mixed_short, sizes.arrivals)
    lengths[sizes.slots - 1 :: sizes.slots] = sizes.mixed_long
    return lengths


def _arrivals(setting: Setting, lengths: Lengths) -> list[Task]:
    _, sizes, rate = setting
    library, rng = Library(setting.backend), np.random.default_rng(17)
    # A Poisson process given its count: of 18 gaps left to chance, those of this seed were half as
    # long as the rate has them, which doubled the load.
    gaps = rng.exponential(1.0, sizes.arrivals)
    times = np.cumsum(gaps) / gaps.mean() / rate
    prompts = rng.permutation(lengths(sizes))
    tokens = rng.integers(*sizes.arrival_tokens, sizes.arrivals)
    tasks = []
    for n in range(sizes.arrivals):
        task = _continue(library, n, n, int(prompts[n]), int(tokens[n]), 0)
        # By Little's law a request of a full engine takes slots / rate seconds; every fourth may take
        # twice that.
        deadline = 2 * sizes.slots / rate if n % 4 == 3 else None
        request = task.request.replace(arrive=float(times[n]), deadline=deadline)
        tasks.append(task._replace(request=request))
    return tasks


def _continue(
    library: Library, number: int, document: int, length: int, truth: int, free: int
) -> Task:
    text = library.passage(document, length + truth + free)
    prompt, rest = text[:length], text[length:]
    request = _request(
        f"{length} tokens, {number + 1}", prompt, [*rest[:truth], *[-1] * free], number
    )
    return Task(request, truth, free, rest[truth:])


def _with_needles(
    library: Library, number: int, length: int, sizes: Sizes, rng: np.random.Generator
) -> Task:
    """A passage with facts hidden at even depths, continued, and then asked for the facts."""
    truth, free = sizes.long_tokens
    facts, questions, answers = [], [], []
    for door in DOORS[: sizes.needles]:
        code = str(rng.integers(10_000, 100_000))
        facts.append(library.tokens(f"\n\nRemember: the code of the {door} door is {code}.\n\n"))
        questions.append(library.tokens(f"\n\nThe code of the {door} door is "))
        answers.append(library.tokens(code))
    body = length - sum(map(len, facts))
    text = library.passage(number, body + truth + free)
    prompt, rest = text[:body], text[body:]
    # Each prompt hides its facts at other depths, so that the prompts together cover all of them.
    shift = number / (len(sizes.long_prompts) * sizes.needles)
    depths = [shift + n / sizes.needles for n in range(sizes.needles)]
    cuts = np.split(prompt, [int(depth * body) for depth in depths])
    parts = [cuts[0]]
    for fact, cut in zip(facts, cuts[1:], strict=True):
        parts += [fact, cut]
    forced = [*rest[:truth], *[-1] * free]
    needles = []
    for depth, question, answer in zip(depths, questions, answers, strict=True):
        forced += [*question, *answer]
        needles.append(Needle(depth, len(forced) - len(answer), len(forced)))
    name = f"{length} tokens, {number + 1}"
    request = _request(name, np.concatenate(parts), forced, number)
    return Task(request, truth, free, rest[truth:], tuple(needles))


def _request(name: str, prompt: Array, forced: list[int], number: int) -> Request:
    return Request(
        id=name,
        prompt=prompt.tolist(),
        forced=tuple(int(token) for token in forced),
        max_tokens=len(forced),
        min_tokens=len(forced),
        seed=7 + number,
    )


def _arrivals_at(
    load: float,
    arms: tuple[str, ...],
    name: str = "arrivals",
    about: str = "mixed lengths",
    lengths: Lengths = _spread_lengths,
    quick: bool = True,
) -> Workload:
    return Workload(
        f"{name}_{load:g}",
        f"Poisson arrivals of {about} at {load:g} of capacity",
        partial(_arrivals, lengths=lengths),
        arms,
        lambda sizes: int(lengths(sizes).max()) + sizes.arrival_tokens[1],
        quick=quick,
        load=load,
    )


ALL = ("baseline", "fair", "sampling", "scheduling", "pruning", "full")

TEMPERATURES = ("fixed_0.5", "fixed_0.7", "fixed_1.0", "pi", "exact", "dynatemp", "edt", "mirostat")

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "chat",
            "short prompts, free text",
            _chat,
            ALL,
            lambda s: s.chat_tokens + _ROOM,
        ),
        Workload(
            "mixed",
            "one long prompt among short ones, true text then free",
            _mixed(1),
            ALL,
            lambda s: s.mixed_long + sum(s.mixed_tokens),
        ),
        Workload(
            "mixed_two",
            "two long prompts among short ones, true text then free",
            _mixed(2),
            ("baseline", "full"),
            lambda s: s.mixed_long + sum(s.mixed_tokens),
            quick=False,
        ),
        _arrivals_at(0.7, ("baseline", "full"), quick=False),
        _arrivals_at(1.1, ("baseline", "fair", "full")),
        _arrivals_at(
            1.1,
            ("baseline", "fair", "full"),
            "arrivals_mixed",
            "the mixed workload's lengths",
            _mixed_lengths,
            quick=False,
        ),
        Workload(
            "temperature",
            "the temperature controllers on the same prompts",
            _ablation,
            TEMPERATURES,
            lambda s: s.ablation_tokens + _ROOM,
        ),
        # Sixteen texts leave the ratio of loops anywhere between 0.17 and 0.29.
        Workload(
            "loops",
            "how often texts repeat themselves, on many of them",
            _loops,
            ("fixed_0.5", "pi"),
            lambda s: s.ablation_tokens + _ROOM,
            quick=False,
        ),
        Workload(
            "drift",
            "long free texts",
            _drift,
            ("baseline", "full"),
            lambda s: s.drift_tokens + _ROOM,
        ),
        Workload(
            "single",
            "one very long prompt",
            _single,
            ("baseline", "full"),
            lambda s: s.single + sum(s.long_tokens),
            quick=False,
        ),
        Workload(
            "long",
            "long prompts with hidden facts, true text, free text and questions",
            _long,
            ("baseline", "fair", "pruning", "full", "quarter"),
            lambda s: max(s.long_prompts) + sum(s.long_tokens) + _ROOM,
        ),
    )
}
