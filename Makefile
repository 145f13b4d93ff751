# Uses .venv, made here, or the environment of another interpreter: make PYTHON=/path/to/python test
BASE ?= python3
PYTHON ?= .venv/bin/python
# A CPU build of torch serves to build and test; set TORCH= to take another release.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0

.PHONY: build test demo clean
.DEFAULT_GOAL := build

ifeq ($(PYTHON),.venv/bin/python)
ready := .venv/ready
.venv/ready: pyproject.toml
	$(BASE) -m venv .venv
	.venv/bin/python -m pip install -q --upgrade pip
	.venv/bin/python -m pip install -q "$(TORCH)" "$(TRITON)" setuptools wheel pybind11 ninja cmake pytest "numpy<2.4" expecttest
	touch $@
endif

build: $(ready)
	$(PYTHON) setup.py -q build_ext --inplace

test: build
	$(PYTHON) -m pytest tests

demo: build
	$(PYTHON) -m liger_ops.demo

clean:
	rm -rf build liger_ops/lib liger_ops/packs
