"""llama.cpp through its low-level API: many sequences in one batch, each in a stream of its own."""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from pydantic import Field

from entropic_control.backends import models, native
from entropic_control.backends.base import (
    Backend,
    BackendConfig,
    Capabilities,
    Chunk,
    Forward,
    Message,
    Prompt,
)
from entropic_control.backends.chat_template import Special, Specials, Turns, render
from entropic_control.backends.closing import CLOSED, close_off
from entropic_control.backends.conversion import converted
from entropic_control.backends.cost import CostModel, Weights
from entropic_control.backends.dimensions import Dimensions
from entropic_control.backends.llama_cpp_processor import (
    entropic_logits_processor as entropic_logits_processor,
)
from entropic_control.controllers.base import Array
from entropic_control.controllers.softmax import load_compiled, surprisals
from entropic_control.errors import CapabilityError, DecodeError, ModelError, NoRoom

if TYPE_CHECKING:
    from types import ModuleType

_CELL_PADDING = 256
"""llama.cpp runs attention over a multiple of this many cells."""

_ROUNDED = "model.gguf"
"""Name of a file with rounded weights, in a directory of its own."""

_CODES = {
    1: "no KV cells are left for this step",
    2: "the step was aborted",
    -1: "the engine refused the batch",
}


class LlamaCppConfig(BackendConfig):
    """llama.cpp on the CPU, and on whatever it was built to offload to.

    Parameters
    ----------
    model : str
        A known name (see `entropic models`), a path to a GGUF file, or hf://owner/repo/file.gguf.
    slots : int
        Sequences at once; each has a KV stream of its own, which batches faster than one shared cache.
    context : int
        Tokens a sequence may reach.
    step_tokens : int
        Tokens of one step: decode rows and prompt chunks together.
    threads : int or None
        CPU threads; None takes the cores this process may run on.
    flash_attention : bool
        Off is faster on CPUs (39 ms against 129 ms a step at 7,900 tokens).
    gpu_layers : int
        Layers to offload, where llama.cpp was built for it.
    chat : bool
        Whether text prompts are wrapped in the model's own chat template.
    weights : {"file", "q8_0"}
        As the file has them, or rounded once to 8 bits in blocks of one scale, and kept in the user's
        cache. CPUs multiply those faster than 4 bits with an offset (Q4_1): the default model then reads
        prompts 1.8 times as fast, decodes sets of 8 rows 1.2 times as fast and a single row a seventh
        slower, and its mean NLL of a text moves by 0.002 nats.
    """

    kind: Literal["llama_cpp"] = "llama_cpp"
    model: str = models.DEFAULT
    slots: int = Field(8, ge=1, le=256)
    context: int = Field(8192, ge=256)
    step_tokens: int = Field(512, ge=32)
    threads: int | None = Field(None, ge=1)
    flash_attention: bool = False
    gpu_layers: int = Field(0, ge=0)
    chat: bool = True
    weights: Literal["file", "q8_0"] = "file"

    def open(self) -> Backend:
        return LlamaCpp(self)

    def file(self) -> Path:
        """The GGUF file that is run.

        Raises
        ------
        ModelError
            If there is none, or its weights cannot be rounded.
        """
        path = models.resolve(self.model)
        if self.weights == "file":
            return path
        native.assure(self.model)
        return converted(path, _round, f"-{self.weights}") / _ROUNDED


