"""Texts that every Python ships: the topics of its manual and the sources of its library, as tokens."""

from __future__ import annotations

import importlib
import inspect
from functools import lru_cache

import numpy as np

from entropic_control.backends.base import Backend
from entropic_control.controllers.base import Array

MODULES = ("argparse", "tarfile", "typing", "ast", "logging", "inspect", "zipfile", "subprocess")


@lru_cache(maxsize=1)
def documents() -> tuple[str, ...]:
    """Prose and code in turn, the longest first: Python's manual topics, and library modules."""
    from pydoc_data.topics import topics

    prose = sorted(topics.values(), key=lambda text: (-len(text), text))
    code = [inspect.getsource(importlib.import_module(name)) for name in MODULES]
    pairs = zip(prose, code, strict=False)
    return (*(text for pair in pairs for text in pair), *prose[len(code) :])


class Library:
    """The documents as a backend reads them.

    Parameters
    ----------
    backend : Backend
        Whose tokens they are. It must read text as it is, without a chat template.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        one, other = backend.encode("a"), backend.encode("b")
        self._begins = int(len(one) > 1 and one[0] == other[0])

    def tokens(self, text: str) -> Array:
        """Token ids of a text, without the token that begins a sequence."""
        return np.asarray(self._backend.encode(text)[self._begins :])

    def passage(self, number: int, length: int) -> Array:
        """The first `length` tokens of document `number`, or of the next one that is long enough."""
        texts = documents()
        for offset in range(len(texts)):
            text = texts[(number + offset) % len(texts)]
            # A token is seldom longer than a dozen characters: no need to read the whole text.
            tokens = self.tokens(text[: 12 * length + 200])
            if len(tokens) >= length:
                return tokens[:length]
        raise ValueError(f"no document has {length} tokens")
