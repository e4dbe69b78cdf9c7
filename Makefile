# Every target makes the environment it needs: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Two processes: each test has one thread, and what it starts has few; more would have tests wait for each other.
PARALLEL := -n 2 --dist worksteal
CODE := lightning_hetpipe tests benchmarks examples

# What pyproject.toml allows at least, and the newest that the package index has: compat-lowest, compat-highest.
LOWEST := "torch==2.11.*" "lightning==2.6.0"
HIGHEST := torch lightning
COMPAT := tests/private tests/exact tests/accelerator tests/rules tests/test_oracle.py tests/test_registration.py

.PHONY: demo test test-all compat compat-lowest compat-highest check bench experiments headline docs clean

demo: $(READY)  ## Train the digits experiment.
	$(BIN)/hetpipe-train

test: $(READY)  ## The tests, without those marked slow.
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-all: $(READY)  ## All tests.
	$(BIN)/python -m pytest $(PARALLEL)

compat: compat-lowest compat-highest  ## Private names, laws and accelerator with the lowest and highest torch, Lightning.

compat-lowest: VERSIONS := $(LOWEST)
compat-highest: VERSIONS := $(HIGHEST)
compat-lowest compat-highest:
	test -x .venv-$@/bin/python || $(PYTHON) -m venv .venv-$@
	grep -Eiv "^(torch|torchvision|lightning|pytorch-lightning|setuptools)==" constraints.txt > .venv-$@/constraints.txt
	.venv-$@/bin/python -m pip install --quiet --upgrade --constraint .venv-$@/constraints.txt --editable ".[test]" $(VERSIONS)
	.venv-$@/bin/python -c "import lightning, torch; print('torch', torch.__version__, 'lightning', lightning.__version__)"
	.venv-$@/bin/python -m pytest $(PARALLEL) -m "not slow" $(COMPAT)

check: $(READY)  ## Format, lint, types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(CODE)

bench: $(READY)  ## The benchmarks; they write benchmarks/results.md, which the README cites.
	$(BIN)/python -m benchmarks --table benchmarks/results.md
	$(BIN)/python -m benchmarks --readme

experiments: $(READY)  ## Weight policies on four small tasks; ARGS="full=true" is the whole grid, and goes on where it stopped.
	$(BIN)/python -m benchmarks.experiments $(ARGS)

headline: $(READY)  ## Time to an accuracy on emulated clusters, next to DDP; needs root. ARGS="full=true" has three seeds.
	$(BIN)/python -m benchmarks.headline $(ARGS)

docs: $(READY)  ## The documentation as a site, into site/; a warning is an error.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/python -m mkdocs build

clean:  ## Remove the environment, builds and caches; runs' outputs stay.
	rm -rf .venv .venv-compat-* build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[examples,test]"
	touch $@
