# ruff: noqa: E402 - imports that need torch follow the check that it is there
"""Any number whatever as a temperature, in the kernels and in torch, against the numpy controllers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from entropic_control.backends.torch_rows import on_device, on_host
from entropic_control.controllers.estimators import FullEntropy
from entropic_control.controllers.measurement import sample
from entropic_control.controllers.sampling import uniform
from entropic_control.controllers.temperature import PITemperature
from entropic_control.controllers.temperature.base import Command
from entropic_control.controllers.truncation import MinP, NoTruncation, TopK
from entropic_control.kernels.control_sample import PIGains, control_sample
from entropic_control.kernels.truncation import truncation

pytestmark = pytest.mark.kernels
INF, NAN = float("inf"), float("nan")
EDGES = [
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1e-30,
    -1e-30,
    1e20,
    1e28,
    1e35,
    3.4e38,
    INF,
    -INF,
    NAN,
    -1.0,
    1.0,
]
SIZES = [1, 255, 256, 300, 1000]


def rows(size, seed, count):
    random = np.random.default_rng(seed)
    z = random.standard_normal((count, size)).astype(np.float32) * 4
    z[random.random((count, size)) < 0.5] = -INF
    z[np.arange(count), random.integers(size, size=count)] = 1.0
    return z


def agrees(z, temperature, cut, settings_of, mode, place):
    count = len(z)
    seeds, steps = np.arange(count) + 11, np.arange(count)
    got = control_sample(
        torch.from_numpy(z), torch.from_numpy(seeds), torch.from_numpy(steps),
        temperature=torch.from_numpy(temperature), mode=mode, place=place,
        truncation=settings_of and truncation(count, "cpu", **settings_of),
    )  # fmt: skip
    uniforms = [uniform(int(seed), int(step)) for seed, step in zip(seeds, steps, strict=True)]
    command = Command(temperature.astype(np.float64))
    tokens, reading, _ = sample(z, command, FullEntropy(), cut, uniforms, [-1] * count)
    fit = (temperature >= 0) & (temperature < INF)
    assert got.valid.tolist() == fit.tolist() == reading.valid.tolist()
    for row, token in enumerate(got.token.tolist()):
        assert (token >= 0) == fit[row]
        assert token < 0 or z[row, token] > -INF
        assert token == tokens[row]
    np.testing.assert_allclose(got.entropy.numpy(), reading.entropy, atol=1e-4)
    np.testing.assert_allclose(got.realized_entropy.numpy(), reading.realized_entropy, atol=1e-4)
    np.testing.assert_allclose(got.surprisal.numpy(), reading.surprisal, atol=1e-3)
    assert np.isnan(got.varentropy.numpy()).tolist() == (~fit).tolist()


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("cut", [NoTruncation(), TopK(k=5), MinP(p=0.3)], ids=lambda cut: cut.kind)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["interpreter", "reference"])
def test_the_kernel_draws_a_live_token_or_none(mode, size, cut, place):
    if cut.kind == "none" and place == "after":
        pytest.skip("nothing is cut")
    fields = {"top_k": "k", "min_p": "p"}
    given = {cut.kind: getattr(cut, fields[cut.kind])} if cut.kind in fields else None
    temperature = np.array(EDGES, np.float32)
    z = rows(size, size, len(EDGES))
    agrees(z, temperature, cut.replace(place=place), given, mode, place)


@settings(max_examples=60)
@given(
    st.lists(st.floats(width=32), min_size=4, max_size=4), st.integers(1, 600), st.integers(0, 999)
)
def test_the_reference_takes_any_single_number(temperature, size, seed):
    z = rows(size, seed, 4)
    agrees(z, np.array(temperature, np.float32), NoTruncation(), None, "reference", "before")


@pytest.mark.parametrize("mode", ["interpreter", "reference"])
def test_a_state_without_a_temperature_is_not_moved(mode):
    controller = PITemperature()
    state = np.stack(controller.init(4)).astype(np.float32)
    state[0] = [NAN, INF, -0.3, 200.0]
    z = torch.from_numpy(rows(300, 1, 4))
    got = control_sample(
        z, torch.arange(4), torch.arange(4), gains=PIGains.of(controller),
        state=torch.from_numpy(state.copy()), mode=mode,
    )  # fmt: skip
    assert got.valid.tolist() == [False, False, True, False]
    assert got.token.tolist()[:2] == [-1, -1]
    np.testing.assert_array_equal(got.state.numpy()[:, [0, 1, 3]], state[:, [0, 1, 3]])


@pytest.mark.parametrize("place", [on_host, on_device])
@settings(max_examples=60)
@given(st.lists(st.one_of(st.floats(), st.sampled_from(EDGES)), min_size=3, max_size=3))
def test_scores_in_torch_are_of_live_tokens(place, temperature):
    temperature = np.array(temperature)
    if ((temperature > 0.9e-6) & (temperature < 1.1e-6)).any():
        return  # single precision may round it to the other side of greedy
    z = rows(300, 5, 3)
    measured = place(torch.from_numpy(z), Command(temperature), NoTruncation())
    fit = (temperature >= 0) & (temperature < math.inf)
    assert measured.reading.valid.tolist() == fit.tolist()
    scores = measured.scores.numpy()
    for row in np.flatnonzero(fit):
        assert np.isfinite(scores[row]).any()
        assert not np.isfinite(scores[row][z[row] == -INF]).any()
        assert not np.isnan(scores[row]).any()
        assert 0 <= measured.reading.entropy[row] <= math.log(300)
    assert np.isnan(measured.reading.entropy[~fit]).all()
