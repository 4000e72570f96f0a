"""The paper's table: cells, resumption, ratios, verdicts, and what is said before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropic_control.backends import LlamaCppConfig, SimulatedConfig
from entropic_control.backends.dimensions import SMOLLM2
from entropic_control.backends.simulated import Simulated
from entropic_control.bench import paper as papers
from entropic_control.bench import resources
from entropic_control.bench.aims import AIMS, CLAIMS, Aim, verdicts
from entropic_control.bench.arms import DENSE, arms_of, default_config
from entropic_control.bench.compare import Compared, comparisons_of, results_of, super_additivity
from entropic_control.bench.measures import measure_run
from entropic_control.bench.paper import Cell, Cells, Paper
from entropic_control.bench.paper_report import markdown, summary_of
from entropic_control.bench.statistics import Interval
from entropic_control.bench.workloads import ALL, QUICK, WORKLOADS, Setting, Sizes, Task
from entropic_control.cli import main
from entropic_control.config import Config
from entropic_control.controllers import FixedTemperature, NoPruning
from entropic_control.engine import Engine
from entropic_control.errors import CapabilityError, ConfigError
from entropic_control.progress import progress_bar
from entropic_control.request import Request

CONFIG = default_config().replace(backend=SimulatedConfig())


def filled(out: Path, config: Config = CONFIG, **options: Any) -> Paper:
    paper = Paper(config, out, quick=True, **options)
    with progress_bar(True) as bar:
        paper.run(bar)
    return paper


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    return filled(tmp_path_factory.mktemp("paper"), workloads=["chat", "mixed", "long"]).done()


# -- what is run ------------------------------------------------------------------------------------


def test_arms_differ_from_the_baseline_by_their_loop_alone() -> None:
    arms = arms_of(CONFIG)
    base, full = arms["baseline"], arms["full"]
    assert full == CONFIG
    for arm, part in {
        "fair": "priority",
        "sampling": "temperature",
        "scheduling": "priority",
        "pruning": "pruning",
    }.items():
        different = [
            name for name in Config.model_fields if arms[arm].__dict__[name] != base.__dict__[name]
        ]
        assert different == [part]
        if arm != "fair":
            assert arms[arm].__dict__[part] == full.__dict__[part]
    assert not base.pruning.prunes
    assert arms["quarter"].pruning.budget == 0.25


def test_every_workload_names_arms_and_aims_that_exist() -> None:
    arms = arms_of(CONFIG)
    for workload in WORKLOADS.values():
        assert set(workload.arms) <= set(arms)
    for aim in AIMS:
        assert aim.arm in WORKLOADS[aim.workload].arms


def test_the_true_continuation_is_forced_and_what_would_follow_is_kept() -> None:
    backend = SimulatedConfig().open()
    for task in WORKLOADS["mixed"].tasks(Setting(backend, QUICK)):
        truth, free = QUICK.mixed_tokens
        assert len(task.request.forced) == task.request.max_tokens == truth + free
        assert min(task.request.forced[:truth]) >= 0
        assert set(task.request.forced[truth:]) == {-1}
        assert len(task.reference) == free


def test_needles_are_in_the_prompt_at_their_depth_and_answered_at_their_place() -> None:
    backend = SimulatedConfig().open()
    sizes = Sizes(long_prompts=(1200, 1600), needles=2, long_tokens=(8, 4))
    tasks = WORKLOADS["long"].tasks(Setting(backend, sizes))
    assert [len(task.request.prompt) for task in tasks] == [1200, 1600]
    assert sorted(needle.depth for task in tasks for needle in task.needles) == [0, 0.25, 0.5, 0.75]
    for task in tasks:
        for needle in task.needles:
            answer = task.request.forced[needle.start : needle.stop]
            places = [n for n, token in enumerate(task.request.prompt) if token == answer[0]]
            near = [abs(place / len(task.request.prompt) - needle.depth) for place in places]
            assert min(near) < 0.05


def test_arrivals_come_faster_under_more_load(tmp_path: Path) -> None:
    paper = Paper(CONFIG, tmp_path, quick=True, workloads=["arrivals_0.7", "arrivals_1.1"])
    last = {
        name: max(task.request.arrive for task in paper._tasks[name])
        for name in ("arrivals_0.7", "arrivals_1.1")
    }
    assert last["arrivals_0.7"] / last["arrivals_1.1"] == pytest.approx(1.1 / 0.7)
    alone = resources.dense_seconds(
        paper._tasks["arrivals_1.1"], CONFIG, paper._cost(), paper.sizes.slots
    )
    assert last["arrivals_1.1"] * 1.1 == pytest.approx(alone)
    assert any(task.request.deadline for task in paper._tasks["arrivals_1.1"])


def test_arrivals_of_mixed_lengths_are_those_of_the_mixed_workload() -> None:
    sizes = Sizes(slots=4, arrivals=9, mixed_long=900, mixed_short=(10, 20))
    tasks = WORKLOADS["arrivals_mixed_1.1"].tasks(Setting(SimulatedConfig().open(), sizes))
    lengths = [len(task.request.prompt) for task in tasks]
    assert lengths.count(900) == 2
    assert all(10 <= length < 20 for length in lengths if length != 900)


def test_the_costs_of_the_machine_are_measured_part_by_part() -> None:
    plant = SimulatedConfig(
        seconds_per_step=0.02,
        seconds_per_row=0.001,
        seconds_per_row_cell=4e-6,
        seconds_per_prompt_token=0.004,
        seconds_per_prompt_read=2e-6,
        context=1536,
    )
    found, slow = resources.calibrated(plant.open()), plant.replace(seconds_per_step=0.08)
    assert found[:5] == pytest.approx((0.02, 0.001, 4e-6, 0.004, 2e-6), rel=0.02)
    assert resources.calibrated(slow.open()).step == pytest.approx(0.08, rel=0.02)


def test_arms_alternate_and_turn_their_order_every_other_time(tmp_path: Path) -> None:
    paper = Paper(CONFIG, tmp_path, quick=True, workloads=["chat"], repeats=2)
    assert [cell.arm for cell in paper.cells()] == [*ALL, *ALL[::-1]]


# -- what comes of it -------------------------------------------------------------------------------


def test_every_cell_holds_the_measures_and_a_forced_text_is_the_same_in_all_arms(
    cells: Cells,
) -> None:
    results = results_of(cells)
    assert list(results) == ["chat", "mixed", "long"]
    mixed = results["mixed"]
    assert list(mixed) == list(ALL)
    for arm in ("fair", "sampling", "scheduling"):
        assert mixed[arm]["tau_true"] == pytest.approx(mixed["baseline"]["tau_true"])
        assert mixed[arm]["nll"] == pytest.approx(mixed["baseline"]["nll"])
    assert mixed["full"]["kv_mean"] < mixed["baseline"]["kv_mean"]
    assert mixed["full"]["wait_bound"] >= mixed["full"]["longest_wait"]
    assert mixed["baseline"]["wait_bound"] is None
    assert results["long"]["full"]["needle_recall_percent"] is not None
    assert results["chat"]["full"]["nll"] is None


def test_ratios_are_over_the_better_dense_arm_and_latency_over_each(cells: Cells) -> None:
    results, compared = results_of(cells), comparisons_of(cells)
    mixed, full = results["mixed"], compared["mixed"]["full"]
    best = max(mixed[arm]["tokens_per_second"] for arm in DENSE)
    assert full["tokens_per_second"].value == pytest.approx(
        mixed["full"]["tokens_per_second"] / best
    )
    for key, arm in (("latency_mean", "baseline"), ("latency_mean_fair", "fair")):
        expected = mixed["full"]["latency_mean"] / mixed[arm]["latency_mean"]
        assert full[key].value == pytest.approx(expected)
        interval = full[key].interval
        assert interval is not None
        assert interval.low < expected < interval.high


def test_recall_is_compared_needle_by_needle(cells: Cells) -> None:
    one = dict(cells["long", "baseline", 0])
    asked = [{"depth": 0.5, "nll": 1.0, "recalled": share} for share in (0.2, 0.4, 0.6, 0.8)]
    worse = [needle | {"recalled": needle["recalled"] - 0.2, "nll": 1.5} for needle in asked]
    table = {
        ("long", arm, 0): {
            **one,
            "arm": arm,
            "measures": {
                **one["measures"],
                "needle_recall_percent": 100 * np.mean([n["recalled"] for n in needles]),
                "needle_nll": np.mean([n["nll"] for n in needles]),
            },
            "requests": [{**one["requests"][0], "needles": needles}],
        }
        for arm, needles in (("baseline", asked), ("full", worse))
    }
    full = comparisons_of(table)["long"]["full"]
    for measure, drop in (("needle_recall_percent", -20), ("needle_nll", 0.5)):
        assert full[measure].value == pytest.approx(drop)
        assert full[measure].interval == pytest.approx((drop, drop))


def test_texts_that_a_deadline_cut_off_are_left_out_of_the_quality(cells: Cells) -> None:
    one = cells["mixed", "baseline", 0]

    def run(nll: list[float | None]) -> dict[str, Any]:
        requests = [one["requests"][0] | {"nll": value} for value in nll]
        mean = np.mean([value for value in nll if value is not None])
        return {**one, "measures": one["measures"] | {"nll": mean}, "requests": requests}

    table = {
        ("mixed", "baseline", 0): run([1.0, 2.0, None, 9.0]),
        ("mixed", "full", 0): run([1.1, 2.1, 8.0, None]),
    }
    assert comparisons_of(table)["mixed"]["full"]["nll"].value == pytest.approx(0.1)


def test_a_text_that_was_cut_off_has_no_figure_of_quality() -> None:
    config = CONFIG.replace(temperature=FixedTemperature(), pruning=NoPruning())
    requests = [
        Request(id=f"{n}", prompt=[5] * 20, forced=(3,) * 40, max_tokens=40, deadline=deadline)
        for n, deadline in enumerate((None, 0.4))
    ]
    with Engine(config) as engine:
        report = engine.run(requests)
        done = measure_run(
            [Task(request, truth=40) for request in requests],
            report,
            SMOLLM2,
            engine.backend.cost,
            str,
            None,
            None,
        )
    whole, cut = done["requests"]
    assert cut["finish_reason"] == "deadline"
    assert 0 < cut["tokens"] < 40
    assert cut["nll"] is None
    assert done["measures"]["nll"] == whole["nll"] > 0


def test_the_same_run_twice_is_a_ratio_of_one_without_a_spread(cells: Cells) -> None:
    twice = {
        ("chat", arm, 0): {**cells["chat", "baseline", 0], "arm": arm}
        for arm in ("baseline", "full")
    }
    for name in ("latency_mean", "tokens_per_second", "decode_tokens_per_second"):
        found = comparisons_of(twice)["chat"]["full"][name]
        assert found.value == 1
        assert found.interval == pytest.approx((1, 1))


def test_the_excess_is_the_full_gain_less_the_sum_of_the_single_ones(cells: Cells) -> None:
    found = super_additivity(cells, "mixed")["tokens_per_second"]
    rates = {arm: cells["mixed", arm, 0]["measures"]["tokens_per_second"] for arm in ALL}
    gains = {arm: 100 * (rates[arm] / rates["baseline"] - 1) for arm in ALL}
    assert found.excess == pytest.approx(
        gains["full"] - gains["sampling"] - gains["scheduling"] - gains["pruning"]
    )
    assert super_additivity(cells, "long") == {}


def test_the_page_and_the_json_say_how_every_figure_stands(cells: Cells, tmp_path: Path) -> None:
    manifest = Paper(CONFIG, tmp_path, quick=True, workloads=["chat"]).manifest
    summary = summary_of(cells, manifest)
    json.dumps(summary, allow_nan=False)
    assert summary["ratios"]["mixed"]["latency_mean"] < 1
    page = markdown(cells, manifest, "entropic bench paper --quick")
    for line in ("entropic bench paper --quick", "-25 to -35 %", "Jain index", "by prompt length"):
        assert line in page
    for claim in CLAIMS:
        assert claim.name in page


def test_the_plot_has_an_axis_for_each_measure(cells: Cells) -> None:
    pytest.importorskip("matplotlib")
    from entropic_control.bench.paper_plot import paper_plot

    axes = paper_plot(cells).axes
    assert axes[0].get_title() == "mean latency over first come"
    assert len(axes) == 4
    assert all(len(place.patches) > 8 for place in axes)


def test_loops_are_judged_on_all_texts_of_all_repeats_with_an_interval() -> None:
    def cell(*shares: float) -> dict[str, Any]:
        requests = [{"repeated_4grams": share} for share in shares]
        return {"measures": {}, "requests": requests}

    cells = {
        ("loops", "pi", 0): cell(0.02, 0.04, 0.0),
        ("loops", "pi", 1): cell(0.08, 0.02, 0.02),
        ("loops", "fixed_0.5", 0): cell(0.1, 0.3, 0.2),
        ("loops", "fixed_0.5", 1): cell(0.4, 0.2, 0.3),
    }
    (verdict,) = verdicts(cells, {}, {})
    assert verdict.value == pytest.approx(0.18 / 1.5)
    assert verdict.reached
    assert verdict.interval is not None
    assert verdict.interval.low < verdict.value < verdict.interval.high
    del cells["loops", "pi", 1]
    assert not verdicts(cells, {}, {})  # not the same texts


def test_verdicts_in_words() -> None:
    results = {"mixed": {"full": {"longest_wait": 3.0}}}
    assert Aim("mixed", "full", "latency_mean", 0.5, False).judge(results, {}) is None
    for bound, words in ((4.0, "reached"), (2.5, "not reached, by 0.5")):
        verdict = Aim("mixed", "full", "longest_wait", bound, False, compared=False).judge(
            results, {}
        )
        assert verdict is not None
        assert verdict.words == words
    full = {"nll": Compared(0.02, "baseline", Interval(0.01, 0.03))}
    for bound, words in (
        (0.05, "reached"),
        (0.025, "reached, but the interval holds worse"),
        (0.015, "not reached, by 0.005, but the interval holds better"),
        (0.005, "not reached, by 0.015"),
    ):
        verdict = Aim("mixed", "full", "nll", bound, False).judge({}, {"mixed": {"full": full}})
        assert verdict is not None
        assert verdict.words == words
    latency, throughput = CLAIMS[0], CLAIMS[1]
    assert latency.verdict(0.5) == "beyond the claim (-50 %)"
    assert latency.verdict(0.7) == "as claimed (-30 %)"
    assert latency.verdict(0.9) == "not reached (-10 %)"
    assert throughput.verdict(1.6) == "beyond the claim (+60 %)"


# -- resuming ---------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_and_equals_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ["chat", "arrivals_1.1"]
    whole = filled(tmp_path / "whole", workloads=chosen)
    run, runs = Paper._run, iter(range(100))

    def interrupted(self: Paper, cell: Cell, bar: Any) -> Any:
        if next(runs) == 4:
            raise KeyboardInterrupt
        return run(self, cell, bar)

    monkeypatch.setattr(Paper, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        filled(tmp_path / "parts", workloads=chosen)
    begun = Paper(CONFIG, tmp_path / "parts", quick=True, workloads=chosen)
    left = len(begun.missing)
    assert left == len(list(begun.cells())) - 4
    resumed = filled(tmp_path / "parts", workloads=chosen)
    assert next(runs) == 4 + 1 + left
    assert resumed.done() == whole.done()
    assert summary_of(resumed.done(), resumed.manifest) == summary_of(whole.done(), whole.manifest)


def test_a_run_that_was_cut_off_while_it_was_written_is_run_again(tmp_path: Path) -> None:
    paper = Paper(CONFIG, tmp_path, quick=True, workloads=["chat"], arms=["baseline"])
    (cell,) = paper.missing
    path = tmp_path / cell.path
    path.parent.mkdir(parents=True)
    path.with_suffix(".part").write_text('{"measures": {"lat')
    assert paper.missing == [cell]


def test_a_directory_with_another_run_is_refused(tmp_path: Path) -> None:
    Paper(CONFIG, tmp_path, quick=True, workloads=["chat"])
    warmer = CONFIG.replace(temperature=CONFIG.temperature.replace(target=2.0))
    with pytest.raises(ConfigError, match=r"another config: choose another --out"):
        Paper(warmer, tmp_path, quick=True, workloads=["chat"])
    with pytest.raises(ConfigError, match="another quick, sizes"):
        Paper(CONFIG, tmp_path, workloads=["chat"])


# -- said before it starts --------------------------------------------------------------------------


def test_too_little_memory_for_a_workload_is_said_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Simulated, "dimensions", SMOLLM2, raising=False)
    monkeypatch.setattr(resources, "available_bytes", lambda: 1 << 30)
    with pytest.raises(
        CapabilityError, match=r"'mixed' needs about \d\.\d GiB .* 1\.0 GiB"
    ) as error:
        Paper(CONFIG, tmp_path, workloads=["chat", "mixed"])
    assert "--workloads chat" in str(error.value)
    assert not list(tmp_path.rglob("cells"))


def test_memory_is_read_where_the_system_tells() -> None:
    available = resources.available_bytes()
    assert available is None or available > 1 << 20


def test_the_time_is_guessed_from_the_cost_model(tmp_path: Path) -> None:
    paper = Paper(CONFIG, tmp_path, quick=True, workloads=["chat", "mixed"], arms=["baseline"])
    expected = paper.expected_seconds
    with progress_bar(True) as bar:
        paper.run(bar)
    took = sum(cell["measures"]["total_time"] for cell in paper.done().values())
    assert expected == pytest.approx(took, rel=0.35)


@pytest.mark.parametrize("option", ["workloads", "arms"])
def test_unknown_names_are_refused_with_those_that_exist(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown \w+ 'nonsense' \(known: "):
        Paper(CONFIG, tmp_path, **{option: ["nonsense"]})


# -- the command ------------------------------------------------------------------------------------


def test_bench_paper_prints_json_writes_a_page_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "paper", "--quick", "--backend", "simulated", "--out", str(tmp_path)]
    arguments += ["--workloads", "chat", "drift", "--arms", "baseline", "full", "--json"]
    assert main(arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["results"]["chat"]["baseline"]["latency_mean"] > 0
    assert summary["ratios"]["drift"]["tokens_per_second"] == pytest.approx(1, abs=0.01)
    assert summary == json.loads((tmp_path / "paper.json").read_text())
    assert "## Against the paper" in (tmp_path / "evidence.md").read_text()
    written = [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.0.json"))]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == summary
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.0.json"))] == written


@pytest.mark.llama
def test_the_table_on_the_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp")
    sizes = Sizes(
        slots=2,
        mixed_long=1100,
        mixed_short=(20, 30),
        mixed_tokens=(6, 4),
    )
    monkeypatch.setattr(papers, "QUICK", sizes)
    config = default_config().replace(backend=LlamaCppConfig(threads=1))
    done = filled(tmp_path, config, workloads=["mixed"], arms=["baseline", "full"]).done()
    base, full = (done["mixed", arm, 0]["measures"] for arm in ("baseline", "full"))
    assert full["tau_true"] == pytest.approx(base["tau_true"], rel=0.2)
    assert 0 < full["nll"] < 6
    assert full["nll"] - base["nll"] == pytest.approx(0, abs=0.3)
    assert full["kv_peak"] <= base["kv_peak"]
    assert full["latency_mean"] < base["latency_mean"]
    assert np.isfinite(full["tau_per_teraflop"])
