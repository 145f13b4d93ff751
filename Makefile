# Creates and uses .venv, or uses the environment of another interpreter: make PYTHON=/path/to/python test
BASE ?= python3
PYTHON ?= .venv/bin/python
# A CPU build of torch is enough to build and test. Set TORCH= to use another release.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
# Needed by the demo and the tests, which train models.
MODELS ?= "transformers>=5.10,<6" "accelerate>=1.10" "peft>=0.18" "bitsandbytes>=0.50" "matplotlib>=3.9"
# Pinned, because other versions format and check differently.
LINTERS ?= ruff==0.17.6 clang-format==23.1.5 mypy==2.4.1 codespell==2.4.3
# In the folder of the package, wherever Python found it.
clang_format = $(shell $(PYTHON) -c "import clang_format; print(clang_format.get_executable('clang-format'))")

# Of the site.
SITE ?= mkdocs==1.6.1 mkdocs-material==9.8.2 mkdocstrings[python]==1.0.8 ruff==0.17.6
# What loads the repository of `make hub`. Newer transformers refuse this release of kernels.
HUB ?= "transformers==5.22.*" kernels==0.17.2

# Torch minors that `make wheel` builds for: all those in liger_ops/aot/torch_release.py, or a list of some.
TORCH_VERSIONS ?= all
# The machine that `make wheel` builds for, by its cross compiler: x86_64 or aarch64. By default this machine.
MACHINE ?=

.PHONY: build test test-thorough test-all test-aarch64 test-machines test-packs test-hub sanitize lint format docs demo wheel hub sdist clean
.DEFAULT_GOAL := build

# Independent targets run in parallel.
MAKEFLAGS += -j2
# Only for this make: ninja would look for the job server that MAKEFLAGS names.
unexport MAKEFLAGS
# Byte code is written at first import, only for the modules that are used; pip would compile all of them.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(PYTHON),.venv/bin/python)
ready := .venv/ready
models := .venv/models
linters := .venv/linters
# Its Python imports this checkout from any folder.
.venv/ready: pyproject.toml
	$(BASE) -m venv .venv
	.venv/bin/python -m pip install -q --no-compile "$(TORCH)" "$(TRITON)" "setuptools>=77" wheel pybind11 ninja cmake \
	  "numpy<2.4"
	.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" | xargs -I{} \
	  sh -c 'echo "$(CURDIR)" >"{}/liger_ops.pth"'
	touch $@
# Not needed by the build.
.venv/models: .venv/ready
	.venv/bin/python -m pip install -q --no-compile pytest pytest-xdist expecttest hypothesis $(MODELS)
	touch $@
.venv/linters: .venv/ready
	.venv/bin/python -m pip install -q --no-compile $(LINTERS)
	touch $@
endif

# Kernels are compiled for the GPUs of this machine. Override with LIGER_OPS_ARCHS=all, none or a list such as 80,90.
build: $(ready)
	$(PYTHON) setup.py -q build_ext --inplace

# With pytest-xdist, two processes run the test files in the order of conftest.py. Tests that measure host time run
# alone. OMP_WAIT_POLICY=passive: waiting threads sleep instead of occupying the cores that the other process needs.
SHARED = $(shell $(PYTHON) -c "import xdist; print('-n 2 --dist loadfile --no-loadscope-reorder')" 2>/dev/null)

RUN = OMP_WAIT_POLICY=passive $(PYTHON) -m pytest $(SHARED)

# Every operator, dtype, pair of options, integration and error at least once.
test: build $(models) test-packs
	$(RUN) --tier quick --ignore tests/ops/test_host_cost.py tests
	$(PYTHON) -m pytest tests/ops/test_host_cost.py

# What test-all runs in addition.
test-thorough: build $(models) test-packs
	$(RUN) --tier thorough tests

# Without $(MAKE), which would run under `make -n` too.
test-all: build $(models) test-packs
	$(RUN) --ignore tests/ops/test_host_cost.py tests
	$(PYTHON) -m pytest tests/ops/test_host_cost.py

