"""The search for a common Lyapunov function against cases whose answer is known."""

import numpy as np
import pytest

from entropic_control.controllers import PITemperature
from entropic_control.proofs import open_loop
from entropic_control.proofs.circle import circle_gain
from entropic_control.proofs.fastgain import fast_gain, vertices
from entropic_control.proofs.quadratic import common_quadratic, fastest, growth
from entropic_control.proofs.scheduled import scheduled_gain


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_one_matrix_has_a_quadratic_exactly_when_it_is_stable(n: int) -> None:
    rng = np.random.default_rng(n)
    for _ in range(20):
        A = rng.normal(size=(n, n))
        A /= np.abs(np.linalg.eigvals(A)).max()
        P = common_quadratic([0.9 * A])
        assert P is not None
        assert np.linalg.eigvalsh(P).min() > 0
        assert np.linalg.eigvalsh(0.81 * A.T @ P @ A - P).max() < 0
        assert common_quadratic([1.02 * A]) is None


def test_stable_matrices_whose_product_is_not_have_none() -> None:
    up, down = np.array([[0.5, 2.0], [0.0, 0.5]]), np.array([[0.5, 0.0], [2.0, 0.5]])
    assert np.abs(np.linalg.eigvals(up @ down)).max() > 1
    assert common_quadratic([up, down]) is None


def test_fastest_finds_a_rate_near_the_spectral_radius() -> None:
    A = np.array([[0.8, 1.0], [0.0, 0.5]])
    P = fastest([A])
    assert P is not None
    assert growth(P, [A])[0] == pytest.approx(0.8, abs=5e-3)


def test_circle_criterion_and_common_quadratic_agree() -> None:
    for kp, ki, a, delay in [(0.05, 0.01, 0.1, 1), (0.3, 0.02, 0.3, 1), (0.02, 0.05, 0.5, 2)]:
        controller = PITemperature(kp=kp, ki=ki, filter=a, schedule="none")
        edge = circle_gain(open_loop(controller, 1.0, delay), 0.1)
        inside, outside = (vertices(controller, delay, 0.1, f * edge, (1.0,)) for f in (0.98, 1.02))
        assert common_quadratic(inside) is not None
        assert common_quadratic(outside) is None


def test_provable_gain_is_below_the_linear_margin_and_scales_with_the_gains() -> None:
    controller = PITemperature(kp=0.05, ki=0.01, schedule="none")
    claim = fast_gain(controller, 0.1, 10.0)
    assert claim.clipped <= claim.circle <= open_loop(controller).radius() * 1e9
    halved = fast_gain(controller.replace(kp=0.025, ki=0.005), 0.2, 10.0)
    assert halved.clipped == pytest.approx(2 * claim.clipped, rel=5e-3)


def test_the_provable_gain_is_an_edge() -> None:
    claim = scheduled_gain(PITemperature())
    near, past = (scheduled_gain(PITemperature(), high=f * claim.provable) for f in (0.99, 1.01))
    assert near.holds
    assert not past.holds
    assert "no common Lyapunov function" in past.faults[0]
