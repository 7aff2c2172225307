"""What a training starts from: the weights of a folder, and a draft vocabulary chosen from the training text."""

import json
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch

import drafters
from data.module import ShareGPTData
from data.tokenizer import tokenizer_hash
from drafters import CTC, Medusa, NoDrafter, checkpoint
from drafters.checkpoint import DrafterConfig
from drafters.recipe import build
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from train.cli import run_drafters, run_lightning
from train.initial_drafter import choose_draft_tokens

EAGLE3 = {
    "class_path": "drafters.EAGLE3",
    "init_args": {"hidden_layers": [0, 1, -1], "own_head": True, "draft_vocab_size": 50, "loss": {"num_unroll": 2}},
}


def ctc(trunk, loss=None, draft=None):
    groups = {"trunk": trunk, "loss": loss or {"num_labels": 4}, "draft": draft or {}}
    return {"class_path": "drafters.CTC", "init_args": groups}


@pytest.fixture
def fit(write_recipe, tmp_path, call):
    """Runs `lightning fit`, or another subcommand, from a drafter's folder."""

    def run(folder, *options, subcommand="fit", runs=tmp_path, **model):
        config = write_recipe(runs, {"initial_drafter": folder and str(folder), **model}, max_steps=1)
        return call(run_lightning, subcommand, "--config", config, *options)

    return run


@pytest.fixture(scope="module")
def imported(tiny_base, tmp_path_factory):
    """An EAGLE-3 drafter as `drafters import` writes it: random weights, and sizes of its layer that are its own."""
    folder = tmp_path_factory.mktemp("imported")
    shape = replace(tiny_base.shape, intermediate_size=24, rope_theta=300.0)
    vocabulary = tokenizer_hash(tiny_base.tokenizer)
    init_args = {"hidden_layers": [0, 1, -1], "own_head": True, "draft_vocab_size": 50}
    config = DrafterConfig(EAGLE3["class_path"], init_args, shape, tiny_base.name, vocabulary)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        drafter = config.build()
        drafter.draft_tokens.copy_(torch.randperm(shape.vocab_size)[:50].sort().values)
    checkpoint.save(folder, drafter, config)
    return folder


@pytest.mark.slow
def test_without_a_learning_rate_the_weights_and_sizes_are_still_those_of_the_folder(fit, call, imported, tmp_path):
    out = tmp_path / "out"
    done = fit(imported, drafter=EAGLE3, learning_rate=0.0)
    assert done.code == 0, done.err
    assert call(run_drafters, "export", tmp_path / "checkpoints" / "last.ckpt", out).code == 0
    (drafter, config), (before, earlier) = checkpoint.load(out), checkpoint.load(imported)
    torch.testing.assert_close(drafter.state_dict(), before.state_dict(), rtol=0, atol=0)
    assert config.base == earlier.base and config.training["initial_drafter"] == str(imported)
    assert f"Trained on from: `{imported}`" in (out / "README.md").read_text()


