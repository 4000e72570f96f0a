"""The loop that is analysed against python-control and against the controller that runs."""

import control
import numpy as np
import pytest

from entropic_control.controllers import FixedTemperature, PITemperature, TemperatureController
from entropic_control.errors import ConfigError
from entropic_control.proofs import open_loop, state_space
from entropic_control.proofs.loop import closed_loop, transfer
from entropic_control.proofs.rollout import rollout

CONTROLLERS = [
    PITemperature(),
    PITemperature(schedule="none", kp=0.05, ki=0.01),
    PITemperature(kp=0.0, ki=0.3, filter=1.0),
    FixedTemperature(),
]


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_transfer_is_what_python_control_makes_of_the_state_space(
    controller: TemperatureController,
) -> None:
    model = controller.linearize(2.0)
    num, den = transfer(model)
    z = np.exp(1j * np.array([0.1, 1.0, 3.0]))
    theirs = control.ss(*model[:4], dt=1)(z)
    assert np.allclose(np.polyval(num, z) / np.polyval(den, z), theirs, atol=1e-12)


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("delay", [1, 2, 5])
def test_poles_of_the_polynomials_are_eigenvalues_of_the_state_matrix(
    controller: TemperatureController, delay: int
) -> None:
    poles = open_loop(controller, 2.0, delay).poles()
    eigenvalues = np.linalg.eigvals(closed_loop(controller.linearize(2.0), 2.0, delay))
    assert np.abs(poles).max(initial=0) == pytest.approx(np.abs(eigenvalues).max(), abs=1e-6)
    assert np.prod(1 - poles) == pytest.approx(np.prod(1 - eigenvalues), abs=1e-9)


@pytest.mark.parametrize("delay", [1, 3])
def test_closed_loop_is_what_the_real_update_does(delay: int) -> None:
    controller = PITemperature(schedule="none", kp=0.05, ki=0.01, bounds=(1e-6, 1e6))
    gain, offset = 4.0, 0.3
    A = closed_loop(controller.linearize(gain), gain, delay)
    x = np.array([0.0, offset, *[offset] * delay])
    loops = rollout(controller, 1, delay)
    centre = loops.in_force - offset
    for _ in range(100):
        x = A @ x
        loops = loops.step(controller.target + gain * (loops.in_force - centre))
        assert loops.state.entropy[0] - controller.target == pytest.approx(x[0], abs=1e-12)
        assert loops.queue[0] - centre == pytest.approx(x[-1], abs=1e-12)


def test_clip_scales_the_command_and_nothing_else() -> None:
    model = PITemperature().linearize()
    shut, open_ = (closed_loop(model, 1.0, 1, clip) for clip in (0.0, 1.0))
    assert np.array_equal(shut[:2], open_[:2])
    assert not shut[2].any()


def test_state_space_has_a_time_step_of_one_token() -> None:
    assert state_space(open_loop(PITemperature(), 1.0, 3)).dt == 1


@pytest.mark.parametrize(("gain", "delay"), [(-1.0, 1), (1.0, -1), (float("nan"), 1)])
def test_bad_loops_are_refused(gain: float, delay: int) -> None:
    with pytest.raises(ConfigError):
        open_loop(PITemperature(), gain, delay)


def test_controllers_that_do_not_move_the_temperature_are_refused() -> None:
    class Limit(FixedTemperature):
        def linearize(self, varentropy: float = 1.0):
            return super().linearize()._replace(outputs=("surprisal limit [nats]",))

    with pytest.raises(ConfigError, match="not ln T"):
        open_loop(Limit())
