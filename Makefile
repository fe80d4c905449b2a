# Every target sets up what it needs: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.holdfast-setup

CODE    := src tests packages $(wildcard bench) $(wildcard examples)
TYPED   := src $(wildcard bench)
# Typed by itself: benches import the real package of that name.
COMPAT  := packages/dlrover-compat/src
BENCHES := $(filter-out bench/__init__.py bench/common.py bench/hollow.py bench/toy_%.py,$(wildcard bench/*.py))

# What takes long to compile. The set-up has done so with torch.
LARGE   := tensorflow ray.data transformers.trainer deepspeed lightning.pytorch

TEST_WORKERS ?= 4
# More words for pytest.
REPORT ?=
# How often `make soak` repeats the tests that start and kill real processes.
SOAK_ROUNDS ?= 20
# Random kills in one training, each round.
SOAK_KILLS  ?= 100
SOAK_SEEDS  ?= 5000
SOAK_TESTS  := $(wildcard tests/integration) $(wildcard tests/e2e)

# Where the environment forbids Python to keep what it compiles, each of the suite's thousand processes would
# compile everything anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test test-times lint ruff types contracts tidy bytecode format bench soak release clean

help:
	@echo "make demo    train on two local nodes, kill a worker, a node and the master, watch it go on"
	@echo "make test    lint, types, import contracts and the whole test suite"
	@echo "make test-times  the same, and then where its time goes: the dearest files and tests"
	@echo "make lint    everything of 'make test' that runs no process"
	@echo "make format  let ruff rewrite the code"
	@echo "make bench   a short run of every benchmark (bench/NAME.py alone gives the figures)"
	@echo "make soak    the suite with all that 'make test' samples, then the process tests SOAK_ROUNDS times ($(SOAK_ROUNDS)), until the first failure"
	@echo "make release build the wheel and the sdist of the last commit into dist/, and install them in every Python here"
	@echo "make setup   only the set-up; make clean removes it and all caches"

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py scripts/setup src/holdfast/checkpoint/_streaming.c
	@PYTHON='$(PYTHON)' scripts/setup $(VENV)
	@touch $@

demo: $(STAMP)
	@$(BIN)/holdfast demo

# The suite checks at its very end that no process, shared memory or folder is left (tests/conftest.py).
# The API server for the kube tests is built once per machine, beside the set-up and lint. More workers than
# cores, because tests with real processes also wait. The longest come first; what starts a Ray cluster or
# loads TensorFlow stays in one of the workers (TOGETHER in tests/conftest.py).
test:
	@scripts/kube-testbed & testbed=$$!; \
	$(MAKE) --no-print-directory setup && $(MAKE) --no-print-directory -j 2 --output-sync lint bytecode && { \
		wait $$testbed || echo "==> without an API server the kube tests will skip"; \
		echo "==> tests"; \
		$(BIN)/python -m pytest -n $(TEST_WORKERS) --ignore=tests/tidy/test_tidy.py $(REPORT); }

test-times:
	@report=$$(mktemp); \
	$(MAKE) --no-print-directory test REPORT="-o junit_family=xunit1 --junitxml=$$report"; code=$$?; \
	$(BIN)/python scripts/test_times.py $$report; rm -f $$report; exit $$code

lint: ruff types contracts tidy

types: $(STAMP)
	@echo "==> types"
	@$(BIN)/mypy --strict $(TYPED)
	@MYPYPATH=src:$(COMPAT) $(BIN)/mypy --strict --package dlrover

ruff: $(STAMP)
	@echo "==> ruff"
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)

contracts: $(STAMP)
	@echo "==> import contracts"
	@$(BIN)/lint-imports

tidy: $(STAMP)
	@echo "==> tidy rules"
	@$(BIN)/python -m pytest -q tests/tidy/test_tidy.py

# Compiled once and before the tests, or those that start first would do it all at the same time.
bytecode: $(STAMP)
	@$(BIN)/python -m compileall -q src
	@for module in $(LARGE); do $(BIN)/python -c "import $$module" >/dev/null 2>&1 || echo "==> $$module cannot be imported"; done

format: $(STAMP)
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/ruff format $(CODE)

bench: $(STAMP)
	@set -e; for bench in $(BENCHES); do echo "==> $$bench --quick"; $(BIN)/python $$bench --quick; done

soak: $(STAMP)
	@echo "==> the whole suite, with all that 'make test' shows by a sample only"
	@HOLDFAST_SOAK_WHOLE=1 $(BIN)/python -m pytest -q -n $(TEST_WORKERS) -x --ignore=tests/tidy/test_tidy.py
	@set -e; for round in $$(seq $(SOAK_ROUNDS)); do \
		echo "==> soak round $$round of $(SOAK_ROUNDS)"; \
		HOLDFAST_SOAK_KILLS=$(SOAK_KILLS) HOLDFAST_SOAK_SEED=$$round $(BIN)/python -m pytest -q -n 2 -x $(SOAK_TESTS); \
		HOLDFAST_SOAK_SEEDS=$(SOAK_SEEDS) $(BIN)/python -m pytest -q -x tests/core/test_shards_history.py \
			tests/core/test_histories.py tests/core/test_checkpoints_histories.py tests/wire/test_fuzz.py; \
		$(BIN)/python -m holdfast.sim.swarm --seeds $$((round * $(SOAK_SEEDS)))..$$((round * $(SOAK_SEEDS) + $(SOAK_SEEDS))); \
		$(BIN)/python -m holdfast.sim.driver_swarm --seeds $$((round * $(SOAK_SEEDS) / 10))..$$(((round + 1) * $(SOAK_SEEDS) / 10)); \
	done

# Needs no set-up: it makes environments of its own.
release:
	@PYTHON='$(PYTHON)' scripts/release

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/holdfast/checkpoint/*.so .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests packages $(wildcard bench) $(wildcard examples) -name __pycache__ -type d -prune -exec rm -rf {} +
