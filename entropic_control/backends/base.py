"""What an engine has to offer so that the decode loop can run on it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from entropic_control.backends.cost import CostModel, Shape
from entropic_control.controllers.base import Array, Kinded
from entropic_control.controllers.signals import Reading

Message = dict[str, str]
"""A chat turn: {"role": ..., "content": ...}."""

Prompt = str | Sequence[Message] | Sequence[int]
"""Text (wrapped in the model's chat template), chat turns, or token ids as they are."""


class Capabilities(NamedTuple):
    """What a backend can do; what it cannot is refused when the engine is built."""

    name: str
    vocab: int
    slots: int
    """Sequences it holds at once."""
    context: int
    """Tokens a sequence may reach."""
    step_tokens: int
    """Tokens of one step, at most."""
    can_evict: bool
    can_swap: bool
    """Whether a sequence's KV can be taken out and put back."""
    can_fork: bool
    can_rollback: bool = False
    """Whether it is `Reversible`, and so can be given drafts."""
    can_select: bool = False
    """Whether a step may attend to some of a sequence's blocks and keep the others."""
    can_score_attention: bool = False
    """Whether it can say how much attention each block got."""
    can_draw: bool = False
    """Whether it measures and samples where the logits live; then it is a `Drawing` too."""
    adjacent: bool = False
    """Whether rows go through the model in one pass only from neighbouring slots."""
    block: int = 16
    """Tokens that are evicted together: an evicted range starts and ends at a multiple of it."""
    virtual_clock: bool = False
    """Whether time passes on its clock only by `forward` and `sleep`."""


class Chunk(NamedTuple):
    """Tokens of one sequence that a step feeds to the model."""

    slot: int
    start: int
    """Position of the first token."""
    tokens: Array
    """Token ids, shape (n,), int32."""
    sample: bool
    """Whether the logits after the last token are wanted."""
    following: Array | None = None
    """Tokens that follow the first m of `tokens` in the prompt, shape (m,), m at most n: asks for their
    surprisals, except where it is negative."""
    drafts: int = 0
    """How many of `tokens`, the last ones, are guesses: the logits before each of them are wanted too."""
    attend: Array | None = None
    """Numbers of the held blocks of 16 tokens that a single token attends to, besides the newest one;
    None for all. Only for backends that `can_select`."""
    score: bool = False
    """Whether the attention that a single token pays to each block is wanted. Only for backends that
    `can_score_attention`."""

    @property
    def outputs(self) -> int:
        """Rows of logits it asks for: after the last token, and before each draft."""
        return self.drafts + 1 if self.sample else 0

    @property
    def asked(self) -> Array:
        """Which of `tokens` have the surprisal of the next one asked for: indices, rising."""
        if self.following is None:
            return np.zeros(0, np.intp)
        return np.flatnonzero(self.following >= 0)

    @property
    def wanted(self) -> Array:
        """Which of `tokens` have their logits asked for, one way or the other: indices, rising."""
        size = len(self.tokens)
        sampled = np.arange(size - self.outputs, size)
        return sampled if self.following is None else np.union1d(self.asked, sampled)

    def answered(self, nats: Array) -> Array | None:
        """The surprisals of what was `asked` in their places of `following`, NaN in the others."""
        if self.following is None:
            return None
        out = np.full(len(self.following), np.nan)
        out[self.asked] = nats
        return out


class Forward(NamedTuple):
    """What a step gave. The logits may be views that hold until the next call; they may be written to."""

    logits: list[Array]
    """Rows, shape (vocab,), chunk by chunk: `outputs` of each, in order of position."""
    surprisal: list[Array | None]
    """For each chunk: -ln p of `following`, nats, NaN where it was not asked, or None."""
    seconds: float
    """Time in the engine itself, by the backend's clock: the rest of a step is control overhead."""
    attention: Sequence[Attention | None] = ()
    """For each chunk: where its token looked, or None. Empty if no chunk asked."""


class Attention(NamedTuple):
    """Where a token looked, arrays of shape (n,)."""

    number: Array
    """Numbers of the blocks it attended to, rising."""
    mass: Array
    """Share of the attention on each, the mean over heads and layers."""


class Backend(Protocol):
    """An inference engine. Slots are numbered from 0; sequences belong to slots."""

    capabilities: Capabilities
    cost: CostModel

    @property
    def fingerprint(self) -> str:
        """Tells models apart: saved KV fits only where this is the same."""

    def encode(self, prompt: Prompt) -> Array:
        """Token ids of a prompt, int32."""

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for; control tokens stand for none."""

    def is_end(self, token: int) -> bool:
        """Whether the token ends the generation."""

    @property
    def ends(self) -> Array:
        """All tokens that end the generation."""

    def forward(self, chunks: Sequence[Chunk]) -> Forward:
        """Run one step. The engine hands the chunks over in rising order of slots.

        Raises
        ------
        NoRoom
            No KV cells are left; nothing was changed.
        DecodeError
            The engine failed; ask `length` what it still holds.
        """

    def evict(self, slot: int, start: int, stop: int) -> bool:
        """Drop the KV of positions [start, stop); False if refused, and then nothing changed."""

    def compact(self, slot: int) -> None:
        """Close the holes that evictions left, where that saves time."""

    def extent(self, slot: int) -> int:
        """Cells that attention runs over in this slot, holes included."""

    def held(self, slot: int) -> Array:
        """Positions whose KV the engine itself says it holds, rising; for checks and after failures."""

    def length(self, slot: int) -> int:
        """One more than the last position the engine holds in the slot; 0 if empty."""

    def release(self, slot: int) -> None:
        """Empty the slot."""

    def fork(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` tokens of `source`."""

    def save(self, slot: int) -> bytes:
        """The KV of a slot, to be put back by `restore`, here or in another slot."""

    def restore(self, slot: int, data: bytes) -> None:
        """Put back what `save` took."""

    def room(self) -> int:
        """KV cells that are free for all slots together."""

    def now(self) -> float:
        """The clock that latencies are measured by, seconds."""

    def sleep(self, seconds: float) -> None:
        """Let time pass on that clock."""

    def close(self) -> None:
        """Free the engine."""


class Reversible(Backend, Protocol):
    """A backend with `can_rollback`: it takes chunks with drafts, and takes wrong ones back."""

    def rollback(self, slot: int, length: int) -> None:
        """Forget the slot's last chunk from position `length` on, as if never fed.

        That is how drafts are taken back, and the whole chunk after a step that was cut short.

        Raises
        ------
        DecodeError
            The engine refused; ask `length` what it holds.
        """


class Draw(NamedTuple):
    """What `Drawing.draw` is to do with each row of logits, arrays of shape (rows,)."""

    seeds: Sequence[int]
    steps: Sequence[int]
    """Key and counter of each row's random number."""
    temperature: Array
    """T in force, where no gains are given."""
    gains: Any = None
    """Parameters of a PI loop, by the names of `PITemperature`; None for a temperature that is given."""
    state: Array | None = None
    """State of that loop before the step, shape (5, rows), in the order of `PIState`."""
    cut: tuple[str, float] | None = None
    """A truncation, by the names of the kernels: ("top_k", 40), ("top_p", 0.9), ("min_p", 0.05)."""
    place: Literal["before", "after"] = "before"
    """Whether it is made before the temperature or after."""


class Drawn(NamedTuple):
    """What a step measured and drew."""

    tokens: list[int]
    """-1 where the row was no distribution."""
    reading: Reading
    state: Array | None
    """Of the PI loop after the step, shape (5, rows)."""


class Drawing(Protocol):
    """What a backend that `can_draw` offers besides."""

    def forward(self, chunks: Sequence[Chunk], *, resident: bool = False) -> Forward:
        """Run one step; `resident` leaves the logits where they are, for `draw`."""

    def draw(self, logits: Sequence[Any], draw: Draw) -> Drawn:
        """Measure, control and sample the rows of the last `forward`."""


class BackendConfig(Kinded):
    """Base of the backend configurations: which engine, which model, what size.

    Parameters
    ----------
    cost_model : {"measured", "fixed"}
        Where the predicted seconds of a step come from: learnt from the engine's own steps, or the
        built-in prior for good. What runs together in a step, in which chunks a prompt is read, how far
        ahead is guessed and who sits where follow from them, and how a step is put together changes how
        its numbers are rounded (on llama.cpp by some 1e-3 of a logit), so that now and then another token
        is drawn. With one sequence at a time and no speculation tokens depend on the configuration, the
        prompt, the seed and the model alone. With several, or with speculation, "fixed" makes them so,
        on one machine and number of threads, for requests without `deadline` and `arrive`, which are in
        seconds; the schedule then is that of the prior's machine.
    """

    family: ClassVar[str] = "backend"
    cost_model: Literal["measured", "fixed"] = "measured"

    @property
    def delay(self) -> int:
        """Tokens from a measurement to the first token drawn under the command that it led to.

        One, with drafts too, which are verified token by token, and in vLLM, where a reading moves its
        state before the next step samples; an engine that runs ahead of its readings has more.
        """
        return 1

    @abstractmethod
    def open(self) -> Backend:
        """Load the model and make the engine ready.

        Raises
        ------
        ModelError
            The model is missing, unreadable or unfit.
        CapabilityError
            The engine cannot run here; the message says what to install.
        """


def step_shape(backend: Backend, chunks: Sequence[Chunk]) -> Shape:
    """The cost features of a step that the backend has just run."""
    decoding: list[Chunk] = []
    longest = drafted = prompt_tokens = prompt_reads = measured = 0
    for chunk in chunks:
        size, cells = len(chunk.tokens), backend.extent(chunk.slot)
        if size - chunk.drafts > 1:
            prompt_tokens += size
            prompt_reads += int(size * (cells - size / 2))
            measured += len(chunk.asked)
        else:
            decoding.append(chunk)
            longest = max(longest, cells)
            drafted += chunk.drafts
    return Shape(
        rows=len(decoding),
        longest=longest,
        prompt_tokens=prompt_tokens,
        prompt_reads=prompt_reads,
        measured=measured,
        drafted=drafted,
        passes=_passes(decoding, backend.capabilities.adjacent),
    )


def _passes(chunks: Sequence[Chunk], adjacent: bool) -> int:
    """Rows with drafts of one length go together, of neighbouring slots only if `adjacent`."""
    if len(chunks) < 2:
        return len(chunks)
    kinds = {chunk.drafts for chunk in chunks}
    if not adjacent:
        return len(kinds)
    return sum(runs(chunk.slot for chunk in chunks if chunk.drafts == kind) for kind in kinds)


def runs(slots: Iterable[int]) -> int:
    """Number of runs of neighbours among slots."""
    rising = sorted(slots)
    return bool(rising) + sum(after - before > 1 for before, after in pairwise(rising))
