"""Intervals, fairness, text quality, and operations: each against what can be worked out by hand."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from entropic_control.backends.dimensions import Dimensions
from entropic_control.bench import quality
from entropic_control.bench.statistics import (
    RATES,
    Run,
    Segments,
    jain,
    mean_ratio,
    paired_interval,
    rate_interval,
    ratio,
)
from entropic_control.bench.workloads import Needle


def a_run(slowness: np.ndarray, tau: np.ndarray | float = 1.0) -> Run:
    """Forty pieces of unequal work, with one piece of a prompt."""
    rng = np.random.default_rng(0)
    work = rng.uniform(0.5, 4, 40)
    tokens = np.round(100 * work)
    decode = Segments(tokens, work * slowness, work, tokens * tau)
    prompt = Segments(np.zeros(1), np.array([5.0]), np.array([5.0]), np.zeros(1))
    return Run(decode, prompt, 1.0)


def test_unequal_work_is_no_spread_of_a_rate() -> None:
    run = a_run(np.ones(40))
    for name, rate in RATES.items():
        interval = rate_interval([run, run._replace(idle=1.0)], rate, ratio)
        assert interval == pytest.approx((1, 1)), name


def test_a_noisy_machine_is_a_spread_that_holds_the_truth() -> None:
    rng = np.random.default_rng(1)
    slow, quick = a_run(rng.normal(2, 0.2, 40)), a_run(rng.normal(1, 0.1, 40))
    interval = rate_interval([quick, slow], RATES["decode_tokens_per_second"], ratio)
    assert interval is not None
    assert 1.8 < interval.low < 2.0 < interval.high < 2.2


def test_a_rate_of_the_whole_run_is_its_tokens_over_its_seconds() -> None:
    run = a_run(np.full(40, 2.0), tau=0.3)
    seconds = run.decode.seconds.sum() + 5
    tokens = run.decode.tokens.sum()
    assert RATES["tokens_per_second"](run, run) == pytest.approx(tokens / (seconds + 1))
    assert RATES["tau_per_second"](run, run) == pytest.approx(0.3 * tokens / seconds)


def test_requests_are_resampled_in_pairs() -> None:
    """Arms that differ by a factor have no spread, however unequal the requests."""
    times = np.array([1.0, 50.0, 3.0, 400.0])
    assert paired_interval([0.5 * times, times], mean_ratio) == pytest.approx((0.5, 0.5))
    assert paired_interval([times[:2], times[:2]], mean_ratio) is None


def test_jain_is_one_for_equals_and_one_nth_for_a_single_winner() -> None:
    assert jain(np.full(5, 3.0)) == pytest.approx(1)
    assert jain(np.array([7.0, 0, 0, 0])) == pytest.approx(0.25)
    assert jain(np.zeros(3)) == 1


def test_a_needle_is_recalled_where_its_tokens_are_likelier_than_not() -> None:
    surprisal = np.array([9.0, 0.1, 0.6, 0.8, 5.0])
    (found,) = quality.needle_figures(surprisal, [Needle(0.5, 1, 4)])
    assert found["nll"] == pytest.approx(0.5)
    assert found["recalled"] == pytest.approx(2 / 3)


def test_overlap_of_equal_texts_is_whole_and_of_others_none() -> None:
    pytest.importorskip("rouge_score")
    pytest.importorskip("sacrebleu")
    text = "the keeper of the lighthouse found an old map in the wall"
    assert quality.rouge_l([text], [text]) == pytest.approx(100)
    assert quality.bleu([text], [text]) == pytest.approx(100)
    assert quality.rouge_l(["zebras run"], [text]) == 0


def test_a_missing_package_is_named_and_its_measure_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    assert quality.missing_overlap() == {"rouge_l": "rouge-score", "bleu": "sacrebleu"}
    assert quality.rouge_l(["a"], ["a"]) is None
    assert quality.bleu(["a"], ["a"]) is None


def test_operations_and_bytes_of_a_step_by_hand() -> None:
    size = Dimensions(1000, 200, layers=2, width=8, cell_bytes=64, weight_bytes=600)
    steps = {
        "rows": np.array([3, 0]),
        "longest": np.array([10, 0]),
        "prompt_tokens": np.array([0, 4]),
        "prompt_reads": np.array([0, 20]),
        "measured": np.array([0, 4]),
    }
    decode = 2 * (1000 * 3 + 200 * 3) + 4 * 2 * 8 * 30
    prompt = 2 * (1000 * 4 + 200 * 4) + 4 * 2 * 8 * 20
    assert size.flops(steps).tolist() == [decode, prompt]
    assert size.traffic(steps).tolist() == [600 + 64 * (30 + 3), 600 + 64 * (5 + 4)]
