# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

SOURCES := pyproject.toml constraints.txt

# Where this is set, each of the many processes that tests start compiles all modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo docs test slow-test test-all deploy-test container-test cluster-test lint bench bench-simulators bench-experiments bench-costs gpu-check benchmark-venvs constraints release clean
.DEFAULT_GOAL := help

help:  ## Show what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 18

demo: $(VENV)/.installed  ## PrivRec on Ray in one and two stages and under differential privacy, beside linear systems and popularity, and a report; offline
	$(BIN)/fedrec demo
	@echo 'next: $(BIN)/fedrec (or `source $(BIN)/activate`, then fedrec)'

test: $(VENV)/.installed-test  ## The test suite in two processes; FEDREC_DATA=FOLDER adds the tests on real data
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow" $(ARGS)

slow-test: $(VENV)/.installed-test  ## Tests of more than about a second
	$(BIN)/pytest -n 2 --dist load -m slow $(ARGS)

test-all: test slow-test deploy-test cluster-test container-test  ## Everything that can run here

docs: $(VENV)/.installed-docs  ## The documentation site, in site/; fails on a warning
	$(BIN)/python docs/settings_page.py docs/settings.md
	$(BIN)/python docs/fill_results.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

deploy-test: $(VENV)/.installed-test  ## Whole deployments on loopback: TLS, keys, attacks, faults (about ten minutes)
	$(BIN)/pytest -n 2 --dist loadfile -m deployment --timeout=1800 $(ARGS)

container-test: $(VENV)/.installed-test  ## A deployment in real containers, with a Docker engine and image fedrec:0.1.0
	$(BIN)/pytest -m containers --timeout=900 -rs $(ARGS)

cluster-test: $(VENV)/.installed-test  ## A Ray cluster of three raylets, of which one is killed
	$(BIN)/pytest -m cluster --timeout=600 $(ARGS)

lint: $(VENV)/.installed-test  ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: bench-simulators bench-experiments bench-costs  ## All tables of benchmarks/RESULTS.md (hours; FEDREC_DATA=FOLDER)

SIMULATION := $(BIN)/python benchmarks/simulation.py --repeats 3
RIVALS     := fedrec,flower,pfl,fedjax
bench-simulators: $(VENV)/.installed-test benchmark-venvs  ## fedrec beside other simulators on equal work
	$(SIMULATION) --cohort 20 --items 3706 --rounds 12 --contestants $(RIVALS),loop
	$(SIMULATION) --cohort 100 --items 3706 --rounds 5 --contestants $(RIVALS),loop
	$(SIMULATION) --cohort 400 --items 3706 --rounds 3 --contestants $(RIVALS),loop
	$(SIMULATION) --cohort 20 --items 27000 --rounds 8 --contestants $(RIVALS),loop-sparse
	$(SIMULATION) --cohort 20 --items 200000 --rounds 5 --contestants $(RIVALS),loop-sparse

bench-experiments: $(VENV)/.installed-test  ## Every shipped experiment beside training one client after the other, and whole commands; ARGS="--json OUT" goes on after an interruption
	$(BIN)/python benchmarks/experiments.py $(ARGS)

gpu-check: $(VENV)/.installed-test  ## What a GPU changes: tests, steps, large cohorts; at most six minutes, on a stand-in where there is none
	$(BIN)/python benchmarks/gpu_check.py $(ARGS)

MILLION := --set dataset.users=1000000 --set dataset.items=100000 --set dataset.mean-interactions=20 \
	--set 'evaluation.baselines=[]' --set evaluation.every=0 --set evaluation.final-users=50 --set rounds=40
bench-costs: $(VENV)/.installed-test  ## A million users; 20 and 200 real nodes on this machine
	$(BIN)/python benchmarks/processes.py $(BIN)/fedrec run privrec-synthetic $(MILLION)
	$(BIN)/python -m benchmarks.deployment --nodes 20 --rounds 3
	$(BIN)/python -m benchmarks.deployment --nodes 200 --rounds 2

benchmark-venvs: benchmarks/.venvs/pfl/.installed benchmarks/.venvs/fedjax/.installed  ## Environments of other simulators, for benchmarks

constraints: $(VENV)/.installed-test  ## Write down the versions that are installed now
	$(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//' | grep -v '^#' > constraints.txt

release: $(VENV)/.installed-test  ## sdist, wheel, bill of materials and licences in dist/; the wheel in a clean environment: doctor, demo, from an empty folder
	$(PIP) hatchling
	rm -rf dist build/release
	$(BIN)/python -m hatchling build
	$(PYTHON) -m venv build/release/venv
	build/release/venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt $$(grep -E '^torch==' constraints.txt)
	build/release/venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	mkdir build/release/empty
	cd build/release/empty && ../venv/bin/fedrec doctor && ../venv/bin/fedrec demo
	$(PYTHON) -m venv build/release/tools
	build/release/tools/bin/pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0
	build/release/tools/bin/cyclonedx-py environment --output-reproducible --output-file dist/sbom.json build/release/venv/bin/python
	$(BIN)/python docs/licences.py dist/sbom.json dist/licences.csv

clean:  ## Remove the virtual environment
	rm -rf $(VENV)

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15) and f"fedrec needs Python 3.11 to 3.14, this is {sys.version.split()[0]}: give another one, as in make demo PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# torch first and by its exact version: a looser request, made by another package, may take a build
# of several gigabytes.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/pip
	$(PIP) $$(grep -E '^torch==' constraints.txt)
	@touch $@

$(VENV)/.installed: $(SOURCES) $(VENV)/.torch
	$(PIP) --editable .
	$(BIN)/python -m fedrec.training.kernel
	@touch $@

$(VENV)/.installed-test: $(SOURCES) $(VENV)/.torch
	$(PIP) --editable '.[test]'
	$(BIN)/python -m fedrec.training.kernel
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: $(SOURCES) $(VENV)/.torch
	$(PIP) --editable '.[docs]'
	@touch $@

benchmarks/.venvs/%/.installed: benchmarks/requirements-%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@
