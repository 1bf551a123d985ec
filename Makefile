# make train   environment, then the default run       make test   everything that the tests need, then all tests
# make unit    only the tests that start nothing       make lint   format, rules and imports; both of the others begin with it
# make soak    an hour of faults: damaged weights, killed ranks, a co-serving pair
# make clean   removes the environment; runs in outputs/ stay
# make gpu     the environment for NVIDIA GPUs (driver 580 or later), from requirements/gpu.txt
# PYTHON=... names the Python, 3.11 to 3.13; without it scripts/set_up.sh finds one. VENV=... names the environment.
VENV := .venv
# PyTorch's index of builds for CPUs, used where pip's own settings offer none (scripts/set_up.py)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
export PYTHON TORCH_INDEX
PYTEST := $(VENV)/bin/python -m pytest -q --durations=10
# One process more than cores: some tests wait. Neighbours share what they made.
UNIT := $(PYTEST) -n $$(( $$(nproc) < 8 ? $$(nproc) + 1 : 8 )) --dist worksteal -m "not slow"
SLOW := $(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "slow and not soak"  # two jobs need about 12 GiB
NONE := 5  # of pytest: ARGS leave tests of the other kind only

# Python's cache of compiled sources, also of rose/: the processes that tests start, hundreds, read it.
unexport PYTHONDONTWRITEBYTECODE

MAKEFLAGS += --jobs=2  # of `make test`: Debian's packages are installed beside Python's
.PHONY: train test packages unit lint soak gpu clean

train: $(VENV)/.stamp-run
	$(VENV)/bin/python launch.py $(ARGS)

test: packages lint
	$(UNIT) $(ARGS) || [ $$? -eq $(NONE) ]
	$(SLOW) $(ARGS) || [ $$? -eq $(NONE) ]

packages:
	VENV="$(VENV)" scripts/install_test_packages.sh

unit: lint
	$(UNIT) $(ARGS)

soak: $(VENV)/.stamp-test
	$(VENV)/bin/python tests/comm/test_mailbox.py 6000
	$(VENV)/bin/python tests/soak/fuzz_transfer.py
	$(VENV)/bin/python tests/soak/storm.py 50
	for way in stream hybrid; do $(VENV)/bin/python tests/soak/storm.py 15 --with $$way || exit 1; done
	$(VENV)/bin/python tests/soak/soak_coserving.py
	$(VENV)/bin/python tests/soak/storm_hosts.py
	$(PYTEST) -m soak

lint: $(VENV)/.stamp-test
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/python scripts/house.py

gpu: $(VENV)/.stamp-gpu
	@echo "installed; what works here: $(VENV)/bin/rose doctor +experiment=qwen3_0_6b (on a GPU node)"

clean:
	rm -rf $(VENV) .pytest_cache build *.egg-info

# vLLM for CPUs and vLLM for GPUs are one package of two builds: an environment has one of them.
refuse = [ ! -e $(VENV)/.stamp-$(1) ] || { echo "make: $(VENV) is of the other kind (with or without GPUs);\
 make clean removes it, make VENV=DIR keeps both" >&2; exit 2; }

# The stamps tell that an installation came to its end; an interrupted one is continued by the next call.
$(VENV)/.stamp-run: requirements/cpu.txt requirements/torch-cuda.txt pyproject.toml
	@$(call refuse,gpu)
	@scripts/set_up.sh $(VENV) cpu
	@touch $@

$(VENV)/.stamp-gpu: requirements/gpu.txt pyproject.toml
	@$(call refuse,run)
	@scripts/set_up.sh $(VENV) gpu
	@touch $@

# A package of the tests is compiled; `make test` installs the compiler beside the packages of a run.
$(VENV)/.stamp-test: requirements/test.txt $(VENV)/.stamp-run $(if $(filter test,$(MAKECMDGOALS)),| packages)
	@VENV="$(VENV)" scripts/install_test_packages.sh compiler
	@scripts/set_up.sh $(VENV) test
	@touch $@
