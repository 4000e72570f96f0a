"""What is asked of the engine, and what it says back while it works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from entropic_control.controllers.base import Strict

FinishReason = Literal["end", "stop", "length", "context", "deadline", "cancelled", "failed"]


class Request(Strict):
    """One prompt and how to continue it; unset fields take the configuration's defaults.

    Parameters
    ----------
    prompt : str, list of {"role", "content"}, or list of int
        Text (wrapped in the model's chat template), chat turns, or token ids as they are.
    id : str
        Name in events, reports and traces; given by the engine if unset.
    max_tokens, min_tokens : int
        Tokens to generate at most; tokens before which the end token is masked.
    ignore_eos : bool
        Whether a token that ends the generation is one like any other, as benchmarks want it.
    seed : int
        What the request samples depends on its seed and its tokens alone.
    stop : list of str
        Texts that end the generation; they are not part of the output.
    deadline : float
        Seconds after arrival at which the request is cut off.
    arrive : float
        Seconds after the start of the run at which the request comes in.
    temperature : dict
        Settings of the temperature controller for this request alone, such as {"target": 1.5}.
    """

    prompt: str | list[dict[str, str]] | list[int]
    id: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    deadline: float | None = Field(None, gt=0)
    arrive: float = Field(0.0, ge=0)
    temperature: dict[str, float] = Field(default_factory=dict)

    @field_validator("prompt")
    @classmethod
    def _check_turns(
        cls, prompt: str | list[dict[str, str]] | list[int]
    ) -> str | list[dict[str, str]] | list[int]:
        for turn in prompt:
            if isinstance(turn, dict) and not {"role", "content"} <= turn.keys():
                raise ValueError("every chat turn needs a 'role' and a 'content'")
        return prompt


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a request."""

    request: str


@dataclass(frozen=True, slots=True)
class Token(Event):
    """A token was sampled; `text` is what became certain to be output with it, maybe nothing."""

    token: int
    text: str


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The request ended, with the last of its text."""

    reason: FinishReason
    text: str = ""


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The request failed; the others go on."""

    error: Exception
