# Every command there is. `make` lists them.
BIN := .venv/bin
ARGS ?=
PYTHON ?= python3
BENCHMARKS := cpu_engine passkeys shared_promises gateway

.DEFAULT_GOAL := help
.PHONY: help serve serve-gpu chat new-key status setup setup-dev test test-gpu test-clients test-browser check audit fmt proto bench clean

help:  ## list the commands
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: setup  ## install what is missing and serve the bundled checkpoint; options: ARGS="--port 8001"
	@exec $(BIN)/farspan serve $(ARGS)

chat: setup  ## talk to what `make serve` serves
	@exec $(BIN)/farspan chat $(ARGS)

new-key: setup  ## make an API key for the gateway: ARGS="alice --tenant research"
	@$(BIN)/farspan new-key $(ARGS)

status: setup  ## show services, workers and pools
	@exec $(BIN)/farspan status $(ARGS)

serve-gpu:  ## serve on GPUs; PYTHON has a CUDA torch and what the extra `local` lists
	@exec $(PYTHON) -m services.local serve --prefill-device cuda:0 --decode-device cuda:0 $(ARGS)

test: setup-dev check  ## install what tests need, run every check and every test
	@$(BIN)/python -m pytest $(ARGS)

test-gpu:  ## run what needs one or two GPUs; PYTHON as for serve-gpu, with pytest and hypothesis
	@PYTHONPATH=. $(PYTHON) -m pytest -c /dev/null --rootdir=. --noconftest --import-mode=importlib -p no:cacheprovider -W ignore tests/shared/engine/kernels tests/shared/engine/gpu tests/shared/engine/kv/test_pinned_pool.py tests/shared/engine/handoff/test_gpu_placing.py tests/system/test_prefill_on_gpus.py tests/system/test_glm_slice.py tests/system/test_services_on_gpus.py $(ARGS)

test-clients: setup-dev  ## install real clients into .clients and run them against a real stack; 15 minutes
	@PYTHON=$(BIN)/python scripts/setup_clients.sh
	@$(BIN)/python -m pytest -m clients tests/clients $(ARGS)

test-browser: setup-dev  ## install Chromium where it is missing and look at the page with it; 2 minutes
	@scripts/setup.sh local browser
	@scripts/setup_browser.sh
	@$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

check: setup-dev  ## format, lint, types, import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

audit: setup  ## look for known weaknesses of what is installed; needs the PyPI advisory service
	@$(PYTHON) -m venv .audit && .audit/bin/pip install --quiet pip-audit==2.10.1
	@$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > .audit/installed.txt
	@.audit/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off -r .audit/installed.txt $(ARGS)

fmt: setup-dev  ## format, and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

proto: setup-dev  ## generate shared/farspan_pb2.py(i) from proto/farspan.proto
	@$(BIN)/python -m grpc_tools.protoc -I shared=proto --python_out=. --pyi_out=. shared/farspan.proto

bench: setup-dev  ## run every benchmark on an idle machine; results go to benchmarks/results
	@set -e; for name in $(BENCHMARKS); do echo "$$name"; $(BIN)/python -m benchmarks.$$name; done

setup:  ## create .venv with what serving needs
	@scripts/setup.sh local

setup-dev:  ## create .venv with what tests need, too
	@scripts/setup.sh local dev

clean:  ## remove .venv, run folders and caches
	rm -rf .venv .audit .run .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
