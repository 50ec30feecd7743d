PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
ENVIRONMENT = $(PYTHON) book/scripts/environment.py
# Two files of tests at a time, each on one core.
SPREAD = OMP_NUM_THREADS=1
TWO = --numprocesses 2 --dist loadfile

.PHONY: help env model book test unit nbval lint compat lab exercises notebooks compile bench gpu clean

help:  ## list the commands
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 20

env:
	@$(ENVIRONMENT) $(VENV) all

model: env
	@$(BIN)/course models fetch

book: model  ## set up, run every notebook on this machine, build the book and print where it is
	@$(BIN)/python book/scripts/build.py book

test: model lint unit nbval  ## set up, then all tests: code, notebooks, and the built book in a browser

lint: env
	@echo "== style, types and the order of rooms"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports >/dev/null || $(BIN)/lint-imports

unit: model
	@echo "== unit tests, exercises and the built book"
	@$(SPREAD) $(BIN)/pytest tests --quiet -m "not gpu" $(TWO) --durations=5

nbval: model
	@echo "== every notebook, executed and compared"
	@$(BIN)/pytest --quiet --nbval-lax --nbval-cell-timeout 600 notebooks/*.ipynb
	@$(BIN)/pytest --quiet --nbval-lax --nbval-cell-timeout 600 $(TWO) notebooks/exercises

compat: ## the unit tests with the oldest supported versions, in an environment of their own
	@$(ENVIRONMENT) .venv-compat dev --oldest
	@.venv-compat/bin/course models fetch
	@$(SPREAD) .venv-compat/bin/pytest tests --quiet -m "not gpu" --ignore=tests/book $(TWO)

lab: model  ## open JupyterLab on the notebooks
	@$(BIN)/jupyter lab --notebook-dir notebooks

exercises: model  ## open the exercises in JupyterLab without solutions; answers stay in my-exercises
	@test -d my-exercises || $(BIN)/course exercises release my-exercises
	@$(BIN)/jupyter lab --notebook-dir my-exercises

notebooks: model  ## run every notebook and store its outputs in the file, ready to commit
	@$(BIN)/python book/scripts/build.py notebooks

compile: env  ## compile every kernel for every card, without one, and store the report
	@TRITON_INTERPRET=0 $(BIN)/python -m course_lib.kernels._compile --json book/compile_report.json

bench: env  ## measure this machine and record the raw results under kernels/results/
	@$(BIN)/course bench

gpu: model  ## on a CUDA machine: notebooks, GPU tests and benchmarks, with raw JSON, in under ten minutes
	@$(BIN)/python -c "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 'course: make gpu needs a CUDA card, and PyTorch sees none; course doctor says why.')"
	@$(BIN)/pytest --quiet --nbval-lax --nbval-cell-timeout 600 notebooks
	@$(BIN)/pytest tests --quiet -m gpu
	@$(BIN)/course bench

clean:  ## remove what was built, but not the environment
	@rm -rf _build .pytest_cache .mypy_cache .ruff_cache .hypothesis
