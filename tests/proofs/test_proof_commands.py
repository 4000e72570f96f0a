"""certify, identify and tune on the command line."""

import argparse
import json
import re
from pathlib import Path

import pytest
import yaml
from recorded import HELD

from entropic_control.controllers import PITemperature
from entropic_control.errors import ConfigError, TraceError
from entropic_control.proof_commands import add_commands
from entropic_control.proofs.identify import identify


def call(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    args = parser.parse_args(arguments)
    return int(args.run(args))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("temperature: {kind: pi}\nbackend: simulated\n")
    return path


def test_certify_exits_with_0_when_every_claim_holds(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("certify", str(config)) == 0
    out = capsys.readouterr().out
    assert re.search(r"(\d+) of \1 claims hold", out)
    assert "[holds] conformance" in out


def test_certify_exits_with_1_and_says_which_claim_fails_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wild.yaml"
    path.write_text("temperature: {kind: pi, kp: 2.5, schedule: none}\n")
    assert call("certify", str(path)) == 1
    out = capsys.readouterr().out
    assert "[FAILS] linear loop" in out
    assert "because: the loop is unstable" in out


def test_certify_prints_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("certify", str(config), "--json") == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True


def test_certify_checks_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recorded.yaml"
    path.write_text("temperature: {kind: pi, kp: 0.1, ki: 0.02}\n")
    assert call("certify", str(path), "--trace", str(HELD)) == 0
    assert "checked on the trace" in capsys.readouterr().out


def test_identify_prints_the_plant(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("identify", str(run)) == 0
    assert "measured varentropy" in capsys.readouterr().out
    assert call("identify", str(run), "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 1600


def test_tune_prints_a_part_that_loads(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("tune", str(run), "--target", "0.9", "--gm", "8", "--pm", "65") == 0
    part = yaml.safe_load(capsys.readouterr().out)["temperature"]
    assert PITemperature.model_validate(part).target == 0.9
    assert call("tune", str(run), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["expected"]["gain_margin_db"] >= 6
    assert data["temperature"]["target"] == round(identify(run).entropy, 2)


def test_faults_are_typed(tmp_path: Path, run: Path) -> None:
    with pytest.raises(TraceError):
        call("identify", str(tmp_path))
    with pytest.raises(ConfigError):
        call("certify", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError):
        call("tune", str(run), "--target", "40")
