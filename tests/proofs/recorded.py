"""Recorded runs of SmolLM2-135M-Instruct on llama.cpp, four requests of 400 tokens each."""

from __future__ import annotations

from pathlib import Path

RUN = Path(__file__).parent / "data" / "run"
"""Under kp 0.1, ki 0.02, from a temperature of 0.7."""
TUNED = RUN.with_name("tuned")
"""The same requests under the gains that `design` found for that run."""
TUNED_GAINS = {"kp": 0.502, "ki": 0.126, "start": 0.706, "v_start": 1.83}
HELD = RUN.with_name("held")
"""Four requests of 400 tokens under the default gains (kp 0.1, ki 0.02) and a target of 1 nat."""
