"""Prompts to token ids and token ids to bytes, with a tokenizer of transformers."""

from __future__ import annotations

import json
import re
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from entropic_control.backends.base import Prompt
from entropic_control.backends.chat_template import Special, Specials, render
from entropic_control.controllers.base import Array
from entropic_control.errors import ModelError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Text:
    """A tokenizer, or the lack of one.

    Parameters
    ----------
    tokenizer
        Of transformers, or None: then prompts are token ids and pieces are empty.
    chat : bool
        Whether text is wrapped in the chat template, if there is one.
    """

    def __init__(self, tokenizer: Any, *, chat: bool) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self.piece = lru_cache(maxsize=1 << 17)(self._piece)

    def encode(self, prompt: Prompt) -> Array:
        """Token ids, int32.

        Raises
        ------
        ModelError
            If the prompt needs a tokenizer or chat template that the model does not have.
        """
        if isinstance(prompt, str):
            if self._chat and self._template:
                return self._render([{"role": "user", "content": prompt}])
            return self._ids(prompt, add=True, parse=False)
        if len(prompt) and isinstance(prompt[0], dict):
            return self._render([turn for turn in prompt if isinstance(turn, dict)])
        return np.asarray(prompt, np.int32)

    @property
    def _template(self) -> str | None:
        return getattr(self._tokenizer, "chat_template", None)

    def _render(self, turns: list[dict[str, str]]) -> Array:
        if not self._template:
            raise ModelError("the model has no chat template: give text or token ids")
        rendered = render(self._formatted, turns, self._specials)
        parts = self._specials.split(rendered)
        if parts is None:
            return self._ids(rendered.text, add=False, parse=True)
        pieces = (
            [p] if isinstance(p, int) else self._ids(p, add=False, parse=False) for p in parts
        )
        return np.concatenate([np.asarray(piece, np.int32) for piece in pieces])

    def _formatted(self, turns: list[dict[str, str]]) -> str:
        text = self._tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False
        )
        return str(text)

    @cached_property
    def _specials(self) -> Specials:
        added = self._tokenizer.added_tokens_decoder.items()
        return Specials(
            Special(token.content, number, token.lstrip, token.rstrip)
            for number, token in added
            if token.special
        )

    def _ids(self, text: str, *, add: bool, parse: bool) -> Array:
        """Token ids, int32; with `parse` the texts of control tokens become those tokens."""
        if self._tokenizer is None:
            raise ModelError("the model has no tokenizer: give token ids, or set backend.tokenizer")
        text.encode()  # a lone surrogate is an error here and a crash in the tokenizer
        ids = self._tokenizer(text, add_special_tokens=add, split_special_tokens=not parse)[
            "input_ids"
        ]
        return np.asarray(ids, np.int32)

    @property
    def end(self) -> int | None:
        """The tokenizer's end token."""
        return getattr(self._tokenizer, "eos_token_id", None)

    def _piece(self, token: int) -> bytes:
        if self._tokenizer is None or token >= len(self._tokenizer) or token in self._special:
            return b""
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        if token in self._added:
            return name.encode()
        if self._byte_level:
            return bytes(_BYTE_OF[character] for character in name)
        if byte := _BYTE.fullmatch(name):
            return bytes.fromhex(byte[1])
        return name.replace("\u2581", " ").encode()

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.added_tokens_decoder)

    @cached_property
    def _byte_level(self) -> bool:
        """Whether tokens spell their bytes in GPT-2's printable characters."""
        described = json.loads(self._tokenizer.backend_tokenizer.to_str())
        return '"ByteLevel"' in json.dumps(described.get("decoder"))


def _byte_characters() -> dict[str, int]:
    """GPT-2's character of each byte: itself where it is printable, else one from 256 on in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    pairs = [(byte, byte) for byte in printable]
    pairs += [(256 + place, byte) for place, byte in enumerate(others)]
    return {chr(character): byte for character, byte in pairs}


_BYTE_OF = _byte_characters()