@pytest.mark.slow
def test_training_goes_on_from_the_folder_and_resumes_from_its_own_checkpoint(fit, imported, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert fit(imported, "--trainer.max_steps", "2", drafter=EAGLE3, runs=whole).code == 0
    assert fit(imported, drafter=EAGLE3, runs=parts).code == 0
    done = fit(imported, "--trainer.max_steps", "2", "--ckpt_path", "last", drafter=EAGLE3, runs=parts)
    assert done.code == 0, done.err
    ends = [torch.load(runs / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for runs in (whole, parts)]
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)
    first = checkpoint.load(imported)[0].state_dict()
    change = max((ends[0][f"drafter.{name}"] - weight).abs().max().item() for name, weight in first.items())
    assert 0 < change < 0.05  # two steps of AdamW move a weight by little more than twice the learning rate


@pytest.mark.slow
def test_validation_measures_the_folder_as_it_measures_its_checkpoint(fit, trained, tmp_path):
    """Its recipe may name an option of the loss that is no longer there."""
    folder = shutil.copytree(trained.folder, tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    config["init_args"]["loss"]["weights"] = "decay"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "SHA256SUMS").unlink()
    of_folder = fit(folder, subcommand="validate")
    of_checkpoint = fit(None, "--ckpt_path", trained.ckpt, subcommand="validate")
    assert "val/acceptance_length" in of_folder.out == of_checkpoint.out


@pytest.mark.slow
@pytest.mark.parametrize("subcommand", ["fit", "validate"])
def test_a_checkpoint_of_other_rotations_is_refused_without_the_initial_drafter_that_had_them(
    fit, trained, tmp_path, subcommand
):
    path, saved = tmp_path / "scaled.ckpt", torch.load(trained.ckpt, weights_only=True)
    saved["base"]["shape"]["rope_factor"] = 8.0
    torch.save(saved, path)
    error = fit(None, "--ckpt_path", path, subcommand=subcommand).one_line_error("lightning")
    assert "whose shape is not that of" in error and "give model.base, model.base_dtype and model.initial" in error


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"class_path": "drafters.Medusa"}, "is CTC, and model.drafter is Medusa"),
        (ctc({"num_frames": 6, "causal": True}), "has other options than model.drafter; give it causal"),
        (
            ctc({"num_frames": 6, "hidden_layers": [1, -1]}),
            "has other options than model.drafter; give it hidden",
        ),
        (ctc({"num_frames": 5, "markov_rank": 4}), "has other options than model.drafter; give it num_frames: 6, mark"),
    ],
)
def test_a_drafter_that_computes_something_else_is_refused_in_one_line(fit, trained, drafter, message):
    error = fit(trained.folder, drafter=drafter).one_line_error("lightning")
    assert f"the drafter in {trained.folder} {message}" in error


def test_no_folder_and_a_drafter_for_another_base_are_refused_in_one_line(fit, trained, make_tiny, tmp_path):
    assert "no drafter at" in fit(tmp_path / "none").one_line_error("lightning")
    error = fit(trained.folder, base=str(make_tiny("larger", hidden_size=48))).one_line_error("lightning")
    assert "with hidden_size 32, but" in error


def test_loss_and_draft_tree_may_be_others(fit, trained):
    node = ctc({"num_frames": 6}, {"num_labels": 3, "objective": "ctc"}, {"num_nodes": 3})
    assert fit(trained.folder, drafter=node, subcommand="validate").code == 0


@pytest.mark.slow
def test_a_lookup_may_be_added_and_changes_nothing_until_it_is_trained(fit, trained):
    plain, lookup = (), ("--model.drafter.init_args.trunk.lookup", "true")
    without, added = (fit(trained.folder, *options, subcommand="validate") for options in (plain, lookup))
    assert "val/acceptance_length" in without.out == added.out
    assert fit(trained.folder, *lookup, "--model.drafter.init_args.trunk.copy", "true", subcommand="validate").code == 0


# ---- the draft vocabulary

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
    drafter = build(CTC, base.shape, {"trunk": {"draft_vocab_size": num_tokens}})
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


def test_a_head_of_the_drafters_own_starts_as_the_bases_rows_for_the_chosen_tokens(tiny_base, rows):
    drafter = build(drafters.EAGLE3, tiny_base.shape, {"own_head": True, "draft_vocab_size": NUM_TOKENS})
    choose_draft_tokens(drafter, tiny_base, rows)
    assert torch.equal(drafter.lm_head.weight, tiny_base.base_weights.head[drafter.draft_tokens])


