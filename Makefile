# Everything a newcomer needs: `make demo` and `make test` set up what they use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test check format bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,flower,postgres]'
	touch $@

demo: setup
	$(BIN)/goldfish demo --out runs/demo

test: setup
	$(BIN)/python -m pytest -n 4 --dist worksteal --durations 15

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/goldfish bench

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
