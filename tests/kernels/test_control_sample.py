# ruff: noqa: E402 - imports that need torch follow the check that it is there
"""Measure, control and sample in one kernel, against the numpy controllers that it must equal."""

from __future__ import annotations

import numpy as np
import pytest
from support import close

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from entropic_control.controllers.estimators import FullEntropy
from entropic_control.controllers.measurement import measure
from entropic_control.controllers.sampling import uniform
from entropic_control.controllers.signals import reading
from entropic_control.controllers.softmax import draw, moments
from entropic_control.controllers.temperature import PITemperature
from entropic_control.controllers.temperature.base import Command
from entropic_control.controllers.temperature.pi import PIState
from entropic_control.controllers.truncation import MinP, NoTruncation, TopK, TopP
from entropic_control.kernels import philox
from entropic_control.kernels._triton import tl, triton
from entropic_control.kernels.control_sample import (
    STATE_ROWS,
    PIGains,
    control_sample,
    control_sample_reference,
)
from entropic_control.kernels.dispatch import KernelInputError
from entropic_control.kernels.rows import workspace
from entropic_control.kernels.truncation import truncation

pytestmark = pytest.mark.kernels
MODES = ("interpreter", "reference")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF, NAN = float("inf"), float("nan")


def batch(rows, vocab, dtype=torch.float32):
    z = (torch.randn(rows, vocab) * 3).to(dtype)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,))
    steps = torch.randint(0, 2**40, (rows,))
    return z, seeds, steps


def uniform_of(seed, step):
    return uniform(int(seed) & (2**64 - 1), int(step))


@triton.jit
def uniform_kernel(seeds, steps, out):
    row = tl.program_id(0)
    tl.store(out + row, philox.uniform(tl.load(seeds + row), tl.load(steps + row)))


def test_uniforms_are_numpys_bit_for_bit():
    seeds = [0, 1, 5, 2**63, 2**64 - 1, 123_456_789_012_345] * 2
    steps = [0, 1, 2**31, 2**32, 2**53 + 1, 2**62] + [2**64 - 1] * 6
    expected = [uniform(seed, step) for seed, step in zip(seeds, steps, strict=True)]
    assert philox.uniforms_reference(seeds, steps) == expected
    out = torch.empty(len(seeds), dtype=torch.float64)
    bits = [torch.tensor(np.array(words, np.uint64).view(np.int64)) for words in (seeds, steps)]
    uniform_kernel[(len(seeds),)](*bits, out)
    assert out.tolist() == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab", "runs"), [(3, 1, 1), (4, 255, 1), (4, 1000, 1), (3, 5000, 4), (2, 49_152, 16)]
)
def test_readings_and_tokens_equal_numpys(rows, vocab, runs, dtype, mode):
    z, seeds, steps = batch(rows, vocab, dtype)
    t = torch.tensor([0.7, 1.0, 1.4, 0.0])[:rows]
    space = workspace(rows, vocab, z.device, runs)
    actual = control_sample(z, seeds, steps, temperature=t, mode=mode, workspace=space)
    check(actual, z, seeds, steps, t, NoTruncation())
    expected = control_sample_reference(z, seeds, steps, temperature=t)
    for name in ("log_norm", "peak", "surprisal"):
        close(getattr(actual, name), getattr(expected, name), 3e-6)
    assert space.tickets.tolist() == [0] * rows


def check(actual, z, seeds, steps, t, rule):
    """Compare with `measure` and `draw` of the controllers."""
    measured = measure(z.float().numpy(), Command(t.double().numpy()), FullEntropy(), rule)
    tokens = [
        measured.draw(row, uniform_of(seeds[row], steps[row])) if valid else -1
        for row, valid in enumerate(measured.reading.valid)
    ]
    expected = measured.completed(tokens)
    assert actual.token.tolist() == tokens
    # At T = 0 the mass lies on one token: how many a cut of the tempered distribution leaves says nothing.
    counted = [temperature > 0 or rule.place == "before" for temperature in t.tolist()]
    assert actual.live[counted].tolist() == expected.live[counted].tolist()
    assert actual.valid.tolist() == expected.valid.tolist()
    for name in ("entropy", "raw_entropy", "realized_entropy", "surprisal", "temperature"):
        value = torch.from_numpy(getattr(expected, name))
        close(getattr(actual, name), value, 3e-6)
    close(actual.varentropy, torch.from_numpy(expected.varentropy), 2e-5)


