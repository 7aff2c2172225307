"""The boundary: a user's mistake ends in one line, and nothing from outside is run, printed raw, or half written."""

import ast
import errno
import io
import json
import os
import shutil
import signal
import sys

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from benchmarks.pretrain import train_tokenizer
from data.conversations import load_conversations
from data.files import output_lock
from data.tokenizer import load_tokenizer
from drafters import checkpoint
from inference.bases import load_config
from inference.verifier.base import load_base, load_base_info
from tests.conftest import full_disk
from train.cli import run_drafters, run_lightning, user_errors
from train.model_card import model_card

USERS = ValueError, OSError, MisconfigurationException


@pytest.mark.parametrize("kind", USERS)
def test_an_error_of_the_user_is_one_line_and_exit_code_2(capsys, kind):
    with pytest.raises(SystemExit) as ended, user_errors("drafters eval"):
        raise kind("first\n   second\n")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "drafters eval: error: first second\n"


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_ends_with_130_and_says_how_to_go_on(capsys, stopped):
    with pytest.raises(SystemExit) as ended, user_errors("drafters eval"):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise stopped(1)  # noqa: B904  # Lightning exits with 1 before the first step
    assert ended.value.code == 130
    assert capsys.readouterr().err == "\ndrafters eval: stopped: repeat the command to go on\n"


@pytest.mark.parametrize("words", [["eval"], ["eval", "--overwrite"], ["regenerate", "--overwrite"]])
def test_sigterm_ends_a_command_that_writes_as_ctrl_c_does(words, capsys, monkeypatch):
    def work(out):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError

    monkeypatch.setattr("train.cli.parse", lambda *_: (work, {"out": None}))
    monkeypatch.setattr(sys, "argv", ["drafters", *words])
    previous = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            run_drafters()
    finally:
        signal.signal(signal.SIGTERM, previous)
    how = "repeat the command" + " without --overwrite" * (words == ["eval", "--overwrite"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == f"\ndrafters {words[0]}: stopped: {how} to go on\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.EACCES, "a/b: permission denied; give another place"),
        (errno.EROFS, "a/b: read-only file system; give another place"),
        (errno.ENAMETOOLONG, "a/b: file name too long; give a shorter name"),
        (errno.ENOENT, "a/b: no such file or directory"),
    ],
)
def test_an_error_of_the_system_names_its_file_and_what_to_do(code, said, capsys):
    with pytest.raises(SystemExit), user_errors("drafters eval"):
        raise OSError(code, os.strerror(code), "a/b")
    assert capsys.readouterr().err == f"drafters eval: error: {said}\n"


@pytest.mark.parametrize("words", ["eval --drafter anpd", "regenerate --files embedded:2", "report nowhere"])
def test_a_name_that_is_too_long_is_refused_by_every_command_that_writes(words, call, tiny, tmp_path):
    base = [] if "report" in words else ["--base", tiny]
    error = call(run_drafters, *words.split(), *base, "--out", tmp_path / ("x" * 300)).one_line_error("drafters")
    assert 300 * "x" in error and error.endswith("file name too long; give a shorter name") and "Errno" not in error


def test_an_unexpected_error_and_an_exit_code_are_not_the_users_mistakes():
    with pytest.raises(TypeError), user_errors("drafters"):
        raise TypeError("ours")
    with pytest.raises(SystemExit, match="7"), user_errors("drafters"):
        raise SystemExit(7)


@pytest.mark.parametrize("asked", ["option", "variable"])
def test_a_traceback_is_shown_on_request_without_keys(tmp_path, monkeypatch, capsys, asked):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-123456")
    if asked == "variable":
        monkeypatch.setenv("DRAFTERS_DEBUG", "1")
    words = ["export", *(["--traceback"] if asked == "option" else []), "sk-123456.ckpt", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="no checkpoint at") as raised:
        run_drafters(words)
    sys.excepthook(raised.type, raised.value, raised.tb)
    said = capsys.readouterr().err
    assert "Traceback" in said and "[OPENAI_API_KEY]" in said and "sk-123456" not in said


