# make train   environment, then the default run       make test   everything that the tests need, then all tests
# make unit    only the tests that start nothing       make clean  removes the environment; runs in outputs/ stay
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
# Compiled afterwards, on all cores (pip uses one); some files of packages are templates and can't be.
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-compile
UNIT := $(VENV)/bin/python -m pytest -q -n auto --maxprocesses 8 -m "not slow"
NONE := 5  # of pytest: ARGS leave tests of the other kind only

.PHONY: train test unit clean

train: $(VENV)/.stamp-run
	$(VENV)/bin/python launch.py $(ARGS)

test: $(VENV)/.stamp-test
	scripts/install_test_packages.sh
	$(UNIT) $(ARGS) || [ $$? -eq $(NONE) ]
	$(VENV)/bin/python -m pytest -q -m slow $(ARGS) || [ $$? -eq $(NONE) ]

unit: $(VENV)/.stamp-test
	$(UNIT) $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache build *.egg-info

# The stamps tell that an installation came to its end; a broken one is continued by the next call.
$(VENV)/.stamp-run: requirements/cpu.txt pyproject.toml
	@PYTHON="$(PYTHON)" scripts/make_venv.sh $(VENV)
	@echo "installing the locked packages into $(VENV) (2.6 GB, some minutes)"
	@$(PIP) -r requirements/cpu.txt
	@$(PIP) --no-build-isolation -e .
	@$(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true
	@$(VENV)/bin/python -c "from rose.transfer import codec; codec.compile_all()"
	@touch $@

$(VENV)/.stamp-test: requirements/test.txt $(VENV)/.stamp-run
	@$(subst --no-compile,,$(PIP)) -r requirements/test.txt
	@touch $@
