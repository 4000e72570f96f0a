"""The frontier of pruning rules, on the simulated plant and through the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropic_control.backends import SimulatedConfig
from entropic_control.bench.frontier import Prefilled, cases_of, rules_of, run_frontier
from entropic_control.cli import main
from entropic_control.config import Config
from entropic_control.controllers import NoPruning

CONFIG = Config(backend=SimulatedConfig())
SMALL: dict[str, Any] = {"tokens": 512, "documents": 2, "depths": 2, "budgets": (0.5, 0.4)}


def silent(_: str, *__: int) -> None:
    return None


def test_cases_hold_what_they_ask_for() -> None:
    backend = CONFIG.backend.open()
    cases = list(cases_of(backend, 512, 2, 3))
    assert [case.needle for case in cases] == [False] * 2 + [True] * 3
    assert len({case.name for case in cases}) == 5
    for case in cases:
        assert len(case.text) == 512
        if case.needle:
            places = np.lib.stride_tricks.sliding_window_view(case.text, len(case.true))
            assert (places == case.true).all(axis=1).any()


@pytest.mark.parametrize("block", [1, 16])
def test_a_rule_prunes_the_same_state_again_and_again(block: int) -> None:
    backend = SimulatedConfig(block=block, slots=1).open()
    case = next(cases_of(backend, 512, 1, 1))
    prefilled = Prefilled(backend, case.text, lambda _: None)
    rules = rules_of(CONFIG, 0.5)
    first = {name: prefilled.score(rule, case) for name, rule in rules.items()}
    assert all(abs(score.kept - 0.5) < 0.04 for score in first.values())
    assert prefilled.score(NoPruning(), case).kept == 1
    assert {name: prefilled.score(rule, case) for name, rule in rules.items()} == first


def test_an_interrupted_run_goes_on_to_the_same_figures(tmp_path: Path) -> None:
    whole = run_frontier(CONFIG, tmp_path / "whole", advance=silent, **SMALL)
    lines = (tmp_path / "whole/scores.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 15 * 4
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/scores.jsonl").write_text("".join(lines[:17]) + lines[17][:9] + "\n")
    resumed = run_frontier(CONFIG, tmp_path / "cut", advance=silent, **SMALL)
    assert resumed == whole
    again = (tmp_path / "cut/scores.jsonl").read_text()
    assert run_frontier(CONFIG, tmp_path / "cut", advance=silent, **SMALL) == whole
    assert (tmp_path / "cut/scores.jsonl").read_text() == again


def test_the_command_prints_writes_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    command = ["bench", "frontier", "--backend", "simulated", "--out", str(tmp_path), "--json"]
    sizes = ["--tokens", "512", "--documents", "2", "--depths", "2", "--budgets", "0.5"]
    assert main([*command, *sizes]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == json.loads((tmp_path / "frontier.json").read_text())
    assert figures["arms"]["dense at 1"]["continuation_nll_delta"] == 0
    assert (tmp_path / "frontier.png").stat().st_size > 5000
    assert main([*command, "--budgets", "1.5"]) == 2
    assert "budgets are shares" in capsys.readouterr().err
    assert main([*command, *sizes, "--tokens", "3000000"]) == 2
    assert "give fewer --tokens" in capsys.readouterr().err
