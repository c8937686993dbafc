# Everything here sets itself up: it needs Python >= 3.10 and make, and puts the rest into .venv.

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
PINNED := --constraint constraints.txt --constraint constraints-dev.txt
# Python compiles the modules that it imports; to compile all 17,000 of these packages takes a third of the set-up.
INSTALL := -m pip install --no-compile --quiet --disable-pip-version-check $(PINNED)
BIN := $(VENV)/bin
RAY := .ray/.ready
DOCS := $(VENV)/.docs-ready
# The stand-in for NVIDIA's library is compiled; where there is no C compiler, PyPI has one.
COMPILER := $(shell command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || echo ziglang)
FAULTS := tests/test_fault_matrix.py tests/actuation/test_actuator_process.py tests/test_trainer_kills.py tests/test_syscall_faults.py \
	tests/test_power_loss.py
# Every process of pytest-xdist imports all it is given, so it is given the files that hold such tests alone.
SLOW := $(shell grep -rl --include='test_*.py' 'mark\.slow' tests)
# Tests that mostly wait for other processes: twice as many at once as there are cores.
WAITING := $(shell echo $$((2 * $$(nproc))))
# And where some wait and some compute: half as many more.
MIXED := $(shell echo $$(((3 * $$(nproc) + 1) / 2)))
# Where Python may keep no compiled modules, each of the thousands of short processes compiles all it imports anew.
unexport PYTHONDONTWRITEBYTECODE
# More words for pytest, as in make test ARGS='-k jetson'.
ARGS :=

.DEFAULT_GOAL := help
.PHONY: help demo docs check test test-slow test-tools test-faults test-faults-all test-fuzz test-services test-llama test-browser \
	test-daemon test-cluster test-search test-ssh hw-test soak lint format bench-search install-units wheel deb test-container test-systemd clean

help:  ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## Tune EfficientNet-B4 on a simulated Jetson AGX Orin
	$(BIN)/polythrottle demo

docs: $(DOCS)  ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

test: $(READY)  ## Run the tests that need Python and make alone
	$(BIN)/python -m pytest -q -n auto --dist worksteal $(ARGS)

test-slow: $(READY)  ## Run those that take longer: real processes that wait for each other, terminals, long searches
	$(BIN)/python -m pytest -q -n $(MIXED) --dist worksteal -m slow $(SLOW) $(ARGS)

test-tools: $(READY)  ## Check units, rules and TLS with systemd, udev, strace and openssl where they are installed
	$(BIN)/python -m pytest -q -m tools $(ARGS)

test-search: $(READY)  ## Run the search over all measured tables (minutes; needs ../shared)
	$(BIN)/python -m pytest -q -m search tests/test_search_acceptance.py $(ARGS)

test-faults: $(READY)  ## Kill and break at every sixth step of a session on every fake board; another sixth each day
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m faults $(FAULTS) $(ARGS)

test-faults-all: $(READY)  ## Kill and break at every step
	POLYTHROTTLE_FAULTS=all $(BIN)/python -m pytest -q -n auto --dist worksteal -m faults $(FAULTS) $(ARGS)

test-fuzz: $(READY)  ## Damage every document that is read, FUZZ times for each reader (benchmarks/fuzz.py counts)
	POLYTHROTTLE_FUZZ=$(or $(FUZZ),1000) $(BIN)/python -m pytest -q -n auto --dist worksteal tests/test_fuzzing.py $(ARGS)

test-services: $(READY)  ## Measure and tune models on real servers, which are installed into .services (minutes)
	$(BIN)/python -m pytest -q -rfE -m services tests/services $(ARGS)

test-llama: $(READY)  ## Measure and tune a tiny model on llama.cpp's server, built into .services (minutes; cmake, g++)
	$(BIN)/python -m pytest -q -rfE -m llama tests/services/test_llama_cpp.py $(ARGS)

test-browser: $(READY)  ## Look at the daemon's page in Chromium, which must be installed
	$(BIN)/python -m pytest -q -rfE -m browser tests/browser $(ARGS)

test-daemon: $(READY)  ## Hours of the daemon with a fault a minute, and its API under schemathesis (minutes)
	$(BIN)/python -m pytest -q -rfE -n $(WAITING) --dist worksteal -m 'soak or schema' tests/soak tests/daemon/test_web_schema.py $(ARGS)

