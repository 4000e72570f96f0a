"""Which tokens are numbers, or parts of one."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from entropic_control.controllers.base import Array


class Numerals:
    """The tokens of a vocabulary that hold a digit. Each is looked at once.

    Parameters
    ----------
    piece : function
        Gives the bytes of a token id.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._holds = lru_cache(maxsize=None)(lambda token: bool(re.search(rb"\d", piece(token))))

    def among(self, tokens: Array) -> Array:
        """A mask of those tokens that hold a digit, shape (n,)."""
        ids, places = np.unique(tokens, return_inverse=True)
        return np.array([self._holds(token) for token in ids.tolist()], np.bool_)[places]