# ---- mistakes


@pytest.fixture(scope="module")
def place(trained, tiny, make_tiny, tmp_path_factory):
    """A folder of broken files, and of valid ones that do not fit together."""
    folder = tmp_path_factory.mktemp("bad")
    for name, target in {
        "tiny": tiny,
        "drafter": trained.folder,
        "last.ckpt": trained.ckpt,
        "wide": make_tiny("wide", hidden_size=48),
        "others": make_tiny("others", tokenizer=train_tokenizer(load_conversations(["embedded:99:500"])[0], 400)),
    }.items():
        (folder / name).symlink_to(target)
    for source, name in ((tiny, "base-cut"), (trained.folder, "drafter-cut")):
        path = shutil.copytree(source, folder / name) / "model.safetensors"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    shutil.copytree(trained.folder, folder / "drafter-of-no-class")
    config = json.loads((trained.folder / "config.json").read_text()) | {"class_path": "os.system"}
    (folder / "drafter-of-no-class" / "config.json").write_text(json.dumps(config))
    (folder / "drafter-of-no-class" / "SHA256SUMS").unlink()
    (folder / "cut.ckpt").write_bytes(trained.ckpt.read_bytes()[:3000])
    flipped = bytearray(trained.ckpt.read_bytes())
    flipped[len(flipped) // 2] ^= 1  # torch itself notices nothing
    (folder / "flipped.ckpt").write_bytes(flipped)
    (folder / "text.ckpt").write_text("not a checkpoint")
    torch.save({"hyper_parameters": 5}, folder / "foreign.ckpt")
    saved = torch.load(trained.ckpt, weights_only=True)
    torch.save({name: saved[name] for name in saved if name != "base"}, folder / "no-base.ckpt")
    config = trained.config.read_text().replace(str(trained.config.parent), str(folder / "new"))
    (folder / "tiny.yaml").write_text(config)
    (folder / "list.yaml").write_text("[1, 2]")
    (folder / "cut.yaml").write_text("model: [")
    (folder / "key.yaml").write_text("model: {drafter: {class_path: drafters.CTC, init_args: {trunk: {num_frame: 3}}}}")
    (folder / "empty.json").write_text("")
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "checkpoints" / "best.ckpt").touch()
    return folder


VERIFY = "verify --base @tiny --limit 1 --max-new-tokens 4 "
DRAFTERS = {
    "frobnicate": "unknown command 'frobnicate': known are eval, ",
    VERIFY + "--drafter anpd extra": "'extra' follows no option: an option that takes several is repeated",
    "verify --drafter anpd --base @nowhere": "no base at",
    "verify --drafter anpd --base @base-cut": "if a file is damaged, copy or download it again",
    VERIFY + "--drafter ctc=@drafter-cut": "model.safetensors",
    VERIFY + "--drafter ctc=@drafter-of-no-class": "os.system",
    "verify --base @wide --drafter ctc=@drafter": "hidden_size 32, but",
    "verify --base @others --drafter ctc=@drafter": "whose tokenizer differs",
    "export @run @out": "run is a folder: give a checkpoint in it, one of checkpoints/best.ckpt",
    "export @cut.ckpt @out": "is not a readable checkpoint",
    "export @flipped.ckpt @drafter --overwrite": "is not a readable checkpoint",
    "export @foreign.ckpt @out": "holds no drafter",
    "export @no-base.ckpt @out": "holds no complete drafter (KeyError: 'base'",
    "export @last.ckpt @text.ckpt": "text.ckpt",
    "export @last.ckpt --out=": "--out has an empty name",
    "show-mask --tokenizer @tiny --files @empty.json": "empty.json",
}
FIT = "fit --config @tiny.yaml "
TRUNK = "--model.drafter.init_args.trunk."
LIGHTNING = {
    "fit": "base",
    "fit --config cct.yaml": "no config 'cct.yaml': give a file, or one of configs/: ",
    "fit --config @cut.yaml": "Problems parsing config",
    "fit --config ctc.yaml --config @list.yaml": "Unexpected config",
    "fit --config ctc.yaml --config @key.yaml": "Group 'trunk' does not accept option 'num_frame'",
    FIT + "--model.learning_rate -1 --model.base @nowhere": "learning_rate must be at least 0, not -1",
    FIT + "--model.base @nowhere": "no base at",
    FIT + "--model.drafter drafters.CTCC": "CTCC",
    FIT + "--model.drafter.class_path os.makedirs --model.drafter.init_args.name @out": "'os.makedirs' is not a",
    FIT + TRUNK + "num_frames 3": "num_frames (3) must be at least num_labels (4)",
    FIT + "--trainer.default_root_dir @text.ckpt/run --trainer.callbacks+=ModelCheckpoint": "text.ckpt is a file",
    FIT + "--data.files [embedded:2]": "val_size 4 leaves nothing",
    FIT + "--data.max_length 2048 --data.files [embedded:200]": "pass --data.max_length 512 or less",
    FIT + "--ckpt_path @cut.ckpt": "cut.ckpt is not a readable checkpoint",
    FIT + f"--ckpt_path @last.ckpt {TRUNK}num_layers 2": "holds another drafter than the config",
    "validate --config @tiny.yaml --ckpt_path @last.ckpt --model.base @wide": "whose shape is not that of",
    "validate --config @tiny.yaml --ckpt_path @last.ckpt --model.base @others": "whose tokenizer_hash is not that of",
}


