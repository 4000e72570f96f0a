# ruff: noqa: E402 - imports that need torch follow the check that it is there
"""What can be tested of the GPU check without a GPU: its comparisons, its rivals, its table."""

from __future__ import annotations

import pytest
from support import close

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from entropic_control.kernels import gpu_check
from entropic_control.kernels.control_sample import PIGains, update_reference
from entropic_control.kernels.gpu_check import Check, Pool, Timing
from entropic_control.kernels.rows import moments_reference

pytestmark = pytest.mark.kernels


def test_every_kernel_passes_its_check_in_the_interpreter():
    found = list(gpu_check.checks(torch.device("cpu"), "interpreter", large=False))
    kernels = (
        "entropy",
        "top_k",
        "control_sample",
        "paged_attention",
        "paged_prefill",
        "kv_cache",
    )
    assert {check.name.split()[0] for check in found} == set(kernels)
    assert [check for check in found if not check.passed] == []


def test_errors_are_found():
    one = torch.ones(3)
    assert gpu_check._error(one, one) == 0
    assert gpu_check._error(one * 2.5, one) == 1.5
    assert gpu_check._error(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")
    assert gpu_check._error(torch.ones(1), torch.tensor([float("nan")])) == float("inf")
    assert gpu_check._error(torch.ones(1), torch.tensor([float("inf")])) == float("inf")
    assert gpu_check._error(torch.full((1,), float("nan")), torch.full((1,), float("nan"))) == 0
    assert not Check("x", float("nan"), 1.0).passed


def test_rivals_compute_the_same():
    z, t = torch.randn(3, 500), torch.tensor([0.5, 1.0, 1.5])
    expected = moments_reference(z, t)
    for actual, name in zip(
        gpu_check.eager_entropy(z, t), ("entropy", "varentropy", "raw_entropy"), strict=True
    ):
        close(actual, getattr(expected, name), 1e-5)
    gains = PIGains(0.1, 0.02, 0.1, (0.1, 2.0), "varentropy", 0.5)
    state = torch.stack([t.log(), t, t, t * 0, t])
    token, moved = gpu_check.eager_control_sample(gains, z, state)
    wanted = update_reference(gains, state, expected.entropy, expected.varentropy, expected.valid)
    close(moved, wanted, 1e-5)
    assert token.shape == (3,)


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.25])
def test_the_pool_keeps_what_it_says(keep):
    pool = Pool(torch.device("cpu"), torch.float32, 2, 160, 1, 8, keep)
    assert pool.table.shape[1] == round(10 * keep)
    assert pool.starts[0].unique().numel() == round(10 * keep)
    assert pool.starts[:, -1].tolist() == [144, 144]
    assert pool.bytes == 2 * 2 * round(10 * keep) * 16 * 8 * 4


def test_the_table_shows_failures_and_omissions():
    text = gpu_check.render(
        [Check("good", 1e-7, 1e-6), Check("bad", 1.0, 1e-6)],
        [Timing("entropy", 10**6, 2.0, eager=20.0), "attention: left out, the time is up"],
        1000.0,
    )
    assert "FAILED" in next(line for line in text.splitlines() if line.startswith("bad"))
    assert "50.0%" in text
    assert "10.00x" in text
    assert "left out" in text
