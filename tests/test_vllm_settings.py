"""What vLLM is given, the order of requests and the blocks that stay, all without vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropic_control.backends.vllm import VllmConfig, arguments, compat, serve_arguments
from entropic_control.backends.vllm.arguments import PROCESSOR
from entropic_control.backends.vllm.config import KEY, Settings
from entropic_control.backends.vllm.ranking import Ranking, View
from entropic_control.backends.vllm.retention import Retention, retention
from entropic_control.cli import main
from entropic_control.config import Config, load_config
from entropic_control.controllers import (
    EntropicPriority,
    FirstCome,
    RandomPruning,
    SlidingWindow,
)
from entropic_control.controllers.priority import Limits
from entropic_control.errors import CapabilityError, ConfigError

# -- what vLLM is given -----------------------------------------------------------------------------


def test_arguments_carry_the_controllers() -> None:
    config = load_config(
        {"backend": {"kind": "vllm"}, "temperature": {"kind": "pi", "target": 2.5}}
    )
    given = arguments(config)
    settings = Settings.found_in(json.loads(json.dumps(given["additional_config"])))
    assert settings is not None
    assert settings.temperature == config.temperature
    assert settings.priority == config.priority
    assert given["scheduling_policy"] == "priority"
    assert given["scheduler_cls"].endswith(".EntropicScheduler")
    asynchronous = arguments(load_config(config, settings=["backend.async_scheduling=true"]))
    assert asynchronous["scheduler_cls"].endswith(".EntropicAsyncScheduler")
    assert asynchronous["async_scheduling"] is True


def test_a_processor_that_vllm_finds_by_itself_is_not_named_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "entry_point_installed", lambda name: name == PROCESSOR)
    assert "logits_processors" not in arguments(Config())
    monkeypatch.setattr(compat, "entry_point_installed", lambda _: False)
    assert arguments(Config())["logits_processors"] == [PROCESSOR]


def test_an_unknown_version_is_named_and_keeps_the_temperature_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "installed_version", lambda: "0.99.1")
    given = arguments(Config())
    assert "0.99.1" in caplog.text
    assert set(given) <= {"additional_config", "logits_processors"}
    assert compat.checked("0.32.0")
    assert compat.checked("0.32.7")
    assert not compat.checked("0.3.2")


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("temperature.kind=mirostat", "mirostat"),
        ("temperature.kind=exact", "exact"),
        ("truncation.kind=top_p", "top_p"),
        ("estimator.kind=top_k", "top_k"),
    ],
)
def test_what_vllm_cannot_give_is_refused(setting: str, fault: str) -> None:
    with pytest.raises(CapabilityError, match=fault):
        arguments(load_config({}, settings=[setting]))


def test_pruning_is_opt_in_and_by_position_alone() -> None:
    assert "block_size" not in arguments(Config())
    chosen = load_config({"backend": {"kind": "vllm", "prune": True}, "pruning": "sliding_window"})
    assert arguments(chosen)["enable_prefix_caching"] is False
    with pytest.raises(CapabilityError, match="surprisal"):
        arguments(load_config(chosen, settings=["pruning.kind=entropic"]))


def test_the_command_prints_words_that_a_shell_splits_rightly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("backend: {kind: vllm}\ntemperature: {kind: pi, target: 2.0}\n")
    assert main(["vllm-args", str(path)]) == 0
    words = capsys.readouterr().out.split()
    flags = dict(pairwise(words))
    found = json.loads(flags["--additional-config"])
    assert found[KEY]["temperature"]["target"] == 2.0
    assert flags["--scheduling-policy"] == "priority"
    assert "--no-async-scheduling" in words
    assert not any("*" in word or "?" in word for word in words)  # nor does it glob
    assert main(["vllm-args", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scheduling_policy"] == "priority"
    path.write_text("truncation: top_p\n")
    assert main(["vllm-args", str(path)]) == 2
    assert main(["run", str(path), "--backend", "vllm"]) == 2


def test_a_value_with_spaces_cannot_be_a_word(tmp_path: Path) -> None:
    config = Config(backend=VllmConfig(trace=str(tmp_path / "a trace.jsonl")))
    assert arguments(config)
    with pytest.raises(ConfigError, match="space"):
        serve_arguments(config)


def test_the_engine_of_ours_says_who_runs_vllm() -> None:
    with pytest.raises(CapabilityError, match="vllm-args"):
        VllmConfig().open()
    assert "vllm" not in sys.modules or Path(sys.modules["vllm"].__file__ or "").exists()


# -- the order of requests --------------------------------------------------------------------------


def views(*prompts: int, running: int = 0, decode: int = 50) -> list[View]:
    return [
        View(
            str(n),
            0,
            0 if n < running else prompt,
            decode,
            prompt if n < running else 0,
            n < running,
        )
        for n, prompt in enumerate(prompts)
    ]


def ranking(priority: Any, count: int) -> Ranking:
    out = Ranking(priority)
    for number in range(count):
        out.arrive(str(number))
    return out


def test_short_prompts_pass_a_long_one_and_wishes_come_first() -> None:
    limits = Limits(2, 512)
    requests = views(2000, 20, 30)
    assert ranking(EntropicPriority(), 3).rank(requests, limits).ids == ["1", "2", "0"]
    assert ranking(FirstCome(), 3).rank(requests, limits).ids == ["0", "1", "2"]
    wished = [requests[0]._replace(wish=-1), *requests[1:]]
    assert ranking(EntropicPriority(), 3).rank(wished, limits).ids == ["0", "1", "2"]


def test_nobody_waits_beyond_patience() -> None:
    order = ranking(EntropicPriority(patience=5), 3)
    requests = views(2000, 20, 30)
    for _ in range(5):
        order.served(["1", "2"])
    ranked = order.rank(requests, Limits(2, 512))
    assert ranked.ids[0] == "0"
    assert "waited 5 steps" in ranked.reason


def test_entropy_that_was_heard_moves_the_index() -> None:
    order = ranking(EntropicPriority(), 2)
    requests = views(100, 100, running=2)
    for step in range(40):
        order.heard({"0": 3.0 if step % 2 else 1.0, "1": 0.1, "gone": 2.0})
    ranked = order.rank(requests, Limits(0, 512))
    assert ranked.indices["0"] > 2 * ranked.indices["1"]
    order.forget_all_but({"1": None})
    assert order.rank(requests[1:], Limits(0, 512)).ids == ["1"]


# -- retention --------------------------------------------------------------------------------------


def lengths() -> Iterator[int]:
    yield from range(1, 1500, 7)


@pytest.mark.parametrize("pruning", [SlidingWindow(min_tokens=0), RandomPruning(min_tokens=200)])
def test_what_is_dropped_stays_dropped_whoever_asks_and_when(pruning: Any) -> None:
    one, other = Retention(pruning, 32), Retention(pruning, 32)
    other.dropped(1499)
    before: set[int] = set()
    for length in lengths():
        dropped = one.dropped(length)
        np.testing.assert_array_equal(dropped, other.dropped(length))
        assert before <= set(dropped.tolist())
        assert not dropped.size or dropped[-1] < -(-length // 32) - 1
        before = set(dropped.tolist())
    assert before


def test_half_a_budget_keeps_about_half_and_a_full_one_everything() -> None:
    half = Retention(SlidingWindow(budget=0.5, min_tokens=0), 32)
    kept = 1 - len(half.dropped(4000)) * 32 / 4000
    assert 0.45 < kept < 0.6
    assert not Retention(SlidingWindow(budget=1.0, min_tokens=0), 32).dropped(4000).size


def test_no_rule_where_none_is_wanted() -> None:
    settings = Settings.of(Config())
    assert retention(settings, 16) is None
    pruned = settings.replace(backend=VllmConfig(prune=True), pruning=SlidingWindow())
    assert retention(pruned, 48) is not None
    with pytest.raises(CapabilityError, match="multiple of 16"):
        retention(pruned, 24)
