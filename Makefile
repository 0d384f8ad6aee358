# Every target makes what it needs, the virtual environment included, and is quick the
# second time. PYTHON chooses the interpreter that the environment is made with.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo test test-slow lint format bench notebooks wheel clean

demo: $(INSTALLED)
	$(BIN)/python -m optax_accum demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 -m slow

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/python benchmarks/readme.py --check

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/scenarios.py
	$(BIN)/python benchmarks/precision.py
	$(BIN)/python benchmarks/prediction.py
	$(BIN)/python benchmarks/memory_table.py
	$(BIN)/python benchmarks/distributed.py
	$(BIN)/python benchmarks/figures.py
	$(BIN)/python benchmarks/readme.py

notebooks: $(INSTALLED)
	$(BIN)/python notebooks/execute.py

# The built wheel, alone in an environment that has nothing else, runs the README's
# first example.
wheel: $(INSTALLED)
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m build --wheel --outdir build/wheel
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/pip install --quiet build/wheel/*.whl
	$(BIN)/python tests/pages.py > build/wheel/example.py
	cd build/wheel && venv/bin/python -W error example.py

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist demo.png
