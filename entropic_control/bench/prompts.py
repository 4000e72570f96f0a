"""Prompts made of what every Python ships: nothing is downloaded."""

from __future__ import annotations

import importlib
import inspect

from entropic_control.backends.base import Backend
from entropic_control.request import Request

LONG_SOURCES = ("argparse", "tarfile", "typing", "ast", "logging", "inspect")

SHORT = (
    "Write a story about a lighthouse keeper who finds a map.",
    "Explain to a child why the sky is blue.",
    "Describe a walk through an old harbour town at night.",
    "Give advice to someone who starts to learn the piano.",
    "Tell the history of bread in a few paragraphs.",
    "Write a letter from an astronaut to her brother.",
    "What should a traveller know about the desert?",
    "Invent a festival and describe its customs.",
)


def long_text(backend: Backend, tokens: int, number: int = 0) -> str:
    """A prompt of about `tokens` tokens: the source of a standard library module, and a task."""
    source = inspect.getsource(importlib.import_module(LONG_SOURCES[number % len(LONG_SOURCES)]))

    def prompt(size: int) -> str:
        return f"Here is a Python module.\n\n{source[:size]}\n\nWrite an essay about its design."

    low, high = 0, len(source)
    while high - low > 16:
        middle = (low + high) // 2
        fits = len(backend.encode(prompt(middle))) <= tokens
        low, high = (middle, high) if fits else (low, middle)
    return prompt(low)


def request(name: str, prompt: str, tokens: int, seed: int) -> Request:
    """A request that generates exactly `tokens` tokens."""
    return Request(id=name, prompt=prompt, max_tokens=tokens, min_tokens=tokens, seed=seed)
