"""The draft vocabulary that training chooses, from the training text to the exported drafter."""

from collections import Counter

import pytest
import torch
import yaml

from data.module import ShareGPTData
from drafters import CTC, Medusa, NoDrafter, checkpoint
from drafters.recipe import build
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from train import draft_vocabulary
from train.cli import commands, lightning_command
from train.draft_vocabulary import choose_draft_tokens

NUM_TOKENS = 60


@pytest.fixture(scope="module")
def rows(tiny):
    data = ShareGPTData(str(tiny), ["embedded:24"], val_size=4, max_length=160)
    data.setup("fit")
    return data.train_set


@pytest.fixture(scope="module")
def counts(rows):
    """How often the assistant writes each token, counted in plain Python."""
    said = (zip(row["input_ids"], row["loss_mask"], strict=True) for row in rows)
    return Counter(token for row in said for token, is_assistants in row if is_assistants)


def chosen_for(base, rows, num_tokens):
    drafter = build(CTC, base.shape, {"draft_vocab_size": num_tokens})
    choose_draft_tokens(drafter, base, rows)
    return drafter.draft_tokens.tolist()


def test_the_assistants_most_frequent_tokens_are_chosen_and_the_end_marks_kept(tiny_base, rows, counts):
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    for num_tokens in (1, 2, NUM_TOKENS):
        chosen = chosen_for(tiny_base, rows, num_tokens)
        assert tiny_base.eos <= set(chosen) and chosen == sorted(chosen)
        others = [token for token in ranked if token not in tiny_base.eos][: num_tokens - len(tiny_base.eos)]
        assert set(chosen) - tiny_base.eos == set(others)


def test_a_special_token_that_the_assistant_writes_is_kept_and_others_are_not(tiny_base, rows):
    specials = set(tiny_base.tokenizer.all_special_ids)
    mark = min(specials - tiny_base.eos)
    assert mark not in chosen_for(tiny_base, rows, NUM_TOKENS)
    told = rows.select([0]).map(lambda row: row | {"input_ids": [mark, *row["input_ids"][1:]], "loss_mask": [1] * 160})
    assert {mark, *tiny_base.eos} <= set(chosen_for(tiny_base, told, 2 + len(tiny_base.eos)))


def test_drafters_for_all_tokens_need_no_text_and_others_do(tiny_base):
    choose_draft_tokens(build(Medusa, tiny_base.shape, {}), tiny_base, None)
    choose_draft_tokens(build(CTC, tiny_base.shape, {}), tiny_base, None)
    with pytest.raises(ValueError, match="needs the training set"):
        chosen_for(tiny_base, None, NUM_TOKENS)


@pytest.mark.slow
def test_a_trained_and_exported_drafter_keeps_its_vocabulary_and_drafts_from_it(
    write_recipe, tiny_base, rows, tmp_path, call
):
    config = write_recipe(tmp_path, max_steps=4)
    values = yaml.safe_load(config.read_text())
    values["model"]["drafter"]["init_args"] |= {"draft_vocab_size": NUM_TOKENS, "markov_rank": 4}
    config.write_text(yaml.safe_dump(values))
    assert call(lightning_command.main, "fit", "--config", config).code == 0
    ckpt = tmp_path / "checkpoints" / "last.ckpt"
    assert call(commands.main, "export", ckpt, tmp_path / "out").code == 0
    drafter, config = checkpoint.load(tmp_path / "out")
    expected = chosen_for(tiny_base, rows, NUM_TOKENS)
    assert torch.load(ckpt, weights_only=True)["state_dict"]["drafter.draft_tokens"].tolist() == expected
    assert drafter.draft_tokens.tolist() == expected
    assert config.init_args["trunk"]["draft_vocab_size"] == NUM_TOKENS
    drafter.attach_base_weights(tiny_base.base_weights)
    drafted, observe = set(), drafter.observe
    drafter.observe = lambda step: drafted.update(step.tree.tokens) or observe(step)
    prompt = rows[0]["input_ids"][:40]
    text = Session(Runner(tiny_base), drafter).run(prompt, 30).tokens
    assert text == Session(Runner(tiny_base), NoDrafter()).run(prompt, 30).tokens
    assert drafted and drafted <= set(expected)


@pytest.mark.slow
def test_a_resumed_training_keeps_its_vocabulary_and_does_not_count_the_text_again(
    write_recipe, tiny_base, rows, tmp_path, call, monkeypatch
):
    counted = []
    count = draft_vocabulary.assistant_token_counts
    monkeypatch.setattr(draft_vocabulary, "assistant_token_counts", lambda *given: counted.append(1) or count(*given))
    config = write_recipe(tmp_path, max_steps=1)
    values = yaml.safe_load(config.read_text())
    values["model"]["drafter"]["init_args"] |= {"draft_vocab_size": NUM_TOKENS}
    config.write_text(yaml.safe_dump(values))
    fit = "fit", "--config", config, "--trainer.limit_val_batches", "0", "--ckpt_path", "last"
    assert call(lightning_command.main, *fit).code == 0 and counted == [1], "there is no checkpoint yet"
    assert call(lightning_command.main, *fit, "--trainer.max_steps", "2").code == 0 and counted == [1]
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert saved["state_dict"]["drafter.draft_tokens"].tolist() == chosen_for(tiny_base, rows, NUM_TOKENS)
