# Every target makes the environment first (tools/setup_env.py, silent when up to date).
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev setup-system setup-clients setup-ray demo test test-papers test-all fuzz mutants ci check audit bench conformance screenshots dashboards reference notebooks manifests clean

# Compiled modules are kept: else each of a thousand processes that tests start compiles its own.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
ifndef SEED
SEED := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
endif
BIN := .venv/bin
CACHES := .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
PURE := tests/policies tests/queueing
PAPERS := tests/papers
BESIDE := tests/loadgen tests/bench tests/grafana tests/kendall tests/server
QUICK = $(BIN)/pytest -q -m "not slow and not left_out" --timeout 300 --randomly-seed=$(SEED) -n
BENCHES := gateway live_cost load_generators page_cost predictions scale simulators
OPERATOR_RULES := docker/k8s/components/prometheus-operator/prometheusrule.yaml

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv; FLAVOUR=cpu|cuda|emulated, PYTHON=python3.11, MODEL=smollm2 fetches that model
	@$(PYTHON) tools/setup_env.py $(if $(FLAVOUR),--flavour $(FLAVOUR)) $(if $(MODEL),--model $(MODEL))

setup-dev: ## the same with the development tools that test, check and others need
	@$(PYTHON) tools/setup_env.py --dev $(if $(FLAVOUR),--flavour $(FLAVOUR))

setup-system: ## Prometheus, Chromium and nginx from Debian's packages, for the tests that use them
	@tools/setup_system.sh

setup-clients: ## LangChain, Instructor and other client libraries in .venv-clients* and tests/clients/node, for the tests that use them
	@$(PYTHON) -m venv .venv-clients && .venv-clients/bin/pip install -q -r tests/clients/requirements.txt
	@$(PYTHON) -m venv .venv-clients-llama-index && .venv-clients-llama-index/bin/pip install -q -r tests/clients/llama-index.txt
	@npm ci --prefix tests/clients/node --silent

setup-ray: setup ## Ray in .venv, for --engine ray and its tests
	@$(BIN)/python -m pip install -q ray==2.60.0

demo: setup ## the gateway under load, observed and predicted delays; ARGS="..."
	@$(BIN)/kendall demo $(ARGS)

test: setup-dev ## the quick tests in random order, the same examples every time, in two or three processes; SEED=N repeats an order, ARGS="..."
	@echo "test: 8 to 11 minutes on two quiet cores, in three parts; SEED=$(SEED) repeats this order"
	@{ echo "part 1 of 3: $(PURE)" && $(QUICK) 2 $(PURE) $(ARGS) \
		&& echo "part 2 of 3: $(BESIDE)" && $(QUICK) 3 --dist loadfile $(BESIDE) $(ARGS) \
		&& echo "part 3 of 3: the others" && $(QUICK) 3 --dist loadfile --no-loadscope-reorder $(addprefix --ignore=,$(PURE) $(PAPERS) $(BESIDE)) $(ARGS); \
		} || { echo "test: it was SEED=$(SEED)"; exit 1; }

test-papers: setup-dev ## the quick tests of papers/, which nothing else needs
	@$(QUICK) 2 $(PAPERS) $(ARGS)

test-all: setup-dev ## every test, in random order; SEED=N repeats it
	@echo "test-all: SEED=$(SEED) repeats this order"
	@$(BIN)/pytest -q --randomly-seed=$(SEED) $(ARGS) || { echo "test-all: it was SEED=$(SEED)"; exit 1; }

fuzz: setup-dev ## the property tests on random examples, 20 times as many; SEED=N repeats a run, ARGS="tests/queueing ..."
	@echo "fuzz: SEED=$(SEED) repeats this run"
	@$(BIN)/pytest -q --hypothesis-profile=fuzz --hypothesis-seed=$(SEED) --randomly-seed=$(SEED) $(ARGS) \
		|| { echo "fuzz: it was SEED=$(SEED)"; exit 1; }

mutants: setup-dev ## 400 small faults in the code, each of which a quick test must detect; 45 to 75 minutes; ARGS="--seed 2 --group policies"
	@$(BIN)/python tools/mutants.py $(ARGS)

ci: ## what has to pass before a change lands, from a clone: .ci/run
	@bash .ci/run

check: setup-dev ## lint, format, types, import direction, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tools/setup_env.py tools/audit.py tools/vendor.py tools/notebook.py tools/mutants.py tools/reference.py
	$(BIN)/mypy -p grafana
	$(BIN)/mypy -p bench
	$(BIN)/lint-imports
	$(BIN)/codespell

audit: ## known vulnerabilities in the pinned packages; fails if the database cannot be reached
	@$(PYTHON) tools/audit.py

bench: setup-dev ## the benchmarks that need no peer, GPU or trace, one after the other
	@for name in $(BENCHES); do echo "== bench/$$name.py"; $(BIN)/python "bench/$$name.py" $(ARGS) || exit 1; done

conformance: setup-dev ## openai-python's tests, schemathesis and the statuses on the real engine; writes docs/why/conformance.md
	@$(BIN)/python -m tests.conformance.generate

screenshots: setup-dev ## pictures of the live page in docs/page (needs Chromium; six minutes); ARGS=FOLDER
	@$(BIN)/python -m tests.page.screenshots $(ARGS)

dashboards: setup-dev ## grafana/dashboards/*.json from the code in grafana/
	@$(BIN)/python -m grafana.generate

reference: setup-dev ## docs/reference/options.md, metrics.md and record.md from the code; docs/documents.md from papers/documents.toml
	@$(BIN)/python tools/reference.py
	@$(BIN)/python -m papers.documents

notebooks: setup ## execute docs/notebooks and write their outputs
	@$(BIN)/python tools/notebook.py docs/notebooks/*.ipynb

manifests: ## the operator's rules from docker/rules.yml; RUNBOOK_BASE=https://.../ begins the alerts' links
	@sed -i 's|\(runbook_url: \).*\(docs/how-to/alarms.md#\)|\1$(RUNBOOK_BASE)\2|' docker/rules.yml
	@sed -n '1,/^spec:/p' $(OPERATOR_RULES) >$(OPERATOR_RULES).new
	@sed -n '/^groups:/,$$p' docker/rules.yml | sed 's/^\(.\)/  \1/' >>$(OPERATOR_RULES).new
	@mv $(OPERATOR_RULES).new $(OPERATOR_RULES)

clean: ## remove caches and builds, keep .venv and runs
	@rm -rf $(CACHES) build dist *.egg-info
	@find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +
