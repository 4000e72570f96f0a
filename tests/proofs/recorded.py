"""Recorded runs of SmolLM2-135M-Instruct on llama.cpp, four requests of 400 tokens each."""

from __future__ import annotations

from pathlib import Path

RUN = Path(__file__).parent / "data" / "run"
"""Under another law, whose whole error was divided by the varentropy: a plant to identify, and a loop that
is not the controllers' any more."""
HELD = RUN.with_name("held")
"""Under kp 0.1, ki 0.02 and a target of 1 nat, from a temperature of 0.7."""
HELD_GAINS = {"kp": 0.1, "ki": 0.02}
TUNED = RUN.with_name("tuned")
"""The same requests under the gains that `design` found for HELD."""
TUNED_GAINS = {"kp": 0.079, "ki": 0.031, "start": 0.716, "v_start": 1.63}
