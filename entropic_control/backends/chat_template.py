"""Chat templates: which parts of a rendered chat are the template's, and which are what people wrote.

A control token, such as the one that ends a turn, has a text. Where the template writes that text it means
the token; where a message holds it, it is text like any other. Both end up in one string, so the values of
the turns are rendered once more between random marks, which say where they went.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from entropic_control.errors import ModelError

Turns = list[dict[str, str]]
Span = tuple[int, int]

ROLES = frozenset(
    [
        *("system", "developer", "user", "assistant", "model"),
        *("tool", "function", "ipython", "observation", "environment"),
    ]
)
"""Roles that a template may make control tokens of, as `<|user|>`; any other role is text."""


class Special(NamedTuple):
    """A control token and its text."""

    text: str
    token: int
    strips_left: bool = False
    """Whether it swallows the blanks in front of it."""
    strips_right: bool = False


class Rendered(NamedTuple):
    """A rendered chat, and where the values of its turns stand in it, rising."""

    text: str
    values: tuple[Span, ...] = ()


class Specials:
    """The control tokens of a vocabulary, by their texts."""

    def __init__(self, specials: Iterable[Special]) -> None:
        self._of = {special.text: special for special in specials if special.text}
        texts = sorted(self._of, key=len, reverse=True)
        self._longest = len(texts[0]) if texts else 0
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._any_case = re.compile(self._pattern.pattern, re.IGNORECASE)
        folded = [text.lower() for text in texts]
        self._ends = {text[at:] for text in folded for at in range(1, len(text))}
        self._starts = {text[:at] for text in folded for at in range(1, len(text))}
        self._folded = folded

    def split(self, rendered: Rendered) -> list[str | int] | None:
        """The template's own control tokens, and the texts between them.

        Returns
        -------
        list of str or int, or None
            In order; None if every control token's text is the template's own, so that the whole can be
            tokenised at once.
        """
        parts, written = self._parts(rendered)
        return [part for part in parts if part != ""] if written else None

    def own(self, rendered: Rendered) -> list[int]:
        """The template's own control tokens."""
        return [part for part in self._parts(rendered)[0] if isinstance(part, int)]

    def _parts(self, rendered: Rendered) -> tuple[list[str | int], bool]:
        """Tokens and texts, and whether one of the texts holds what a person wrote of a token."""
        text, parts, begin, at = rendered.text, list[str | int](), 0, 0
        written = False
        while found := self._pattern.search(text, at):
            start, stop = found.span()
            if any(start < right and left < stop for left, right in rendered.values):
                written, at = True, start + 1
                continue
            special = self._of[found[0]]
            between = text[begin:start]
            parts += [between.rstrip() if special.strips_left else between, special.token]
            begin = stop
            if special.strips_right:
                begin += len(text) - stop - len(text[stop:].lstrip())
            at = begin
        parts.append(text[begin:])
        return parts, written

    def suspect(self, value: str) -> list[Span]:
        """Where a value holds a control token's text in any case, or may be part of one at its ends."""
        core = value.strip()
        first, low = value.find(core), core.lower()
        if len(low) != len(core):  # a letter whose lower case is two: the whole of it then
            return [(first, first + len(core))]
        if any(low in text for text in self._folded):
            return [(first, first + len(core))] if core else []
        spans = [found.span() for found in self._any_case.finditer(core)]
        sizes = range(min(len(core), self._longest - 1), 0, -1)
        spans += [(0, size) for size in sizes if low[:size] in self._ends][:1]
        spans += [(len(core) - size, len(core)) for size in sizes if low[-size:] in self._starts][
            :1
        ]
        return [(first + start, first + stop) for start, stop in _merged(spans)]


def render(template: Callable[[Turns], str], turns: Turns, specials: Specials) -> Rendered:
    """Render a chat, and find what of it the turns' values became.

    Parameters
    ----------
    template : function
        Gives the text of turns; it may trim, change or repeat what is in them, and look into it.
    turns : list of dict
        The chat.
    specials : Specials
        The vocabulary's control tokens.

    Raises
    ------
    ModelError
        If the template is faulty or refuses the turns, or if it looks at a control token's text in a
        message so closely that template and message cannot be told apart.
    """
    try:
        plain = template(turns)
    except Exception as error:  # templates come with models and raise what they like
        words = f"{type(error).__name__}: {error}"
        raise ModelError(f"the model's chat template does not take these turns: {words}") from error
    # Marks around whole values show the most. A template that looks at how a value begins or how long it is
    # can tell them; then only what could be taken for a control token is marked.
    for find in (_core, specials.suspect):
        marks = _marks(chain.from_iterable(turn.values() for turn in turns), plain)
        marked = [
            {
                key: value if key == "role" and value in ROLES else _mark(value, find(value), marks)
                for key, value in turn.items()
            }
            for turn in turns
        ]
        try:
            rendered = _unmarked(template(marked), marks)
        except Exception:  # noqa: BLE001 (it took the turns without the marks)
            continue
        if rendered is not None and rendered.text == plain:
            return rendered
        # The template took another way, but every token in the text without marks is its own.
        if rendered is not None and specials.own(rendered) == specials.own(Rendered(plain)):
            return Rendered(plain)
    raise ModelError(
        "a message holds the text of a control token, and the model's chat template treats such "
        "messages in a way of its own: leave it out, or give token ids"
    )


def _core(value: str) -> list[Span]:
    """All of a value but the blanks around it, which templates trim."""
    core = value.strip()
    first = value.find(core)
    return [(first, first + len(core))] if core else []


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _marks(values: Iterable[str], plain: str) -> tuple[str, str]:
    """Two texts that stand nowhere yet: digits, which no template escapes, trims or changes the case of.

    They begin with their only zero, so that a digit in front of one cannot be taken for part of it.
    """
    known = [*values, plain]
    while True:
        first, second = (
            "0" + "".join(secrets.choice("123456789") for _ in range(19)) for _ in "ab"
        )
        if first != second and not any(mark in text for mark in (first, second) for text in known):
            return first, second


def _mark(value: str, spans: Sequence[Span], marks: tuple[str, str]) -> str:
    for start, stop in reversed(spans):
        value = value[:start] + marks[0] + value[start:stop] + marks[1] + value[stop:]
    return value


def _unmarked(text: str, marks: tuple[str, str]) -> Rendered | None:
    """The text without its marks, and what stood between them; None if they do not pair."""
    pieces = re.split(f"({marks[0]}|{marks[1]})", text)
    out, values, at, opened = [], [], 0, -1
    for place, piece in enumerate(pieces):
        if place % 2 == 0:
            out.append(piece)
            at += len(piece)
        elif (piece == marks[0]) == (opened >= 0):
            return None
        elif piece == marks[0]:
            opened = at
        else:
            values.append((opened, at))
            opened = -1
    return None if opened >= 0 else Rendered("".join(out), tuple(values))
