# Everything a person does with this checkout.  `make` alone lists the verbs.
#
#   PROMPT        the question of `make run`, passed on untouched
#   QUIRE_ENV     where the private environment goes (default: .venv in the checkout)
#   QUIRE_TORCH   cpu or cuda, instead of looking for an NVIDIA GPU
#   PYTHON        the interpreter that makes the environment (default: python3)

PYTHON ?= python3
export QUIRE_ENV := $(or $(value QUIRE_ENV),$(CURDIR)/.venv)
NO_PYTHON := Error: $(PYTHON) was not found; install Python 3.11 or newer (Debian, Ubuntu: sudo apt install python3 python3-venv).
INSTALL := command -v "$(PYTHON)" >/dev/null || { echo "$(NO_PYTHON)" >&2; exit 1; }; "$(PYTHON)" -IS packaging/install.py
# One process per core; a file's tests stay together, because they share fixtures that take seconds.
PYTEST := "$$QUIRE_ENV/bin/python" -m pytest -n auto --maxprocesses 8 --dist loadfile
MAKEFLAGS += --no-print-directory

# The prompt travels through the environment: make must not expand it, nor the shell parse it.
export QUIRE_PROMPT := $(value PROMPT)
unexport PROMPT

.DEFAULT_GOAL := help
.PHONY: help run install test test-pure test-cpu test-e2e lint format bench clean

help: ## list these verbs
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r verb text; do printf '%-18s %s\n' "$$verb" "$$text"; done

run: install ## chat with the starter model; PROMPT="..." asks one question
	@if [ -n "$$QUIRE_PROMPT" ]; then \
	  exec "$$QUIRE_ENV/bin/quire" run starter -- "$$QUIRE_PROMPT" </dev/null; \
	else \
	  exec "$$QUIRE_ENV/bin/quire" run starter; \
	fi

install: ## make or update the private environment
	@$(INSTALL)

test: ## run every test this machine can
	@$(INSTALL) test
	@$(PYTEST)

test-pure: ## run the tests that need no torch
	@$(INSTALL) test
	@$(PYTEST) tests/pure

test-cpu: ## run the engine's tests on the CPU
	@$(INSTALL) test
	@$(PYTEST) tests/cpu

test-e2e: ## run the tests that start a real daemon
	@$(INSTALL) test
	@$(PYTEST) tests/e2e

lint: ## check style, types and layers
	@$(INSTALL) dev
	@"$$QUIRE_ENV/bin/ruff" check .
	@"$$QUIRE_ENV/bin/ruff" format --check .
	@"$$QUIRE_ENV/bin/mypy"
	@"$$QUIRE_ENV/bin/mypy" packaging/install.py
	@"$$QUIRE_ENV/bin/lint-imports"

format: ## rewrite the sources in the house style
	@$(INSTALL) dev
	@"$$QUIRE_ENV/bin/ruff" check --fix .
	@"$$QUIRE_ENV/bin/ruff" format .

bench: install ## measure what concurrent requests gain with the starter model
	@"$$QUIRE_ENV/bin/quire" pull starter
	@"$$QUIRE_ENV/bin/python" benchmarks/concurrency.py --model starter

clean: ## remove the private environment and all caches; models and chats stay
	@if [ -f "$$QUIRE_ENV/pyvenv.cfg" ]; then rm -rf "$$QUIRE_ENV"; fi
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find app engine store tui tests benchmarks packaging -name __pycache__ -type d -prune -exec rm -rf {} +