class LlamaCpp:
    """The engine of `LlamaCppConfig`.

    Notes
    -----
    Logits are views into llama.cpp's own buffer: they hold until the next `forward`. Its memory is freed
    by `close`, or when the backend is dropped; not before the last view is.
    """

    def __init__(self, config: LlamaCppConfig) -> None:
        self.config = config
        native.assure(config.model)
        self._api: Any = _library()
        gc.collect()  # the garbage may hold engines: little to Python, 100 MB and more to llama.cpp
        path = config.file()
        self._open(str(path))
        # With the layout of its saved states, which flash attention changes.
        self.fingerprint = f"{models.digest(path)}{'-flash' * config.flash_attention}"
        api = self._api
        self._memory = api.llama_get_memory(self._context)
        self._vocab = api.llama_model_get_vocab(self._model)
        size = int(api.llama_vocab_n_tokens(self._vocab))
        can_evict = not (
            api.llama_model_is_recurrent(self._model) or api.llama_model_is_hybrid(self._model)
        )
        self.capabilities = Capabilities(
            name="llama_cpp",
            vocab=size,
            slots=config.slots,
            context=min(config.context, int(api.llama_n_ctx_seq(self._context))),
            step_tokens=config.step_tokens,
            can_evict=can_evict,
            can_swap=True,
            can_fork=True,
            can_rollback=can_evict,
            adjacent=True,
            block=1,
        )
        scale = int(api.llama_model_n_params(self._model)) / 135e6
        self.cost = CostModel(
            Weights(*(scale * w for w in (4.7e-3, 5.8e-3, 3e-6, 4.7e-3, 5e-7, 1.2e-3)))
        )
        self._batch = _Batch(
            api, max(config.step_tokens, config.slots), self.capabilities.context, size
        )
        self._held = np.zeros((config.slots, self.capabilities.context + 1), np.bool_)
        self._used = [0] * config.slots
        self._extent = [0] * config.slots
        self._length = [0] * config.slots
        self._pieces: dict[int, bytes] = {}
        self._ending: dict[int, bool] = {}
        # The buffer moves rarely, and making a view of it costs as much as a draw.
        self._rows = lru_cache(maxsize=64)(partial(_view, self._native, size))
        load_compiled()

    def _open(self, path: str) -> None:
        api, config = self._api, self.config
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = config.gpu_layers
        _log.clear()
        self._model = api.llama_model_load_from_file(path.encode(), parameters)
        if not self._model:
            raise ModelError(f"llama.cpp could not load {path!r}: {_last_words()}")
        self._native: Any = _Native(api, self._model)
        trained = int(api.llama_model_n_ctx_train(self._model))
        if config.context > trained:
            self.close()
            raise ModelError(
                f"context {config.context} is more than the {trained} tokens {path!r} was trained for"
            )
        threads = config.threads or _cores()
        wanted = api.llama_context_default_params()
        wanted.n_ctx = config.slots * config.context
        wanted.n_seq_max = config.slots
        wanted.n_batch = max(config.step_tokens, config.slots)
        wanted.n_ubatch = min(wanted.n_batch, 512)
        wanted.n_threads = wanted.n_threads_batch = threads
        wanted.kv_unified = False
        wanted.flash_attn_type = int(config.flash_attention)
        self._context = self._native.open(wanted)
        if not self._context:
            self.close()
            raise ModelError(
                f"llama.cpp could not make a context of {config.slots} x {config.context} tokens: "
                f"{_last_words()}"
            )

    def encode(self, prompt: Prompt) -> Array:
        if isinstance(prompt, str):
            if self.config.chat and self._template is not None:
                return self.encode([{"role": "user", "content": prompt}])
            return self._tokenize(prompt, add_special=True)
        if len(prompt) and isinstance(prompt[0], dict):
            return self._render([turn for turn in prompt if isinstance(turn, dict)])
        return np.asarray(prompt, np.int32)

    @cached_property
    def _template(self) -> str | None:
        text = self._api.llama_model_chat_template(self._model, None)
        return text.decode() if text else None

    @cached_property
    def _formatter(self) -> Callable[[Turns], str]:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        api = self._api
        begin, end = api.llama_vocab_bos(self._vocab), api.llama_vocab_eos(self._vocab)
        try:
            formatter = Jinja2ChatFormatter(
                template=self._template or "",
                eos_token=self._name(end),
                bos_token=self._name(begin),
                stop_token_ids=[end],
            )
        except Exception as error:  # a template of bad syntax raises while it is compiled
            raise ModelError(f"the model's chat template is faulty: {error}") from error
        return lambda turns: str(formatter(messages=cast("Any", turns)).prompt)

    @cached_property
    def _specials(self) -> Specials:
        api, vocab = self._api, self._vocab
        control = api.LLAMA_TOKEN_ATTR_CONTROL | api.LLAMA_TOKEN_ATTR_UNKNOWN
        kinds = ((i, api.llama_vocab_get_attr(vocab, i)) for i in range(self.capabilities.vocab))
        left, right = api.LLAMA_TOKEN_ATTR_LSTRIP, api.LLAMA_TOKEN_ATTR_RSTRIP
        return Specials(
            Special(self._name(token), token, bool(kind & left), bool(kind & right))
            for token, kind in kinds
            if kind & control
        )

    def _render(self, turns: list[Message]) -> Array:
        if self._template is None:
            raise ModelError("the model has no chat template: give text or token ids")
        rendered = render(self._formatter, turns, self._specials)
        parts = self._specials.split(rendered)
        api, begin = self._api, self._api.llama_vocab_bos(self._vocab)
        if parts is None:
            named = rendered.text.startswith(self._name(begin) or "\0")
            return self._tokenize(rendered.text, add_special=not named, parse_special=True)
        if api.llama_vocab_get_add_bos(self._vocab) and parts[:1] != [begin]:
            parts.insert(0, begin)
        if api.llama_vocab_get_add_eos(self._vocab):
            parts.append(api.llama_vocab_eos(self._vocab))
        tokens: list[int] = []
        for part in parts:
            tokens += [part] if isinstance(part, int) else self._tokenize(part).tolist()
        return np.array(tokens, np.int32)

    def _name(self, token: int) -> str:
        if token < 0:
            return ""
        return str(self._api.llama_vocab_get_text(self._vocab, token).decode())

    def _tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> Array:
        """Token ids, int32; with `parse_special` the texts of control tokens become those tokens."""
        data = text.encode()
        out = (ctypes.c_int32 * (len(data) + 8))()
        count = self._api.llama_tokenize(
            self._vocab, data, len(data), out, len(out), add_special, parse_special
        )
        return np.array(out[: max(count, 0)], np.int32)

    def piece(self, token: int) -> bytes:
        if token not in self._pieces:
            size = 32
            while size > 0:
                out = ctypes.create_string_buffer(size)
                wanted = self._api.llama_token_to_piece(self._vocab, token, out, size, 0, False)
                self._pieces[token] = out.raw[: max(wanted, 0)]
                size = -wanted  # negative if the piece is longer than the buffer
        return self._pieces[token]

    def is_end(self, token: int) -> bool:
        if token not in self._ending:
            self._ending[token] = bool(self._api.llama_vocab_is_eog(self._vocab, token))
        return self._ending[token]

    @cached_property
    def ends(self) -> Array:
        ids = (i for i in range(self.capabilities.vocab) if self.is_end(i))
        return np.fromiter(ids, np.int64)

    def forward(self, chunks: Sequence[Chunk]) -> Forward:
        for chunk in chunks:
            self._check(chunk)
        outputs = self._batch.fill(chunks)
        native = self._native  # held, so that no other thread frees it meanwhile
        began = time.perf_counter()
        code = int(self._api.llama_decode(native.context, self._batch.struct))
        seconds = time.perf_counter() - began
        if code != 0:
            for chunk in chunks:
                self._api.llama_memory_seq_rm(self._memory, chunk.slot, chunk.start, -1)
            message = _CODES.get(code, "the engine failed")
            raise (NoRoom if code == 1 else DecodeError)(code, message)
        for chunk in chunks:
            size = len(chunk.tokens)
            self._held[chunk.slot, chunk.start : chunk.start + size] = True
            self._length[chunk.slot] += size
            self._used[chunk.slot] += size
            self._extent[chunk.slot] = max(self._extent[chunk.slot], self._used[chunk.slot])
        return Forward(*self._collect(chunks, outputs), seconds)

    def _check(self, chunk: Chunk) -> None:
        # Before the engine sees them: it may take a wrong batch apart halfway, and a failed step is
        # undone by dropping every position from `start` on.
        if chunk.start != self._length[chunk.slot]:
            raise DecodeError(
                -1, f"slot {chunk.slot} is at {self._length[chunk.slot]}, not {chunk.start}"
            )
        if chunk.start + len(chunk.tokens) > self.capabilities.context:
            raise NoRoom(
                1, f"slot {chunk.slot} would pass its context of {self.capabilities.context}"
            )

    def _collect(
        self, chunks: Sequence[Chunk], outputs: int
    ) -> tuple[list[Array], list[Array | None]]:
        logits: list[Array] = []
        surprisal: list[Array | None] = []
        if not outputs:
            return [], [None] * len(chunks)
        first = self._api.llama_get_logits(self._context)
        table, rows = self._rows(ctypes.addressof(first.contents), outputs)
        row = 0
        for chunk in chunks:
            if chunk.following is None:
                surprisal.append(None)
                row += chunk.outputs
            else:
                asked = chunk.asked
                nats = surprisals(table[row : row + len(asked)], chunk.following[asked])
                surprisal.append(chunk.answered(nats))
                row += len(chunk.wanted)
            logits += rows[row - chunk.outputs : row]
        return logits, surprisal

    @property
    def dimensions(self) -> Dimensions:
        """The size of the model; keys and values are held at half precision."""
        api, model = self._api, self._model
        width, layers = int(api.llama_model_n_embd(model)), int(api.llama_model_n_layer(model))
        keys = width * int(api.llama_model_n_head_kv(model)) // int(api.llama_model_n_head(model))
        output = width * self.capabilities.vocab
        return Dimensions(
            weights=int(api.llama_model_n_params(model)) - output,
            output_weights=output,
            layers=layers,
            width=width,
            cell_bytes=2 * 2 * layers * keys,
            weight_bytes=int(api.llama_model_size(model)),
        )

    def evict(self, slot: int, start: int, stop: int) -> bool:
        if not self.capabilities.can_evict:
            return False
        if not self._api.llama_memory_seq_rm(self._memory, slot, start, stop):
            return False
        self._used[slot] -= int(np.count_nonzero(self._held[slot, start:stop]))
        self._held[slot, start:stop] = False
        self._length[slot] = self.length(slot)
        return True

    def rollback(self, slot: int, length: int) -> None:
        if not self.evict(slot, length, self.capabilities.context + 1):
            raise DecodeError(-1, f"the engine did not take back the drafts of slot {slot}")

    def compact(self, slot: int) -> None:
        data = self._take(slot)
        self.release(slot)
        self.restore(slot, data)

    def extent(self, slot: int) -> int:
        return -(-self._extent[slot] // _CELL_PADDING) * _CELL_PADDING

    def held(self, slot: int) -> Array:
        return _positions(self._take(slot))

    def length(self, slot: int) -> int:
        return int(self._api.llama_memory_seq_pos_max(self._memory, slot)) + 1

    def release(self, slot: int) -> None:
        self._api.llama_memory_seq_rm(self._memory, slot, -1, -1)
        self._held[slot] = False
        self._used[slot] = self._extent[slot] = self._length[slot] = 0

    def fork(self, source: int, target: int, length: int) -> None:
        # Through the saved state, because a partial seq_cp across streams aborts the process.
        if not 0 < length <= self.length(source):
            raise CapabilityError(
                f"slot {source} holds {self.length(source)} tokens: cannot fork the first {length}"
            )
        self.restore(target, self._take(source))
        if length < self.length(source) and not self.evict(
            target, length, self.capabilities.context + 1
        ):
            self.release(target)
            raise CapabilityError("this model cannot drop part of a sequence, so no prefix of one")

    def save(self, slot: int) -> bytes:
        return bytes(self._take(slot))

    def _take(self, slot: int) -> memoryview:
        native = self._native
        size = self._api.llama_state_seq_get_size(native.context, slot)
        buffer = (ctypes.c_uint8 * size)()
        written = self._api.llama_state_seq_get_data(native.context, buffer, size, slot)
        return memoryview(buffer).cast("B")[:written]

    def restore(self, slot: int, data: bytes | memoryview) -> None:
        self.release(slot)
        native, size = self._native, len(data)
        buffer = (ctypes.c_uint8 * size).from_buffer_copy(data)
        if self._api.llama_state_seq_set_data(native.context, buffer, size, slot) != size:
            self.release(slot)
            raise DecodeError(-1, f"the engine did not take the saved state of slot {slot}")
        positions = _positions(data)
        self._held[slot, positions] = True
        self._used[slot] = self._extent[slot] = len(positions)
        self._length[slot] = int(positions[-1]) + 1 if len(positions) else 0

    def room(self) -> int:
        return self.capabilities.context * self.config.slots - sum(self._used)

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        # Freed with the last reference to it, which this is unless somebody still looks at logits.
        self._native = self._rows = self._api = CLOSED
        close_off(self)


class _Native:
    """llama.cpp's model and context, freed when nothing refers to them any more.

    Parameters
    ----------
    api : module
        llama-cpp-python's low-level API.
    model
        The model's pointer, taken over.
    """

    def __init__(self, api: ModuleType, model: Any) -> None:
        self._api = api
        self._pointers = [model]
        self.context: Any = None
        # Not when the interpreter ends: a daemon thread may be decoding, and all is freed then anyhow.
        weakref.finalize(self, _free, api, self._pointers).atexit = False

    def open(self, wanted: Any) -> Any:
        """Make the context; its pointer, or nothing if llama.cpp refused."""
        self.context = self._api.llama_init_from_model(self._pointers[0], wanted)
        if self.context:
            self._pointers.append(self.context)
        return self.context


def _free(api: ModuleType, pointers: list[Any]) -> None:
    model, *contexts = pointers
    for context in contexts:
        api.llama_free(context)
    api.llama_model_free(model)


def _view(native: _Native, vocab: int, address: int, rows: int) -> tuple[Array, list[Array]]:
    """llama.cpp's output buffer as an array, shape (rows, vocab), and row by row."""
    buffer = (ctypes.c_float * (rows * vocab)).from_address(address)
    buffer.owner = native  # type: ignore[attr-defined] # whoever looks keeps it from being freed
    table = np.ctypeslib.as_array(buffer).reshape(rows, vocab)
    return table, list(table)


class _Batch:
    """One llama_batch over numpy memory, so that filling it costs no Python per token."""

    def __init__(self, api: ModuleType, size: int, context: int, vocab: int) -> None:
        self._vocab = vocab
        self.tokens = np.zeros(size, np.int32)
        self._unsigned = self.tokens.view(np.uint32)  # where a negative one is larger than any
        self._numbers = np.arange(context, dtype=np.int32)
        self.positions = np.zeros(size, np.int32)
        self.counts = np.ones(size, np.int32)
        self.sequences = np.zeros(size, np.int32)
        self.outputs = np.zeros(size, np.int8)
        step = self.sequences.itemsize
        self._pointers = self.sequences.ctypes.data + step * np.arange(size, dtype=np.uintp)
        batch = api.llama_batch
        fields = dict(batch._fields_)
        self.struct = batch(
            n_tokens=0,
            token=self.tokens.ctypes.data_as(fields["token"]),
            embd=None,
            pos=self.positions.ctypes.data_as(fields["pos"]),
            n_seq_id=self.counts.ctypes.data_as(fields["n_seq_id"]),
            seq_id=self._pointers.ctypes.data_as(fields["seq_id"]),
            logits=self.outputs.ctypes.data_as(fields["logits"]),
        )

    def fill(self, chunks: Sequence[Chunk]) -> int:
        """Lay the chunks out; returns how many rows of logits they ask for."""
        at = wanted = 0
        for chunk in chunks:
            stop = at + len(chunk.tokens)
            if stop > len(self.tokens):
                raise DecodeError(-1, f"a step holds at most {len(self.tokens)} tokens")
            self.tokens[at:stop] = chunk.tokens
            self.positions[at:stop] = self._numbers[chunk.start : chunk.start + stop - at]
            self.sequences[at:stop] = chunk.slot
            self.outputs[at:stop] = 0
            if chunk.following is None:
                self.outputs[stop - chunk.outputs : stop] = 1
                wanted += chunk.outputs
            else:
                self.outputs[at + chunk.wanted] = 1
                wanted += len(chunk.wanted)
            at = stop
        if at and np.maximum.reduce(self._unsigned[:at]) >= self._vocab:
            slot = self.sequences[self._unsigned[:at].argmax()]
            raise DecodeError(-1, f"slot {slot} was given a token outside the vocabulary")
        self.struct.n_tokens = at
        return wanted


def _positions(data: bytes | memoryview) -> Array:
    """Positions of the cells in a saved sequence state, rising.

    The layout is llama.cpp's own (`llama_kv_cache::state_write`): magic, sequence header, number of
    streams, then for each stream its cell count and, for each cell, its position and owners.
    """
    _, _, streams = struct.unpack_from("<3I", data)
    words = np.frombuffer(data, np.uint32, count=len(data) // 4)
    counts = words[3 : 3 + streams]
    used = np.flatnonzero(counts)
    if not used.size:
        return np.zeros(0, np.int64)
    first = 4 + int(used[0])
    cells = int(counts[used[0]])
    table = words[first : first + 3 * cells].reshape(cells, 3)
    if not np.all(table[:, 1] == 1):
        raise DecodeError(-1, "this version of llama.cpp lays its saved states out differently")
    return np.sort(table[:, 0].astype(np.int64))


def _round(gguf: Path, target: Path) -> None:
    """Write a GGUF file with its weights in 8 bits (Q8_0) into a directory."""
    api = _library()
    parameters = api.llama_model_quantize_default_params()
    parameters.ftype = api.LLAMA_FTYPE_MOSTLY_Q8_0
    parameters.allow_requantize = True
    parameters.nthread = _cores()
    _log.clear()
    if api.llama_model_quantize(str(gguf).encode(), str(target / _ROUNDED).encode(), parameters):
        raise ModelError(
            f"llama.cpp could not round the weights of {str(gguf)!r}: {_last_words()}; set "
            f"backend.weights to 'file'"
        )


def _cores() -> int:
    """The cores this process may run on, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_log: deque[str] = deque(maxlen=20)


def _last_words() -> str:
    return " ".join("".join(_log).split()) or "it gave no reason"


@lru_cache(maxsize=1)
def _library() -> ModuleType:
    try:
        from llama_cpp import llama_cpp as api
    except ImportError as error:
        raise CapabilityError(
            "the llama_cpp backend needs llama-cpp-python: pip install 'entropic-control[llama]'"
        ) from error
    except (
        OSError,
        RuntimeError,
    ) as error:  # a shared library that is missing, or lacks another one
        raise CapabilityError(
            f"llama-cpp-python cannot be loaded: {error}; `entropic doctor` says more"
        ) from error
    api.llama_log_set(_keep_errors(api), None)
    api.llama_backend_init()
    module: ModuleType = api
    return module


@lru_cache(maxsize=1)
def _keep_errors(api: ModuleType) -> Any:
    """The log callback; llama.cpp keeps the pointer, so it must never be collected."""
    warn_level = 3

    def callback(level: int, text: bytes, _: Any) -> None:
        if level >= warn_level:
            _log.append(text.decode(errors="replace"))

    return api.llama_log_callback(callback)
