"""A synthetic language plant: seeded, exact, no model and no heavy dependency.

Its entropy answers to the temperature as a real model's does, and drifts with its own text: sampling
colder than the model's own distribution makes the text more predictable and the next distributions
sharper (collapse), sampling hotter makes them flatter (noise). Time is virtual: a step costs what the
cost parameters say, so latencies are exact and repeatable.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import Literal

import numpy as np
from pydantic import Field

from entropic_control.backends.base import (
    Backend,
    BackendConfig,
    Capabilities,
    Chunk,
    Forward,
    Prompt,
    step_shape,
)
from entropic_control.backends.closing import close_off
from entropic_control.backends.cost import CostModel, Weights
from entropic_control.controllers.base import Array
from entropic_control.controllers.softmax import moments, surprisals
from entropic_control.errors import CapabilityError, DecodeError, NoRoom

_CACHE = 1 << 28
"""Bytes of logits that a plant remembers."""

_PLANT = ("seed", "vocab", "sharpness", "drift", "relax", "bias", "end")
"""What makes a plant this one and no other: size, speed and abilities do not."""


class SimulatedConfig(BackendConfig):
    """A seeded synthetic plant with a KV cost model.

    Parameters
    ----------
    vocab, slots, context, step_tokens : int
        Tokens of the vocabulary; sequences at once; tokens a sequence may reach; tokens of a step.
    cells : int or None
        KV cells of all slots together; None gives every slot its whole context.
    block : int
        Tokens that are evicted together.
    sharpness : float
        Standard deviation of the logits: higher is more certain.
    drift : float
        How strongly the text's own surprise moves the sharpness, per nat. 0 is a plant without memory.
    relax : float
        Share of the drift that is forgotten in a token.
    bias : float
        Nats a token by which text at T = 1 drifts to noise.
    end : float
        Logit of the end token; -inf (null) never ends by itself.
    can_evict, can_swap, can_fork, can_rollback : bool
        Abilities, to try a controller against an engine that lacks one.
    adjacent : bool
        Whether every run of neighbouring slots is a pass of its own through the model.
    seconds_per_step, seconds_per_row, seconds_per_row_cell, seconds_per_prompt_token,
    seconds_per_prompt_read, seconds_per_measured : float
        The true costs behind the virtual clock.
    """

    kind: Literal["simulated"] = "simulated"
    seed: int = 0
    vocab: int = Field(512, ge=2)
    slots: int = Field(8, ge=1)
    context: int = Field(8192, ge=32)
    step_tokens: int = Field(512, ge=1)
    cells: int | None = Field(None, ge=16)
    block: int = Field(16, ge=1)
    sharpness: float = Field(3.0, gt=0)
    drift: float = Field(0.02, ge=0)
    relax: float = Field(0.01, ge=0, le=1)
    bias: float = 0.15
    end: float | None = None
    can_evict: bool = True
    can_swap: bool = True
    can_fork: bool = True
    can_rollback: bool = True
    adjacent: bool = False
    seconds_per_step: float = Field(4.7e-3, ge=0)
    seconds_per_row: float = Field(5.8e-3, ge=0)
    seconds_per_row_cell: float = Field(3e-6, ge=0)
    seconds_per_prompt_token: float = Field(4.7e-3, ge=0)
    seconds_per_prompt_read: float = Field(5e-7, ge=0)
    seconds_per_measured: float = Field(1e-3, ge=0)

    def open(self) -> Backend:
        return Simulated(self)

    def costs(self) -> Weights:
        """The true cost of each feature of a step, seconds."""
        return Weights(
            self.seconds_per_step,
            self.seconds_per_row,
            self.seconds_per_row_cell,
            self.seconds_per_prompt_token,
            self.seconds_per_prompt_read,
            self.seconds_per_measured,
        )


@dataclass
class _Text:
    """What the plant remembers of one sequence."""

    positions: list[int] = field(default_factory=list)
    length: int = 0
    extent: int = 0
    last: int = 0
    disorder: float = 0.0
    generating: bool = False


class Simulated:
    """The plant of `SimulatedConfig`."""

    def __init__(self, config: SimulatedConfig) -> None:
        self.config = config
        self.capabilities = Capabilities(
            name="simulated",
            vocab=config.vocab,
            slots=config.slots,
            context=config.context,
            step_tokens=config.step_tokens,
            can_evict=config.can_evict,
            can_swap=config.can_swap,
            can_fork=config.can_fork,
            can_rollback=config.can_rollback,
            adjacent=config.adjacent,
            block=config.block,
        )
        plant = {name: getattr(config, name) for name in _PLANT}
        self.fingerprint = json.dumps(plant)
        self.cost = CostModel(config.costs())
        self._true = CostModel(config.costs())
        # The rows of a large vocabulary together would not fit into memory.
        self._after = lru_cache(maxsize=_CACHE // (8 * config.vocab) + 1)(
            partial(_logits_after, config)
        )
        self._texts = [_Text() for _ in range(config.slots)]
        self._before_drafts: list[list[_Text]] = [[] for _ in range(config.slots)]
        self._clock = 0.0

    def encode(self, prompt: Prompt) -> Array:
        if isinstance(prompt, str):
            words = re.findall(r"\w+|[^\w\s]", prompt)
        elif prompt and isinstance(prompt[0], dict):
            words = re.findall(
                r"\w+|[^\w\s]",
                " ".join(turn["content"] for turn in prompt if isinstance(turn, dict)),
            )
        else:
            return np.asarray(prompt, np.int32)
        usable = self.config.vocab - 1
        return np.array([1 + zlib.crc32(word.encode()) % usable for word in words], np.int32)

    def piece(self, token: int) -> bytes:
        return b"" if token == 0 else f" w{token}".encode()

    def is_end(self, token: int) -> bool:
        return token == 0

    @property
    def ends(self) -> Array:
        return np.zeros(1, np.int64)

    def forward(self, chunks: Sequence[Chunk]) -> Forward:
        needed = sum(len(chunk.tokens) for chunk in chunks)
        if needed > self.room():
            raise NoRoom(1, f"{needed} cells are needed and {self.room()} are free")
        for chunk in chunks:
            self._check(chunk)
        logits, surprisal = [], []
        for chunk in chunks:
            surprisal.append(self._surprisal(chunk))
            text = self._texts[chunk.slot]
            certain = len(chunk.tokens) - chunk.drafts
            self._feed(text, chunk.tokens[:certain])
            self._before_drafts[chunk.slot] = []
            if chunk.sample:
                text.generating = True
                logits.append(self._row(text))
            for at in range(certain, len(chunk.tokens)):
                self._before_drafts[chunk.slot].append(replace(text))
                self._feed(text, chunk.tokens[at : at + 1])
                logits.append(self._row(text))
        seconds = self._true.predict(step_shape(self, chunks))
        self._clock += seconds
        return Forward(logits, surprisal, seconds)

    def _check(self, chunk: Chunk) -> None:
        text = self._texts[chunk.slot]
        if chunk.start != text.length:
            raise DecodeError(-1, f"slot {chunk.slot} is at {text.length}, not {chunk.start}")
        if text.length + len(chunk.tokens) > self.config.context:
            raise NoRoom(1, f"slot {chunk.slot} would pass its context of {self.config.context}")
        if not np.all((chunk.tokens >= 0) & (chunk.tokens < self.config.vocab)):
            raise DecodeError(-1, f"slot {chunk.slot} was given a token outside the vocabulary")

    def _row(self, text: _Text) -> Array:
        return np.asarray(self._after(text.last) * np.exp(-text.disorder))

    def _surprisal(self, chunk: Chunk) -> Array | None:
        if chunk.following is None:
            return None
        pairs = zip(chunk.tokens[chunk.asked], chunk.following[chunk.asked], strict=True)
        nats = [surprisals(self._after(int(given))[None], token[None])[0] for given, token in pairs]
        return chunk.answered(np.array(nats))

    def _feed(self, text: _Text, tokens: Array) -> None:
        c = self.config
        if text.generating and c.drift:
            for token in tokens:
                row = self._row(text)
                at_one = moments(row, 1.0)
                surprise = at_one.log_norm - (row[token] - at_one.peak) - at_one.entropy
                step = c.drift * (np.clip(surprise, -5, 5) + c.bias)
                text.disorder = float(np.clip((1 - c.relax) * text.disorder + step, -2.5, 2.5))
                text.last = int(token)
        text.last = int(tokens[-1])
        text.positions.extend(range(text.length, text.length + len(tokens)))
        text.length += len(tokens)
        text.extent = max(text.extent, len(text.positions))

    def evict(self, slot: int, start: int, stop: int) -> bool:
        if not self.config.can_evict:
            return False
        text = self._texts[slot]
        text.positions = [p for p in text.positions if not start <= p < stop]
        return True

    def rollback(self, slot: int, length: int) -> None:
        text = self._texts[slot]
        before = next((t for t in self._before_drafts[slot] if t.length == length), None)
        if not self.config.can_rollback or before is None:
            raise DecodeError(-1, f"slot {slot} cannot go back to {length} tokens")
        del text.positions[length - text.length :]
        self._texts[slot] = before
        self._before_drafts[slot] = []

    def compact(self, slot: int) -> None:
        text = self._texts[slot]
        text.extent = len(text.positions)

    def extent(self, slot: int) -> int:
        return self._texts[slot].extent

    def held(self, slot: int) -> Array:
        return np.array(self._texts[slot].positions, np.int64)

    def length(self, slot: int) -> int:
        return self._texts[slot].length

    def release(self, slot: int) -> None:
        self._texts[slot] = _Text()
        self._before_drafts[slot] = []

    def fork(self, source: int, target: int, length: int) -> None:
        origin = self._texts[source]
        if not self.config.can_fork or length != origin.length:
            raise CapabilityError(
                f"the simulated backend forks whole sequences: slot {source} holds {origin.length} "
                f"tokens, not {length}"
            )
        self.restore(target, self.save(source))

    def save(self, slot: int) -> bytes:
        return json.dumps(asdict(self._texts[slot])).encode()

    def restore(self, slot: int, data: bytes) -> None:
        self._texts[slot] = _Text(**json.loads(data))
        self._before_drafts[slot] = []

    def room(self) -> int:
        total = self.config.cells or self.config.slots * self.config.context
        return total - sum(len(text.positions) for text in self._texts)

    def now(self) -> float:
        return self._clock

    def sleep(self, seconds: float) -> None:
        self._clock += seconds

    def close(self) -> None:
        close_off(self)


def _logits_after(config: SimulatedConfig, token: int) -> Array:
    """Logits after a token, at no disorder: a property of the seed and the token alone.

    Contexts differ: after some tokens the next is nearly certain, as inside a word.
    """
    rng = np.random.default_rng((config.seed, token))
    sharpness = config.sharpness * rng.lognormal(0.0, 0.5)
    row = sharpness * rng.standard_normal(config.vocab)
    row[0] = -np.inf if config.end is None else config.end
    return row