test-ssh: $(READY)  ## Tune, kill and cut off boards behind a real sshd on loopback (Debian: openssh-server, pypy3)
	$(BIN)/python -m pytest -q -rfE -n $(WAITING) --dist worksteal -m ssh tests/ssh $(ARGS)

test-cluster: $(RAY)  ## Kill and bring back real nodes: torchrun, and two Slurm nodes where Slurm is installed (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rfE -n 2 --dist loadgroup -m cluster tests/cluster $(ARGS)

soak: $(READY)  ## A whole simulated day of the daemon with a fault a minute, into benchmarks/soak.md (minutes)
	$(BIN)/python benchmarks/soak.py --write benchmarks/soak.md

hw-test: $(READY)  ## Check a real NVIDIA GPU by reading alone, and print what that cannot prove
	$(BIN)/python -m pytest -q -rfE -m hardware tests/hardware $(ARGS)

# The tests nearest to a file are those called after it, else the three that name it most. A package is named by its
# folder, in which __init__.py lies.
MODULE = $(patsubst %/__init__,%,$(FILE:.py=))
NEAREST = $(or $(filter tests/%,$(FILE)),$(wildcard tests/test_$(notdir $(MODULE)).py tests/*/test_$(notdir $(MODULE)).py),$(shell \
	grep -rc --include='test_*.py' '$(subst /,.,$(MODULE))\b' tests | sort -t: -k2 -rn | awk -F: '$$2 {print $$1}' \
	| head -n 3),tests/test_architecture.py)
check: $(READY)  ## Look at one file in about a minute: style, types, and the tests nearest to it (make check FILE=polythrottle/…)
	$(BIN)/ruff check $(FILE)
	$(BIN)/ruff format --check $(FILE)
	$(BIN)/mypy $(FILE)
	$(BIN)/python -m pytest -q -x $(NEAREST) $(ARGS)

lint: $(READY)  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/vermin --quiet --violations --target=3.10- --eval-annotations --exclude file polythrottle tests benchmarks examples

format: $(READY)  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-search: $(READY)  ## Compare the search methods, into benchmarks/ (hours; goes on where it stopped; needs ../shared)
	$(BIN)/python benchmarks/search.py $(if $(SEEDS),--seeds $(SEEDS))

test-container: $(READY)  ## Build the container images and run what is in them (minutes; root; Debian's debootstrap and buildah)
	.ci/container

test-systemd: $(READY)  ## Install the Debian package and run the units under a real systemd (minutes; root; Debian's debootstrap)
	.ci/systemd $(ARGS)

wheel: $(READY)  ## Build the wheel into dist/
	$(BIN)/python -m hatchling build --target wheel

deb: $(READY)  ## Build the Debian package into dist/ (dpkg-deb; for the architecture and the Python of this machine)
	PYTHON=$(BIN)/python packaging/debian/build

install-units:  ## Lay systemd units, udev rules and the group below DESTDIR, for programs in BINDIR (/usr/local/bin)
	@DESTDIR='$(DESTDIR)' BINDIR='$(or $(BINDIR),/usr/local/bin)' packaging/install-units

clean:  ## Remove what make made
	rm -rf $(VENV) .container .ray .services demo .pytest_cache .mypy_cache .ruff_cache .hypothesis site

$(READY): pyproject.toml constraints.txt constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "polythrottle needs Python 3.10 or newer; say which with make PYTHON=python3.12"; exit 1; }
	@echo 'Setting up $(VENV), once: 2 GB of packages, which takes a few minutes'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --editable '.[dev,onnx,serving]' $(COMPILER)
	touch $@

$(DOCS): $(READY)
	$(BIN)/python $(INSTALL) --editable '.[docs]'
	touch $@

# Ray pins what the rest leaves open, so it has an environment of its own, which sees the other one's packages behind it.
$(RAY): $(READY)
	$(PYTHON) -m venv .ray
	.ray/bin/python $(INSTALL) 'ray[default,train]>=2.60'
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)", sep="\n")' > \
		"$$(.ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/polythrottle.pth"
	touch $@
