"""Any causal model of transformers over a paged KV cache, with our kernels on CUDA and torch on CPUs."""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
from pydantic import Field

from entropic_control.backends import models
from entropic_control.backends.base import (
    Backend,
    BackendConfig,
    Capabilities,
    Chunk,
    Draw,
    Drawn,
    Forward,
    Prompt,
)
from entropic_control.backends.closing import CLOSED, close_off
from entropic_control.backends.cost import CostModel, Weights
from entropic_control.backends.paged.pool import BLOCK, BlockPool, Table
from entropic_control.controllers.base import Array
from entropic_control.errors import CapabilityError, DecodeError, ModelError, NoRoom

_LAYERS = {"full_attention": False, "sliding_attention": True}
"""The kinds of layers that are known, by transformers' names, and whether they must slide."""

_INSTALL = "pip install 'entropic-control[gpu]'"


class TritonConfig(BackendConfig):
    """A model of transformers with paged KV: Triton kernels on a CUDA device, plain torch on a CPU.

    Parameters
    ----------
    model : str
        A known name (see `entropic models`), a directory of transformers' format, hf://owner/repo, or
        a GGUF file, which is converted once and kept in the user's cache.
    tokenizer : str or None
        Where the tokenizer is, if not with the model.
    device : str
        "cuda", "cuda:1", "cpu"; "auto" takes CUDA where it is there. Asking for CUDA where there is
        none is an error.
    dtype : str
        Of weights, keys and values; "auto" is float32 on a CPU and the checkpoint's own on CUDA.
    slots : int
        Sequences at once.
    context : int
        Tokens a sequence may reach.
    cells : int or None
        Tokens of KV cache for all slots together; None gives every slot its whole context.
    step_tokens : int
        Tokens of one step: decode rows and prompt chunks together.
    attention : {"auto", "kernels", "gathered"}
        The paged kernels, or torch's attention over gathered keys and values, which is faster on a CPU;
        "auto" chooses by the device.
    kernels : str
        Which implementation of the kernels: auto, compiled, interpreter or reference.
    sampling : {"auto", "host", "device"}
        Where tokens are measured and drawn: by numpy on the host, which runs every controller, or by
        the control-and-sample kernel where the logits live, for the controllers it knows. "auto" is
        the device on CUDA.
    graphs : bool
        Whether decode steps are captured as CUDA graphs, on CUDA.
    threads : int or None
        CPU threads of torch; None leaves them as they are.
    chat : bool
        Whether text prompts are wrapped in the model's own chat template.
    """

    kind: Literal["triton"] = "triton"
    model: str = models.DEFAULT
    tokenizer: str | None = None
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    slots: int = Field(8, ge=1, le=256)
    context: int = Field(8192, ge=BLOCK)
    cells: int | None = Field(None, ge=BLOCK)
    step_tokens: int = Field(512, ge=32)
    attention: Literal["auto", "kernels", "gathered"] = "auto"
    kernels: Literal["auto", "compiled", "interpreter", "reference"] = "auto"
    sampling: Literal["auto", "host", "device"] = "auto"
    graphs: bool = True
    threads: int | None = Field(None, ge=1)
    chat: bool = True

    def open(self) -> Backend:
        _require("torch", "transformers")
        from entropic_control.backends.paged.loading import load
        from entropic_control.kernels._torch import torch

        device = _device(self.device)
        if device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # where graphs are captured
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        dtype = None if self.dtype == "auto" else getattr(torch, self.dtype)
        loaded = load(self.model, device, dtype, self.tokenizer)
        return Triton(self, loaded.model, loaded.tokenizer)


