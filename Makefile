# `make train` and `make test` need Python 3.10 to 3.12 and nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# One rank for each GPU, two on a machine without.
RANKS ?= $(shell $(BIN)/python -c "import torch; print(torch.cuda.device_count() or 2)")
# More `key=value` for the run: make train ARGS="seed=3 optimizer.lr=1e-3"
ARGS ?=

.PHONY: train test test-fast check benchmark configuration constraints clean

train: $(VENV)/installed
	$(BIN)/composer -n $(RANKS) train.py yamls/pretrain.yaml $(ARGS)

test: $(VENV)/installed-test
	$(BIN)/python -m pytest

test-fast: $(VENV)/installed-test
	$(BIN)/python -m pytest -m "not slow"

check: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: $(VENV)/installed-test
	for script in packing order interference memory start waiting_for_items pack_sequences data resume; do \
	  $(BIN)/python benchmarks/$$script.py || exit 1; \
	done

# The tables of docs/configuration.md, from the dataclasses of the schema; a test fails when they are out of date.
configuration: $(VENV)/installed
	$(BIN)/python docs/make_configuration.py

# Needs uv; the result is for every supported Python at once.
constraints:
	( echo "# Exact versions of everything, for Python 3.10 to 3.12. Made by \`make constraints\`."; \
	  uv pip compile pyproject.toml --extra test --universal --python-version 3.10 --no-header --no-annotate -q ) \
	  > constraints.new
	mv constraints.new constraints.txt

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13) and \
	  f'Python {sys.version.split()[0]} will not do: give one of 3.10 to 3.12, as in make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[train]"
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV)
