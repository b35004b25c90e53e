# The two commands, `make demo` and `make test`; both make or find the environment first (scripts/environment.sh).
# Variables: PYTHON=python3.12  VENV=.venv  TORCH_INDEX=<index with CPU wheels of torch>  PIP_INDEX=<index for the rest>
#            KERNELS=off (no compiled kernels)  CUDA=ON|OFF  ARCHITECTURES="89;90a;100a"  NATIVE=ON (scripts/kernels.sh)
#            WORKERS=2 (pytest processes)  TESTS=tests/numerics (a part of the suite)  LIMIT=2400 (seconds for the suite)
#            MARK=nightly (the long tests)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help env kernels demo check smoke test lint format wheel site

export PYTHON VENV TORCH_INDEX PIP_INDEX KERNELS CUDA ARCHITECTURES NATIVE
WORKERS ?= 2
TESTS ?= tests
LIMIT ?= 2400
MARK ?= not gpu and not nightly
ENV = python=$$(scripts/environment.sh)

help:   ## this list
	@grep -E '^[a-z]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+): *## /  make \1\t/' | expand -t 16

env:    ## make or find the environment: torch, the pinned needs, the project (editable)
	@$(ENV); scripts/environment.sh --hint

kernels: ## build the C++ and CUDA kernels in the checkout, or rebuild what has changed
	@python=$$(KERNELS=off scripts/environment.sh); scripts/kernels.sh "$$python"

demo:   ## train llama_tiny under bf16, fp8, fp4 and mxfp4 on the same batches and compare (4 minutes on 2 cores)
	@$(ENV); "$$python" scripts/quickstart.py; scripts/environment.sh --hint

check:  ## what every edit should pass: lint, every recipe for a few steps, one case of every oracle test (90 seconds on 2 cores)
	@$(ENV)
	@$(MAKE) --no-print-directory --output-sync=target -j 2 lint smoke

smoke:  ## every recipe for a few steps, one case of every oracle test
	@$(ENV); OMP_NUM_THREADS=1 "$$python" -m pytest -q -m "check and not nightly" tests/test_smoke.py tests/numerics tests/precision

test:   ## the whole CPU suite (about 20 minutes on 2 cores)
	@$(ENV); OMP_NUM_THREADS=1 timeout --foreground $(LIMIT) "$$python" -m pytest -q -n $(WORKERS) --dist worksteal -m "$(MARK)" $(TESTS)

lint:   ## format, lint, types, import floors
	@$(ENV); "$$python" -m ruff format --check . && "$$python" -m ruff check . && "$$python" -m mypy && \
	"$$python" -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

format: ## rewrite the sources as the formatter wants them
	@$(ENV); "$$python" -m ruff format . && "$$python" -m ruff check --fix .

wheel:  ## a wheel for other machines into dist/, compiled kernels inside (needs the extra `wheel`)
	@$(ENV); scripts/wheel.sh "$$python" dist

site:   ## run the notebook, then build the documentation into build/site; a warning is an error (needs the extra `docs`)
	@$(ENV); "$$python" scripts/notebook.py docs/notebooks/roundings.ipynb build/notebooks/roundings.ipynb; \
	NO_MKDOCS_2_WARNING=1 "$$python" -m mkdocs build --strict -f scripts/site/mkdocs.yml
