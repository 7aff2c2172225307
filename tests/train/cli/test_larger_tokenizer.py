"""A base whose tokenizer has more tokens than its embedding has rows: only their use is refused, in one line."""

import copy
import json

import pytest

from train.cli import run_drafters, run_lightning

NOTHING = "has the token 401 (<image>), for which the base has no embedding, but only for 0 to 399: leave it out"
VERIFY = "--drafter", "anpd", "--drafter", "token_recycling", "--limit", 3, "--max-new-tokens", 8
TRUNK, LOSS = {"num_frames": 6, "draft_vocab_size": 50}, {"num_labels": 4, "num_anchors": 16}
CTC = {"class_path": "drafters.CTC", "init_args": {"trunk": TRUNK, "loss": LOSS}}


@pytest.fixture(scope="module")
def larger(make_tiny, tiny_tokenizer):
    """A folder as of a fine-tuning that added a padding token, and a special one, without resizing the embedding."""
    folder, tokenizer = make_tiny("larger"), copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "additional_special_tokens": ["<image>"]})
    assert (len(tokenizer), tokenizer.pad_token_id) == (402, 400)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def chats(tmp_path):
    """A file of conversations, and one in which a later one contains the special token."""
    files = []
    for name, texts in (("plain", ["a b c", "d e"]), ("image", ["a b c", "an <image> here"])):
        rows = [
            {"messages": [{"role": "user", "content": text * n}, {"role": "assistant", "content": "Yes. " * n}]}
            for n in range(1, 5)
            for text in texts
        ]
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps({"id": f"c{place}"} | row) + "\n" for place, row in enumerate(rows)))
    return files


@pytest.mark.slow
def test_commands_use_it_as_ever_and_pad_with_a_token_that_it_has(call, larger, chats, write_recipe, tmp_path):
    assert "Nothing is lost" in call(run_drafters, "verify", "--base", larger, *VERIFY).succeeded().out
    config = write_recipe(tmp_path / "run", {"base": str(larger), "drafter": CTC}, max_steps=2)
    words = "--config", config, "--data.files", f"[{chats[0]}]", "--data.val_size", 2
    call(run_lightning, "fit", *words).succeeded()
    store = tmp_path / "store"
    words = "--base", larger, "--files", chats[0], "--out", store, "--layers", "1", "--max-length", 400
    assert "8 conversations" in call(run_drafters, "features", *words).succeeded().out


@pytest.mark.slow
def test_a_conversation_with_such_a_token_is_named_before_training_and_left_out_of_answers(
    call, larger, chats, write_recipe, tmp_path
):
    config = write_recipe(tmp_path / "run", {"base": str(larger), "drafter": CTC}, max_steps=2)
    words = "--config", config, "--data.files", f"[{chats[1]}]", "--data.val_size", 2
    assert NOTHING in call(run_lightning, "fit", *words).one_line_error("lightning")
    words = "--base", larger, "--files", chats[1], "--out", tmp_path / "store", "--layers", "1", "--max-length", 400
    assert f"conversation c1 {NOTHING}" in call(run_drafters, "features", *words).one_line_error("drafters")
    words = "--base", larger, "--files", chats[1], "--out", tmp_path / "own.jsonl", "--max-new-tokens", 4
    done = call(run_drafters, "regenerate", *words).succeeded()
    assert "4 x the prompt has the token 401, but" in done.out + done.err
    assert len((tmp_path / "own.jsonl").read_text().splitlines()) == 4
