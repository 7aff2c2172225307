"""Every mistake a user can make ends in one line that names it, exit code 2, and no traceback."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from data import embedded
from train.cli import commands, lightning_command


@pytest.fixture(scope="module")
def place(trained, tiny, make_tiny, tiny_tokenizer, tmp_path_factory):
    """A folder of broken files, and of valid ones that do not fit together."""
    folder = tmp_path_factory.mktemp("bad")

    def copy(source, name):
        shutil.copytree(source, folder / name)
        return folder / name

    def cut(path):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    (folder / "tiny").symlink_to(tiny)
    (folder / "drafter").symlink_to(trained.folder)
    config = trained.config.read_text().replace(str(trained.ckpt.parent), str(folder / "checkpoints"))
    (folder / "tiny.yaml").write_text(config)
    (folder / "last.ckpt").symlink_to(trained.ckpt)
    (folder / "hollow").mkdir()
    (folder / "hollow" / "note.txt").write_text("nothing here")
    cut(copy(tiny, "base-cut") / "model.safetensors")
    (copy(tiny, "base-without-weights") / "model.safetensors").unlink()
    (copy(tiny, "base-without-tokenizer") / "tokenizer.json").unlink()
    (copy(tiny, "base-garbled") / "config.json").write_text("{")
    (folder / "wide").symlink_to(make_tiny("wide", hidden_size=48))
    (folder / "more-words").symlink_to(make_tiny("more-words", vocab_size=416))
    other = embedded.train_tokenizer(embedded.conversations(100, seed=5), vocab_size=400)
    (folder / "other-words").symlink_to(make_tiny("other-words", tokenizer=other))
    large = embedded.train_tokenizer(embedded.conversations(100, seed=5), vocab_size=420)
    (folder / "large-tokenizer").symlink_to(make_tiny("large-tokenizer", tokenizer=large, vocab_size=400))

    cut(copy(trained.folder, "drafter-cut") / "model.safetensors")
    (copy(trained.folder, "drafter-without-weights") / "model.safetensors").unlink()
    (copy(trained.folder, "drafter-garbled") / "config.json").write_text('{"format": 1')
    config = json.loads((trained.folder / "config.json").read_text())
    for name, change in {
        "drafter-of-tomorrow": {"format": 99},
        "drafter-of-another-recipe": {"init_args": config["init_args"] | {"num_layers": 3}},
        "drafter-with-unknown-argument": {"init_args": config["init_args"] | {"num_heads": 3}},
        "drafter-of-no-class": {"class_path": "os.system"},
    }.items():
        (copy(trained.folder, name) / "config.json").write_text(json.dumps(config | change))
        (folder / name / "SHA256SUMS").unlink()

    (folder / "cut.ckpt").write_bytes(trained.ckpt.read_bytes()[:3000])
    (folder / "text.ckpt").write_text("not a checkpoint")
    torch.save({"state_dict": {}}, folder / "foreign.ckpt")
    torch.save([1, 2], folder / "list.ckpt")

    said = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hello there"}]
    whole = [{"id": str(n), "conversations": said} for n in range(12)]
    for name, text in {
        "whole.json": json.dumps(whole),
        "long.json": json.dumps(
            [{"conversations": [{"from": "human", "value": f"{n} words " * 300}, said[1]]} for n in range(12)]
        ),
        "nothing.json": "",
        "empty-list.json": "[]",
        "malformed.json": json.dumps(whole)[:-20],
        "malformed.jsonl": json.dumps(whole[0]) + "\n{oops\n",
        "broken-records.json": json.dumps([{"conversations": []}, {"text": "x"}, 5]),
        "sharegpt.txt": json.dumps(whole),
        "questions-not-json.jsonl": "{oops\n",
        "questions-without-turns.jsonl": json.dumps({"question_id": 1, "category": "x"}) + "\n",
        "questions-empty.jsonl": "\n",
        "questions-huge.jsonl": json.dumps({"question_id": 1, "category": "x", "turns": ["many words " * 900]}) + "\n",
        "questions-blank.jsonl": json.dumps({"question_id": 1, "category": "x", "turns": [""]}) + "\n",
    }.items():
        (folder / name).write_text(text)
    (folder / "run" / "checkpoints").mkdir(parents=True)
    for name in ("best", "last"):
        (folder / "run" / "checkpoints" / f"{name}.ckpt").touch()
    (folder / "results" / "answers").mkdir(parents=True)
    (folder / "results" / "answers" / "none.jsonl").write_text("{}\n")
    (folder / "results" / "results.json").write_text("{}")
    return folder


def arguments(row, place):
    """The words of a command; ``@name`` is a path in the folder of broken things."""
    return [word.replace("@", f"{place}/") for word in row.split()]


EVAL = "eval --base @tiny --benchmark embedded --limit 1 --max-new-tokens 4 "
ASKED = "eval --base @tiny --drafter anpd --benchmark embedded="
VERIFY = "verify --base @tiny --limit 1 --max-new-tokens 4 "
DRAFTERS = {
    # ---- commands and options
    "frobnicate": "unknown command 'frobnicate': known are train, eval, ",
    EVAL + "--drafter anpd --frob 3": "frob",
    EVAL + "--drafter anpd --lim 3": "lim",
    EVAL + "--drafter anpd extra": "extra",
    EVAL + "--drafter": "drafter",
    EVAL + "--drafter anpd --limit two": "--limit takes a whole number, not 'two'",
    EVAL + "--drafter anpd --temperature hot": "--temperature takes a number, not 'hot'",
    EVAL + "--drafter anpd --devices many": "--devices takes a whole number or auto, not 'many'",
    EVAL + "--drafter anpd ngram": "--drafter takes one value at a time: write --drafter again before ngram",
    EVAL + "--benchmark embedded --drafter anpd": "the benchmark embedded is named twice",
    "regenerate --files a b": "--files takes one value at a time: write --files again before b",
    EVAL + "--drafter anpd --limit 0": "limit must be at least 1, not 0",
    EVAL + "--drafter anpd --limit -1": "limit must be at least 1, not -1",
    EVAL + "--drafter anpd --rows x": "rows must be a slice such as 1200:1260",
    EVAL + "--drafter anpd --rows 1000:": "selects none of the 40 questions",
    EVAL + "--drafter anpd --dtype float8": "--dtype takes float32, bfloat16, float16, int8 or nf4, not 'float8'",
    EVAL + "--drafter anpd --device cuda": "no CUDA device here",
    EVAL + "--drafter anpd --template chatml": "unknown chat template 'chatml'",
    "eval --benchmark embedded --drafter anpd": "base",
    # ---- the base
    "verify --drafter anpd --base @nowhere": "no base at",
    "verify --drafter anpd --base nowhere": "no base at nowhere",
    "verify --drafter anpd --base nobody/nothing": "nobody/nothing is not in the local hub cache",
    "verify --drafter anpd --base @hollow": "is a folder without config.json",
    "verify --drafter anpd --base @whole.json": "no base at",
    "verify --drafter anpd --base @base-cut": "model.safetensors is damaged or cut short",
    "verify --drafter anpd --base @base-without-weights": "cannot load the base",
    "verify --drafter anpd --base @base-without-tokenizer": "cannot load the tokenizer",
    "verify --drafter anpd --base @base-garbled": "config.json line 1: invalid JSON",
    "verify --drafter anpd --base @large-tokenizer": "do not belong together",
    "verify --drafter anpd --base @drafter": "cannot load the",
    # ---- the drafter
    VERIFY + "--drafter anpt": "unknown drafter 'anpt'; known are anpd, cascade=MODEL,",
    VERIFY + "--drafter an-pd": "is no drafter",
    VERIFY + "--drafter anpd:ordr=3": "'ordr=3'",
    VERIFY + "--drafter anpd:order": "anpd:order",
    VERIFY + "--drafter anpd:order=x": "order must be int, not 'x'",
    VERIFY + "--drafter anpd=@drafter": "has no weights",
    VERIFY + "--drafter ctc": "needs its folder",
    VERIFY + "--drafter ctc:num_nodes=3": "needs its folder",
    VERIFY + "--drafter ctc=@nowhere": "config.json is missing",
    VERIFY + "--drafter ctc=@tiny": "is not a drafter's configuration",
    VERIFY + "--drafter ctc=@drafter:num_node=3": "'num_node=3'",
    VERIFY + "--drafter ctc=@drafter:num_frames=3": "num_frames is fixed by training",
    VERIFY + "--drafter ctc=@drafter:num_nodes=many": "num_nodes must be int, not 'many'",
    VERIFY + "--drafter ctc=@drafter-cut": "is damaged or cut short",
    VERIFY + "--drafter ctc=@drafter-without-weights": "model.safetensors is missing",
    VERIFY + "--drafter ctc=@drafter-garbled": "is not a drafter's configuration",
    VERIFY + "--drafter ctc=@drafter-of-tomorrow": "another format version",
    VERIFY + "--drafter ctc=@drafter-of-another-recipe": "does not fit its config.json",
    VERIFY + "--drafter ctc=@drafter-with-unknown-argument": "the arguments of drafters.CTC do not fit",
    VERIFY + "--drafter ctc=@drafter-of-no-class": "holds a os.system, not a ctc",
    "verify --base @wide --drafter ctc=@drafter": "hidden_size 32, but",
    "verify --base @more-words --drafter ctc=@drafter": "vocab_size 400, but",
    "verify --base @other-words --drafter ctc=@drafter": "whose tokenizer differs",
    EVAL + "--drafter anpd --drafter anpd": "the drafter anpd is named twice",
    # ---- the questions
    "eval --base @tiny --drafter anpd --benchmark mtbench": "unknown benchmark 'mtbench'; choose one of: mt_bench,",
    "eval --base @tiny --drafter anpd --benchmark mt_bench": "cannot reach",
    ASKED + "@hollow": "hollow is a folder; give a file of questions in it",
    EVAL
    + "--drafter anpd --benchmark mt_bench=@whole.json --benchmark mt_bench": "the benchmark mt_bench is named twice",
    ASKED + "@nowhere.jsonl": "no such file",
    ASKED + "@questions-not-json.jsonl": "line 1: invalid JSON",
    ASKED + "@questions-without-turns.jsonl": "not a question of embedded",
    ASKED + "@questions-empty.jsonl": "no question selected",
    ASKED + "@questions-huge.jsonl": "shorten the prompt",
    ASKED.replace("eval", "verify") + "@questions-huge.jsonl": "shorten the prompt",
    # ---- the results
    EVAL + "--drafter anpd --out @results": "already holds results",
    EVAL + "--drafter anpd --out @whole.json": "is a file",
    # ---- export
    "export @nowhere.ckpt @out": "no checkpoint at",
    "export @tiny @out": "no checkpoint at",
    "export @run @out": "run is a folder: give a checkpoint in it, one of checkpoints/best.ckpt, checkpoints/last.ckpt",
    "export @run/checkpoints @out": "is a folder: give a checkpoint in it, one of best.ckpt, last.ckpt",
    "export @cut.ckpt @out": "is not a readable checkpoint",
    "export @text.ckpt @out": "is not a readable checkpoint: it is another kind of file",
    "export @whole.json @out": "is not a readable checkpoint: it is another kind of file",
    "export @foreign.ckpt @out": "holds neither a drafter nor a base",
    "export @list.ckpt @out": "holds neither a drafter nor a base",
    "export @last.ckpt @drafter": "already holds a model",
    "export @last.ckpt @whole.json": "whole.json",
    "export @last.ckpt": "out",
    "export @last.ckpt @out more": "more",
    # ---- show-mask and tokenizer
    "show-mask --tokenizer @nowhere --files embedded:1": "nowhere",
    "show-mask --tokenizer @tiny --files @nothing.json": "nothing.json line 1: invalid JSON",
    "show-mask --tokenizer @tiny --files embedded:x": "expected embedded, embedded:COUNT",
    "show-mask --tokenizer @tiny --files embedded:2 --max-length 4": "the loss mask is zero everywhere",
    "tokenizer --out @tiny": "already holds a tokenizer",
    "tokenizer --out @t --vocab-size 10": "vocab_size",
}


@pytest.mark.slow
@pytest.mark.parametrize("count", ["0", "-3"])
@pytest.mark.parametrize("row", [EVAL, VERIFY], ids=["eval", "verify"])
def test_a_limit_of_zero_new_tokens_is_refused(call, place, row, count):
    outcome = call(commands.main, *arguments(row, place), "--drafter", "anpd", "--max-new-tokens", count)
    assert "max_new_tokens" in without_notes(outcome).one_line_error("drafters")


def without_notes(outcome):
    """Return the outcome without the progress bar and Lightning's messages on standard error."""
    lines = outcome.err.splitlines(keepends=True)
    return replace(outcome, err="".join(line for line in lines if "error" in line or "Traceback" in line))


