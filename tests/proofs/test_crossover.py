"""Gain crossovers and the margins read off them, on loops that a grid of frequencies steps over."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_control.controllers import PITemperature
from entropic_control.controllers.base import Array
from entropic_control.proofs import Loop, loop_margins, open_loop
from entropic_control.proofs.crossover import crossovers
from entropic_control.proofs.margins import frequencies

# The radius, the angle and the gain of a resonance; with a zero anywhere, any delay.
RADII = st.one_of(
    st.sampled_from([1.0, 0.0, 0.5, 1.1]),
    st.floats(1, 9).map(lambda digits: 1 - 10**-digits),
)
ANGLES = st.one_of(st.sampled_from([0.0, np.pi, np.pi / 2]), st.floats(0.01, 3.13))


@st.composite
def resonant_loops(draw: st.DrawFn) -> Loop:
    den, num = np.ones(1), np.ones(1)
    for _ in range(draw(st.integers(1, 2))):
        pole = draw(RADII) * np.exp(1j * draw(ANGLES))
        den = np.polymul(den, np.poly([pole, pole.conjugate()]).real)
    for _ in range(draw(st.integers(0, 2))):
        num = np.polymul(num, [1.0, -draw(st.floats(-1.5, 1.5))])
    num = np.concatenate([np.zeros(len(den) - len(num)), num])
    return Loop(10 ** draw(st.floats(-5, 0.5)) * num, den, draw(st.integers(0, 40)))


def by_bisection(loop: Loop) -> Array:
    """Crossovers between neighbours of a grid that is denser the nearer a root of num or den is."""
    near = [np.linspace(1e-6, np.pi, 20_001)]
    for angle in np.angle(np.concatenate([np.roots(loop.num), np.roots(loop.den)])):
        offsets = np.geomspace(1e-13, 1, 2_000)
        near += [angle - offsets, [angle], angle + offsets]
    grid = np.unique(np.concatenate(near))
    grid = grid[(grid > 1e-6) & (grid <= np.pi)]

    def sign(omega: Array) -> Array:
        z = np.exp(1j * omega)
        return np.sign(np.abs(np.polyval(loop.num, z)) - np.abs(np.polyval(loop.den, z)))

    at = np.flatnonzero(sign(grid)[1:] * sign(grid)[:-1] < 0)
    low, high, left = grid[at], grid[at + 1], sign(grid)[at]
    for _ in range(60):
        middle = 0.5 * (low + high)
        same = sign(middle) == left
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    return 0.5 * (low + high)


@settings(deadline=None, max_examples=150)
@given(resonant_loops())
def test_every_crossover_that_bisection_finds_is_found_and_is_one(loop: Loop) -> None:
    found = crossovers(loop.num, loop.den)
    if found is None or np.ptp(np.abs(loop.at(np.linspace(0.1, 3, 99)))) < 1e-9:
        return  # an all-pass, to rounding
    z = np.exp(1j * found)
    num, den = np.abs(np.polyval(loop.num, z)), np.abs(np.polyval(loop.den, z))
    rounding = 1e-13 * (np.abs(loop.num).sum() + np.abs(loop.den).sum())
    assert np.all(np.abs(num - den) <= rounding)
    for omega in by_bisection(loop):
        at = np.exp(1j * omega)
        if max(abs(np.polyval(loop.num, at)), abs(np.polyval(loop.den, at))) > 100 * rounding:
            assert np.abs(found - omega).min() < 1e-6


@settings(deadline=None, max_examples=150)
@given(resonant_loops())
def test_turning_the_loop_by_its_phase_margin_puts_a_pole_on_the_unit_circle(loop: Loop) -> None:
    found = loop_margins(loop)
    if not found.stable or found.pole_radius > 1 - 1e-8 or not np.any(loop.num):
        return

    def sizes(degrees: float) -> Array:
        shifted = np.concatenate([loop.den, np.zeros(loop.delay)])
        turned = [
            np.polyadd(shifted, loop.num * np.exp(s * 1j * np.radians(degrees))) for s in (1, -1)
        ]
        return np.abs(np.concatenate([np.roots(p) for p in turned]))

    if np.isfinite(found.phase_margin):
        assert np.abs(sizes(found.phase_margin) - 1).min() < 1e-6
    for share in (0.3, 0.7, 0.99):
        assert sizes(share * min(found.phase_margin, 180.0)).max() < 1 + 1e-9
    if np.isfinite(found.delay_margin):
        for extra in range(1, min(int(found.delay_margin), 12) + 1):
            assert loop._replace(delay=loop.delay + extra).radius() < 1 + 1e-9
    if np.isfinite(found.gain_margin) and 1.001 < found.gain_margin < 1e6:
        for share in (0.2, 0.9, 1 - 1e-4):
            assert loop.radius(1 + share * (found.gain_margin - 1)) < 1 + 1e-9
        near = np.abs(np.abs(loop.poles(found.gain_margin)) - 1).min()
        assert near < 1e-6, "a pole is on the circle at the gain margin"
    # |1 + L| is nowhere less than the peak says, resonances included.
    nearest = np.abs(1 + loop.at(np.append(frequencies(loop), np.pi))).min()
    assert 1 / found.sensitivity_peak <= nearest * (1 + 1e-9)


def test_a_sharp_resonance_has_a_phase_margin() -> None:
    num = np.array([0.0, -0.00046321775841162813, 0.0006531906754823736])
    loop = Loop(num, np.array([1.0, -0.03204637424370557, 0.99980001]), 1)
    found = loop_margins(loop)
    assert found.stable
    assert found.phase_margin == pytest.approx(48.352, abs=1e-3)
    assert found.delay_margin == pytest.approx(1.8038, abs=1e-4)


@pytest.mark.parametrize("away", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("delay", [0, 1, 7])
def test_a_resonance_of_any_sharpness_crosses_where_algebra_says(away: float, delay: int) -> None:
    # |z^2 + r^2| on the circle: 1 + r^4 + 2 r^2 cos(2 omega); equal to k^2 for a gain of k.
    r = 1 - away
    k = 4 * away
    cosine = (k**2 - 1 - r**4) / (2 * r**2)
    true = np.array([np.arccos(cosine) / 2, np.pi - np.arccos(cosine) / 2])
    found = crossovers(np.array([0.0, 0.0, k]), np.array([1.0, 0.0, r**2]))
    assert found == pytest.approx(true, abs=1e-7)
    half = (
        np.sqrt(k**2 - (2 * away) ** 2) / 2
    )  # to first order the crossings lie this far from pi / 2
    assert np.abs(found - np.pi / 2) == pytest.approx(half, rel=5 * away + 1e-6)


@pytest.mark.parametrize("delay", range(0, 41, 5))
def test_a_crossing_at_z_minus_one_counts(delay: int) -> None:
    # L = 2 / (3 z^d (z + 1/3)) has |L| = 1 at z = -1, to rounding.
    loop = Loop(np.array([0.0, 2.0 / 3.0]), np.array([1.0, 1.0 / 3.0]), delay)
    found = crossovers(loop.num, loop.den)
    assert found == pytest.approx([np.pi])
    margin = loop_margins(loop)
    if delay % 2 == 0:  # L(-1) = -1: a closed-loop pole on the circle
        assert margin.pole_radius == pytest.approx(1.0)
    else:  # L(-1) = 1: one more token turns it onto -1
        assert margin.phase_margin == pytest.approx(180.0)
        assert margin.delay_margin == pytest.approx(1.0)


def test_a_loop_that_is_large_at_z_minus_one_bears_no_whole_token() -> None:
    loop = Loop(np.array([0.0, 0.1, 0.0]), np.array([1.0, 1.8, 0.81]), 1)
    assert loop.radius() < 1 < loop._replace(delay=2).radius()
    assert int(loop_margins(loop).delay_margin) == 0


def test_an_all_pass_crosses_everywhere_and_a_quiet_loop_nowhere() -> None:
    assert crossovers(np.array([0.5, 1.0]), np.array([1.0, 0.5])) is None
    quiet = crossovers(np.array([0.0, 0.1]), np.array([1.0, 0.0]))
    assert quiet is not None
    assert not quiet.size
    assert loop_margins(Loop(np.array([0.0, 0.1]), np.array([1.0, 0.0]), 3)).phase_margin == np.inf


@pytest.mark.parametrize("gain", [0.0, 1e-3, 1.0, 30.0])
def test_the_temperature_loop_has_one_crossover_where_it_has_any(gain: float) -> None:
    loop = open_loop(PITemperature(), gain)
    found = crossovers(loop.num, loop.den)
    assert found is not None
    assert len(found) == (gain > 0)
