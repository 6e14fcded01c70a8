# Two commands on a fresh machine with Python 3.11 and make: `make demo` and `make test`.
# Both create the environment .venv themselves.

PYTHON ?= python3
BIN := .venv/bin
export NO_MKDOCS_2_WARNING := 1
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-federation browser lint types docs docs-serve bench bench-quick clean

help: ## show the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@echo "==> environment: .venv (torch and friends; a minute or two the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "deltafl needs Python 3.11 or later")'
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

demo: $(STAMP) ## compare the paper's eight optimizers on the embedded digits (about a minute)
	@echo "==> demo: 8 client optimizers x 2 heterogeneities x 3 seeds on scikit-learn's digits"
	@$(BIN)/deltafl compare examples/demo.toml --out runs/demo

test: $(STAMP) browser ## run all tests but the slow ones of test-federation
	@echo "==> tests (unit, property, end to end; the real data sets are fetched once)"
	@$(BIN)/pytest -n 2 --dist worksteal

test-federation: $(STAMP) ## run the slow tests of clusters and federations of many processes
	@echo "==> federations: real nodes, killed in the middle"
	@$(BIN)/pytest -m federation

# The pages of deltafl report are tested in a real browser; pip cannot bring one.
browser: ## install Debian's chromium for the tests, where that is possible
	@if command -v chromium >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "==> chromium, for the tests of the pages: apt-get install chromium"; \
		(apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium) >/dev/null \
			|| echo "==> chromium could not be installed: the browser tests will be skipped"; \
	else \
		echo "==> no chromium, and no apt-get as root to install it: the browser tests will be skipped"; \
	fi

lint: $(STAMP) ## check style
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(STAMP) ## check types strictly
	@$(BIN)/mypy

docs: $(STAMP) ## build the site into site/
	@$(BIN)/mkdocs build --strict --quiet && echo "site/index.html"

docs-serve: $(STAMP) ## show the site while writing it
	@$(BIN)/mkdocs serve

bench: $(STAMP) ## measure speed and memory beside other simulators, on an idle machine (half an hour)
	@$(BIN)/python -m benchmarks all

bench-quick: $(STAMP) ## measure speed beside a hand-written loop (two minutes)
	@$(BIN)/python -m benchmarks quick

clean: ## delete the environment, the runs and all caches
	rm -rf .venv runs site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
