"""What a configuration asks of a backend, and the error that says what to change where it cannot."""

from __future__ import annotations

from entropic_control.backends.base import Capabilities
from entropic_control.config import Config
from entropic_control.controllers.base import Controller
from entropic_control.errors import CapabilityError


def require(config: Config, able: Capabilities) -> None:
    """Check that a backend can do what the controllers need.

    Raises
    ------
    CapabilityError
        Naming the part, what the backend cannot do, and the remedy.
    """
    pruning, speculation = config.pruning, config.speculation

    def check(needed: bool, able_to: bool, what: str, part: Controller, remedy: str) -> None:
        if needed and not able_to:
            raise CapabilityError(
                f"backend '{able.name}' cannot {what}, so {part.family} '{part.kind}' cannot run "
                f"on it: {remedy}"
            )

    evict, draft = "evict parts of this model's KV cache", "take back tokens that it was fed"
    select, watch = "attend to some of the KV blocks only", "measure the attention of KV blocks"
    other = "choose another kind, or the triton backend"
    check(pruning.prunes, able.can_evict, evict, pruning, "set pruning to 'none'")
    check(pruning.selects, able.can_select, select, pruning, other)
    check(pruning.needs_attention, able.can_score_attention, watch, pruning, other)
    alone = "set speculation to 'none'"
    check(speculation.drafts, able.can_rollback, draft, speculation, alone)
    by_token = pruning.selects or pruning.needs_attention
    if speculation.drafts and by_token:
        raise CapabilityError(
            f"pruning '{pruning.kind}' looks at every token of its own, so speculation "
            f"'{speculation.kind}' cannot run with it: {alone}"
        )
