# Everything runs in .venv, which is made once and reused. `make PYTHON=python3.12 ...` chooses another Python (3.10+),
# `make PIP_ARGS="--index-url ..." ...` another package index (docs/index.md: CPU and CUDA builds of torch), and
# `make demo DEMO_ARGS="--steps 100"` other settings (PREPARE_ARGS: other data), as of `make shakespeare TEXT=FILE`.

PYTHON ?= python3
PIP_ARGS ?=
PREPARE_ARGS ?=
DEMO_ARGS ?=
MINUTES ?= 10
TORTURE_ARGS ?=
FUZZ_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NATIVE := runtime/popxl_engine/native/*.cpp runtime/popxl_engine/native/*.h runtime/popxl_engine/native/memory/*.cpp
TEXT ?=
STDLIB := data/files/stdlib
CHARACTERS := data/files/characters
# Four processes on two cores, each with one thread: a test waits for a third of its time, for programs that it
# has started and for limits of time. `make WORKERS=16 test` where there are eight.
WORKERS ?= 4
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes: each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo shakespeare text_is_there test exhaustive check format bench docs clean torture fuzz
.DELETE_ON_ERROR:

help:
	@echo "make demo    prepare real text, train a small GPT on it for three to five minutes, show what it learned"
	@echo "make shakespeare TEXT=FILE   train nanoGPT's small model of characters on a text"
	@echo "make test    the tests that need no GPU, with a sample of the cases of costly ones"
	@echo "make exhaustive   what make test leaves out: the other cases, and tests that take minutes"
	@echo "make check   format, lint, types and the fast tests"
	@echo "make torture kills, damages and fills disks for MINUTES (10), every case of some kinds with FULL=1"
	@echo "make fuzz    random programs through the compiler's passes for MINUTES (10)"
	@echo "make bench   every benchmark, one after the other, but time_to_loss.py and screening.py, which take hours"
	@echo "make docs    the generated pages and pictures of docs/, and the site in build/site"
	@echo "make format  format and tidy the sources"
	@echo "make clean   delete .venv, the site and caches; runs and prepared text stay"

demo: $(INSTALLED)
	$(BIN)/python data/prepare.py stdlib --output $(STDLIB) --overwrite $(PREPARE_ARGS)
	$(BIN)/python demo/pretraining.py --config demo --input_files $(STDLIB) $(DEMO_ARGS)

# One document, whose last tenth is held out, as in nanoGPT.
shakespeare: text_is_there $(INSTALLED)
	$(BIN)/python data/prepare.py text "$(TEXT)" --output $(CHARACTERS) --tokenizer characters --sequence_length 64 \
	    --validation 0.1 --document_bytes 2147483647 --overwrite $(PREPARE_ARGS)
	$(BIN)/python demo/pretraining.py --config shakespeare --input_files $(CHARACTERS) $(DEMO_ARGS)

text_is_there:
	@test -f "$(TEXT)" || { echo "make: got TEXT='$(TEXT)'; expected a text file." \
	    "Run: make shakespeare TEXT=FILE, with tinyshakespeare or any other text" >&2; exit 2; }

test: $(INSTALLED)
	$(PYTEST) -m "not gpu and not exhaustive"

# Before a release: what `make test` leaves out.
exhaustive: $(INSTALLED)
	$(PYTEST) -m "not gpu and exhaustive"

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)
	$(BIN)/python -m mypy
	$(PYTEST) -m "not gpu and not slow and not multi and not exhaustive"

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(NATIVE)

# `make torture MINUTES=60 TORTURE_ARGS="--seed 1 --kind kills"`; what came out is in build/torture.json, too.
torture: $(INSTALLED)
	$(BIN)/python -m tests.torture --minutes $(MINUTES) --json build/torture.json $(TORTURE_ARGS)

# `make fuzz MINUTES=60 FUZZ_ARGS="--seed 1"` begins with that seed; without one, the clock gives it.
fuzz: $(INSTALLED)
	PYTHONPATH=runtime POPXL_VERIFY=1 OMP_NUM_THREADS=1 $(BIN)/python runtime/tests/fuzz.py --minutes $(MINUTES) $(FUZZ_ARGS)

bench: $(INSTALLED)
	@set -e; for script in $$(grep -l '__name__ == "__main__"' benchmarks/*.py | grep -vE 'time_to_loss|screening'); do \
	    echo "== $$script"; $(BIN)/python $$script || [ $$? -eq 2 ]; done  # 2: it has said what it needs

docs: $(INSTALLED)
	$(BIN)/python imgs/write_tables.py
	PYTHONPATH=runtime:runtime/tests $(BIN)/python -m helpers.ops_page
	$(BIN)/python imgs/draw_phases.py
	$(BIN)/python imgs/draw_schedule.py
	$(BIN)/python imgs/draw_architecture.py
	$(BIN)/python imgs/draw_passes.py
	$(BIN)/python imgs/draw_five_minutes.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build/site .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(INSTALLED): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo "make: got $(PYTHON) = $$($(PYTHON) --version 2>&1); expected Python 3.10 to 3.13." \
	         "Install one of them and run: make PYTHON=python3.x $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "make: $(PYTHON) cannot make virtual environments; expected its modules venv and ensurepip." \
	         "Run: sudo apt install python3-venv" >&2; exit 2; }
	@echo "Installing what requirements.txt pins into $(VENV); the first time this takes a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -r requirements.txt
	@$(BIN)/python -c 'from popxl_engine.native import build; build.begin(); build.load()'  # no run waits for kernels
	@touch $@
