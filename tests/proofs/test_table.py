"""The table of claims is open: a user's own joins certify, its report, its JSON and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from entropic_control.config import Config
from entropic_control.controllers import FixedTemperature, NoPruning, PITemperature
from entropic_control.errors import ConfigError
from entropic_control.proofs import Certificate, Claim, Subject, certify, claim, table

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table.load_claims()
    monkeypatch.setattr(table, "_table", dict(table._table))


def cool() -> type[Claim]:
    """A claim of a user's: it starts no hotter than asked."""

    @claim("temperature")
    @dataclass(frozen=True)
    class Cool(Claim):
        name: ClassVar[str] = "cool start"
        statement: ClassVar[str] = "the first token is drawn at most at T = 0.8"
        source: ClassVar[str] = "looking at it"

        first: float

        @classmethod
        def certify(cls, subject: Subject) -> Iterable[Claim | str]:
            loop = subject.temperature
            assert loop is not None
            if loop.reads_logits:
                yield "a loop that reads logits has no start"
            else:
                yield cls(float(loop.command(loop.init(1)).temperature[0]))

        @property
        def figures(self) -> dict[str, float]:
            return {"first temperature": self.first}

        def check(self) -> list[str]:
            return [] if self.first <= 0.8 else [f"it starts at {self.first:g}"]

        def falsify(self, trials: int = 0, seed: int = 0) -> str | None:
            return None if self.first <= 0.8 else f"{self.first:g}"

    return Cool


def names(certificate: Certificate) -> list[str]:
    return [one.name for one in certificate.claims]


def test_a_claim_of_a_users_is_certified_reported_and_printed() -> None:
    cool()
    for subject in (PITemperature(), Config()):
        certificate = certify(subject, trials=50)
        assert certificate["cool start"].holds
        assert "[holds] cool start" in str(certificate)
        assert certificate.figures["cool start: first temperature"] == pytest.approx(0.7)
        data = json.loads(certificate.to_json())
        assert "cool start" in [one["name"] for one in data["claims"]]
    hot = certify(FixedTemperature(), trials=50)
    assert not hot.holds
    assert "it starts at 1" in str(hot)
    assert hot.counterexamples["cool start"] == "1"
    assert "cool start" not in names(certify(NoPruning()))


def test_a_claim_of_a_users_is_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from entropic_control.cli import main

    cool()
    path = tmp_path / "warm.yaml"
    path.write_text("backend: simulated\ntemperature: {kind: fixed, temperature: 1.2}\n")
    assert main(["certify", str(path)]) == 1
    assert "[FAILS] cool start" in capsys.readouterr().out


def test_a_function_and_the_whole_configuration_can_be_registered() -> None:
    seen: list[Subject] = []

    @claim("configuration")
    def everything(subject: Subject) -> Iterable[Claim | str]:
        seen.append(subject)
        return ["nothing is claimed of the weather"]

    certificate = certify(Config(backend={"kind": "simulated", "slots": 3, "can_swap": False}))
    assert "nothing is claimed of the weather" in certificate.notes
    assert seen[0].slots == 3
    assert seen[0].vocab == 512
    assert seen[0].preempts is False
    assert set(seen[0].parts) == {
        "temperature", "truncation", "estimator", "priority", "pruning", "speculation"
    }  # fmt: skip


def test_a_cell_that_runs_twice_replaces_its_claim() -> None:
    first = cool()
    before = len(table.registered())
    second = cool()
    assert len(table.registered()) == before
    assert first is not second


@pytest.mark.parametrize(
    ("register", "words"),
    [
        (lambda: claim("weather"), "no claim can be about 'weather'"),
        (lambda: claim("temperature")(type("Other", (), {"name": "other"})), "is no Claim"),
        (
            lambda: claim("temperature")(type("Conformance", (Claim,), {"name": "conformance"})),
            "is entropic_control.proofs.conformance.Conformance already",
        ),
    ],
)
def test_what_cannot_be_registered_is_refused_in_words(register: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        register()


def raising(where: str) -> None:
    @claim("temperature")
    @dataclass(frozen=True)
    class Careless(Claim):
        name: ClassVar[str] = "careless"
        statement: ClassVar[str] = "none"
        source: ClassVar[str] = "none"

        @classmethod
        def certify(cls, subject: Subject) -> Iterable[Claim | str]:  # noqa: ARG003
            if where == "certify":
                raise KeyError("gone")
            return [cls()]

        @property
        def figures(self) -> dict[str, float]:
            return {}

        def check(self) -> list[str]:
            if where == "check":
                raise KeyError("gone")
            return []

        def falsify(self, trials: int = 0, seed: int = 0) -> str | None:
            raise KeyError("gone")


@pytest.mark.parametrize("where", ["certify", "check", "falsify"])
def test_a_claim_that_raises_fails_alone(where: str) -> None:
    raising(where)
    certificate = certify(FixedTemperature(), trials=20)
    assert not certificate.holds
    assert "KeyError" in str(certificate)
    assert certificate["conformance"].holds
    json.loads(certificate.to_json())


def test_claims_of_another_distribution_are_found_by_their_entry_point(tmp_path: Path) -> None:
    (tmp_path / "ec_claims.py").write_text(
        "from entropic_control.proofs import claim\n"
        "@claim('temperature')\n"
        "def borrowed(subject):\n"
        "    return [f'borrowed from elsewhere: {subject.temperature.kind}']\n"
    )
    info = tmp_path / "ec_claims-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ec_claims\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[entropic_control.claims]\nborrowed = ec_claims:borrowed\nbroken = ec_missing:nothing\n"
    )
    code = (
        "from entropic_control.controllers import FixedTemperature\n"
        "from entropic_control.proofs import certify\n"
        "print(certify(FixedTemperature()))\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert "note: borrowed from elsewhere: fixed" in done.stdout
    assert "claim 'broken' cannot be loaded" in done.stderr
