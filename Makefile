# Two commands on a fresh machine with Python 3.11 and make: `make demo` and `make test`.
# Both create the environment .venv themselves.

PYTHON ?= python3
BIN := .venv/bin
export NO_MKDOCS_2_WARNING := 1
STAMP := .venv/.installed
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# LOCKED=1, as in CI: exactly the packages of the lock, each checked against its checksum, where
# the lock was made for such a Python and machine. torch has no checksum there (make lock says why).
LOCK := requirements/ci.lock

.DEFAULT_GOAL := help
.PHONY: help demo test test-federation fuzz browser nginx lint types docs docs-serve bench \
	bench-quick lock audit sbom clean

help: ## show the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt $(if $(LOCKED),$(LOCK))
	@echo "==> environment: .venv (torch and friends; a minute or two the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "deltafl needs Python 3.11 or later")'
	@$(PYTHON) -m venv .venv
	@if [ -n "$(LOCKED)" ] && $(BIN)/python requirements/lock.py fits ci; then \
		echo "==> from $(LOCK), every checksum checked"; \
		$(PIP) --require-hashes --no-deps -r $(LOCK) \
			&& $(PIP) -c constraints.txt --no-deps torch \
			&& $(PIP) --no-deps --no-build-isolation -e . \
			&& $(BIN)/pip check; \
	else \
		$(PIP) -c constraints.txt -e '.[dev,docs]'; \
	fi
	@touch $@

demo: $(STAMP) ## compare the paper's eight optimizers on the embedded digits (about a minute)
	@echo "==> demo: 8 client optimizers x 2 heterogeneities x 3 seeds on scikit-learn's digits"
	@$(BIN)/deltafl compare examples/demo.toml --out runs/demo

test: $(STAMP) browser ## run all tests but the slow ones of test-federation
	@echo "==> tests (unit, property, end to end; the real data sets are fetched once)"
	@$(BIN)/pytest -n 2 --dist worksteal

test-federation: $(STAMP) nginx ## run the tests of clusters and federations of many processes
	@echo "==> federations: real nodes, killed in the middle"
	@$(BIN)/pytest -m federation -n 2 --dist loadfile

fuzz: $(STAMP) ## hand every reader 100,000 inputs that nobody meant (an hour or two)
	@$(PIP) --require-hashes --no-deps -r requirements/fuzz.lock
	@nice $(BIN)/python -m benchmarks.faults.fuzz

# The pages of deltafl report are tested in a real browser; pip cannot bring one.
browser: ## install Debian's chromium for the tests, where that is possible
	@$(call debian,chromium,the browser tests)

# The proxy before a SuperLink is tested with the program that its guide names.
nginx: ## install Debian's nginx for the tests, where that is possible
	@$(call debian,nginx,the test of the proxy)

# $(call debian,PROGRAM,TESTS): install a package unless it is there; without it tests are skipped.
# Debian would start a server that it installs: the policy forbids that.
define debian
if PATH=$$PATH:/usr/sbin command -v $(1) >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "==> $(1), for $(2): apt-get install $(1)"; \
		(apt-get update && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
			apt-get install -y --no-install-recommends $(1)) >/dev/null \
			|| echo "==> $(1) could not be installed: $(2) will be skipped"; \
	else \
		echo "==> no $(1), and no apt-get as root to install it: $(2) will be skipped"; \
	fi
endef

lint: $(STAMP) ## check style
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(STAMP) ## check types strictly
	@$(BIN)/mypy

docs: $(STAMP) ## build the site into site/
	@$(BIN)/mkdocs build --strict --quiet && echo "site/index.html"

docs-serve: $(STAMP) ## show the site while writing it
	@$(BIN)/mkdocs serve

bench: $(STAMP) ## measure speed and memory beside other simulators, on an idle machine (an hour)
	@$(BIN)/python -m benchmarks all

bench-quick: $(STAMP) ## measure speed beside a hand-written loop (two minutes)
	@$(BIN)/python -m benchmarks quick

lock: ## resolve the environments anew and write their checksums (requirements/*.lock)
	@$(PYTHON) requirements/lock.py

TOOLS := .venv/tools
$(TOOLS)/.installed: requirements/tools.lock | $(STAMP)
	@$(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $<
	@touch $@

# Strict: a package that the vulnerability service does not know is not a package without faults.
audit: $(TOOLS)/.installed ## look the locked packages up in a database of known vulnerabilities
	@$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes -r $(LOCK)

sbom: $(STAMP) $(TOOLS)/.installed ## write the bill of materials and the page of licences
	@$(TOOLS)/bin/cyclonedx-py environment --output-reproducible --of JSON $(BIN)/python \
		| $(BIN)/python requirements/inventory.py

clean: ## delete the environment, the runs and all caches
	rm -rf .venv runs site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
