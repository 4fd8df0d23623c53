# Every target builds .venv first where it is missing or older than its lock or pyproject.toml: `make serve` needs
# requirements.lock, every other target requirements-dev.lock, which holds the same versions and what develops.

VENV   := .venv
BIN    := $(VENV)/bin
SERVES := $(VENV)/.layertap-serves
STAMP  := $(VENV)/.layertap-installed
LOW    := .venvs/lowest
# The first of these that runs, is 3.11 or newer and can make environments; `make setup PYTHON=/path/to/python` names one.
PYTHON ?= python3.13 python3.12 python3.11 python3

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-all test-lowest peers test-hard fuzz soak lint audit sbom dist format bench pictures lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## Build .venv from requirements-dev.lock

serve: $(SERVES) ## Start the server; options in ARGS="--port 9000 --config models.yaml"
	@$(BIN)/layertap serve $(ARGS)

# Workers share the cores: torch takes one thread in each. A file stays in one worker, for the servers that its tests share.
PARALLEL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

test: $(STAMP) ## Run the quick tests, as many at once as there are cores; pytest's options in ARGS, "-n 0" for one at a time
	$(PARALLEL) $(ARGS)

test-all: $(STAMP) ## Run the slow tests too, and those of accelerators on a simulated one, which is built once
	@$(BIN)/python -m tests.gpu.simdev.build || [ $$? -eq 2 ]  # 2: nothing to build it with
	$(PARALLEL) -m 'not gpu and not hard' $(ARGS)

# Tests that use most of the other packages, without those that need the dev extra.
LOWEST := tests/service/bulk tests/service/cli tests/service/config tests/service/formats tests/service/http tests/service/pictures \
	tests/models/hooks $(addprefix tests/models/run/test_, extractor.py functions.py graph_nodes.py reduction.py traps.py) $(addprefix --ignore tests/service/, bulk/test_readers.py bulk/test_tables.py cli/test_inspect.py formats/test_arrow.py \
	http/test_openapi_conformance.py)
test-lowest: $(LOW)/.layertap-installed ## Run some of the quick tests with the lowest versions that pyproject.toml allows
	OMP_NUM_THREADS=1 $(LOW)/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile \
		--override-ini filterwarnings=default $(LOWEST) $(ARGS)

peers: $(STAMP) ## Install the libraries beside which tests and bench.jobs hold requests, into .venvs/peers
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target .venvs/peers --no-deps --require-hashes -r tests/peers/requirements.txt

test-hard: peers ## Run every architecture, hostile input and faults at length (two hours and more)
	PYTHONPATH=$(CURDIR)/.venvs/peers $(BIN)/python -m pytest -m hard $(ARGS)

fuzz: READERS := image npy npz safetensors selector
fuzz: $(STAMP) ## Fuzz the readers of strangers' bytes, half an hour each; another time in ARGS="--seconds 60"
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r fuzz/requirements.txt
	@for reader in $(READERS); do $(BIN)/python -m fuzz $$reader $(ARGS) || exit 1; done

soak: $(STAMP) ## Send good and bad requests for an hour and look at the server's memory; ARGS="--seconds 600"
	$(BIN)/python -m tests.soak $(ARGS)

lint: $(STAMP) ## Check style, formatting, types, import directions and unsafe loading
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m tests.unsafe models service client \
		|| { echo 'lint: read files with safetensors or models/sources/checkpoints.py, never with what may run code in them' >&2; exit 1; }

# Only what the lock names, by version and hash; nothing is installed or resolved.
audit: $(STAMP) ## Look for known vulnerabilities of what requirements-dev.lock pins (needs the network)
	$(BIN)/pip-audit --requirement requirements-dev.lock --require-hashes --disable-pip --strict --progress-spinner off $(ARGS)

sbom: $(STAMP) ## Write dist/layertap.cdx.json: what is in .venv, with versions and licences, in CycloneDX
	@mkdir -p dist
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type application --output-reproducible \
		--output-file dist/layertap.cdx.json $(BIN)/python

dist: $(STAMP) ## Write dist/: sdists of layertap and layertap-client, and the wheels that are built of them
	@for project in . client; do \
		$(BIN)/uv build --quiet --no-build-isolation --python $(BIN)/python --out-dir dist $$project || exit 1; done
	@ls dist

format: $(STAMP) ## Apply ruff's fixes and formatting
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: NOW := $(shell date +%Y-%m-%d-%H%M)
bench: RESULTS := bench/results
bench: $(STAMP) ## Measure start-up, then servers beside a plain loop (half an hour and more); the latter's options in ARGS
	$(BIN)/python -m bench.startup --rounds 3 --json $(RESULTS)/startup-$(NOW).json
	$(BIN)/python -m bench.serving --json $(RESULTS)/serving-$(NOW).json $(ARGS)
	$(BIN)/python -m bench.table $(RESULTS)/serving-$(NOW).json
	-$(BIN)/python -m bench.plot $(RESULTS)/serving-$(NOW).json --out $(RESULTS)/serving-$(NOW).svg

pictures: $(STAMP) ## Draw the pictures of the guide and the README anew, by the commands that these print
	$(BIN)/python -m tests.examples.draw_pages

COMPILE := $(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock'
lock: $(BIN)/uv ## Bring the locks in line with pyproject.toml; ARGS=--upgrade for the newest versions
	$(COMPILE) --extra dev -o requirements-dev.lock $(ARGS)
	$(COMPILE) --extra all --extra build --constraint requirements-dev.lock -o requirements.lock --upgrade
	$(COMPILE) --extra all --extra build --extra test --resolution lowest-direct -o .ci/lowest.lock $(ARGS)

clean: ## Remove caches and build outputs, but not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(SERVES): requirements.lock pyproject.toml client/pyproject.toml | $(BIN)/uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install --no-config --quiet --python $(BIN)/python --no-deps --no-build-isolation -e . -e ./client
	@$(BIN)/uv pip check --quiet --python $(BIN)/python \
		|| { echo 'make: requirements.lock does not fit pyproject.toml: make lock' >&2; exit 1; }
	@touch $@

$(STAMP): requirements-dev.lock $(SERVES)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements-dev.lock
	@$(BIN)/uv pip check --quiet --python $(BIN)/python \
		|| { echo 'make: requirements-dev.lock does not fit pyproject.toml: make lock' >&2; exit 1; }
	@touch $@

$(LOW)/.layertap-installed: .ci/lowest.lock pyproject.toml client/pyproject.toml | $(BIN)/uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOW)
	$(BIN)/uv pip install --quiet --python $(LOW)/bin/python --require-hashes --only-binary :all: -r .ci/lowest.lock
	$(BIN)/uv pip install --no-config --quiet --python $(LOW)/bin/python --no-deps --no-build-isolation -e . -e ./client
	@touch $@

# The installer comes out of the lock as well, hashes and all.
$(BIN)/uv: | $(BIN)/python
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null
	@awk '/^[^ ]/ {on = /^uv==/} on' requirements.lock >$(VENV)/uv.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(VENV)/uv.txt

$(BIN)/python:
	@bare=; for candidate in $(PYTHON); do \
		"$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue; \
		"$$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1 || { bare="$$bare $$candidate"; continue; }; \
		echo "$$candidate -m venv $(VENV)"; exec "$$candidate" -m venv --clear $(VENV); \
	done; \
	if [ -n "$$bare" ]; then \
		echo "make:$$bare cannot make environments (ensurepip is missing): apt-get install python3-venv" >&2; \
	else \
		echo 'make: no Python 3.11 or newer among $(PYTHON): install one, or type make setup PYTHON=/path/to/python' >&2; \
	fi; exit 1
