import json

import pytest
import torch

from train.cli import commands
from train.cli.commands import normalise


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"], ["help"]])
def test_bare_and_help_list_every_command(call, args):
    outcome = call(commands.main, *args)
    assert (outcome.code, outcome.err) == (0, "")
    for name, text in {"train": commands.TRAIN, **{n: c.summary for n, c in commands.COMMANDS.items()}}.items():
        assert any(row.split() == [name, *text.split()] for row in outcome.out.splitlines())


@pytest.mark.slow
def test_drafters_train_is_the_same_as_lightning_fit(call, write_recipe, tmp_path):
    config = write_recipe(tmp_path, max_steps=1, limit_val_batches=0)
    outcome = call(commands.main, "train", "--config", config)
    assert outcome.code == 0, outcome.err
    checkpoint = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 1 and checkpoint["command"] == f"lightning fit --config {config}"
    wrong = call(commands.main, "train", "--config", "cct.yaml")
    assert "no config 'cct.yaml'" in wrong.one_line_error("lightning")


def test_the_list_of_commands_is_printed_without_importing_torch(fresh_python):
    code = "import sys; from train.cli.commands import main; main([]); print('torch' in sys.modules)"
    done = fresh_python("-c", code, timeout=5)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_explains_each_of_its_arguments(call, name):
    from importlib import import_module
    from inspect import signature

    command = commands.COMMANDS[name]
    function = getattr(import_module(command.module), command.function)
    outcome = call(commands.main, name, "--help")
    assert outcome.code == 0 and outcome.err == ""
    said = " ".join(outcome.out.split())
    groups = commands.option_groups(function)
    documented = dict.fromkeys(signature(function).parameters.keys() - groups.keys(), function.__doc__)
    for group in groups.values():
        inherited = "\n".join(parent.__doc__ or "" for parent in group.__mro__)
        documented |= dict.fromkeys(signature(group).parameters, inherited)
    for argument, text in documented.items():
        assert f"--{argument}" in said
        line = text.partition(f" {argument}: ")[2].split(".")[0].split(";")[0]
        assert line and " ".join(line.split()[:6]) in said, f"--{argument} has no help line"


@pytest.mark.parametrize(
    "args, expected",
    [
        (["--max-new-tokens", "5"], ["--max_new_tokens=5"]),
        (["--max_new_tokens=5"], ["--max_new_tokens=5"]),
        (["--drafter", "a", "--drafter=b:k=1"], ["--drafter+=a", "--drafter+=b:k=1"]),
        (["x.ckpt", "out", "--base", "b"], ["--ckpt=x.ckpt", "--out=out", "--base=b"]),
        (["--base", "b", "x.ckpt", "out"], ["--base=b", "--ckpt=x.ckpt", "--out=out"]),
        (["--offset", "-1"], ["--offset=-1"]),
        (["--limit", "5", "--help"], ["--help"]),
        (["x.ckpt", "-h"], ["--help"]),
        (["--overwrite", "--limit", "2"], ["--overwrite=true", "--limit=2"]),
        (["--overwrite", "x.ckpt"], ["--overwrite=true", "--ckpt=x.ckpt"]),
        (["--overwrite", "false", "--limit=2"], ["--overwrite=false", "--limit=2"]),
        (["--limit"], ["--limit"]),
    ],
)
def test_arguments_are_normalised_to_one_form(args, expected):
    assert normalise(args, {"drafter"}, ["ckpt", "out"], {"overwrite"}) == expected


def test_the_last_positional_argument_may_be_a_list():
    assert normalise(["a", "b", "--out", "c"], {"folders"}, ["folders"]) == ["--folders+=a", "--folders+=b", "--out=c"]


QUICK = ("--benchmark", "embedded", "--limit", 2)


@pytest.fixture(scope="module")
def results(trained, tiny, tmp_path_factory):
    """What `drafters eval` writes for three drafters on two questions."""
    folder = tmp_path_factory.mktemp("eval") / "results"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["pytest"])
        commands.main(
            [
                *("eval", "--base", str(tiny), "--drafter", "none", "--drafter", "anpd"),
                *("--drafter", f"ctc={trained.folder}", *map(str, QUICK), "--max-new-tokens", "16"),
                *("--repeats", "1", "--out", str(folder)),
            ]
        )
    return folder


@pytest.mark.slow
def test_eval_writes_answers_that_fastchat_reads(results):
    files = {path.stem: path for path in (results / "answers" / "embedded").glob("*.jsonl")}
    assert files.keys() == {"none", "anpd", "ctc"}
    for name, path in files.items():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["question_id"] for row in rows] == [1, 2]
        for row in rows:
            assert row.keys() >= {"question_id", "answer_id", "model_id", "choices", "tstamp"}
            assert row["model_id"] == name
            (choice,) = row["choices"]
            assert choice["index"] == 0 and len(choice["turns"]) == 2
            assert choice["new_tokens"][0] == 16 and 0 < choice["new_tokens"][1] <= 16
            assert choice["new_tokens"] == [len(ids) for ids in choice["token_ids"]]


