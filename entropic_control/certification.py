"""Certificates of whole configurations, from a file too: the top floor's door to the proofs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from entropic_control.config import load_config

if TYPE_CHECKING:
    from entropic_control.proofs import Certificate


def certify(source: Any, **how: Any) -> Certificate:
    """Prove what can be proven about a configuration, file or mapping included.

    Parameters
    ----------
    source : path, dict, Config, Engine or Controller
        A YAML or JSON file, what one would hold, or what `entropic_control.proofs.certify` takes.
    how
        As in `entropic_control.proofs.certify`: delay, vocab, gain, gm, pm, trace, trials.

    Raises
    ------
    ConfigError
        If the configuration cannot be used, or there is nothing to certify.
    TraceError
        If the trace is empty, holds NaN or does not move.
    """
    from entropic_control.proofs.certify import certify as prove

    return prove(load_config(source) if isinstance(source, str | Path | dict) else source, **how)
