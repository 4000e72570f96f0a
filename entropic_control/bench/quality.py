"""What a text is worth: likelihood of the truth, recalled facts, overlap, loops, drift."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from entropic_control.bench.workloads import Needle
from entropic_control.controllers.base import Array
from entropic_control.report import repeated

OVERLAP_PACKAGES = {"rouge_l": "rouge-score", "bleu": "sacrebleu"}


def missing_overlap() -> dict[str, str]:
    """The overlap measures that cannot be taken here, and the package that each needs."""
    modules = {"rouge_l": "rouge_score", "bleu": "sacrebleu"}
    return {m: OVERLAP_PACKAGES[m] for m, module in modules.items() if find_spec(module) is None}


def needle_figures(surprisal: Array, needles: Sequence[Needle]) -> list[dict[str, Any]]:
    """For each needle: its depth, the NLL of its answer in nats a token, and the share recalled.

    A token counts as recalled where the model gives it more than half: it would be the greedy choice.
    """
    return [
        {
            "depth": needle.depth,
            "nll": float(surprisal[needle.start : needle.stop].mean()),
            "recalled": float(np.mean(surprisal[needle.start : needle.stop] < np.log(2))),
        }
        for needle in needles
    ]


def text_figures(tokens: Sequence[int]) -> dict[str, float]:
    """Repeated and distinct n-grams of a text that was drawn."""
    return {
        "repeated_3grams": repeated(tokens, 3),
        "repeated_4grams": repeated(tokens, 4),
        "distinct_1": 1 - repeated(tokens, 1),
        "distinct_2": 1 - repeated(tokens, 2),
    }


def rouge_l(texts: Sequence[str], references: Sequence[str]) -> float | None:
    """Mean ROUGE-L F1 (Lin, 2004) of texts against their references, in percent."""
    if "rouge_l" in missing_overlap() or not texts:
        return None
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    pairs = zip(references, texts, strict=True)
    return 100 * float(np.mean([scorer.score(a, b)["rougeL"].fmeasure for a, b in pairs]))


def bleu(texts: Sequence[str], references: Sequence[str]) -> float | None:
    """Corpus BLEU (Papineni et al., 2002; Post, 2018) of texts against their references, in percent."""
    if "bleu" in missing_overlap() or not texts:
        return None
    from sacrebleu import corpus_bleu

    return float(corpus_bleu(list(texts), [list(references)]).score)