RULES = {
    "top_k": [({"top_k": k}, TopK(k=k)) for k in (1, 40, 10**6)],
    "top_p": [({"top_p": p}, TopP(p=p)) for p in (0.01, 0.9, 1.0)],
    "min_p": [({"min_p": p}, MinP(p=p)) for p in (0.05, 1.0)],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("kind", RULES)
def test_truncation_equals_the_controllers(kind, place, mode):
    z, seeds, steps = batch(5, 1100)
    # Ties by the dozen at every limit, as half-precision logits have.
    z[1:3] = (z[1:3] * 2).round() / 2
    z[2, 100:900] = -INF
    z[3, 5] = NAN
    t = torch.tensor([0.7, 1.0, 1.4, 1.0, 0.0])
    for settings, rule in RULES[kind]:
        cuts = truncation(5, z.device, **settings)
        actual = control_sample(
            z,
            seeds,
            steps,
            temperature=t,
            truncation=cuts,
            place=place,
            mode=mode,
            workspace=workspace(5, 1100, z.device, 2),
        )
        check(actual, z, seeds, steps, t, rule.replace(place=place))


@pytest.mark.parametrize("place", ["before", "after"])
def test_rules_combine_and_are_set_by_row(place):
    z, seeds, steps = batch(4, 900)
    t = torch.tensor([0.8, 1.0, 1.2, 1.5])
    cuts = truncation(
        4, z.device, top_k=[0, 30, 30, 5], top_p=[0.8, 1, 0.9, 1.0], min_p=[0, 0.1, 0.01, 0]
    )
    actual = control_sample(
        z,
        seeds,
        steps,
        temperature=t,
        truncation=cuts,
        place=place,
        mode="interpreter",
        workspace=workspace(4, 900, z.device, 1),
    )
    expected = control_sample_reference(
        z, seeds, steps, temperature=t, truncation=cuts, place=place
    )
    assert actual.token.tolist() == expected.token.tolist()
    assert actual.live.tolist() == expected.live.tolist()
    close(actual.realized_entropy, expected.realized_entropy, 3e-6)
    close(actual.surprisal, expected.surprisal, 3e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": NAN},
        {"top_k": [1, 2, 3]},
    ],
)
def test_settings_out_of_domain_are_refused(settings):
    with pytest.raises(KernelInputError, match=next(iter(settings))):
        truncation(2, "cpu", **settings)


@pytest.mark.parametrize("mode", MODES)
def test_thousands_of_tokens_equal_numpys(mode):
    rows, vocab = (1200 if mode == "interpreter" else 4000), 300
    z, seeds, steps = batch(rows, vocab)
    z[::3] = z[0]
    z[1::50, 7:] = -INF
    t = torch.rand(rows) * 1.5 + 0.2
    space = workspace(rows, vocab, z.device, 2)
    tokens = control_sample(
        z, seeds, steps, temperature=t, raw=False, mode=mode, workspace=space
    ).token.tolist()
    logits = z.numpy()
    expected = [
        draw(logits[row], moments(logits[row], float(t[row])), uniform_of(seeds[row], steps[row]))
        for row in range(rows)
    ]
    assert sum(a != b for a, b in zip(tokens, expected, strict=True)) == 0


def test_tokens_have_the_stated_probabilities():
    rows = 4000
    z = torch.tensor([1.0, -INF, 0.0, 2.0, -1.0]).expand(rows, 5).contiguous()
    sampled = control_sample(
        z, torch.full((rows,), 3), torch.arange(rows), temperature=0.9, mode="reference"
    )
    p = torch.softmax(z[0].double() / 0.9, -1)
    counts = torch.bincount(sampled.token, minlength=5).double()
    live = p > 0
    chi2 = ((counts - rows * p)[live] ** 2 / (rows * p[live])).sum()
    assert counts[1] == 0
    assert chi2 < 16.3  # 0.1 % of samples lie above, 3 degrees of freedom


@pytest.mark.parametrize("mode", MODES)
def test_greedy_takes_the_first_of_equal_peaks(mode):
    z = torch.zeros(2, 2000)
    z[0, [700, 701, 1900]] = 5.0
    t = torch.tensor([0.0, 1e-7])
    sampled = control_sample(
        z,
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int64),
        temperature=t,
        mode=mode,
        workspace=workspace(2, 2000, z.device, 1),
    )
    assert sampled.token.tolist() == [700, 0]
    assert sampled.surprisal.tolist() == [0.0, 0.0]
    assert sampled.entropy.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_broken_rows_leave_their_neighbours_alone(mode):
    z, seeds, steps = batch(4, 600)
    z[1] = -INF
    z[2, 599] = NAN
    alone = control_sample(z[:1], seeds[:1], steps[:1], temperature=1.0, mode=mode)
    sampled = control_sample(z, seeds, steps, temperature=1.0, mode=mode)
    assert sampled.token.tolist()[1:3] == [-1, -1]
    assert sampled.token[0] == alone.token[0]
    for name in ("entropy", "realized_entropy", "surprisal"):
        assert getattr(sampled, name).isnan().tolist() == [False, True, True, False]
        assert getattr(sampled, name)[0] == getattr(alone, name)[0]


