"""Margins against closed forms, bisection on closed-loop poles, and python-control where it is right."""

import warnings

import control
import numpy as np
import pytest

from entropic_control.controllers import PITemperature
from entropic_control.errors import ConfigError
from entropic_control.proofs import Loop, loop_margins, margins, open_loop, state_space
from entropic_control.proofs.margins import stable_gains
from entropic_control.proofs.varentropy import largest


def integrator(gain: float, delay: int) -> Loop:
    """L = gain / (z^delay (z - 1))."""
    return Loop(np.array([0.0, gain]), np.array([1.0, -1.0]), delay)


@pytest.mark.parametrize("delay", range(41))
@pytest.mark.parametrize("gain", [0.01, 0.1, 0.9, 2.5])
def test_case_21_integrator_with_delay(gain: float, delay: int) -> None:
    found = loop_margins(integrator(gain, delay))
    true = 2 * np.sin(np.pi / (2 * (2 * delay + 1))) / gain
    assert found.gain_margin == pytest.approx(true, rel=1e-9)
    assert found.stable == (true > 1)


def test_case_21_says_unstable_where_control_margin_says_inf() -> None:
    loop = integrator(2.5, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert control.margin(state_space(loop))[0] == np.inf
    found = loop_margins(loop)
    assert not found.stable
    assert found.pole_radius == pytest.approx(1.5)
    assert "unstable" in str(found)
    assert found.phase_margin == found.delay_margin == found.disk_margin == 0


def random_loop(rng: np.random.Generator) -> Loop:
    """A PI loop at a random gain and delay, now and then around a plant with dynamics."""
    controller = PITemperature(
        kp=float(np.exp(rng.uniform(-5, 0.5))) * (rng.random() > 0.1),
        ki=float(np.exp(rng.uniform(-6, -0.5))),
        filter=float(rng.choice([1.0, rng.uniform(0.02, 1)])),
        schedule="none",
    )
    loop = open_loop(controller, float(np.exp(rng.uniform(-2, 2))), int(rng.integers(0, 21)))
    if rng.random() < 0.3:
        pole = rng.uniform(-0.6, 0.95)
        loop = loop._replace(num=loop.num * (1 - pole), den=np.polymul(loop.den, [1.0, -pole]))
        loop = loop._replace(num=np.append(0.0, loop.num))
    return loop


def bisected(loop: Loop) -> float:
    """The gain at which the largest closed-loop pole crosses the unit circle, searched from 1 up."""
    shifted = np.concatenate([loop.den, np.zeros(loop.delay)])

    def unstable(k: float) -> bool:
        return bool(np.abs(np.roots(np.polyadd(shifted, k * loop.num))).max() >= 1)

    if unstable(1.0):
        return 0.0
    low, high = 1.0, 1.1
    while not unstable(high):
        low, high = high, high * 1.1
        if high > 1e7:
            return np.inf
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if unstable(middle) else (middle, high)
    return low


def test_gain_margin_equals_bisection_on_poles_on_200_random_loops() -> None:
    rng = np.random.default_rng(5)
    compared = missed = wrong = 0
    while compared < 200:
        loop = random_loop(rng)
        true = bisected(loop)
        if true == 0.0:
            continue
        assert loop_margins(loop).gain_margin == pytest.approx(true, rel=1e-6)
        compared += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = control.margin(state_space(loop))[0]
        missed += theirs == np.inf
        wrong += theirs < 1e-3
    assert missed + wrong >= 10, "the comparison must include loops where control.margin is wrong"


def test_unstable_loops_get_the_factor_that_stabilises_them() -> None:
    rng = np.random.default_rng(6)
    seen = 0
    while seen < 30:
        loop = random_loop(rng).scaled(20.0)
        if loop.radius() < 1:
            continue
        _, high = stable_gains(loop)
        seen += 1
        if high:
            assert loop.radius(high * (1 - 1e-6)) < 1 < loop.radius(high * (1 + 1e-6))


def test_phase_and_disk_margins_equal_python_control() -> None:
    rng = np.random.default_rng(7)
    seen = 0
    while seen < 12:
        loop = random_loop(rng)
        found = loop_margins(loop)
        if not found.stable or not np.isfinite(found.phase_margin):
            continue
        seen += 1
        omega = np.geomspace(1e-3, np.pi, 4000)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            disk = control.disk_margins(state_space(loop), omega)[0]
            theirs = control.stability_margins(state_space(loop))[1]
        assert found.disk_margin == pytest.approx(float(disk), rel=2e-2)
        if np.isfinite(theirs):
            assert found.phase_margin == pytest.approx(theirs, abs=1e-3)


def test_delay_margin_is_where_the_poles_leave_the_unit_circle() -> None:
    for delay in (1, 2, 4):
        controller = PITemperature(schedule="none", kp=0.05, ki=0.01)
        found = loop_margins(open_loop(controller, 8.0, delay))
        extra = int(found.delay_margin)
        assert open_loop(controller, 8.0, delay + extra).radius() < 1
        assert open_loop(controller, 8.0, delay + extra + 1).radius() > 1


def test_worst_case_over_a_range_is_no_better_than_any_gain_in_it() -> None:
    controller = PITemperature(schedule="none", kp=0.05, ki=0.01)
    over = margins(controller, gain=(0.1, 30), delay=1)
    for gain in np.geomspace(0.1, 30, 57):
        one = margins(controller, gain=float(gain))
        assert over.gain_margin <= one.gain_margin * (1 + 1e-9)
        assert over.disk_margin <= one.disk_margin + 1e-3
        assert over.pole_radius >= one.pole_radius - 1e-9


def test_default_gains_keep_their_margins_for_every_model() -> None:
    found = margins(PITemperature(), (0.1, largest(262_144).bound))
    assert found.stable
    assert found.gain_margin_db > 4
    assert found.phase_margin > 45


@pytest.mark.parametrize("gain", [(-1.0, 2.0), (3.0, 2.0), (1.0, float("inf"))])
def test_bad_ranges_are_refused(gain: tuple[float, float]) -> None:
    with pytest.raises(ConfigError):
        margins(PITemperature(), gain)
