# make report   the main job on the shipped checkpoint; report in conformance_report/
# make test     the test suite on a CPU, under 20 minutes on two cores
# make test-slow   the rest of it, minutes a test; CI runs both
# make test-gpu the numerics, the modules, the kernels, the golden bits and the
#               facts of the device, on an accelerator, in the Python that runs
#               now
# make clean    removes the environment and the report
#
# The first two set up .venv when there is none. PYTHON chooses the interpreter.

PYTHON ?= python3
VENV ?= .venv
OUT ?= conformance_report
INSTALLED := $(VENV)/installed

.PHONY: report test test-slow test-gpu clean

report: $(INSTALLED)
	@$(VENV)/bin/python -m experiments.conformance --out=$(OUT)

test: $(INSTALLED)
	@$(VENV)/bin/python -m pytest -q -n 2 --dist loadfile \
	  -m "not accelerator and not slow" tests

test-slow: $(INSTALLED)
	@$(VENV)/bin/python -m pytest -q -n 2 --dist loadfile \
	  -m "slow and not accelerator" tests

test-gpu:
	@$(PYTHON) -m pytest -q tests/accelerator_test.py tests/numerics \
	  tests/modules tests/pallas_kernels tests/experiments/golden_test.py

$(INSTALLED): requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@touch $@

clean:
	rm -rf $(VENV) $(OUT)
