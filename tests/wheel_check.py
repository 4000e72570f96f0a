"""Run by `make wheel` in an environment that holds the built wheel and nothing else of ours."""

import sys
from importlib import resources
from pathlib import Path

import entropic_control
from entropic_control.errors import CapabilityError

light = {"torch", "llama_cpp", "matplotlib", "control"} & set(sys.modules)
assert not light, f"`import entropic_control` pulled in {light}"
assert "site-packages" in str(Path(entropic_control.__file__)), entropic_control.__file__
assert (resources.files("entropic_control") / "py.typed").is_file()

report = entropic_control.load({}, backend="simulated").run(["Write a story.", "And another."])
assert [done.finish_reason for done in report.completions] == ["length", "length"]
assert all(len(done.tokens) == 256 for done in report.completions)
try:
    entropic_control.load({})
    answer = "it opened"
except CapabilityError as error:
    answer = str(error)
assert "pip install 'entropic-control[llama]'" in answer, answer
light = {"torch", "llama_cpp", "matplotlib"} & set(sys.modules)
assert not light, f"running the simulated backend pulled in {light}"
print("the wheel works by itself")
