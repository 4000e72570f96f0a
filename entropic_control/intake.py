"""From a request to a sequence with fresh states, or to the error that says why it cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
from pydantic import ValidationError

from entropic_control.backends.base import Backend, Prompt
from entropic_control.config import Config, describe
from entropic_control.controllers.base import Array
from entropic_control.errors import ConfigError, ModelError, PromptError, RequestError
from entropic_control.loops import Loops
from entropic_control.request import Request
from entropic_control.sequence import Sequence as Work


class Intake:
    """Checks requests and makes sequences of them.

    Parameters
    ----------
    config : Config
        Defaults of the generation.
    backend : Backend
        Whose tokens and context they must fit.
    loops : Loops
        Gives each sequence its states.
    """

    def __init__(self, config: Config, backend: Backend, loops: Loops) -> None:
        self._defaults = config.generation
        self._backend = backend
        self._loops = loops

    def accepted(self, request: Request | Prompt, names: Sequence[str]) -> Work:
        """The sequence of a request or a bare prompt, with the defaults filled in.

        Parameters
        ----------
        request : Request, str, token ids or chat messages
            What was asked for.
        names : sequence of str
            The ids in use; their count is the request's number.

        Raises
        ------
        PromptError
            If the prompt is empty, no text or no tokens of the model, or leaves no room in the context.
        ConfigError
            If the id is taken, or a per-request setting is unknown or out of range.
        """
        name = _free(names)
        if not isinstance(request, Request):
            try:
                request = Request.model_validate({"prompt": request})
            except ValidationError as error:
                raise PromptError(name, describe(error, "the prompt")) from None
        defaults = self._defaults
        request = request.replace(
            id=request.id or name,
            max_tokens=request.max_tokens or defaults.max_tokens,
            seed=defaults.seed + len(names) if request.seed is None else request.seed,
            stop=defaults.stop if request.stop is None else request.stop,
        )
        prompt = self._tokens_of(request.id or "", request.prompt)
        self._check_ids(request.id or "", np.maximum(request.forced, 0))
        return self.sequence(request, prompt, names)

    def sequence(self, request: Request, prompt: Array, names: Sequence[str]) -> Work:
        """The sequence of a request with every field set, whose prompt is tokens already."""
        work_id = request.id or ""
        if work_id in names:
            raise ConfigError(f"request id {work_id!r} is taken")
        able = self._backend.capabilities
        limit = min(request.max_tokens or 0, able.context - len(prompt))
        if limit < 1:
            raise PromptError(
                work_id,
                f"the prompt has {len(prompt)} tokens and the context holds {able.context}: shorten "
                f"it, or set backend.context higher if the model allows",
            )
        work = Work(request, len(names), prompt, limit, able.context, able.block)
        self._loops.enter(work)
        return work

    def _tokens_of(self, name: str, prompt: Prompt) -> Array:
        if isinstance(prompt, str) and not prompt.strip():
            raise PromptError(name, "the prompt is empty")
        try:
            tokens = self._backend.encode(prompt)
        except ModelError as error:
            raise PromptError(name, str(error)) from error
        except OverflowError:
            raise self._outside(name) from None
        except UnicodeEncodeError as error:
            raise PromptError(name, f"the prompt is not text: {error}") from None
        if not len(tokens):
            raise PromptError(name, "the prompt is empty")
        self._check_ids(name, tokens)
        return tokens

    def _check_ids(self, name: str, tokens: Array) -> None:
        if np.any((tokens < 0) | (tokens >= self._backend.capabilities.vocab)):
            raise self._outside(name)

    def _outside(self, name: str) -> PromptError:
        last = self._backend.capabilities.vocab - 1
        return PromptError(name, f"token ids must lie between 0 and {last}")


def rejected(request: Request | Prompt, error: RequestError, names: Sequence[str]) -> Work:
    """The sequence that stands in the report for a request which was not accepted."""
    if not isinstance(request, Request):
        request = Request.model_construct(prompt=str(request))
    work = Work(request, len(names), np.zeros(0, np.int32), 0, 0)
    work.reason, work.error = "failed", error
    return work


def _free(names: Sequence[str]) -> str:
    """The name of a request that has none: its number, or the next one that nobody chose."""
    return next(name for name in map(str, count(len(names))) if name not in names)
