# Two commands: `make demo` sets up and runs the main job, `make test` sets up and passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-fast lint docs clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/python -m caramba.launch $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses=logical --maxprocesses=4 --dist=loadfile --no-loadscope-reorder $(ARGS)

test-fast: $(VENV)/.installed-dev # under 90 s on two idle cores: no torch.compile, no processes
	$(BIN)/python -m pytest --fast --numprocesses=2 --dist=loadfile --no-loadscope-reorder tests/unit $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python scripts/lint_language.py

docs: $(VENV)/.installed-dev # the documentation as pages in site/, which open from disk
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:
	rm -rf $(VENV) .caramba build dist site