CONTROLLERS = (
    PITemperature(),
    PITemperature(schedule="none", kp=0.3, ki=0.05, filter=1.0),
    PITemperature(kp=2.0, ki=2.0, filter=0.9, bounds=(0.5, 0.9), v_min=0.1),
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda c: f"{c.schedule}-{c.kp:g}")
def test_update_equals_the_controller(controller, mode):
    """Every row its own target; some infeasible, some broken; several steps, clips included."""
    rows, vocab, steps = 6, 400, 8
    targets = np.array([0.5, 1.0, 3.0, 1.0, 1.0, 5.9])
    expected = controller.init(rows, dtype=np.float32, target=targets)
    state = torch.tensor(np.stack(expected))
    assert PIState._fields == STATE_ROWS
    space = workspace(rows, vocab, state.device, 1)
    saturated = 0
    for step in range(steps):
        z, seeds, counters = batch(rows, vocab)
        z[3, 10:] = -INF if step % 2 else 0.0
        z[3, 1:] = -INF  # a single live token: no temperature reaches the target
        z[4, 3] = NAN if step % 3 == 0 else 1.0
        before = state.clone()
        out = control_sample(
            z,
            seeds,
            counters,
            gains=PIGains.of(controller),
            state=state,
            mode=mode,
            workspace=space,
        )
        assert torch.equal(state, before), "the old state is a value"
        close(out.temperature, torch.from_numpy(np.exp(expected.log_temperature)), 1e-6)
        signals = reading(
            out.entropy.numpy(),
            out.varentropy.numpy(),
            dtype=np.float32,
            live=out.live.numpy(),
            valid=out.valid.numpy(),
        )
        _, expected = controller.update(PIState(*before.numpy()), signals)
        close(out.state, torch.from_numpy(np.stack(expected)), 1e-6)
        held = [row for row in range(rows) if torch.equal(out.state[:, row], before[:, row])]
        assert held == ([4] if step % 3 == 0 else [])
        saturated += int(np.abs(controller.saturated(expected)).sum())
        state = out.state
    if controller.bounds == (0.5, 0.9):
        assert saturated > 0


@pytest.mark.parametrize("mode", MODES)
def test_state_may_be_updated_in_place(mode):
    z, seeds, steps = batch(3, 500)
    state = torch.tensor(np.stack(PITemperature().init(3, dtype=np.float32)))
    gains = PIGains.of(PITemperature())
    fresh = control_sample(z, seeds, steps, gains=gains, state=state, mode=mode)
    same = control_sample(z, seeds, steps, gains=gains, state=state, next_state=state, mode=mode)
    assert same.state is state
    assert torch.equal(state, fresh.state)


@pytest.mark.parametrize("place", ["before", "after"])
def test_what_truncation_leaves_is_what_the_loop_sees(place):
    z, seeds, steps = batch(2, 500)
    state = torch.tensor(np.stack(PITemperature(target=3.0).init(2, dtype=np.float32)))
    gains = PIGains.of(PITemperature(target=3.0))
    for mode in MODES:
        moved = control_sample(
            z,
            seeds,
            steps,
            gains=gains,
            state=state,
            mode=mode,
            place=place,
            truncation=truncation(2, z.device, top_k=[400, 10]),
        )
        assert torch.equal(moved.entropy, moved.realized_entropy)
        # ten tokens have less than ln 10 = 2.3 nats, and the integral adds up what is missing
        assert moved.state[3, 1] - state[3, 1] > 0.03 * (3.0 - 2.31)


def test_bad_arguments_are_named():
    z, seeds, steps = batch(2, 50)
    gains, state = PIGains.of(PITemperature()), torch.zeros(5, 2)
    for match, arguments in {
        "either a temperature": {},
        "either a temperature, or": {"temperature": 1.0, "gains": gains, "state": state},
        "with their state": {"gains": gains},
        "next_state": {"temperature": 1.0, "next_state": state},
        "state must have shape": {"gains": gains, "state": torch.zeros(4, 2)},
        "temperature must be": {"temperature": torch.ones(2, dtype=torch.float64)},
        "truncation must have": {"temperature": 1.0, "truncation": torch.zeros(4, 2)},
        "unknown place": {"temperature": 1.0, "place": "between"},
        "unknown mode": {"temperature": 1.0, "mode": "fast"},
        "workspace is for": {
            "temperature": 1.0,
            "mode": "interpreter",
            "workspace": workspace(1, 50, "cpu"),
        },
    }.items():
        with pytest.raises(KernelInputError, match=match):
            control_sample(z, seeds, steps, **arguments)
    with pytest.raises(KernelInputError, match=r"seeds must be torch\.int64"):
        control_sample(z, seeds.int(), steps, temperature=1.0)
