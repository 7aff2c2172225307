"""Bases of the hub at a revision, from the local cache, and names that are none."""

import pytest

from data.hub import find_folder, join_revision, split_revision
from data.sources import read_rows
from data.tokenizer import load_tokenizer

ANSWER = next(read_rows("embedded:1"))[1]["conversations"][1]["value"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_tokenizer_and_files_are_read_at_their_revision(tokenizer, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--owner--name" / "snapshots" / COMMIT
    tokenizer.save_pretrained(place)
    (place / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(f"owner/name@{COMMIT}").get_vocab() == tokenizer.get_vocab()
    assert find_folder(f"owner/name@{COMMIT}", ["config.json"]) == place
    for other in ("owner/name", f"owner/name@{COMMIT[::-1]}"):
        with pytest.raises(ValueError, match=r"no base owner/name.* from the hub \(.*\): check the name, go online"):
            load_tokenizer(other)
    with pytest.raises(ValueError, match=r"cannot download owner/name@main \(.*\): check the name"):
        find_folder("owner/name@main", ["config.json"])


def test_only_names_of_the_hub_have_a_revision(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name@1").mkdir(parents=True)
    assert split_revision("owner/name@1") == ("owner/name@1", None)
    for name, revision in (("owner/other", COMMIT), ("owner/other", None), (str(tmp_path), None)):
        assert split_revision(join_revision(name, revision)) == (name, revision)
    assert join_revision(str(tmp_path), "v1") == str(tmp_path)
    assert find_folder("owner/name@1", ["config.json"]).is_dir()


def test_the_tokenizer_has_the_ids_of_llama(tokenizer):
    assert len(tokenizer) == 600
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<unk>", "<s>", "</s>"]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.model_max_length == 1024


@pytest.mark.parametrize("text", [ANSWER, "  two  spaces \n\n\ttab", "naïve 漢字 🙂 1234", "don't , stop .", ""])
def test_decoding_undoes_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_splits_numbers_into_digits(tokenizer):
    assert tokenizer.tokenize("1024") == ["1", "0", "2", "4"]
