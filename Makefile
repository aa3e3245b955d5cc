# Two commands for a newcomer: `make demo` and `make test`. Both set up their own .venv first.
PYTHON ?= python3
# Tests start many processes. Each starts in half the time where bytecode may be written.
export PYTHONDONTWRITEBYTECODE =
VENV := .venv
BIN := $(VENV)/bin

# Tests of behaviour that also run with tiny thresholds (state_backends/thresholds.py), where a few events cross each one.
TINY := $(addprefix tests/, local/test_restarts.py local/test_filled.py local/test_all_windows.py \
	local/test_parts_of_a_batch.py local/test_large_windows.py execute/test_scenarios.py core/keyed/test_keyed_windows.py \
	core/keyed/test_keyed_index.py core/operator/test_operator_any_order.py execute/panes/test_updates.py \
	execute/panes/test_changing.py execute/test_evolution.py execute/spill/test_waiting_orders.py stores/test_any_order.py \
	versions/test_any_order.py versions/test_map_any_order.py stateful/test_states.py core/join/test_join.py \
	core/join/test_evolving.py state/test_read.py)

.PHONY: demo dist docs test lint behaviour proof check format clean setup

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Aion needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set PYTHON=python3.11." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[demo,dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

demo: setup
	$(BIN)/aion demo

# The site of the documentation, in out/site. Begin with out/site/index.html.
docs: $(VENV)/.docs
	$(BIN)/python docs/site/build.py out/site

# ruff and mypy need one core. They run beside the tests, because the first query of these leaves a core idle.
test: setup
	$(MAKE) --no-print-directory -j2 lint behaviour

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

behaviour: setup
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder -m "not proof and not slow"
	AION_THRESHOLDS=tiny $(BIN)/python -m pytest -n 2 -q -m "not proof and not slow" $(TINY)

# All that takes minutes rather than hours: before a release, and after a change that touches several parts.
check: setup
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder -m "not proof"
	AION_THRESHOLDS=tiny $(BIN)/python -m pytest -n 2 -q -m "not proof" $(TINY)

proof: setup $(VENV)/.docs
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n 2 --no-loadscope-reorder --timeout 3600 \
		-m "proof or slow or hypothesis"
	AION_THRESHOLDS=tiny $(BIN)/python -m pytest -n 2 --no-loadscope-reorder --timeout 3600 -m "not proof"
	AION_THRESHOLDS=tiny HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n 2 -q --timeout 3600 -m "not proof" $(TINY)

# What `pip install` takes, tried in an empty environment.
dist: setup
	rm -rf out/dist out/empty
	$(BIN)/hatchling build --directory out/dist
	$(PYTHON) -m venv out/empty
	out/empty/bin/pip install --quiet --disable-pip-version-check "$$(ls out/dist/*.whl)[cli]"
	cd out && empty/bin/aion --version && empty/bin/aion --help > /dev/null && empty/bin/aion policy check standard
	cd out && empty/bin/python -c "import aion; aion.LocalOperator(windows=aion.Tumbling('1 minute'), time='ts', \
		aggregates={'n': aion.aggregates.count()}, input_schema='ts timestamp').close()"

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .hypothesis spark-warehouse
