"""A small tokenizer, and LLaMA's, if the folder `shared` is next to the checkout."""

import pytest

from benchmarks.pretrain import train_tokenizer
from data.conversations import load_conversations


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(load_conversations(["embedded:150:700"])[0], vocab_size=600)


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def llama_tokenizer(shared):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(shared("data/tokenizer")))
