"""A small tokenizer, and the real files in the folder `shared` next to the checkout, if it exists."""

from pathlib import Path

import pytest

from benchmarks.pretrain import train_tokenizer
from data.conversations import load_conversations

SHARED = Path(__file__).parents[2].parent / "shared"


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(load_conversations(["embedded:150:700"])[0], vocab_size=600)


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def llama_tokenizer():
    folder = SHARED / "data" / "tokenizer"
    if not folder.is_dir():
        pytest.skip("the real LLaMA tokenizer is not in the folder `shared` next to the checkout")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))