def test_no_drafter_changes_an_answer(results):
    texts = {
        path.stem: [json.loads(line)["choices"][0]["token_ids"] for line in path.read_text().splitlines()]
        for path in (results / "answers" / "embedded").glob("*.jsonl")
    }
    assert texts["anpd"] == texts["ctc"] == texts["none"]
    found = json.loads((results / "results.json").read_text())
    assert '"identical"' in json.dumps(found)
    markdown = (results / "results.md").read_text()
    assert all(name in markdown for name in ("none", "anpd", "ctc"))
    assert "prefill excluded" in markdown, "every table says how it counts"


def test_eval_writes_a_self_contained_page(results):
    page = (results / "report.html").read_text()
    assert "<html" in page and all(name in page for name in ("anpd", "ctc"))
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert "<script src" not in page and 'rel="stylesheet"' not in page


@pytest.mark.slow
def test_eval_replaces_results_only_with_overwrite(call, results, tiny):
    again = (
        "eval",
        "--base",
        tiny,
        "--drafter",
        "anpd",
        *QUICK,
        "--max_new_tokens",
        4,
        "--repeats",
        1,
        "--out",
        results,
    )
    before = {path: path.read_bytes() for path in results.rglob("*") if path.is_file()}
    refused = call(commands.main, *again)
    assert "already holds results" in refused.one_line_error("drafters")
    assert before == {path: path.read_bytes() for path in results.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_verify_reports_that_several_drafters_are_lossless(call, trained, tiny):
    outcome = call(
        *(commands.main, "verify", "--base", tiny, "--drafter", "anpd", "--drafter", f"ctc={trained.folder}"),
        *("--limit", 2, "--max-new-tokens", 16),
    )
    assert outcome.code == 0, outcome.out
    assert outcome.out.count("2/2") == 2 and "Nothing is lost" in outcome.out


@pytest.mark.slow
def test_verify_compares_sampled_texts_too(call, trained, tiny):
    outcome = call(
        *(commands.main, "verify", "--base", tiny, "--drafter", f"ctc={trained.folder}:num_nodes=4"),
        *("--limit", 2, "--max-new-tokens", 16, "--temperature", 0.8, "--top-p", 0.9, "--seed", 3, "--texts", 40),
    )
    assert outcome.code == 0, outcome.out
    assert "ctc:num_nodes=4" in outcome.out and "2/2" in outcome.out and "p-value" in outcome.out


@pytest.mark.slow
def test_verify_fails_if_a_drafted_text_differs(call, trained, tiny, monkeypatch):
    from inference import verify

    honest = verify.generate_reference
    monkeypatch.setattr(verify, "generate_reference", lambda *arguments: [*honest(*arguments)[:-1], 5])
    outcome = call(commands.main, "verify", "--base", tiny, "--drafter", "anpd", "--limit", 1, "--max-new-tokens", 8)
    assert outcome.code == 1
    assert "0/1" in outcome.out and "logit gap" in outcome.out and "differs from token 7 on" in outcome.out


def test_show_mask_prints_the_assistants_text(call, tiny):
    from data import embedded

    outcome = call(commands.main, "show-mask", "--tokenizer", tiny, "--files", "embedded:2")
    assert outcome.code == 0, outcome.err
    shown = " ".join(outcome.out.split())
    for record in embedded.conversations(2, seed=0):
        assert record["id"] in shown
        for turn in record["conversations"]:
            assert " ".join(turn["value"].split())[:40] in shown
    assert "of the assistant" in shown


def test_show_mask_colours_the_tokens_that_the_loss_is_computed_on(fork, tiny, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    words = "show-mask", "--tokenizer", tiny, "--files", "embedded:1", "--max-length", 400
    done = fork(*words, main=commands.main)
    assert done.wait() == 0, done.log.read_text()
    assert "\x1b[1;32m" in done.log.read_text() and "\x1b[2m" in done.log.read_text()


def test_tokenizer_trains_a_vocabulary_with_the_chat_template(call, tmp_path):
    from inference.verifier.base import load_tokenizer

    made = call(commands.main, "tokenizer", "--out", tmp_path / "t", "--count", 60, "--vocab-size", 320)
    assert made.code == 0, made.err
    vocabulary = load_tokenizer(str(tmp_path / "t"))
    assert len(vocabulary) == 320 and vocabulary.chat_template and vocabulary.eos_token == "</s>"
    refused = call(commands.main, "tokenizer", "--out", tmp_path / "t")
    assert "already holds a tokenizer" in refused.one_line_error("drafters")


@pytest.mark.slow
def test_step_cost_writes_a_curve_that_drafters_read(call, tiny, tmp_path):
    from drafters.trees.step_cost import read_costs

    out = tmp_path / "new" / "cost.json"
    row = ("step-cost", "--base", tiny, "--out", out, "--device", "cpu", "--max-nodes", 6, "--context", 9)
    outcome = call(commands.main, *row, "--repeats", 2)
    assert outcome.code == 0, outcome.err
    written = json.loads(out.read_text())
    assert list(written) == ["base", "device", "dtype", "threads", "context", "nodes", "seconds"]
    assert written["nodes"] == [0, 1, 2, 4, 6] and (written["dtype"], written["context"]) == ("float32", 9)
    curve = read_costs(out)
    assert len(curve) == 7 and curve[[0, 1, 2, 4, 6]].tolist() == written["seconds"]
    assert call(commands.main, *row).code == 2 and call(commands.main, *row, "--repeats", 1, "--overwrite").code == 0