def _require(*packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise CapabilityError(f"the triton backend needs {package}: {_INSTALL}")


def _device(name: str) -> Any:
    """The torch device, if it is there.

    Raises
    ------
    CapabilityError
        If CUDA is asked for and cannot be had: never a silent run on the CPU.
    """
    from entropic_control.kernels._torch import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise CapabilityError(
            f"device {name!r} was asked for, and torch {torch.__version__} sees no CUDA device: set "
            f"backend.device to 'cpu', or install a torch built for CUDA and its driver"
        )
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise CapabilityError(f"device {name!r} was asked for, and there are {count} CUDA devices")
    return device


class Triton:
    """The engine of `TritonConfig`.

    Parameters
    ----------
    config : TritonConfig
        What to build; its `model` is only named in messages.
    model
        A causal model of transformers, on its device.
    tokenizer : optional
        Its tokenizer; without one, prompts are token ids.
    """

    def __init__(self, config: TritonConfig, model: Any, tokenizer: Any = None) -> None:
        from entropic_control.backends.paged.attention import NAME, Gathered, Kernels, PagedCache
        from entropic_control.backends.paged.drawing import Sampler
        from entropic_control.backends.paged.graphs import captured
        from entropic_control.backends.paged.runner import Runner
        from entropic_control.backends.paged.storage import Storage
        from entropic_control.backends.paged.text import Text

        self.config = config
        self._model = model
        self._text = Text(tokenizer, chat=config.chat)
        self.device = next(model.parameters()).device
        self._shape = model.config.get_text_config(decoder=True)
        self._check_context()
        vocab = int(model.get_output_embeddings().weight.shape[0])
        cells = config.cells if config.cells is not None else config.slots * config.context
        # Each slot may leave a block part empty, take one for the next token, and copy a shared one.
        self._reserve = 3 * config.slots
        self._pool = BlockPool(-(-cells // BLOCK) + self._reserve + 1)
        self._tables = [Table() for _ in range(config.slots)]
        self._layers = int(self._shape.num_hidden_layers)
        self._storage = Storage(self._layers, self._pool.blocks, config.kernels)
        gathers = config.attention == "gathered" or (
            config.attention == "auto" and self.device.type != "cuda"
        )
        attend = (Gathered if gathers else Kernels)(config.kernels)
        self._cache = PagedCache(self._layers, self._storage, attend)
        model.set_attn_implementation(NAME)
        graphs = config.graphs and self.device.type == "cuda"
        self._runner = Runner(model, self._cache, captured if graphs else None)
        self.capabilities = Capabilities(
            name="triton",
            vocab=vocab,
            slots=config.slots,
            context=config.context,
            step_tokens=config.step_tokens,
            can_evict=True,
            can_swap=True,
            can_fork=True,
            can_rollback=True,
            can_select=True,
            can_score_attention=True,
            can_draw=config.sampling == "device"
            or (config.sampling == "auto" and self.device.type == "cuda"),
        )
        self._sampler = Sampler(config.slots, vocab, self.device, config.kernels)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self.cost = CostModel(_prior(parameters, self.device.type))
        self._probe()

    def _check_context(self) -> None:
        trained = getattr(self._shape, "max_position_embeddings", None)
        if trained is not None and self.config.context > trained:
            raise ModelError(
                f"context {self.config.context} is more than the {trained} tokens "
                f"{self.config.model!r} was trained for: set backend.context lower"
            )

    def _probe(self) -> None:
        """One token and a chunk of two: makes the pools, and refuses what cannot run before a request."""
        for size in (1, 2):
            chunk = Chunk(0, 0, np.zeros(size, np.int32), True)
            try:
                self.forward([chunk])
            except DecodeError as error:
                raise CapabilityError(
                    f"{type(self._model).__name__} cannot run on a paged cache: {error}"
                ) from error
            self.release(0)
        name = type(self._model).__name__
        if missing := self._storage.missing:
            raise CapabilityError(
                f"layers {missing} of {name} keep no keys and values: recurrent and hybrid models are "
                f"not supported"
            )
        # A layer with attention of its own would see the newest tokens alone, and nobody would notice.
        kinds = getattr(self._shape, "layer_types", None) or ["full_attention"] * self._layers
        for layer, kind in enumerate(kinds):
            attended = layer in self._cache.windows
            slides = self._cache.windows.get(layer) is not None
            if not attended or kind not in _LAYERS or (_LAYERS[kind] and not slides):
                raise CapabilityError(
                    f"layer {layer} of {name} ({kind}) does not attend through transformers' attention "
                    f"interface as the paged kernels need it"
                )

    @cached_property
    def fingerprint(self) -> str:
        from entropic_control.backends.paged.loading import digest

        return digest(self._model)

    def encode(self, prompt: Prompt) -> Array:
        return self._text.encode(prompt)

    def piece(self, token: int) -> bytes:
        return self._text.piece(token)

    def is_end(self, token: int) -> bool:
        return token in self._ends

    @property
    def ends(self) -> Array:
        return np.array(sorted(self._ends), np.int64)

    @cached_property
    def _ends(self) -> frozenset[int]:
        own = getattr(self._model.generation_config, "eos_token_id", None)
        listed = own if isinstance(own, list) else [own]
        return frozenset(t for t in [*listed, self._text.end] if t is not None)

    def forward(self, chunks: Sequence[Chunk], *, resident: bool = False) -> Forward:
        for chunk in chunks:
            self._check(chunk)
        if len({chunk.slot for chunk in chunks}) < len(chunks):
            raise DecodeError(-1, "a slot was given twice in one step")
        tables = [self._tables[chunk.slot] for chunk in chunks]
        self._pool.check(tables, [len(chunk.tokens) for chunk in chunks])
        began = time.perf_counter()
        pairs = zip(chunks, tables, strict=True)
        copies = [self._pool.extend(table, len(chunk.tokens)) for chunk, table in pairs]
        try:
            self._storage.copy([copy for copy in copies if copy is not None])
            result = self._runner(chunks, tables, resident=resident)
        except Exception as error:
            for chunk, table, copy in zip(chunks, tables, copies, strict=True):
                self._pool.retract(table, chunk.start, copy)
            if isinstance(error, (CapabilityError, DecodeError, ModelError)):
                raise
            raise self._failure(error) from error
        return result._replace(seconds=time.perf_counter() - began)

    def _check(self, chunk: Chunk) -> None:
        length = self._tables[chunk.slot].length
        if chunk.start != length:
            raise DecodeError(-1, f"slot {chunk.slot} is at {length}, not {chunk.start}")
        if chunk.start + len(chunk.tokens) > self.capabilities.context:
            raise NoRoom(
                1, f"slot {chunk.slot} would pass its context of {self.capabilities.context}"
            )
        if not np.all((chunk.tokens >= 0) & (chunk.tokens < self.capabilities.vocab)):
            raise DecodeError(-1, f"slot {chunk.slot} was given a token outside the vocabulary")

    def _failure(self, error: Exception) -> DecodeError:
        from entropic_control.kernels._torch import torch

        if isinstance(error, torch.cuda.OutOfMemoryError):
            return NoRoom(1, f"{self.device} has too little memory left for this step")
        return DecodeError(-1, f"the model failed: {type(error).__name__}: {error}")

    def draw(self, logits: Sequence[Any], draw: Draw) -> Drawn:
        return self._sampler(logits, draw)

    def evict(self, slot: int, start: int, stop: int) -> bool:
        table = self._tables[slot]
        if stop >= table.length:
            self._pool.truncate(table, start)
            return True
        if start % BLOCK or stop % BLOCK:
            return False  # a block is held or not
        self._pool.evict(table, start, stop)
        return True

    def rollback(self, slot: int, length: int) -> None:
        self._pool.truncate(self._tables[slot], length)

    def compact(self, slot: int) -> None:
        """A table has no holes: evicted blocks are free at once."""

    def extent(self, slot: int) -> int:
        return self._tables[slot].cells

    def held(self, slot: int) -> Array:
        return self._tables[slot].positions()

    def length(self, slot: int) -> int:
        return self._tables[slot].length

    def release(self, slot: int) -> None:
        self._pool.release(self._tables[slot])

    def fork(self, source: int, target: int, length: int) -> None:
        table = self._tables[source]
        if not 0 < length <= table.length:
            raise CapabilityError(
                f"slot {source} holds {table.length} tokens: cannot fork the first {length}"
            )
        self.release(target)
        self._tables[target] = self._pool.share(table, length)

    def save(self, slot: int) -> bytes:
        table = self._tables[slot]
        arrays = {f"kv/{at}": data for at, data in enumerate(self._storage.take(table.blocks))}
        arrays["numbers"] = table.numbers.astype(np.int64)
        arrays["length"] = np.array(table.length)
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **arrays)
        return file.getvalue()

    def restore(self, slot: int, data: bytes) -> None:
        self.release(slot)
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                contents = [arrays[f"kv/{at}"] for at in range(len(arrays.files) - 2)]
                numbers, length = arrays["numbers"].tolist(), int(arrays["length"])
            table = self._tables[slot] = self._pool.fill(numbers, length)
            self._storage.put(table.blocks, contents)
        except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
            self.release(slot)
            raise DecodeError(-1, f"the saved state of slot {slot} is unfit: {error}") from error

    def room(self) -> int:
        slack = sum(table.slack for table in self._tables)
        return max(BLOCK * (self._pool.free - self._reserve) + slack, 0)

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def greedy(self, logits: Sequence[Any]) -> list[int]:
        """The most probable tokens of resident logits: the least that sampling can cost."""
        from entropic_control.backends.paged.drawing import joined

        tokens: list[int] = joined(logits).argmax(-1).tolist()
        return tokens

    def occupy(self, slot: int, numbers: Sequence[int], length: int) -> None:
        """Let a slot hold blocks whose keys and values were never computed: for timing."""
        self.release(slot)
        self._tables[slot] = self._pool.fill(numbers, length)

    @contextmanager
    def plain(self) -> Iterator[Any]:
        """The model with transformers' own attention, for comparisons."""
        from entropic_control.backends.paged.attention import NAME

        self._model.set_attn_implementation("sdpa")
        try:
            yield self._model
        finally:
            self._model.set_attn_implementation(NAME)

    def close(self) -> None:
        # Let go of at once, whoever still holds this object.
        self._model = self._runner = self._cache = self._storage = self._sampler = CLOSED
        close_off(self)


def _prior(parameters: int, device: str) -> Weights:
    """Seconds of each feature of a step before any was measured."""
    scale = parameters / 135e6
    if device == "cpu":
        return Weights(*(scale * w for w in (2.5e-2, 4e-3, 5e-7, 4e-3, 5e-8, 1.2e-3)))
    return Weights(5e-3, 1e-4 * scale, 1e-9 * scale, 1e-5 * scale, 1e-10 * scale, 2e-6 * scale)
