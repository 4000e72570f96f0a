"""Typed errors. This module imports nothing, so every floor of the package may raise them."""

from __future__ import annotations


class EntropicError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(EntropicError, ValueError):
    """A configuration that cannot be used; the message holds the path of each fault."""


class ModelError(EntropicError):
    """A model that is missing, unreadable or unfit for what was asked of it."""


class CapabilityError(EntropicError):
    """The backend cannot do what the configuration asks; found when the engine is built."""


class RequestError(EntropicError):
    """One request failed; its neighbours go on.

    Parameters
    ----------
    request : str
        Identifier of the request at fault.
    reason : str
        What happened and what to do about it.
    """

    def __init__(self, request: str, reason: str) -> None:
        super().__init__(f"request {request!r}: {reason}")
        self.request = request
        self.reason = reason


class PromptError(RequestError):
    """A prompt that is empty, too long for the context, or not text."""


class LogitsError(RequestError):
    """The model gave no usable distribution (all masked, NaN or +inf)."""


class BudgetError(RequestError):
    """A KV budget that cannot hold the blocks that must stay."""


class DecodeError(EntropicError):
    """The inference engine refused a step.

    Parameters
    ----------
    code : int
        The engine's own return code.
    message : str
        What the code means and what was done.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{message} (engine code {code})")
        self.code = code


class NoRoom(DecodeError):
    """No KV cells are left for the step; nothing was changed."""


class EngineBusy(EntropicError, RuntimeError):
    """The engine is in use by another thread."""


class EngineClosed(EntropicError, RuntimeError):
    """An engine or backend was used after it was closed."""


class StateError(EntropicError):
    """A saved engine state that cannot be restored here."""


class OutputError(EntropicError):
    """Results that cannot be written; the message says what is safe and what to do."""


class TraceError(EntropicError, ValueError):
    """A trace that holds nothing to learn from, or numbers that are none; the message says which."""
