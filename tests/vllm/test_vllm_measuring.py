"""Real tensors: what is measured on the host and on a device agrees, and rows are tempered in place."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from entropic_control.backends.vllm.adapters import ProcessorV1
from entropic_control.backends.vllm.config import KEY, Settings
from entropic_control.backends.vllm.cuts import cuts_of
from entropic_control.backends.vllm.measuring import _on_device, _on_host, _reading, measure
from entropic_control.config import Config
from entropic_control.controllers import FixedTemperature, MinP, TopK, TopP, Truncation

torch = pytest.importorskip("torch", reason="needs torch: make test-vllm")


CUTS: list[tuple[Truncation, ...]] = [
    (MinP(p=0.05, place="after"), TopK(k=40, place="after"), TopP(p=0.9, place="after")),
    (),
    (TopP(p=0.9, place="after"),),
    (TopK(k=3, place="after"),),
    (TopK(k=100, place="after"), TopP(p=0.5, place="after")),
]


@pytest.mark.parametrize("cuts", [[()] * 5, CUTS], ids=["whole", "cut"])
def test_host_and_device_agree(cuts: list[tuple[Truncation, ...]]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 4001) * 4
    logits[1, 7:] = -float("inf")
    logits[2, 3] = float("nan")
    logits[3] = -float("inf")
    temperature = np.array([1.0, 0.3, 1.0, 1.0, 2.0])
    host = _reading(_on_host(logits.numpy(), temperature, True, cuts), temperature)
    device = _reading(_on_device(logits, temperature, True, cuts).double().numpy(), temperature)
    np.testing.assert_array_equal(host.valid, [True, True, False, False, True])
    np.testing.assert_array_equal(device.valid, host.valid)
    np.testing.assert_array_equal(device.live, host.live)
    for name in ("entropy", "varentropy", "raw_entropy"):
        np.testing.assert_allclose(getattr(device, name), getattr(host, name), rtol=1e-4)
    plain = _on_host(logits.numpy(), temperature, False, cuts)
    # Not bit for bit: compiled, the pass over one temperature adds up in another order than that over two.
    np.testing.assert_allclose(plain[0], host.entropy, rtol=1e-6)
    assert np.isnan(plain[2]).all()
    assert np.isnan(_on_device(logits, temperature, False, cuts)[2].numpy()).all()


def test_what_is_measured_is_what_vllm_samples() -> None:
    params = SimpleNamespace(min_p=0.05, top_k=40, top_p=0.9)
    assert [(cut.kind, cut.place) for cut in cuts_of(params)] == [
        ("min_p", "after"),
        ("top_k", "after"),
        ("top_p", "after"),
    ]
    assert cuts_of(SimpleNamespace(min_p=0.0, top_k=-1, top_p=1.0)) == ()
    row = (torch.randn(1, 2000) * 3).numpy()
    p = np.exp((row[0] - row.max()) / 0.8).astype(float)
    p[p < 0.05 * p.max()] = 0
    p[np.argsort(-p)[40:]] = 0
    order = np.argsort(-p)
    p /= p.sum()
    p[order[np.searchsorted(np.cumsum(p[order]), 0.9) + 1 :]] = 0
    p = p[p > 0] / p.sum()
    found = measure(torch.from_numpy(row), np.array([0.8]), True, [cuts_of(params)])()
    assert found.live[0] == len(p)
    np.testing.assert_allclose(found.entropy[0], -(p * np.log(p)).sum(), rtol=1e-5)


def test_rows_are_tempered_as_vllm_will_divide_them() -> None:
    config = Config(temperature=FixedTemperature(temperature=0.5))
    given = {KEY: Settings.of(config).model_dump(mode="json")}
    vllm_config = SimpleNamespace(additional_config=given, speculative_config=None)
    processor = ProcessorV1(vllm_config, torch.device("cpu"), False)
    asked = [0.8, 0.0, 1.0]
    added = [
        (n, SimpleNamespace(temperature=t, extra_args=None), [], []) for n, t in enumerate(asked)
    ]
    processor.update_state(SimpleNamespace(removed=[], added=added, moved=[]))
    logits = torch.randn(3, 1000)
    before = logits.clone()
    assert processor.apply(logits) is logits
    torch.testing.assert_close(logits[0] / 0.8, before[0] / 0.5)
    assert torch.equal(logits[1], before[1])
    torch.testing.assert_close(logits[2], before[2] / 0.5)
