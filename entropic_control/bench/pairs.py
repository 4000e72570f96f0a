"""Two ways of doing the same work, timed in pairs within one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any


def paired(
    name: str,
    rival: Callable[[], float],
    engine: Callable[[], float],
    repeats: int,
    done: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Tokens per second of a rival called `name` and of the engine; who goes first takes turns.

    `done` is called after each pair.

    Returns
    -------
    dict
        The medians, the median ratio (engine over rival) and all ratios.
    """
    pairs = []
    for turn in range(repeats):
        if turn % 2:
            second, first = engine(), rival()
        else:
            first, second = rival(), engine()
        pairs.append((first, second))
        done()
    return compared(name, pairs)


def compared(name: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """What `paired` returns, of the tokens per second of a rival and of the engine in each pair."""
    return {
        f"{name}_tokens_per_second": median(first for first, _ in pairs),
        "engine_tokens_per_second": median(second for _, second in pairs),
        "ratio": median(second / first for first, second in pairs),
        "ratios": [second / first for first, second in pairs],
    }
