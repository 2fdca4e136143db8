# Every command there is. `make` lists them.
BIN := .venv/bin
ARGS ?=
PYTHON ?= python3
BENCHMARKS := cpu_engine passkeys shared_promises

.DEFAULT_GOAL := help
.PHONY: help serve serve-gpu chat status setup setup-dev test test-gpu check fmt proto bench clean

help:  ## list the commands
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: setup  ## install what is missing and serve the bundled checkpoint; options: ARGS="--port 8001"
	@exec $(BIN)/farspan serve $(ARGS)

chat: setup  ## talk to what `make serve` serves
	@exec $(BIN)/farspan chat $(ARGS)

status: setup  ## show services, workers and pools
	@exec $(BIN)/farspan status $(ARGS)

serve-gpu:  ## serve on GPUs; PYTHON has a CUDA torch and what the extra `local` lists
	@exec $(PYTHON) -m services.local serve --prefill-device cuda:0 --decode-device cuda:0 $(ARGS)

test: setup-dev check  ## install what tests need, run every check and every test
	@$(BIN)/python -m pytest $(ARGS)

test-gpu:  ## run what needs one or two GPUs; PYTHON as for serve-gpu, with pytest and hypothesis
	@PYTHONPATH=. $(PYTHON) -m pytest -c /dev/null --rootdir=. --noconftest --import-mode=importlib -p no:cacheprovider -W ignore tests/shared/engine/kernels tests/shared/engine/gpu tests/shared/engine/kv/test_pinned_pool.py tests/shared/engine/handoff/test_gpu_placing.py tests/system/test_prefill_on_gpus.py tests/system/test_glm_slice.py tests/system/test_services_on_gpus.py $(ARGS)

check: setup-dev  ## format, lint, types, import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

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
	rm -rf .venv .run .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
