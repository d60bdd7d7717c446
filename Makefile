# Everything runs in .venv, which the first target that needs it makes. Nothing but Python 3.11 or newer, pip and make is assumed.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13; do $$name -c '' 2>/dev/null && echo $$name && exit; done; echo python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
WORKERS ?= 2
# One thread a process: the tests and the demo start several processes on few cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test slow long-tests ci-slow strict habits check docs versions version gpu prove operators bench clean

help:
	@echo "make demo    plan GPT-2 for 8 ranks, run it on this machine, compare with one device"
	@echo "make test    the tests that take seconds      make slow    the others"
	@echo "make strict  the tests of ranks, held to NCCL's rules"
	@echo "make habits  what training scripts do, under plans of all kinds, in build/habits.md"
	@echo "make check   ruff, mypy --strict, doctests"
	@echo "make versions  the tests that use torch, on the oldest, the pinned and the newest torch and Python"
	@echo "make gpu     what this machine's GPUs run, in build/gpu-report.md, by its own torch (GPU_PYTHON=python3)"
	@echo "make prove   every sharding rule, executed"
	@echo "make docs    the documents as a site, in build/site"
	@echo "make bench   the benchmarks, quick (DATA=DIR: the cost model on published measurements, too)"
	@echo "make clean   remove .venv and build"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# What the demo needs; `pip` looks again only when a requirement or the compiled part changes.
COMPILED := $(wildcard autopar/compiled/*.[ch])
$(VENV)/.run: pyproject.toml constraints.txt $(COMPILED) | $(BIN)/python
	$(PIP) -e '.[torch]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(COMPILED) | $(BIN)/python
	$(PIP) -e '.[torch,test,dev]'
	@touch $@ $(VENV)/.run

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --quiet

demo: $(VENV)/.run
	@mkdir -p build
	$(BIN)/python examples/gpt2_onnx.py build/gpt2.onnx
	$(BIN)/autopar plan build/gpt2.onnx --cluster local-cpu --devices 8 --mesh 8 --batch 8 --dim sequence=64 -o build/gpt2.plan.json
	$(BIN)/autopar run build/gpt2.plan.json --model build/gpt2.onnx --nproc 8 --steps 1 --check

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) -q

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow -q

# Writes down which of them, and of the fast tests, take long (CONTRIBUTING.md).
long-tests: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow or long" -n $(WORKERS) -q --record-long

# One change after the other is checked with another quarter of the slow tests.
PART ?= $(shell git rev-list --count HEAD 2>/dev/null || echo 0)

# The longer tables of plans, scripts and pipelines (`make slow`) take too long for every change.
ci-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m "slow and ci" --part $(PART) -n $(WORKERS) -q tests/search tests/sharding tests/raising tests/costmodel/collectives/test_schedules.py tests/end_to_end/test_scale.py \
	  tests/costmodel/step/test_step_schedules.py tests/integrations tests/examples/test_examples.py \
	  tests/end_to_end/test_losses.py tests/end_to_end/test_spatial.py tests/frontends/torch/test_assertions.py tests/runtime/compression \
	  tests/planning/outer_search/test_best_first.py tests/planning/tables/test_offload.py tests/planning/stages/test_pipeline_estimate.py \
	  tests/runtime/training/test_leftovers.py tests/runtime/training/test_optimizers.py tests/cli/test_cli.py tests/test_documents.py \
	  tests/test_document_commands.py tests/gpu/test_report.py
	$(BIN)/python -m pytest -m long --part $(PART) -n $(WORKERS) -q

# Ranks are told what would hang on NCCL, and their backward passes run on a thread of their own (CONTRIBUTING.md).
STRICT_TESTS ?= tests/end_to_end tests/runtime tests/integrations tests/training tests/operators

strict: $(VENV)/.dev
	$(BIN)/python -m pytest --strict-backend -n $(WORKERS) -q $(STRICT_TESTS)

# What training scripts do, under plans of all kinds beside one device, in three quarters of an hour; then modules and scripts
# drawn from a seed (`make habits SEED=7 DRAWS=500` for a night).
SEED ?= 1
DRAWS ?= 100

habits: $(VENV)/.dev
	$(BIN)/python -m tests.habits.page build/habits.md
	$(BIN)/python -m tests.habits.drawn --seed $(SEED) --draws $(DRAWS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --doctest-modules -q autopar

# The oldest torch that the project allows, that of constraints.txt, and the newest that was tried, with a Python for each.
# Every pair has a venv of its own; `make versions VERSIONS=3.12:2.11.0` runs one. A Python that is not here is left out.
VERSIONS ?= 3.12:2.11.0 3.11:2.13.0 3.13:2.15.0
TORCH_TESTS ?= tests/frontends tests/sharding tests/end_to_end tests/integrations tests/runtime tests/training tests/operators

versions:
	@failed=; for pair in $(VERSIONS); do \
		python=; for name in python$${pair%:*} $$HOME/.pyenv/versions/$${pair%:*}.*/bin/python; do \
			$$name -c '' 2>/dev/null && python=$$name && break; done; \
		echo "== Python $${pair%:*}, torch $${pair#*:}: $${python:-not on this machine, left out}"; \
		[ -z "$$python" ] || $(MAKE) --no-print-directory version PYTHON=$$python TORCH=$${pair#*:} \
			VENV=build/python-$${pair%:*}-torch-$${pair#*:} || failed="$$failed $$pair"; \
	done; [ -z "$$failed" ] || { echo "failed on$$failed"; exit 1; }

# Setuptools is left to torch, of which old ones want an old one.
$(VENV)/.version: pyproject.toml constraints.txt | $(BIN)/python
	sed 's/^torch==.*/torch==$(TORCH)/; /^setuptools==/d' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[torch,test]'
	@touch $@

version: $(VENV)/.version
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) -q $(TORCH_TESTS)

# By the torch of the machine, and without a network: nothing is installed. PYTHONPATH may name a folder with pydantic.
GPU_PYTHON ?= python3

gpu:
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m tests.gpu.report -o build/gpu-report.md

# Executes every sharding rule on torch's own samples, on onnx's node tests and on ours, and writes down what came out.
prove: $(VENV)/.dev
	$(BIN)/python -m tests.sharding.proof -o docs/proof-aten.json
	$(BIN)/python -m tests.sharding.onnx_proof docs/proof-onnx.json
	$(BIN)/python -m tests.frontends.onnx.lowering.node_report docs/onnx-node-tests.json
	$(BIN)/python -m tests.sharding.operators_page

operators: $(VENV)/.dev
	$(BIN)/python -m tests.sharding.operators_page

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/planning.py --quick
	$(BIN)/python benchmarks/correction.py --quick
	$(BIN)/python benchmarks/search.py --quick
	$(BIN)/python benchmarks/runtime.py --quick
	$(BIN)/python benchmarks/faults.py --quick
	$(if $(DATA),$(BIN)/python benchmarks/validation.py --data $(DATA) --quick)

clean:
	rm -rf $(VENV) build
