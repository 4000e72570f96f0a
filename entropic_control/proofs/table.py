"""The table of claims: what `certify` goes through, open to anyone's own.

A claim joins it by `@claim(part)` on its class, or on a function that makes claims. Other distributions
offer theirs through the entry point group `entropic_control.claims`: each point names a module, class or
function whose import registers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import NamedTuple, TypeVar

from entropic_control.errors import ConfigError, EntropicError
from entropic_control.proofs.claim import Claim, Unfinished
from entropic_control.proofs.subject import PARTS, Subject

ENTRY_POINTS = "entropic_control.claims"
WHOLE = "configuration"
"""The part of claims about the configuration as a whole."""
BUILTIN = (
    "gainclaims",
    "conformance",
    "measuredslope",
    "linearloop",
    "loopclaims",
    "lawclaims",
    "requestgains",
    "cutting",
    "estimates",
    "topk",
    "queueclaims",
    "keepclaims",
)
"""Modules of this package that register claims, in the order in which they are told."""

Made = Iterable[Claim | str]
"""What is claimed about a subject; a string is a note on what is not."""


class Entry(NamedTuple):
    """A row of the table."""

    name: str
    part: str
    make: Callable[[Subject], Made]
    home: str
    """Where it was defined."""


T = TypeVar("T", bound=Callable[..., object])
_table: dict[str, Entry] = {}


def claim(part: str) -> Callable[[T], T]:
    """Register a claim.

    Parameters
    ----------
    part : str
        The part it is about: 'temperature', 'truncation', 'estimator', 'priority', 'pruning' or
        'speculation', or 'configuration' for all together. It is asked for only where there is one.

    Returns
    -------
    decorator
        Of a `Claim` class, whose `certify` is asked for claims about a subject, or of a function from a
        `Subject` to claims. A string among them is a note on something that no claim covers.

    Raises
    ------
    ConfigError
        For another part, a class that is no claim, and a name that is taken by another definition; the
        same definition again (a notebook's cell run twice) takes its own place.

    Examples
    --------
    >>> from entropic_control.proofs import Claim, claim
    >>> @claim("temperature")
    ... class Warm(Claim):
    ...     name, statement, source = "warm", "it starts above 0.1", "arithmetic"
    """
    if part not in (*PARTS, WHOLE):
        raise ConfigError(f"no claim can be about {part!r} (known: {', '.join((*PARTS, WHOLE))})")

    def register(what: T) -> T:
        home = f"{what.__module__}.{what.__qualname__}"
        name = getattr(what, "name", what.__qualname__)
        if isinstance(what, type):
            if not issubclass(what, Claim):
                raise ConfigError(
                    f"{home} is no Claim: derive it from entropic_control.proofs.Claim"
                )
            make: Callable[[Subject], Made] = what.certify
        else:
            make = what  # type: ignore[assignment]
        known = _table.get(name)
        if known is not None and known.home != home:
            raise ConfigError(
                f"the claim {name!r} is {known.home} already: give {home} another name"
            )
        _table[name] = Entry(name, part, make, home)
        return what

    return register


def forget(name: str) -> None:
    """Take a claim out of the table."""
    _table.pop(name, None)


@lru_cache(maxsize=1)
def load_claims() -> None:
    """Import the built-in claims and those of other distributions; a broken one of these is a warning."""
    for module in BUILTIN:
        import_module(f"{__package__}.{module}")
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:  # noqa: BLE001 (third-party code may raise anything at import)
            warnings.warn(f"claim {point.name!r} cannot be loaded: {error}", stacklevel=2)


def registered() -> list[Entry]:
    """The rows of the table, in the order in which they are told."""
    load_claims()
    return list(_table.values())


def claims_of(subject: Subject) -> Iterator[Claim | str]:
    """Every claim and note about a subject.

    A row that raises gives a claim that fails and says so; errors of this package, which tell of a
    fault in what was asked, come through.
    """
    for entry in registered():
        if entry.part != WHOLE and entry.part not in subject.parts:
            continue
        if entry.part in subject.dry:
            yield f"{entry.part} only observes in a dry run: '{entry.name}' is claimed of a real one"
        try:
            yield from entry.make(subject) or ()
        except EntropicError:
            raise
        except Exception as error:  # noqa: BLE001 (a user's claim may raise anything)
            yield Unfinished(entry.name, f"{type(error).__name__}: {error}")
