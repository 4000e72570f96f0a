"""Pruning rules on the frontier of quality: a text going on against a fact asked for.

Each text is prefilled once. Every rule then prunes the saved state to every budget, and is scored by how
much worse it predicts what really follows, and by whether a five-digit code hidden in the text is still
found. The code is hidden at the end of a line, and pruned for before the question is known.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np

from entropic_control.backends.base import Backend, Chunk
from entropic_control.bench.texts import Library
from entropic_control.config import Config
from entropic_control.controllers import (
    EntropicPruning,
    NoPruning,
    Pruning,
    RandomPruning,
    SlidingWindow,
)
from entropic_control.controllers.base import Array
from entropic_control.controllers.softmax import surprisals
from entropic_control.errors import CapabilityError, ConfigError
from entropic_control.ledger import Ledger
from entropic_control.numerals import Numerals
from entropic_control.report import write_json

CONTINUATION = 192
"""True tokens that are scored after a text."""

QUESTION = (
    "\n\nQuestion: What is the secret code that was mentioned in the text above?"
    "\nAnswer: The secret code is "
)
DOCUMENTS = ("topics 0", "shutil", "topics 1", "ast", "topics 2", "socket", "topics 3", "logging")
HAYSTACKS = ("topics 4", "doctest", "topics 3", "turtle")


class Case(NamedTuple):
    """A text, and what is asked of it."""

    name: str
    text: Array
    """Token ids that are prefilled, and pruned."""
    given: Array
    """Token ids between the text and what is scored."""
    true: Array
    """Token ids that are scored."""
    needle: bool


class Score(NamedTuple):
    """How one pruned text did."""

    nll: float
    """-ln p of the true tokens, nats per token."""
    recalled: bool
    """Whether greedy decoding gives the true tokens."""
    kept: float
    """Share of the text's cells that stayed."""


def rules_of(config: Config, budget: float) -> dict[str, Pruning]:
    """The rules that are compared, at one budget; 'entropic' is the configuration's own.

    Beside it stands the same rule with nothing of the text measured, and with everything.
    """
    own = config.pruning if config.pruning.prunes else EntropicPruning()
    common = {"budget": budget, "min_tokens": 0, "sinks": own.sinks, "recent": own.recent}
    entropic = own.replace(**common)
    single = {
        "span": 1,
        "lead": 0,
        "tail": 0,
        "fading": 0.0,
        "measured": 1.0,
        "numbers": 0.0,
        **common,
    }
    sources = {"entropic, estimated": 0.0, "entropic, measured": 1.0}
    return {
        "entropic": entropic,
        **{
            name: entropic.replace(measured=share)
            for name, share in sources.items()
            if isinstance(entropic, EntropicPruning) and entropic.measured != share
        },
        "recency": SlidingWindow(**common),
        "surprisal": EntropicPruning(window=0.0, **single),
        "half surprisal": EntropicPruning(window=0.5, **single),
        "random": RandomPruning(**common),
    }


def cases_of(backend: Backend, tokens: int, documents: int, depths: int) -> Iterator[Case]:
    """Texts of `tokens` tokens to be continued, then texts with a code at each of `depths` depths."""
    for name in DOCUMENTS[:documents]:
        text = tokens_of(backend, name, tokens + CONTINUATION)
        if len(text) < tokens + CONTINUATION:
            raise ConfigError(f"{name!r} has {len(text)} tokens only: give fewer --tokens")
        yield Case(f"{name}, {tokens}", text[:tokens], text[:0], text[tokens:], needle=False)
    for number in range(depths):
        yield _needle(backend, HAYSTACKS[number % len(HAYSTACKS)], tokens, number, depths)


def _needle(backend: Backend, name: str, tokens: int, number: int, depths: int) -> Case:
    code = "".join(random.Random(number).sample("0123456789", 5))
    said, asked, answer = (
        Library(backend).tokens(text)
        for text in (f"The secret code is {code}. Remember it.\n", QUESTION, code)
    )
    hay = tokens_of(backend, name, tokens - len(said))
    ends = [at + 1 for at, token in enumerate(hay) if backend.piece(int(token)).endswith(b"\n")]
    wanted = (number + 0.5) / depths * len(hay)
    at = min(ends or range(len(hay)), key=lambda end: abs(end - wanted))
    text = np.concatenate([hay[:at], said, hay[at:]])
    return Case(f"{name}, {tokens}, code at {at}", text, asked, answer, needle=True)


def tokens_of(backend: Backend, name: str, tokens: int) -> Array:
    """The first `tokens` tokens of a text that every Python ships."""
    kind, _, number = name.partition(" ")
    if kind == "topics":
        from pydoc_data.topics import topics

        longest = sorted(topics, key=lambda topic: (-len(topics[topic]), topic))
        text = "\n\n".join(topics[topic] for topic in longest[int(number) :: 5])
    else:
        text = inspect.getsource(importlib.import_module(name))
    return Library(backend).tokens(text[: 12 * tokens])[:tokens]


