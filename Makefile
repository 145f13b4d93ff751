# Uses .venv, made here, or the environment of another interpreter: make PYTHON=/path/to/python test
BASE ?= python3
PYTHON ?= .venv/bin/python
# A CPU build of torch serves to build and test; set TORCH= to take another release.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
# What the demo and the tests train.
MODELS ?= "transformers>=5.10,<6" "accelerate>=1.10" "peft>=0.18" "matplotlib>=3.9"
# Of fixed versions, because each release formats and spells differently.
LINTERS ?= ruff==0.17.6 clang-format==23.1.5 mypy==2.4.1 codespell==2.4.3

# Torch minors that `make wheel` builds for: all of liger_ops/aot/torch_release.py, or some of them.
TORCH_VERSIONS ?= all

.PHONY: build test test-packs lint demo wheel sdist clean
.DEFAULT_GOAL := build

# What comes with nothing else to wait for, side by side.
MAKEFLAGS += -j2
# Of make alone: ninja would look for its job server.
unexport MAKEFLAGS
# Byte code is made where it is first needed, a third of what pip would make.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(PYTHON),.venv/bin/python)
ready := .venv/ready
models := .venv/models
linters := .venv/linters
.venv/ready: pyproject.toml
	$(BASE) -m venv .venv
	.venv/bin/python -m pip install -q --no-compile "$(TORCH)" "$(TRITON)" "setuptools>=77" wheel pybind11 ninja cmake \
	  "numpy<2.4"
	touch $@
# The build does not wait for these.
.venv/models: .venv/ready
	.venv/bin/python -m pip install -q --no-compile pytest pytest-xdist expecttest hypothesis $(MODELS)
	touch $@
.venv/linters: .venv/ready
	.venv/bin/python -m pip install -q --no-compile $(LINTERS)
	touch $@
endif

# Kernels are compiled for the GPUs of this machine; LIGER_OPS_ARCHS=all, none or 80,90 says otherwise.
build: $(ready)
	$(PYTHON) setup.py -q build_ext --inplace

# Two processes where pytest-xdist is installed, a file of tests at a time in the order of conftest.py; what counts the
# host's time runs alone.
# Threads that wait sleep: two processes that spin would take each other's cores.
SHARED = $(shell $(PYTHON) -c "import xdist; print('-n 2 --dist loadfile --no-loadscope-reorder')" 2>/dev/null)

test: build $(models) test-packs
	OMP_WAIT_POLICY=passive $(PYTHON) -m pytest $(SHARED) --ignore tests/test_host_cost.py tests
	$(PYTHON) -m pytest tests/test_host_cost.py

test-packs: $(ready)
	$(PYTHON) tests/stub_cuda/packs.py

lint: $(linters)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	git ls-files "*.cpp" "*.h" | xargs "$(dir $(shell command -v $(PYTHON)))clang-format" --dry-run -Werror
	$(PYTHON) liger_ops/aot/build.py declarations liger_ops
	$(PYTHON) -m mypy
	git ls-files ":!*.json*" ":!*.png" ":!tests/liger_kernel_names.txt" | xargs $(PYTHON) -m codespell_lib

demo: build $(models)
	$(PYTHON) -m liger_ops.demo

# One wheel for all these torches, the same byte for byte from one commit. Downloads what it needs of those releases.
wheel: $(ready)
	LIGER_OPS_TORCH_VERSIONS="$(TORCH_VERSIONS)" SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
	  $(PYTHON) setup.py -q bdist_wheel

sdist: $(ready)
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(PYTHON) setup.py -q sdist

clean:
	rm -rf build liger_ops/lib liger_ops/packs liger_ops/include/liger_ops liger_ops/_declared.pyi