@pytest.mark.slow
@pytest.mark.parametrize("row, said", DRAFTERS.items(), ids=DRAFTERS)
def test_a_wrong_drafters_command_ends_with_one_line(call, place, row, said):
    outcome = call(commands.main, *arguments(row, place))
    assert said in without_notes(outcome).one_line_error("drafters")
    assert not (place / "out").exists(), "nothing is written"
    assert (place / "results" / "results.json").read_text() == "{}"


FIT = "fit --config @tiny.yaml "
LIGHTNING = {
    FIT + "--model.base @nowhere": "no base at",
    FIT + "--model.base @hollow": "is a folder without config.json",
    FIT + "--model.base @base-cut": "model.safetensors is damaged or cut short",
    FIT + "--model.drafter drafters.CTCC": "drafters.CTCC is no drafter to train: give --model.drafter one of "
    "drafters.Block, drafters.CTC, drafters.EAGLE,",
    FIT + "--model.drafter.class_path drafters.ANPD": "drafters.ANPD is no drafter to train: give --model.drafter one",
    FIT + "--model.drafter.class_path os.makedirs --model.drafter.init_args.name @out": "os.makedirs is no drafter to",
    FIT + "--model.drafter nonsense.Own": "No module named 'nonsense'",
    FIT + "--model.drafter.init_args.num_frames x": "error: trunk.num_frames takes a whole number, not 'x'",
    FIT + "--model.drafter.init_args.num_frame 3": "num_frame",
    FIT + "--model.learning_rate -1 --model.base @nowhere": "learning_rate must be at least 0, not -1",
    FIT + "--model.warmup_steps -1 --model.base @nowhere": "warmup_steps must be at least 0, not -1",
    FIT + "--trainer.devices many": "Pass --trainer.devices 1 or auto",
    FIT + "--model.learning_rate fast": "--model.learning_rate takes a number, not 'fast'",
    FIT + "--data.val_size x": "--data.val_size takes a whole number, not 'x'",
    FIT + "--model.drafter.init_args.num_frames 3": "num_frames (3) must be at least num_labels (4)",
    FIT + "--model.drafter drafters.Medusa --model.drafter.init_args.decay -1": "decay must be at least 0, not -1",
    FIT + "--model.drafter drafters.Hydra --model.drafter.init_args.top_k 0": "top_k must be at least 1, not 0",
    FIT + "--data.files [@nowhere.json]": "no such file",
    FIT + "--data.files [@nothing.json]": "nothing.json line 1: invalid JSON",
    FIT + "--data.files [@empty-list.json]": "no usable conversation",
    FIT + "--data.files [@malformed.json]": "invalid JSON",
    FIT + "--data.files [@malformed.jsonl]": "val_size 4 leaves nothing of 1 conversations",
    FIT + "--data.files [@broken-records.json]": "no usable conversation",
    FIT + "--data.files [@sharegpt.txt]": "unknown kind of file",
    FIT + "--data.files [embedded:2]": "val_size 4 leaves nothing",
    FIT + "--data.files []": "data.files",
    FIT + "--data.files [@long.json] --data.max_length 2048": "pass --data.max_length 512 or less",
    FIT + "--data.max_length 3": "the loss mask is zero everywhere",
    FIT + "--data.template chatml": "unknown chat template 'chatml'",
    FIT + "--data.tokenizer @other-words": "tokenizer",
    FIT + "--ckpt_path @nowhere.ckpt": "nowhere.ckpt",
    FIT + "--ckpt_path @cut.ckpt": "cut.ckpt is not a readable checkpoint",
    FIT + "--ckpt_path @text.ckpt": "text.ckpt is not a readable checkpoint",
    FIT + "--ckpt_path @last.ckpt --model.drafter.init_args.num_frames 8": "holds another drafter than the config",
    FIT + "--ckpt_path @last.ckpt --model.drafter.init_args.num_layers 2": "holds another drafter than the config",
    "validate --config @tiny.yaml --ckpt_path @nowhere.ckpt": "nowhere.ckpt",
    "validate --config @tiny.yaml --ckpt_path @last.ckpt --model.base @nowhere": "no base at",
    "validate --config @tiny.yaml --ckpt_path @last.ckpt --model.base @wide": "holds another drafter than the config",
}


