"""From a request to a sequence with fresh states, or to the error that says why it cannot run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from pydantic import ValidationError

from entropic_control.backends.base import Backend, Prompt
from entropic_control.config import Config, describe
from entropic_control.controllers.base import Array
from entropic_control.errors import (
    ConfigError,
    EntropicError,
    ModelError,
    PromptError,
    RequestError,
)
from entropic_control.loops import Loops
from entropic_control.request import Request
from entropic_control.sequence import Sequence as Work


class Names:
    """The ids in use."""

    def __init__(self) -> None:
        self.count = 0
        """Requests that came, those that were forgotten among them."""
        self._taken: set[str] = set()
        self._next = 0

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def take(self, name: str) -> None:
        """From now on the id is in use."""
        self._taken.add(name)
        self.count += 1

    def drop(self, names: Collection[str]) -> None:
        """These may be used again."""
        self._taken.difference_update(names)

    def free(self, reserved: Collection[str] = ()) -> str:
        """The id of a request that has none: its number, or the next that nobody chose."""
        self._next = max(self._next, self.count)
        while (name := str(self._next)) in self._taken or name in reserved:
            self._next += 1
        return name


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

    def accepted(
        self, request: Request | Prompt, names: Names, number: int, reserved: Collection[str] = ()
    ) -> Work:
        """The sequence of a request or a bare prompt, with the defaults filled in.

        Parameters
        ----------
        request : Request, str, token ids or chat messages
            What was asked for.
        names : Names
            The ids in use.
        number : int
            Its place in the order of arrival.
        reserved : collection of str
            Ids that are not to be given to it.

        Raises
        ------
        PromptError
            If the prompt is empty, no text or no tokens of the model, or leaves no room in the context;
            or if the model's template or tokenizer fails at it.
        ConfigError
            If the id is taken, or a per-request setting is unknown or out of range.
        RequestError
            If anything else is wrong with it.
        """
        name = names.free(reserved)
        try:
            return self._accepted(request, name, names, number)
        except EntropicError:
            raise
        except Exception as error:
            raise RequestError(name, f"it cannot be run: {error!r}") from error

    def _accepted(self, asked: Request | Prompt, name: str, names: Names, number: int) -> Work:
        given: dict[str, Any] = dict(asked) if isinstance(asked, Request) else {"prompt": asked}
        defaults = self._defaults
        filled = {
            "id": given.get("id") or name,
            "max_tokens": given.get("max_tokens") or defaults.max_tokens,
            "seed": given.get("seed"),
            "stop": given.get("stop"),
        }
        if filled["seed"] is None:
            filled["seed"] = defaults.seed + names.count
        if filled["stop"] is None:
            filled["stop"] = defaults.stop
        try:
            # Again, as one may have been made without a check.
            request = Request.model_validate(given | filled)
        except ValidationError as error:
            what = "the request" if isinstance(asked, Request) else "the prompt"
            raise PromptError(name, describe(error, what)) from None
        prompt = self._tokens_of(request.id or "", request.prompt)
        if request.forced:
            self._check_ids(request.id or "", np.maximum(request.forced, 0))
        return self.sequence(request, prompt, names, number)

    def sequence(self, request: Request, prompt: Array, names: Names, number: int) -> Work:
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
        work = Work(request, number, prompt, limit, len(prompt) + limit, able.block)
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
        except Exception as error:
            reason = f"the model's chat template or tokenizer failed at the prompt: {error!r}"
            raise PromptError(name, reason) from error
        if not len(tokens):
            raise PromptError(name, "the prompt is empty")
        self._check_ids(name, tokens)
        return tokens

    def _check_ids(self, name: str, tokens: Array) -> None:
        if tokens.min() < 0 or tokens.max() >= self._backend.capabilities.vocab:
            raise self._outside(name)

    def _outside(self, name: str) -> PromptError:
        last = self._backend.capabilities.vocab - 1
        return PromptError(name, f"token ids must lie between 0 and {last}")


def rejected(error: EntropicError, name: str, number: int) -> Work:
    """The sequence that stands in the report for a request which was not accepted."""
    work = Work(Request.model_construct(prompt="", id=name), number, np.zeros(0, np.int32), 0, 0)
    work.reason, work.error = "failed", error
    return work
