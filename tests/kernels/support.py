"""What the kernel tests share."""

from __future__ import annotations

from typing import Any

import numpy as np


def close(actual: Any, expected: Any, tolerance: float) -> None:
    """Every element within `tolerance`, absolute and relative; NaN and infinities where expected."""
    np.testing.assert_allclose(
        actual.double().numpy(), expected.double().numpy(), rtol=tolerance, atol=tolerance
    )