@pytest.mark.slow
@pytest.mark.parametrize("row, said", LIGHTNING.items(), ids=LIGHTNING)
def test_a_wrong_lightning_command_ends_with_one_line(call, place, row, said, tmp_path):
    outcome = call(lightning_command.main, *arguments(row, place), "--trainer.default_root_dir", str(tmp_path))
    assert said in without_notes(outcome).one_line_error("lightning")
    assert not (place / "out").exists(), "nothing that a config names is called before it is checked"


@pytest.mark.slow
def test_a_run_where_nothing_can_be_written_is_refused_before_the_base_is_loaded(call, place):
    row = FIT + "--model.base @nowhere --trainer.default_root_dir @whole.json/run "
    row += "--trainer.callbacks+=ModelCheckpoint --trainer.callbacks.dirpath null"
    said = without_notes(call(lightning_command.main, *arguments(row, place))).one_line_error("lightning")
    assert "cannot be made" in said and "whole.json is a file" in said


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_error_about_a_missing_gpu_names_the_option_to_change(call, place, tmp_path):
    row = FIT + f"--trainer.accelerator gpu --trainer.default_root_dir {tmp_path}"
    said = without_notes(call(lightning_command.main, *arguments(row, place))).one_line_error("lightning")
    assert "Pass --trainer.accelerator cpu or auto" in said


