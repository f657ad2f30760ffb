# `make demo` and `make test` need make and Python 3.11 or newer; they make .venv for themselves.
# Paths here are relative, so that the folder may lie anywhere, under a name with spaces too.

PYTHON_IN_VENV := .venv/bin/python
export PYTHON

.PHONY: demo test test-full lint bench clean

# Stream a chat answer from SmolLM2-135M-Instruct.
demo: .venv/.demo
	@$(PYTHON_IN_VENV) -m asyncllm demo

# One thread of torch a process: on tiny models a team of threads only spins. What measures times runs by itself.
PYTEST := OMP_NUM_THREADS=1 $(PYTHON_IN_VENV) -m pytest -q

# Lint, types, and every test that is not marked `full`.
test: .venv/.dev lint
	@$(PYTEST) -m "alone and not full"
	@$(PYTEST) -m "not alone and not full" -n 2

# All tests, the long ones too. Those of the page are skipped where no Chromium is found.
test-full: .venv/.dev lint
	@$(PYTEST) -m "alone"
	@$(PYTEST) -m "not alone" -n 2

lint: .venv/.dev
	@$(PYTHON_IN_VENV) -m ruff check .
	@$(PYTHON_IN_VENV) -m mypy

# What planning, the engine and HTTP cost without a model; then asyncllm beside its peers, which writes benchmarks/results/.
bench: .venv/.dev
	@$(PYTHON_IN_VENV) -m benchmarks.planning
	@$(PYTHON_IN_VENV) -m benchmarks.engine_cost
	@$(PYTHON_IN_VENV) -m benchmarks.http_cost
	@$(PYTHON_IN_VENV) -m benchmarks.compare

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis

# A stamp is newer than the files that say what is installed. What `dev` installs holds what `demo` needs.
.venv/.demo: pyproject.toml scripts/environment.sh
	@{ test .venv/.dev -nt pyproject.toml && test .venv/.dev -nt scripts/environment.sh; } || sh scripts/environment.sh demo
	@touch .venv/.demo

.venv/.dev: pyproject.toml scripts/environment.sh
	@sh scripts/environment.sh dev
	@touch .venv/.dev
