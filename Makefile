# Everything here sets itself up: it needs Python >= 3.11 and make, and puts the rest into .venv.

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin
RAY := .ray/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test hw-test test-faults test-services test-browser test-daemon test-cluster soak test-search lint format bench-search install-units clean

help:  ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## Tune EfficientNet-B4 on a simulated Jetson AGX Orin
	POLYTHROTTLE_STATE_DIR=demo $(BIN)/polythrottle tune --device sim:jetson-agx-orin --workload efficientnet-b4 \
		--slo 'p99<=1.2x' --out demo/profile.toml

test: $(READY)  ## Run the tests
	$(BIN)/python -m pytest -n auto -m 'not (search or faults or hardware or services or browser or soak or schema or cluster)'

test-search: $(READY)  ## Run the search over all measured tables (minutes; needs ../shared)
	$(BIN)/python -m pytest -n auto -m search

test-faults: $(READY)  ## Kill and break at every step of a session on every fake board (minutes)
	$(BIN)/python -m pytest -n auto -m faults

test-services: $(READY)  ## Measure and tune models on real servers, which are installed into .services (minutes)
	$(BIN)/python -m pytest -q -rfE -m services tests/services

test-browser: $(READY)  ## Look at the daemon's page in Chromium, which must be installed
	$(BIN)/python -m pytest -q -rfE -m browser tests/browser

test-daemon: $(READY)  ## Hours of the daemon with a fault a minute, and its API under schemathesis (minutes)
	$(BIN)/python -m pytest -q -rfE -n auto -m 'soak or schema'

test-cluster: $(RAY)  ## Kill and bring back real nodes: torchrun, and two Slurm nodes where Slurm is installed (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rfE -m cluster tests/cluster

soak: $(READY)  ## A whole simulated day of the daemon with a fault a minute, into benchmarks/soak.md (minutes)
	$(BIN)/python benchmarks/soak.py --write benchmarks/soak.md

hw-test: $(READY)  ## Check a real NVIDIA GPU by reading alone, and print what that cannot prove
	$(BIN)/python -m pytest -q -rfE -m hardware tests/hardware

lint: $(READY)  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-search: $(READY)  ## Compare the search methods, into benchmarks/ (hours; goes on where it stopped; needs ../shared)
	$(BIN)/python benchmarks/search.py $(if $(SEEDS),--seeds $(SEEDS))

install-units:  ## Lay systemd units, udev rules and the group below DESTDIR, for programs in BINDIR (/usr/local/bin)
	@DESTDIR='$(DESTDIR)' BINDIR='$(or $(BINDIR),/usr/local/bin)' packaging/install-units

clean:  ## Remove what make made
	rm -rf $(VENV) .ray .services demo .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "polythrottle needs Python 3.11 or newer; say which with make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[dev,onnx,serving]'
	touch $@

# Ray pins what the rest leaves open, so it has an environment of its own, which sees the other one's packages behind it.
$(RAY): $(READY)
	$(PYTHON) -m venv .ray
	.ray/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'ray[default,train]>=2.60'
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"), "$(CURDIR)", sep="\n")' > \
		"$$(.ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/polythrottle.pth"
	touch $@
