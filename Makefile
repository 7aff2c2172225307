PYTHON ?= python3
BIN := .venv/bin
RUN := runs/quickstart
TORCH ?= torch>=2.6,<2.14

.PHONY: install quickstart test lint tiny-chat clean

install: $(BIN)/.installed

# torch comes first, so that an index with a CPU build can be named: make install TORCH='torch --index-url URL'
$(BIN)/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# Train a CTC drafter for checkpoints/tiny-chat, show that it loses nothing, measure it, make the report.
# Stopped half-way, it goes on from the last checkpoint; `make clean` starts anew.
quickstart: install
	$(BIN)/lightning fit --config quickstart.yaml --ckpt_path last
	$(BIN)/drafters export $(RUN)/checkpoints/best.ckpt $(RUN)/ctc --overwrite true
	$(BIN)/drafters verify --base checkpoints/tiny-chat --drafter ctc=$(RUN)/ctc --drafter anpd --drafter prompt_lookup
	$(BIN)/drafters eval --base checkpoints/tiny-chat --drafter none --drafter anpd --drafter prompt_lookup \
		--drafter ctc=$(RUN)/ctc --benchmark embedded --out $(RUN)/eval --overwrite true

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# How the shipped base was made: its tokenizer, its pre-training, its export.
tiny-chat: install
	rm -rf runs/tiny-chat && mkdir -p runs/tiny-chat
	$(BIN)/drafters tokenizer runs/tiny-chat/tokenizer
	$(BIN)/lightning fit --config base/tiny.yaml
	$(BIN)/drafters export runs/tiny-chat/checkpoints/last.ckpt checkpoints/tiny-chat --overwrite true

clean:
	rm -rf $(RUN)