@pytest.mark.slow
def test_the_error_about_an_unknown_hub_id_tells_what_to_do(call, place, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")  # transformers stays offline: it read the variable when it was imported
    said = call(commands.main, *arguments("verify --drafter anpd --base nobody/nothing", place))
    assert "check the name, go online, or give a folder" in without_notes(said).one_line_error("drafters")


@pytest.mark.slow
def test_what_is_on_a_hub_that_cannot_be_reached_is_refused_after_one_request(fresh_python):
    code = """
import os
os.environ.pop("HF_HUB_OFFLINE", None)
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
from data.benchmarks import load_questions
from data.sources import read_records
from data.tokenizer import load_tokenizer
for read in (
    lambda: load_tokenizer("nobody/nothing"),
    lambda: load_questions("mt_bench"),
    lambda: read_records("hub:nobody/nothing"),
    lambda: read_records("hub:nobody/nothing/talks.json"),
):
    try:
        read()
    except ValueError as error:
        print(error)
"""
    done = fresh_python("-c", code)
    base, questions, *talks = done.stdout.splitlines()
    assert base.startswith("no base nobody/nothing from the hub (") and "go online" in base
    assert questions.startswith("cannot reach HuggingFaceH4/mt_bench_prompts on the hub; download")
    assert all(line.startswith("hub:nobody/nothing") and "go online, or give a file" in line for line in talks)
    assert len(talks) == 2 and "Retrying" not in done.stderr


@pytest.mark.slow
def test_the_error_about_another_selection_in_the_same_folder_is_in_plain_words(call, place):
    row = EVAL + "--drafter anpd --out @kept "
    assert call(commands.main, *arguments(row, place)).code == 0
    before = (place / "kept" / "results.json").read_bytes()
    for change, said in {"--rows 1:": "different benchmarks", "--seed 3": "different sampling"}.items():
        line = without_notes(call(commands.main, *arguments(row + change, place))).one_line_error("drafters")
        assert f"was started with {said}: repeat that command to continue it, pass --overwrite to start over" in line
        assert "another --out" in line and "{" not in line
    assert (place / "kept" / "results.json").read_bytes() == before


def test_the_traceback_of_a_users_mistake_is_shown_on_request(place, monkeypatch):
    monkeypatch.setenv("DRAFTERS_DEBUG", "1")
    with pytest.raises(ValueError, match="no checkpoint at"):
        commands.main(["export", str(place / "nowhere.ckpt"), str(place / "out")])


def test_an_unexpected_error_is_not_reported_as_a_users_mistake():
    from train.cli.errors import user_errors

    with pytest.raises(TypeError), user_errors("drafters"):
        raise TypeError("ours")


PATH_ERRORS = FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        *((kind, "[Errno 1] No such luck: 'a/b'") for kind in PATH_ERRORS),
        (PermissionError, "no permission to use a/b: give another place"),
    ],
)
def test_an_error_about_a_path_is_one_line(capsys, kind, said):
    from train.cli.errors import user_errors

    with pytest.raises(SystemExit) as ended, user_errors("drafters"):
        raise kind(1, "No such luck", "a/b")
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"drafters: error: {said}\n"


def test_a_message_with_several_lines_is_printed_as_one(capsys):
    from train.cli.errors import user_errors

    with pytest.raises(SystemExit) as ended, user_errors("drafters"):
        raise ValueError("first\n   second\n")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "drafters: error: first second\n"
