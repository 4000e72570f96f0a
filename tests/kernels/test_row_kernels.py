# ruff: noqa: E402 - imports that need torch follow the check that it is there
"""Entropy and top-k kernels against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support import close

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from entropic_control.controllers.estimators import TopKEntropy
from entropic_control.controllers.softmax import moments as numpy_moments
from entropic_control.kernels.entropy import entropy
from entropic_control.kernels.rows import moments_reference, workspace
from entropic_control.kernels.top_k import top_k_entropy, top_k_reference

pytestmark = pytest.mark.kernels
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# rows, vocabulary, runs in a tile: single elements, borders of runs and tiles, many tiles
SHAPES = (
    (1, 1, None),
    (3, 255, 1),
    (2, 256, 1),
    (2, 257, 1),
    (3, 1000, None),
    (2, 4097, 4),
    (5, 5000, 2),
    (4, 49_152, None),
    (1, 262_144, None),
)


def logits(rows, vocab, dtype, scale=3.0):
    return (torch.randn(rows, vocab) * scale).to(dtype)


def temperatures(rows):
    return torch.tensor([0.7, 1.0, 1.3, 0.1, 2.0])[:rows]


def compare(actual, expected, tolerance=2e-6, spread=1e-5):
    for name, value in expected._asdict().items():
        close(getattr(actual, name), value, spread if name == "varentropy" else tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab", "runs"), SHAPES)
def test_moments(rows, vocab, runs, dtype):
    z, t = logits(rows, vocab, dtype), temperatures(rows)
    space = workspace(rows, vocab, z.device, runs)
    actual = entropy(z, t, mode="interpreter", workspace=space)
    compare(actual, moments_reference(z, t))
    assert space.tickets.tolist() == [0] * rows
    if runs is not None and vocab > runs * 256:
        assert space.tiling.tiles > 1


def test_a_workspace_is_reusable():
    z, t = logits(3, 3000, torch.float32), temperatures(3)
    space = workspace(5, 3000, z.device, 4)
    first = entropy(z, t, mode="interpreter", workspace=space)
    entropy(logits(5, 3000, torch.float32), temperatures(5), mode="interpreter", workspace=space)
    again = entropy(z, t, mode="interpreter", workspace=space)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_rows_may_be_strided():
    z, t = logits(3, 1000, torch.float32), temperatures(3)
    wide = torch.full((3, 1500), float("nan"))
    wide[:, :1000] = z
    compare(entropy(wide[:, :1000], t, mode="interpreter"), moments_reference(z, t))


INF, NAN = float("inf"), float("nan")
ADVERSARIAL = {
    "one live of two": ([0.0, -INF], 1.0, 0.0),
    "two live of three": ([0.0, 0.0, -INF], 1.0, math.log(2)),
    "fp16 extremes": ([65504.0, -65504.0], 1.0, 0.0),
    "fp16 extremes, cold": ([65504.0, -65504.0], 1e-5, 0.0),
    "ties": ([2.0] * 700, 0.3, math.log(700)),
    "one live token of many": ([-INF] * 600 + [3.0] + [-INF] * 600, 1.0, 0.0),
    "greedy": ([11.06, 11.0, 3.0], 0.0, 0.0),
    "nearly greedy": ([11.06, 9.0, 3.0], 1e-12, 0.0),
    "cold": ([11.06, 9.0, 3.0], 1e-5, 0.0),
    "float32 extremes": ([3e38, -3e38], 1.0, 0.0),
    "masks written as the lowest number": (
        [-3.4028234663852886e38] * 300 + [1.0, 1.0],
        1.0,
        math.log(2),
    ),
    "hot": ([1.0, -1.0, -INF], 50.0, None),
}


@pytest.mark.parametrize("mode", ["interpreter", "reference"])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_rows(name, mode):
    row, temperature, expected = ADVERSARIAL[name]
    z, t = torch.tensor([row]), torch.tensor([temperature])
    space = workspace(1, len(row), z.device, 1)
    actual = entropy(z, t, mode=mode, workspace=space)
    compare(actual, moments_reference(z, t))
    of = numpy_moments(z[0].numpy(), temperature)
    assert actual.entropy.item() == pytest.approx(of.entropy, abs=1e-6)
    assert actual.varentropy.item() == pytest.approx(of.varentropy, abs=1e-5)
    assert actual.live.item() == of.live
    assert actual.valid.item()
    if expected is not None:
        assert actual.entropy.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("mode", ["interpreter", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_broken_rows_are_invalid(dtype, mode):
    rows = [
        [NAN, 6.0, 8.0],
        [1.0, INF, 2.0],
        [-INF] * 3,
        [NAN] * 3,
        [1.0, 2.0, 3.0],
        [NAN, INF, 0.0],
    ]
    z = torch.full((6, 900), -INF)
    z[:, 300:303] = torch.tensor(rows)
    z[3] = NAN
    space = workspace(6, 900, z.device, 1)
    actual = entropy(z.to(dtype), 1.0, mode=mode, workspace=space)
    assert actual.valid.tolist() == [False, False, False, False, True, False]
    assert actual.live.tolist() == [0, 0, 0, 0, 3, 0]
    for name in ("entropy", "varentropy", "raw_entropy", "log_norm", "peak"):
        assert getattr(actual, name).isnan().tolist() == [True, True, True, True, False, True]
    close(actual.entropy[4], moments_reference(z[4:5], torch.ones(1)).entropy[0], 1e-6)


def test_raw_entropy_only_on_request():
    z, t = logits(2, 700, torch.float32), temperatures(2)
    for mode in ("interpreter", "reference"):
        assert entropy(z, t, raw=False, mode=mode).raw_entropy.isnan().all()
        close(entropy(z, t, mode=mode).raw_entropy, moments_reference(z, t).raw_entropy, 2e-6)


TOP_K = (
    (3, 255, 1, 1),
    (3, 255, 1, 255),
    (3, 1000, 1, 7),
    (3, 1000, 1, 255),
    (2, 5000, 4, 1),
    (2, 5000, 4, 10**6),
    (1, 49_152, 64, 64),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab", "runs", "k"), TOP_K)
def test_top_k(rows, vocab, runs, k, dtype):
    z, t = logits(rows, vocab, dtype), temperatures(rows)
    space = workspace(rows, vocab, z.device, runs)
    actual = top_k_entropy(z, t, k=k, mode="interpreter", workspace=space)
    # 1 - sum p cancels: what remains is known to the rounding of the sum.
    compare(actual, top_k_reference(z, t, k), tolerance=1e-5)
    if k >= vocab:
        assert torch.equal(actual.lower, actual.entropy)
        assert torch.equal(actual.upper, actual.entropy)
        assert not actual.tail_mass.any()


@pytest.mark.parametrize("mode", ["interpreter", "reference"])
def test_top_k_equals_the_estimator(mode):
    z = logits(4, 3000, torch.float32).round()
    z[0, 10:2500] = -INF
    z[1] = 1.0
    t = temperatures(4)
    for k in (1, 5, 600):
        actual = top_k_entropy(z, t, k=k, mode=mode)
        for row in range(4):
            of = numpy_moments(z[row].numpy(), float(t[row]))
            expected = TopKEntropy(k=k).estimate(z[row].numpy(), of)
            found = [float(actual[index][row]) for index in (2, 1, 2, 3)]
            assert found == pytest.approx(list(expected), abs=1e-5)


def test_top_k_of_broken_and_greedy_rows():
    z = torch.tensor([[NAN, 1.0, 2.0], [-INF] * 3, [1.0, 2.0, 3.0]])
    actual = top_k_entropy(z, torch.tensor([1.0, 1.0, 0.0]), k=2, mode="interpreter")
    assert actual.valid.tolist() == [False, False, True]
    assert actual.upper.isnan().tolist() == [True, True, False]
    assert actual.upper[2] == 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_is_float64_softmax(dtype):
    z, t = logits(3, 777, dtype), temperatures(3)
    z[:, 100:300] = -INF
    p = torch.softmax(z.double() / t.double()[:, None], -1).numpy()
    logs = np.log(np.where(p > 0, p, 1.0))
    h = -(p * logs).sum(-1)
    actual = moments_reference(z, t)
    np.testing.assert_allclose(actual.entropy, h, rtol=1e-10)
    np.testing.assert_allclose(actual.varentropy, (p * logs**2).sum(-1) - h**2, rtol=1e-9)
