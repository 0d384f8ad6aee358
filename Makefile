# Every target makes what it needs, the virtual environment included, and is quick the
# second time. PYTHON chooses the interpreter that the environment is made with.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo test test-slow test-oldest test-newest lint format bench notebooks docs \
	wheel clean

demo: $(INSTALLED)
	$(BIN)/python -m optax_accum demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --junitxml=$(VENV)/tests/quick.xml

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 -m slow --junitxml=$(VENV)/tests/slow.xml

# All tests on the oldest versions that pyproject.toml admits and on the newest that
# there are; what ran is then recorded for the README.
test-oldest: RESOLUTION := lowest-direct
test-newest: RESOLUTION := highest
test-oldest test-newest: test-%: $(INSTALLED)
	$(BIN)/uv venv --quiet --allow-existing --python 3.11 build/$*
	$(BIN)/uv pip install --quiet --upgrade --resolution $(RESOLUTION) \
		--python build/$* --editable '.[test]'
	touch build/$*/installed
	$(MAKE) test test-slow VENV=build/$*
	build/$*/bin/python benchmarks/versions.py $* build/$*/tests

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

docs: $(INSTALLED)
	$(BIN)/python -m sphinx -q -W --keep-going -n -d build/doctrees -c docs . build/docs

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
