"""The path of an OpenAI client: `vllm serve MODEL $(entropic vllm-args CONFIG)`.

The server is started by its module: the command `vllm` of the CPU wheel asks for the version of a package
that goes by another name there.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

CONFIG = Path(__file__).parents[2] / "examples" / "vllm_serve.yaml"
MODEL = "smollm2"

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("server")]


class Server(NamedTuple):
    url: str
    trace: Path

    def client(self) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none")

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20) as answer:
            return str(answer.read().decode())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    where = tmp_path_factory.mktemp("server")
    trace = where / "decisions.jsonl"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    counters = where / "metrics"
    counters.mkdir()
    here = Path(sys.executable).parent
    command = (
        f"exec {sys.executable} -m vllm.entrypoints.openai.api_server "
        f"--model {shlex.quote(os.environ['ENTROPIC_VLLM_MODEL'])} "
        f"$({here}/entropic vllm-args {shlex.quote(str(CONFIG))} --set backend.trace={trace}) "
        f"--served-model-name {MODEL} --port {port} --max-model-len 1024 --max-num-seqs 8 --enforce-eager"
    )
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PROMETHEUS_MULTIPROC_DIR": str(counters),
    }
    log = where / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", command], stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 400
        while not _healthy(url):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(1)
        yield Server(url, trace)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except OSError:
        return False


def ask(server: Server, tokens: int, **xargs: Any) -> Any:
    return server.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Write a long story about a lighthouse keeper."}],
        max_tokens=tokens,
        extra_body={"ignore_eos": True, **({"vllm_xargs": xargs} if xargs else {})},
    )


def test_a_client_sets_targets_and_a_bad_one_hurts_nobody_else(server: Server) -> None:
    import openai

    with ThreadPoolExecutor(4) as pool:
        low = pool.submit(ask, server, 120, target=0.3)
        high = pool.submit(ask, server, 120, target=2.5, kp=0.06, ki=0.025)
        off = pool.submit(ask, server, 120, enabled=False)
        time.sleep(1)
        for bad in (
            {"target": -1},
            {"kp": "much"},
            {"kp": 50},
            {"targt": 1.0},
            {"enabled": "perhaps"},
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                ask(server, 8, **bad)
            assert refused.value.status_code == 400
            assert next(iter(bad)) in str(refused.value)
        answers = [low.result(), high.result(), off.result()]
    assert [answer.usage.completion_tokens for answer in answers] == [120] * 3
    assert len({answer.choices[0].message.content for answer in answers}) == 3


def test_decisions_are_in_the_trace_and_in_the_metrics(server: Server) -> None:
    ask(server, 40)
    events = [json.loads(line) for line in server.trace.read_text().splitlines()]
    assert {"admitted"} <= {event["event"] for event in events}
    assert all(event["reason"] for event in events)
    metrics = server.metrics()
    assert 'entropic_decisions_total{event="admitted"}' in metrics
    for name in ("entropic_entropy_nats", "entropic_temperature", "entropic_target_nats"):
        line = next(line for line in metrics.splitlines() if line.startswith(name))
        assert float(line.split()[-1]) > 0
    assert "vllm:num_requests_running" in metrics