@pytest.mark.slow
@pytest.mark.parametrize("row, said", (DRAFTERS | LIGHTNING).items(), ids=[*DRAFTERS, *LIGHTNING])
def test_a_mistake_ends_in_one_line_that_names_it(call, place, row, said):
    command = run_lightning if row in LIGHTNING else run_drafters
    outcome = call(command, *row.replace("@", f"{place}/").split())
    assert said in outcome.one_line_error("lightning" if row in LIGHTNING else "drafters")
    assert not (place / "out").exists(), "nothing is written or called"


# ---- nothing from outside is run


CODE = """from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).touch()
class Config(LlamaConfig):
    model_type = "marker"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def folder_with_code(tiny, tmp_path, monkeypatch):
    """A base of a type that transformers does not know, with code for it; "yes" is all that standard input says."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n" * 50))
    folder = shutil.copytree(tiny, tmp_path / "base")
    (folder / "own.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    change(folder / "config.json", model_type="marker", architectures=["Model"], auto_map=classes)
    change(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Tokenizer", None]})
    yield folder
    assert not (tmp_path / "marker").exists()


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


LOADERS = load_base, load_base_info, load_tokenizer, load_config


@pytest.mark.parametrize("load", LOADERS)
def test_a_model_with_code_of_its_own_is_refused(load, folder_with_code):
    with pytest.raises(ValueError, match=r"code in its folder \(auto_map\), which is never run"):
        load(str(folder_with_code))


def test_every_model_configuration_and_tokenizer_is_loaded_without_its_code_and_every_pickle_without_its(repository):
    loads, pickles = set(), set()
    for package in ("data", "drafters", "inference", "train", "benchmarks"):
        for path in (repository / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("from_pretrained"):
                    loads.add(f"{path.relative_to(repository)}: {ast.unparse(node)}")
                elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                    pickles.add(ast.unparse(node))
    assert loads == {"data/hub.py: auto_class.from_pretrained(source, trust_remote_code=False, **options)"}
    assert pickles and all("weights_only=True" in each for each in pickles)


class Planted:
    """Creates a file when it is unpickled by a loader that runs code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["export", "fit"])
def test_code_in_a_checkpoint_is_not_run(command, trained, call, tmp_path):
    planted = tmp_path / "planted"
    torch.save(torch.load(trained.ckpt, weights_only=True) | {"extra": Planted(planted)}, tmp_path / "bad.ckpt")
    if command == "export":
        outcome = call(run_drafters, "export", tmp_path / "bad.ckpt", tmp_path / "out")
    else:
        words = "--config", trained.config, "--ckpt_path", tmp_path / "bad.ckpt"
        outcome = call(run_lightning, command, *words, "--trainer.default_root_dir", tmp_path)
    assert "holds more than weights and numbers" in outcome.one_line_error("drafters|lightning")
    assert not planted.exists()


def test_pickled_weights_that_hold_code_are_refused_without_advice_to_run_it(call, tiny, tmp_path):
    planted, folder = tmp_path / "planted", shutil.copytree(tiny, tmp_path / "base")
    (folder / "model.safetensors").unlink()
    torch.save({"extra": Planted(planted)}, folder / "pytorch_model.bin")
    for words in (("--base", folder, "--drafter", "anpd"), ("--base", tiny, "--drafter", f"draft_model={folder}")):
        line = call(run_drafters, "verify", *words, "--limit", 1).one_line_error("drafters")
        assert "a file holds more than weights, and code in it is never run: convert it to safetensors" in line
        assert "weights_only" not in line and not planted.exists()


# ---- locks, and a full disk


INPUTS = {
    "regenerate --base @tiny --files @talk.json --out @talk.json --overwrite": "is read by this command",
    "index corpus @talk.json --tokenizer @tiny --files @talk.json --min-count 1 --overwrite": "is read by this command",
    "import @drafter @drafter --base @tiny --overwrite": "is the folder that is read",
}


@pytest.mark.parametrize("line, said", INPUTS.items())
def test_what_a_command_reads_is_not_replaced_by_what_it_writes(line, said, call, trained, tiny, tmp_path):
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    (tmp_path / "talk.json").write_text(json.dumps([{"conversations": turns}]))
    shutil.copytree(trained.folder, tmp_path / "drafter")
    before = contents(tmp_path)
    words = line.replace("@tiny", str(tiny)).replace("@", f"{tmp_path}/").split()
    assert said in call(run_drafters, *words).one_line_error("drafters")
    assert contents(tmp_path) == before


def test_records_are_not_written_under_a_name_that_is_read_whole(call, tiny, tmp_path):
    words = "regenerate", "--base", tiny, "--files", "embedded:2", "--out", tmp_path / "own.json"
    assert f"name it {tmp_path}/own.jsonl" in call(run_drafters, *words).one_line_error("drafters")


def test_a_page_is_not_replaced_by_its_table(call, tmp_path):
    words = "report", "nowhere", "--out", tmp_path / "page.md", "--format", "md"
    assert "names the page and a table: end it in .html" in call(run_drafters, *words).one_line_error("drafters")


@pytest.mark.slow
def test_a_second_process_is_told_who_writes_to_its_place(call, write_recipe, tmp_path):
    place = tmp_path / "held"
    said = f"{place} is in use by process {os.getpid()} on"
    with output_lock(place):
        assert said in call(run_drafters, "export", "nowhere", place).one_line_error("drafters")
        assert said in call(run_drafters, "report", place).one_line_error("drafters"), "without --out it writes there"
        folder = "--trainer.callbacks+=ModelCheckpoint", f"--trainer.callbacks.dirpath={place}"
        outcome = call(run_lightning, "fit", "--config", write_recipe(tmp_path), *folder)
        assert said in outcome.one_line_error("lightning") and not place.exists()


def contents(place):
    """The files of an output, without journals, which let the command go on."""
    files = (path for path in place.rglob("*") if path.is_file() and path.suffix != ".partial")
    return {path.relative_to(place): path.read_bytes() for path in files}


FULL = {
    "export @ckpt @out": 4000,
    "regenerate --base @tiny --files embedded:4 --limit 2 --max-new-tokens 8 --out @out": 300,
    "features --base @tiny --files embedded:4 --max-length 160 --out @out": 3000,
}


@pytest.mark.slow
@pytest.mark.parametrize("line", FULL)
def test_a_full_disk_loses_nothing(line, call, trained, tiny, tmp_path):
    paths = {"@ckpt": trained.ckpt, "@tiny": tiny, "@out": tmp_path / "out"}
    words = [paths.get(word, word) for word in line.split()]
    with full_disk(FULL[line]):
        assert "File too large" in call(run_drafters, *words).one_line_error("drafters")
    assert not contents(tmp_path), "nothing is left of a new output"
    assert call(run_drafters, *words).code == 0
    if "features" not in line:  # which writes nothing twice
        before = contents(tmp_path)
        with full_disk(FULL[line]):
            outcome = call(run_drafters, *words, "--overwrite")
        assert "what was there before is kept" in outcome.one_line_error("drafters")
        assert contents(tmp_path).items() >= before.items()


@pytest.mark.slow
def test_the_checkpoints_of_a_training_are_kept_on_a_full_disk(call, write_recipe, tmp_path):
    config = write_recipe(tmp_path, max_steps=2, val_check_interval=1, limit_val_batches=0)
    caching = "--config", write_recipe(tmp_path / "caching", max_steps=1)  # the tokens of the text, if no test has
    assert call(run_lightning, "fit", *caching).code == 0
    with full_disk(4000):
        line = call(run_lightning, "fit", "--config", config).one_line_error("lightning")
    said = "could not be written (file too large), and what was there before is kept: make room, then go on with --ckpt"
    assert said in line
    assert call(run_lightning, "fit", "--config", config, "--ckpt_path", "last").code == 0, "nothing was there"
    before, more = contents(tmp_path / "checkpoints"), ("--ckpt_path", "last", "--trainer.max_steps", 4)
    with full_disk(4000):
        outcome = call(run_lightning, "fit", "--config", config, *more)
    assert said in outcome.one_line_error("lightning")
    assert contents(tmp_path / "checkpoints") == before
    assert call(run_lightning, "fit", "--config", config, *more).code == 0, "it goes on when there is room again"


# ---- text from outside


HOSTILE = "\x1b]0;title\x0e\x9b2J\x7f\u202e[/]"


def is_harmless(text):
    return not any(mark in text for mark in ("\x1b", "\x0e", "\x9b", "\x7f", "\u202e"))


def test_control_characters_and_brackets_of_a_conversation_and_of_a_name_are_shown(call, tiny, tmp_path):
    turns = [{"from": "human", "value": f"hello {HOSTILE}"}, {"from": "gpt", "value": HOSTILE}]
    records = [{"id": f"first{HOSTILE}", "conversations": turns}, {"conversations": [{"from": HOSTILE, "value": ""}]}]
    (tmp_path / "some.json").write_text(json.dumps(records))
    outcome = call(run_drafters, "show-mask", "--tokenizer", tiny, "--files", tmp_path / "some.json").succeeded()
    assert "first␛]0;title␎" in outcome.out and outcome.out.count("[/]") >= 3
    assert is_harmless(outcome.out + outcome.err)
    error = call(run_drafters, "verify", "--base", f"./{HOSTILE}", "--drafter", "anpd").one_line_error("drafters")
    assert "␛]0;title␎" in error and is_harmless(error)


@pytest.mark.parametrize("name", ["owner/base", f"owner/{HOSTILE}`x`\n- injected: yes\r# Title", "a: b"])
def test_a_model_card_names_its_base_without_becoming_another_card(name, trained):
    import yaml

    drafter, config = checkpoint.load(trained.folder)
    plain = model_card(drafter, config)
    object.__setattr__(config, "base_name", name)
    card = model_card(drafter, config, license="mit")
    assert is_harmless(card) and len(card.splitlines()) <= len(plain.splitlines()) + 2
    header = yaml.safe_load(card.split("---\n")[1])
    assert header.keys() <= {"license", "base_model", "library_name", "tags"}
    assert all(line.count("`") % 2 == 0 for line in card.splitlines())
