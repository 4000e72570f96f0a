from __future__ import annotations

from hypothesis import settings

# Its examples are kept nowhere, and no run depends on the one before.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=150)
settings.load_profile("repeatable")