# As other CPUs, thread counts and random numbers: their verdicts may not differ. An hour on two cores.
test-machines: build $(models)
	$(PYTHON) tests/machines.py

# The runtime under ASan, UBSan and TSan. Ten minutes on two cores.
sanitize: build $(models) test-packs
	$(PYTHON) tests/sanitize.py address
	$(PYTHON) tests/sanitize.py thread

# The repository in the library `kernels` and in transformers, in an environment of its own.
test-hub: build build/hub-env/ready
	$(PYTHON) setup.py -q hub
	PYTHONPATH="$(CURDIR)" build/hub-env/bin/python -m pytest -m kernels tests/packaging/test_hub.py tests/docs/test_docs.py

build/hub-env/ready: Makefile
	$(BASE) -m venv build/hub-env
	build/hub-env/bin/python -m pip install -q --no-compile "$(TORCH)" pytest $(HUB)
	touch $@

test-packs: $(ready)
	$(PYTHON) tests/support/host/stub_cuda/packs.py

lint: $(linters)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	git ls-files "*.cpp" "*.h" | xargs "$(clang_format)" --dry-run -Werror
	# clang-format does not break comments.
	! git ls-files "*.cpp" "*.h" | xargs grep -nE ".{121}"
	$(PYTHON) liger_ops/aot/build.py declarations liger_ops
	$(PYTHON) -m mypy
	git ls-files ":!*.json*" ":!*.png" ":!*.pt*" ":!tests/compat/liger_kernel_names.txt" | xargs $(PYTHON) -m codespell_lib
	$(PYTHON) tests/support/prose.py

# What lint demands of the layout.
format: $(linters)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	git ls-files "*.cpp" "*.h" | xargs "$(clang_format)" -i

# The site, in build/site/html. It reads the sources and imports none of them. A broken link is an error.
MKDOCS ?= build/site/venv/bin/mkdocs
build/site/venv/bin/mkdocs:
	$(BASE) -m venv build/site/venv
	build/site/venv/bin/python -m pip install -q $(SITE)
docs: $(MKDOCS)
	rm -rf build/site/pages && mkdir -p build/site/pages/benchmarks
	ln -s $(addprefix $(CURDIR)/,README.md CONTRIBUTING.md CHANGELOG.md docs examples) build/site/pages
	ln -s $(CURDIR)/benchmarks/results build/site/pages/benchmarks
	NO_MKDOCS_2_WARNING=1 LIGER_OPS_RELEASE="liger-ops $$(sed -n 's/__version__ = "\(.*\)"/\1/p' liger_ops/_version.py)" \
	  $(MKDOCS) build --strict

demo: build $(models)
	$(PYTHON) -m liger_ops.demo

# One wheel for all TORCH_VERSIONS, reproducible byte for byte. Downloads the headers and libraries of those releases.
wheel: $(ready)
	LIGER_OPS_TORCH_VERSIONS="$(TORCH_VERSIONS)" LIGER_OPS_MACHINE="$(MACHINE)" SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
	  $(PYTHON) setup.py -q bdist_wheel

# A repository for Hugging Face's library `kernels`, in build/hub, for the installed torch. With
# LIGER_OPS_TORCH_VERSIONS=all, for all releases and all GPUs. It uses the object files of `build` and waits for it if both
# are made.
hub: $(ready) $(filter build,$(MAKECMDGOALS))
	$(PYTHON) setup.py -q hub

# The wheel for aarch64 in an emulator, on x86-64.
test-aarch64: $(ready)
	$(PYTHON) tests/packaging/emulated.py dist/*_aarch64.whl

sdist: $(ready)
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(PYTHON) setup.py -q sdist

clean:
	rm -rf build liger_ops/lib liger_ops/packs liger_ops/include/liger_ops liger_ops/_declared.pyi