def test_an_initial_drafter_drafts_the_new_texts_tokens_unless_it_has_weights_for_its_own(tiny_base, rows, counts):
    own = torch.arange(tiny_base.shape.vocab_size)[-NUM_TOKENS:]
    few = rows.select([0]).map(lambda row: row | {"loss_mask": [0] * 150 + row["loss_mask"][150:]})
    said = {few[0]["input_ids"][place] for place, is_assistants in enumerate(few[0]["loss_mask"]) if is_assistants}
    assert 0 < len(said | tiny_base.eos) < NUM_TOKENS
    for kind, options, text, keeps in (
        (CTC, {"trunk": {"draft_vocab_size": NUM_TOKENS}}, rows, False),
        (CTC, {"trunk": {"draft_vocab_size": NUM_TOKENS}}, few, False),
        (CTC, {"trunk": {"draft_vocab_size": NUM_TOKENS, "markov_rank": 4}}, rows, True),
        (drafters.EAGLE3, {"own_head": True, "draft_vocab_size": NUM_TOKENS}, rows, True),
    ):
        drafter = build(kind, tiny_base.shape, options)
        drafter.draft_tokens.copy_(own)
        choose_draft_tokens(drafter, tiny_base, text, is_initial=True)
        chosen = set(drafter.draft_tokens.tolist())
        if keeps:
            assert chosen == set(own.tolist())
        elif text is rows:
            assert min(counts[token] for token in chosen - tiny_base.eos) >= max(
                number for token, number in counts.items() if token not in chosen
            )
        else:
            assert said <= chosen and chosen - said - tiny_base.eos <= set(own.tolist()), "filled up with its own"


@pytest.mark.slow
def test_a_further_training_says_for_which_base_its_drafter_was_and_how_much_of_the_text_it_can_draft(
    fit, imported, tiny_base, counts, caplog
):
    """The drafter keeps its 50 random tokens."""
    with caplog.at_level("INFO"):
        assert fit(imported, "--data.files", "[embedded:24]", "--data.val_size", "4", drafter=EAGLE3).code == 0
    assert f"initial drafter: {imported}, trained for {tiny_base.name}" in caplog.text
    share = sum(counts[token] for token in checkpoint.load(imported)[0].draft_tokens.tolist()) / counts.total()
    assert 0 < share < 1
    assert f"50 of {tiny_base.shape.vocab_size} tokens, {share:.2%} of the assistant's training text" in caplog.text


def test_drafters_for_all_tokens_need_no_text_and_others_do(tiny_base):
    choose_draft_tokens(build(Medusa, tiny_base.shape, {}), tiny_base, None)
    choose_draft_tokens(build(CTC, tiny_base.shape, {}), tiny_base, None)
    with pytest.raises(ValueError, match="needs the training set"):
        chosen_for(tiny_base, None, NUM_TOKENS)


@pytest.mark.slow
def test_a_trained_resumed_and_exported_drafter_keeps_its_vocabulary_and_drafts_from_it(
    write_recipe, tiny_base, rows, tmp_path, call
):
    trunk = "--model.drafter.init_args.trunk"
    words = (
        "fit",
        "--config",
        write_recipe(tmp_path),
        f"{trunk}.draft_vocab_size={NUM_TOKENS}",
        f"{trunk}.markov_rank=4",
    )
    assert call(run_lightning, *words, "--trainer.max_steps", 4).code == 0
    ckpt = tmp_path / "checkpoints" / "last.ckpt"
    assert call(run_drafters, "export", ckpt, tmp_path / "out").code == 0
    drafter, exported = checkpoint.load(tmp_path / "out")
    expected = chosen_for(tiny_base, rows, NUM_TOKENS)
    assert torch.load(ckpt, weights_only=True)["state_dict"]["drafter.draft_tokens"].tolist() == expected
    assert drafter.draft_tokens.tolist() == expected
    assert exported.init_args["trunk"]["draft_vocab_size"] == NUM_TOKENS
    drafter.attach_base_weights(tiny_base.base_weights)
    drafted, observe = set(), drafter.observe
    drafter.observe = lambda step: drafted.update(step.tree.tokens) or observe(step)
    prompt = rows[0]["input_ids"][:40]
    text = Session(Runner(tiny_base), drafter).run(prompt, 30).tokens
    assert text == Session(Runner(tiny_base), NoDrafter()).run(prompt, 30).tokens
    assert drafted and drafted <= set(expected)
    assert call(run_lightning, *words, "--ckpt_path", "last", "--trainer.max_steps", 5).code == 0
    assert torch.load(ckpt, weights_only=True)["state_dict"]["drafter.draft_tokens"].tolist() == expected
