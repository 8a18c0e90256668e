# `make help` lists what there is. Everything runs in .venv, which is made when it is missing or its pins have changed.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Where no NVIDIA GPU is found, torch comes without CUDA, at a tenth of the size. TORCH_INDEX= takes PyPI's build.
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)

# The tests drive the API with this version of the OpenAI SDK too, kept apart from the one in pyproject.toml.
SDK_2 := openai==2.54.0 distro==1.9.0

# Only what is given on make's command line is passed on: a shell may well have a HOST of its own.
given = $(if $(filter command,$(firstword $(origin $(1)))),--$(2) $($(1)))
SERVE := $(call given,MODEL,model) $(call given,HOST,host) $(call given,PORT,port) $(call given,DTYPE,dtype) $(FLAGS)

too_old = $(shell $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || echo yes)
version = $(shell $(PYTHON) -c 'import sys; print(sys.version.split()[0])' 2>/dev/null || echo missing)
complain = $(error Yardstick needs Python 3.11 or newer, and $(PYTHON) is $(version); name another: make PYTHON=python3.12)

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-all test-cluster test-cluster-all check lint types imports format bench wheelhouse wheels images chart

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

setup: $(READY) ## Make .venv with everything in it

serve: $(READY) ## Serve the demo model, or MODEL=directory-or-hub-id, at HOST= PORT= DTYPE=, with any other FLAGS=
	@$(BIN)/yardstick serve $(SERVE)

# Tests marked redis start a real one. Where none can be started the quick tests do without and say so; make test-all fails there.
HAS_REDIS := $(shell command -v redis-server || { docker info >/dev/null 2>&1 && echo docker; })
WITHOUT := $(if $(HAS_REDIS),, and not redis)

# $(call tested,EXPRESSION): what computes in several processes, then what measures time or starts servers by itself.
tested = @status=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 -m "not alone and $(1)" || status=$$?; \
	$(BIN)/python -m pytest -q -m "alone and $(1)" || status=$$?; \
	exit $$status

test: $(READY) ## Run the quick tests
	$(call tested,not slow and not gpu and not cluster$(WITHOUT))
	$(if $(HAS_REDIS),,@echo "Left out: the tests that need a real Redis. Install redis-server (or start Docker) to run them.")

test-all: $(READY) ## Run all tests that need neither a GPU nor a cluster
	$(call tested,not gpu and not cluster)

check: lint types imports test-all ## Run all checks, as CI does

lint: $(READY) ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## Check types
	$(BIN)/mypy

imports: $(READY) ## Check who imports whom
	$(BIN)/lint-imports

format: $(READY) ## Put the code in format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## Measure the engine on this machine, with FLAGS= of python -m benchmarks score
	$(BIN)/python -m benchmarks score $(FLAGS)

# What a GPU host without internet lacks: it has torch, triton, transformers and what these bring along, whose versions are best
# left alone. Of the dependencies that FlashInfer declares, only those here are needed.
WHEEL_PYTHON := 3.12
GPU_WHEELS := flashinfer-python==0.6.6 apache-tvm-ffi==0.1.9
BROUGHT := numpy tokenizers safetensors huggingface_hub hf_xet
NOT_WHEELS := torch|triton|transformers|mypy|ruff|import-linter
PINNED = $(shell sed -n '/^dependencies = /,/^\[project.scripts/ s/^  "\([^";]*\)[";].*/\1/p' pyproject.toml)
DOWNLOAD = $(BIN)/python -m pip download --quiet --dest wheelhouse --only-binary=:all: --python-version $(WHEEL_PYTHON) \
	$(foreach glibc,2_28 2_27 2_17 2_12 2_5,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64

wheelhouse: $(READY) ## Collect the wheels that a GPU host without internet needs
	@rm -rf wheelhouse
	@$(DOWNLOAD) --constraint constraints.txt $(shell printf '%s\n' $(PINNED) | grep -Ev '^($(NOT_WHEELS))==')
	@$(DOWNLOAD) --no-deps $(GPU_WHEELS)
	@rm -f $(BROUGHT:%=wheelhouse/%-*.whl)
	@du -sh --apparent-size wheelhouse
	@echo "On the GPU host, here: python$(WHEEL_PYTHON) -m pip install --no-index --no-deps wheelhouse/*.whl"

# The images. BASE= builds them on another base, such as the one that tests/cluster/base_image.sh makes where no registry can be
# reached; where pip has no index inside a build either, `make wheels` first, and OFFLINE=1.
RELEASE := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REGISTRY ?= localhost/
VARIANT ?= cpu
IMAGE_PYTHON ?= 3.11
# What redis needs on Python before 3.11.3, which pip does not see from here.
IMAGE_ALSO := async-timeout
IMAGE_DOWNLOAD = $(BIN)/python -m pip download --quiet --dest wheels --only-binary=:all: --python-version $(IMAGE_PYTHON)
IMAGE_FLAGS = $(if $(BASE),--build-arg BASE=$(BASE)) $(if $(OFFLINE),--build-arg PIP_NO_INDEX=1)
ENGINE_TAG = $(RELEASE)$(if $(filter cuda,$(VARIANT)),-cuda)

images: ## Build both images, on BASE=, into REGISTRY=, with VARIANT=cuda for GPUs
	docker build $(IMAGE_FLAGS) -f gateway/Dockerfile -t $(REGISTRY)yardstick-gateway:$(RELEASE) .
	docker build $(IMAGE_FLAGS) --build-arg VARIANT=$(VARIANT) -f engine/Dockerfile -t $(REGISTRY)yardstick-engine:$(ENGINE_TAG) .

wheels: $(READY) ## Collect the wheels for `make images OFFLINE=1`, for a base with Python IMAGE_PYTHON=3.11
	@rm -rf wheels
	@$(IMAGE_DOWNLOAD) --no-deps --retries 1 $(addprefix --extra-index-url ,$(TORCH_INDEX)) $(TORCH)
	@$(IMAGE_DOWNLOAD) --find-links wheels --constraint constraints.txt $(IMAGE_ALSO) \
		$(shell sed -n '/^dependencies = /,/^gpu = /p' pyproject.toml | sed -n 's/^  "\([^";]*\)[";].*/\1/p')

chart: $(READY) ## Write what is made from the chart: its README and the tests' rendered manifests
	$(BIN)/python -m tests.helm.generate

test-cluster: $(READY) ## Run the tests that need a cluster, as CI does, on the one that KUBECONFIG names
	$(BIN)/python -m pytest -q -m "cluster and not slow" --durations=12 tests/cluster

test-cluster-all: $(READY) ## Run those that take minutes each too
	$(BIN)/python -m pytest -q -m cluster --durations=12 tests/cluster

$(READY): pyproject.toml constraints.txt
	$(if $(too_old),$(complain))
	@echo "Making .venv; the first time takes some minutes."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --no-deps --retries 1 $(addprefix --extra-index-url ,$(TORCH_INDEX)) $(TORCH)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[engine,dev]'
	@$(BIN)/python -m pip install --quiet --no-deps --target .venv/openai-2 $(SDK_2)
	@touch $@
