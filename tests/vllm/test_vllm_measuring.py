"""Real tensors: what is measured on the host and on a device agrees, and rows are tempered in place."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from entropic_control.backends.vllm.adapters import ProcessorV1
from entropic_control.backends.vllm.config import KEY, Settings
from entropic_control.backends.vllm.measuring import _on_device, _on_host, _reading
from entropic_control.config import Config
from entropic_control.controllers import FixedTemperature

torch = pytest.importorskip("torch", reason="needs torch: make test-vllm")


def test_host_and_device_agree() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 4001) * 4
    logits[1, 7:] = -float("inf")
    logits[2, 3] = float("nan")
    logits[3] = -float("inf")
    temperature = np.array([1.0, 0.3, 1.0, 1.0, 2.0])
    host = _reading(_on_host(logits.numpy(), temperature, True), temperature)
    device = _reading(_on_device(logits, temperature, True).double().numpy(), temperature)
    np.testing.assert_array_equal(host.valid, [True, True, False, False, True])
    np.testing.assert_array_equal(device.valid, host.valid)
    np.testing.assert_array_equal(device.live, host.live)
    for name in ("entropy", "varentropy", "raw_entropy"):
        np.testing.assert_allclose(getattr(device, name), getattr(host, name), rtol=1e-4)
    plain = _on_host(logits.numpy(), temperature, False)
    # Not bit for bit: compiled, the pass over one temperature adds up in another order than that over two.
    np.testing.assert_allclose(plain[0], host.entropy, rtol=1e-6)
    assert np.isnan(plain[2]).all()
    assert np.isnan(_on_device(logits, temperature, False)[2].numpy()).all()


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
