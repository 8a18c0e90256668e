# `make help` lists the targets. They run in .venv, which is created if it is missing or its pins have changed.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Without an NVIDIA GPU, torch is installed without CUDA, at a tenth of the size. TORCH_INDEX= selects PyPI's build.
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)

# The tests also use this version of the OpenAI SDK, which is separate from the one in constraints.txt.
SDK_2 := openai==2.54.0 distro==1.9.0

# Files that are seldom or never imported: Python compiles those that are, at that time.
SELDOM := /(kubernetes|transformers/models|sympy|faker|networkx|tests|torch/_inductor|torch/testing|pygments/lexers|openai|matplotlib|mpl_toolkits|fontTools|mypyc?|pip|setuptools|torchgen|torch/_vendor)/

# Only variables on make's command line are passed on, because a shell may define its own HOST.
given = $(if $(filter command,$(firstword $(origin $(1)))),--$(2) $($(1)))
SERVE := $(call given,MODEL,model) $(call given,HOST,host) $(call given,PORT,port) $(call given,DTYPE,dtype) $(FLAGS)

IMAGE_PYTHON ?= 3.11

too_old = $(shell $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || echo yes)
version = $(shell $(PYTHON) -c 'import sys; print(sys.version.split()[0])' 2>/dev/null || echo missing)
complain = $(error Yardstick needs Python 3.11 or newer, and $(PYTHON) is $(version); name another: make PYTHON=python3.12)

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-all soak test-cluster test-cluster-all check lint types imports format bench gpu wheelhouse wheels images release drills chart

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24
setup: $(READY) ## Create .venv with all dependencies
serve: $(READY) ## Serve the demo model, or MODEL=directory, hub id or file.gguf, at HOST= PORT= DTYPE=, with any other FLAGS=
	@$(BIN)/yardstick serve $(SERVE)

test: $(READY) ## Run the quick tests, and say which parts of them this machine leaves out
	@PYTHON=$(BIN)/python PART=parallel scripts/test.sh "not slow and not gpu and not cluster" --hypothesis-profile=quick
test-all: $(READY) ## Run all tests that need neither a GPU nor a cluster
	@PYTHON=$(BIN)/python scripts/test.sh "not gpu and not cluster"
soak: $(READY) ## Run hostile clients beside well-behaved ones for SOAK_SECONDS=600
	@SOAK_SECONDS=$(or $(SOAK_SECONDS),600) $(BIN)/python -m pytest -q -s tests/attacks/test_soak.py
test-cluster: $(READY) ## Run the tests that need a cluster, as CI does, on the one that KUBECONFIG names
	$(BIN)/python -m pytest -q -m "cluster and not slow" --durations=12 tests/cluster
test-cluster-all: $(READY) ## Run also the cluster tests that take minutes each
	$(BIN)/python -m pytest -q -m cluster --durations=12 tests/cluster
drills: $(READY) ## Upgrade, kill, evict and scale a release under load on the cluster that KUBECONFIG names, and count the requests that fail
	$(BIN)/python -m tests.cluster.chart.drills $(FLAGS)
check: lint types imports test-all ## Run all checks, as CI does
lint: $(READY) ## Check style and format
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
types: $(READY) ## Check types
	$(BIN)/mypy
imports: $(READY) ## Check imports between packages
	$(BIN)/lint-imports
format: $(READY) ## Format the code
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .
bench: $(READY) ## Measure the engine on this machine, with FLAGS= of python -m benchmarks score
	$(BIN)/python -m benchmarks score $(FLAGS)
gpu: ## On a GPU host: RUN=a, b or c of the benchmarks into OUT=gpu-run and ARCHIVE=, in LIMIT=480 seconds; CONTINUE=1 runs what is left
	@$(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON)) -m benchmarks gpu --run $(or $(RUN),a) --out $(or $(OUT),gpu-run) $(if $(CONTINUE),--continue) $(call given,LIMIT,limit) $(call given,ARCHIVE,archive)
images: ## Build both images, on BASE=, into REGISTRY=, with VARIANT=cuda for GPUs and the modules in FLASHINFER_ZIP=
	@scripts/images.sh
release: ## Build the images for VARIANTS=cpu, and push them and the chart with their digests to REGISTRY=registry.example.com/yardstick
	$(if $(call given,REGISTRY,registry),,$(error name a registry: make release REGISTRY=registry.example.com/yardstick))
	@for variant in $(or $(VARIANTS),cpu); do REGISTRY="$(REGISTRY)/" VARIANT=$$variant scripts/images.sh || exit; done
	@scripts/release.sh publish "$(REGISTRY)"
wheels: $(READY) ## Collect the wheels for `make images OFFLINE=1`, for a base with Python IMAGE_PYTHON=3.11
	@PYTHON=$(BIN)/python TORCH="$(TORCH)" TORCH_INDEX="$(if $(filter cuda,$(VARIANT)),,$(TORCH_INDEX))" IMAGE_PYTHON=$(IMAGE_PYTHON) scripts/wheels.sh
wheelhouse: $(READY) ## Collect the wheels that a GPU host without internet needs, but HOST_HAS=, with the modules in FLASHINFER_ZIP=
	@PYTHON=$(BIN)/python FLASHINFER_ZIP="$(FLASHINFER_ZIP)" HOST_HAS="$(HOST_HAS)" scripts/wheelhouse.sh
chart: $(READY) ## Write the chart's README and the rendered manifests of the tests
	$(BIN)/python -m tests.helm.generate

$(READY): pyproject.toml constraints.txt
	$(if $(too_old),$(complain))
	@echo "Making .venv; the first time takes some minutes."
	@$(PYTHON) -m venv --upgrade-deps .venv # a current pip takes half the CPU time
	@$(BIN)/python -m pip install --quiet --no-compile --no-deps --retries 1 $(addprefix --extra-index-url ,$(TORCH_INDEX)) $(TORCH)
	@$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch numba
	@# pip works on one core, so another compiles loops for this processor meanwhile. Files for other versions of Python do not compile.
	@PYTHONPATH=src $(BIN)/python -m yardstick_llm.kernels.native & loops=$$!; \
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target .venv/openai-2 $(SDK_2) & sdk=$$!; \
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[engine,dev]' && wait $$sdk && \
	{ $(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)' .venv; wait $$loops; } && touch $@