class Prefilled:
    """A text in slot 0 of a backend, to be pruned again and again from one saved state."""

    def __init__(self, backend: Backend, text: Array, advance: Callable[[int], None]) -> None:
        self._backend = backend
        # The last token stays out: feeding it again is what gives the first scored distribution.
        self._last = text[-1:]
        self._body = body = text[:-1]
        self._numbers = Numerals(backend.piece).among(body)
        self._nats = np.full(len(text), np.nan)
        for at in range(0, len(body), backend.capabilities.step_tokens):
            part = body[at : at + backend.capabilities.step_tokens]
            following = text[at + 1 : at + 1 + len(part)]
            result = backend.forward([Chunk(0, at, part, False, following)]).surprisal[0]
            if result is not None:
                self._nats[at + 1 : at + 1 + len(result)] = result
            advance(at + len(part))
        self._state = backend.save(0)

    def ledger(self, pruning: Pruning) -> Ledger:
        """What a pruning controller knows of the text: what it has measured, and what it assumes."""
        able = self._backend.capabilities
        ledger = Ledger(able.context, able.block)
        ledger.extend(len(self._body))
        survey = pruning.survey(self._body, len(self._body), self._numbers)
        ledger.record(0, survey.estimate)
        ledger.record(0, np.where(survey.measured, self._nats[:-1] + survey.extra, np.nan))
        return ledger

    def score(self, pruning: Pruning, case: Case) -> Score:
        """Prune from the saved state, and score what the case asks for."""
        self._backend.restore(0, self._state)
        ledger = self.ledger(pruning)
        kept = pruning.keep(ledger.view())
        for start, stop in ledger.runs(kept):
            if not self._backend.evict(0, start, stop):
                raise CapabilityError(f"the backend does not evict positions {start} to {stop}")
        given = np.concatenate([self._last, case.given])
        length = ledger.length
        if case.needle:
            nll, recalled = self._asked(given, case.true, length)
        else:
            tokens = np.concatenate([given, case.true[:-1]])
            nats = self._backend.forward([Chunk(0, length, tokens, False, case.true)]).surprisal[0]
            assert nats is not None
            nll, recalled = float(nats.mean()), False
        return Score(nll, recalled, float(kept.mean()))

    def _asked(self, given: Array, true: Array, length: int) -> tuple[float, bool]:
        total, recalled = 0.0, True
        for token in true:
            row = self._backend.forward([Chunk(0, length, given, True)]).logits[0]
            total += float(surprisals(row[None], np.array([token]))[0])
            recalled &= int(row.argmax()) == int(token)
            length, given = length + len(given), np.array([token], np.int32)
        return total / len(true), recalled


def run_frontier(
    config: Config,
    out: Path,
    *,
    budgets: Sequence[float] = (0.5, 0.25),
    tokens: int = 2048,
    documents: int = 8,
    depths: int = 12,
    advance: Callable[[str, int, int, int], None],
) -> dict[str, Any]:
    """Score every rule at every budget on every text; finished scores in `out` are not run again.

    Parameters
    ----------
    config : Config
        Its backend runs; its pruning is the rule under test.
    out : path
        Directory of scores.jsonl and frontier.json.
    budgets : sequence of float
        Shares of the text to keep.
    tokens : int
        Length of the texts.
    documents, depths : int
        Texts to be continued, and codes to be found.
    advance : function
        Called with the text at work, tokens done before it, tokens of all texts, and tokens of it done.
    """
    out.mkdir(parents=True, exist_ok=True)
    scores = _Scores(out / "scores.jsonl")
    arms = {"dense at 1": NoPruning()} | {
        f"{name} at {budget:g}": rule
        for budget in budgets
        for name, rule in rules_of(config, budget).items()
    }
    alone = {"slots": 1, "chat": False} if hasattr(config.backend, "chat") else {"slots": 1}
    backend = config.backend.model_copy(update=alone).open()
    try:
        cases = list(cases_of(backend, tokens, documents, depths))
        total, done = sum(len(case.text) for case in cases), 0
        for case in cases:
            missing = {arm: rule for arm, rule in arms.items() if (case.name, rule) not in scores}
            if missing:
                backend.release(0)
                progress = partial(advance, case.name, done, total)
                prefilled = Prefilled(backend, case.text, progress)
                for rule in missing.values():
                    scores.add(case.name, rule, prefilled.score(rule, case))
            advance(case.name, done, total, len(case.text))
            done += len(case.text)
    finally:
        backend.close()
    figures = {
        "tokens": tokens,
        "continuations": documents,
        "needles": depths,
        "block": backend.capabilities.block,
        "arms": {
            arm: _summary(rule, arms["dense at 1"], cases, scores) for arm, rule in arms.items()
        },
    }
    write_json(out / "frontier.json", figures)
    return figures


class _Scores:
    """Scores on disk, by text and rule, so that an interrupted run goes on where it stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[str, str], Score] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    case, rule, score = json.loads(line)
                except ValueError:  # the line at which a run was interrupted
                    continue
                self._known[case, rule] = Score(*score)

    def __contains__(self, key: tuple[str, Pruning]) -> bool:
        return (key[0], key[1].model_dump_json()) in self._known

    def __getitem__(self, key: tuple[str, Pruning]) -> Score:
        return self._known[key[0], key[1].model_dump_json()]

    def add(self, case: str, rule: Pruning, score: Score) -> None:
        name = rule.model_dump_json()
        self._known[case, name] = score
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([case, name, score]) + "\n")


def _summary(rule: Pruning, dense: Pruning, cases: list[Case], scores: _Scores) -> dict[str, float]:
    worse = [scores[c.name, rule].nll - scores[c.name, dense].nll for c in cases if not c.needle]
    found = [scores[c.name, rule] for c in cases if c.needle]
    return {
        "continuation_nll_delta": mean(worse) if worse else float("nan"),
        "continuation_error": stdev(worse) / len(worse) ** 0.5 if len(worse) > 1 else float("nan"),
        "needle_nll": mean(s.nll for s in found) if found else float("nan"),
        "needle_recall": mean(s.recalled for s in found) if found else float("nan"),
        "kept": mean(scores[c.name, rule].kept for c in cases),
    }
