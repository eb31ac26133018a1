# Every target sets itself up, with pip alone: a virtual environment under $(VENV), the pinned versions of
# constraints.txt, and a stamp that makes the second run start at once. PYTHON picks the interpreter, VENV the
# environment; pip's own settings (an index with CPU-only torch, a proxy) are taken from your environment as they are.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
ARGS ?=

bin := $(VENV)/bin
py := $(bin)/python
pip := $(py) -m pip install -qq --disable-pip-version-check --constraint $(CONSTRAINTS)
sources := tritoncp kernels perf tests examples docs/conf.py docs/gallery.py docs/tables.py setup.py

.PHONY: help demo bench mutants quick scorecard test test-all test-browser test-integrations test-newest test-oldest gpu \
	docs format lint types check clean find-browser find-compiler
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.demo-ready ## train a small model on 4 ranks and on one, and compare
	@$(py) -m tritoncp demo $(ARGS)

# Processes of the suite share the bytecode of its modules, also where that is not written by default.
pytest := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(py) -m pytest

test: $(VENV)/.dev-ready ## the suite (ARGS="-k mask" narrows it)
	$(pytest) $(ARGS)

# With fewer drawn cases, and without files that compile graphs, start processes, draw pictures or run many
# interpreted kernels, and mistakes that import transformers.
slow := graph/test_dynamo* report/* $(addprefix api/test_,layout.py log_lines.py parallel.py reshard.py roll.py \
	trees.py) $(addprefix call/test_,autograd.py call_modes.py expand.py modes_around_calls.py) call/selected/test_probabilities.py
quick: $(VENV)/.dev-ready ## tests of plans, masks, the CPU engine and calls: before a commit
	$(pytest) --hypothesis-profile=quick tests/planning tests/masks tests/cpu tests/graph tests/call tests/api \
		$(foreach file,$(slow),--ignore-glob='*/$(file)') \
		--deselect='tests/call/test_checks.py::test_a_mistake_raises_an_error_with_a_remedy[transformers' $(ARGS)

scorecard: $(VENV)/.dev-ready ## the tests that prove the rows of docs/scorecard.md, and what was seen
	$(pytest) -q -p tests.scorecard -m "bar and not nightly" $(ARGS)

bench: $(VENV)/.dev-ready ## times of masks, plans, calls and the CPU engine, kept in .benchmarks (ARGS="-k mask --benchmark-compare")
	$(pytest) -n 0 -p benchmark -o python_files='bench_*.py' --benchmark-autosave perf/benchmarks $(ARGS)

mutants: $(VENV)/.mutants-ready ## change lines of the package, and run their tests (ARGS="--count 25 masks")
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(py) -m tests.mutants $(ARGS)

# The tests of pages in a browser; CHROMIUM names another one than is found.
CHROMIUM ?= $(firstword $(foreach name,chromium chromium-browser google-chrome,$(shell command -v $(name) 2> /dev/null)))
test-browser: find-browser $(VENV)/.dev-ready ## pages of results in a browser
	CHROMIUM=$(CHROMIUM) $(pytest) -m browser tests/perf/dashboard $(ARGS)

find-browser:
	@test -n "$(CHROMIUM)" || { echo "make test-browser needs a browser: apt-get install chromium, or CHROMIUM=path"; exit 2; }

# Models and trainers of other libraries, in an environment with pins of its own.
others := .venv-integrations
test-integrations: ## train models of transformers, TRL and torchtitan on CPU ranks
	$(MAKE) --no-print-directory VENV=$(others) CONSTRAINTS=constraints-integrations.txt $(others)/.integrations-ready
	OMP_NUM_THREADS=1 $(others)/bin/python -m pytest -m "integrations or not long" tests/integrations $(ARGS)

# Kernels with the oldest torch and Triton that are promised, in an environment of its own. That torch has CUDA: 3 GB
# to fetch, also for a machine without a GPU.
oldest := .venv-oldest
test-oldest: ## execute kernels that the oldest promised Triton compiles for Hopper
	$(MAKE) --no-print-directory VENV=$(oldest) CONSTRAINTS=constraints-oldest.txt test \
		ARGS='--compiled sm_90 -m "not nightly" tests/compiled tests/executor/compiled $(ARGS)'

# The suite on the newest torch and Triton that it is run with, in an environment of its own. That torch has CUDA:
# 3 GB to fetch, also for a machine without a GPU.
newest := .venv-newest
test-newest: ## the suite with the versions of constraints-newest.txt
	$(MAKE) --no-print-directory VENV=$(newest) CONSTRAINTS=constraints-newest.txt test

# What compares results of matrix products runs again as NumPy's OpenBLAS, torch's MKL and ATen are on other CPUs,
# with two threads. Without caches: graphs that were kept from a run with wider vectors are wrong there.
products := $(addprefix tests/,kernels call cpu selection/test_invariant.py api/test_attention.py api/test_parallel.py \
	distributed/test_schedules.py distributed/test_ulysses.py graph/test_dynamo.py masks/test_varlen.py test_extremes.py)
no_products := $(addprefix --deselect=tests/,call/test_checks.py kernels/test_toolchain.py kernels/test_compiled.py)
another_cpu := OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive OPENBLAS_CORETYPE=Prescott MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=avx2 \
	TORCHINDUCTOR_FORCE_DISABLE_CACHES=1

find-compiler:
	@command -v $(CXX) > /dev/null || { echo "make test-all needs a C++ compiler: apt-get install g++, or CXX=path"; exit 2; }

test-all: find-compiler test ## the suite, the tests marked long, and products of matrices as on another CPU
	$(pytest) --hypothesis-profile=wide -m "long and not integrations and not browser" $(ARGS)
	PYTHONDONTWRITEBYTECODE= $(another_cpu) $(py) -m pytest $(products) $(no_products)

# Uses the python3 that has torch, if there is one, with this checkout on the path; it also needs pytest, click and
# rich. perf/gpu.sh has the parts and their time limits, together under nine minutes.
OUT ?= gpu-out
gpu: ## check, measure, test and tune on a GPU (OUT=folder JOBS=12 PARTS="check routes" ARGS="-k masks")
	@run=$$($(PYTHON) -c "import sys, torch; print(sys.executable)" 2>/dev/null || true); \
	if [ -z "$$run" ]; then $(MAKE) --no-print-directory $(VENV)/.dev-ready && run=$(py) || exit 1; fi; \
	PYTHON="$$run" OUT="$(OUT)" JOBS="$(JOBS)" PARTS="$(PARTS)" perf/gpu.sh $(ARGS)

# Warnings are errors: broken links between pages, pages outside of a table of contents, malformed docstrings and
# addresses. LINKCHECK=1 also requests every external address.
docs: $(VENV)/.docs-ready ## the documentation site, in build/docs (LINKCHECK=1)
	$(py) -m sphinx -W --keep-going -q -b html docs build/docs
	$(if $(LINKCHECK),$(py) -m sphinx -W --keep-going -q -b linkcheck docs build/linkcheck)
	@echo "open build/docs/index.html"

format: $(VENV)/.dev-ready ## rewrite in the house style
	$(bin)/ruff format $(sources)
	$(bin)/ruff check --fix --exit-zero --quiet $(sources)

lint: $(VENV)/.dev-ready ## style, likely mistakes and formatting
	$(bin)/ruff check $(sources)
	$(bin)/ruff format --check --quiet $(sources) || { echo "make lint: make format rewrites these files"; exit 1; }

types: $(VENV)/.dev-ready ## type-check the package
	@$(layout)
	$(bin)/mypy

check: lint types test ## what a change has to pass

# Editable installs, also of environments elsewhere, point into build/__editable__.*: it stays.
clean: ## remove the environment and everything built
	rm -rf $(VENV) $(others) $(newest) $(oldest) dist *.egg-info demo-out \
		.pytest_cache .mypy_cache .ruff_cache .hypothesis
	[ ! -d build ] || find build -mindepth 1 -maxdepth 1 ! -name '__editable__.*' -exec rm -rf {} +

# Steps of the set-up, a line each.
$(py):
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('tritoncp needs Python 3.11 or newer, this is ' + sys.version.split()[0] + ': make PYTHON=python3.12 ...')"
	@echo "set-up: a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }

# torch first and by its pin: asked for by a range, an installer takes the newest build there is.
$(VENV)/.torch-ready: $(CONSTRAINTS) | $(py)
	@echo "set-up: torch (large: a few minutes the first time)"
	@$(pip) $$(grep -E '^(torch|setuptools)==' $(CONSTRAINTS))
	@touch $@

# Strict: type checkers follow it, and neither kernels/ nor tests/ becomes importable elsewhere. It is a tree of links to
# files, so a module that comes or goes installs again.
install = @echo "set-up: tritoncp with what $(1) needs"; \
	$(pip) --no-build-isolation --config-settings editable_mode=strict --editable $(2)
files := build/package-files

$(files): FORCE
	@mkdir -p build; find tritoncp kernels perf -name __pycache__ -prune -o -type f -print | sort > $@.new
	@cmp -s $@.new $@ || cp $@.new $@; rm $@.new

FORCE:

# The package as it is installed, by links, for mypy and for the type checker of an editor.
layout = rm -rf build/types && mkdir -p build/types/tritoncp && \
	ln -s $(CURDIR)/tritoncp/* $(CURDIR)/kernels $(CURDIR)/perf build/types/tritoncp

$(VENV)/.demo-ready: pyproject.toml $(files) $(VENV)/.torch-ready
	$(call install,its demo,'.[demo]')
	@touch $@

$(VENV)/.docs-ready: pyproject.toml $(files) $(VENV)/.torch-ready
	$(call install,its pages,'.[docs]')
	@touch $@

$(VENV)/.dev-ready: pyproject.toml $(files) $(VENV)/.torch-ready
	$(call install,its tests,'.[dev]')
	@$(layout)
	@touch $@ $(VENV)/.demo-ready

$(VENV)/.mutants-ready: pyproject.toml $(VENV)/.dev-ready
	$(call install,its mutants,'.[mutants]')
	@touch $@

$(VENV)/.integrations-ready: pyproject.toml $(files) $(VENV)/.torch-ready
	$(call install,its tests,'.[test]' accelerate lightning torchtitan transformers trl)
	@touch $@
