"""``drafters datastore``: building, opening, drafting and refusing mistakes."""

import json

import pytest

from drafters import SuffixArray
from inference import drafter_specs
from inference.indexes import documents
from inference.verifier.base import tokenizer_hash
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from train.cli.commands import main


def write(path, *lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def records(path, *rows):
    return write(path, *map(json.dumps, rows))


@pytest.fixture
def tokenizer(toy_tokenizer, tmp_path):
    toy_tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def run(out, tokenizer, *files, more=()):
    main(["datastore", str(out), "--tokenizer", tokenizer, *(f"--files={file}" for file in files), *more])


def refusal(capsys, *args, **more):
    with pytest.raises(SystemExit) as ended:
        run(*args, **more)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("drafters: error: ") and message.count("\n") == 1
    return message


def documents_of(store):
    """The documents of a store, split at their borders."""
    found = [[]]
    for token in store.tokens.tolist():
        found[-1].append(token) if token != store.border else found.append([])
    return found[:-1]


def test_the_command_writes_a_store_that_rest_drafts_from(base, tokenizer, tmp_path, capsys):
    alone = Session(Runner(base), drafter_specs.make("none", Runner(base))).run([5, 6, 7], 20).tokens
    text = write(tmp_path / "a.txt", "w3 w4", "w5", "", " ".join(f"w{token}" for token in (5, 6, 7, *alone)))
    out = tmp_path / "new" / "store"
    run(
        out, tokenizer, text, records(tmp_path / "b.jsonl", {"question": "w8 w9", "answer": "w10"}), more=["--depth=26"]
    )
    assert f"{6 + 3 + len(alone)} tokens in 4 documents" in capsys.readouterr().out
    store = SuffixArray.open(out)
    assert (store.depth, store.sources) == (26, ("a.txt", "b.jsonl"))
    assert store.tokenizer_hash == tokenizer_hash(base.tokenizer)
    assert documents_of(store)[:1] + documents_of(store)[2:] == [[3, 4, 5], [8, 9], [10]]
    assert [path.name for path in out.parent.iterdir()] == ["store"]
    for spec in (f"rest={out}", f"rest={out}:num_draft=4,shortest=1,official_cut=true"):
        result = Session(Runner(base), drafter_specs.make(spec, Runner(base))).run([5, 6, 7], 20)
        assert result.tokens == alone
        assert sum(step.accepted for step in result.steps) > 2


def test_a_store_of_another_tokenizer_or_of_too_little_depth_is_refused(base, tmp_path):
    SuffixArray.build([[3, 4, 5]], tokenizer_hash="0" * 16).save(tmp_path / "other")
    SuffixArray.build([[3, 4, 5]], 8, tokenizer_hash(base.tokenizer)).save(tmp_path / "flat")
    with pytest.raises(ValueError, match="built with another tokenizer than that of toy-llama: build it again"):
        drafter_specs.make(f"rest={tmp_path / 'other'}", Runner(base))
    with pytest.raises(ValueError, match="sorted by 8 tokens, and longest \\+ length is 26"):
        drafter_specs.make(f"rest={tmp_path / 'flat'}", Runner(base))
    assert drafter_specs.make(f"rest={tmp_path / 'flat'}:longest=4,length=4", Runner(base)).longest == 4
    with pytest.raises(ValueError, match="rest needs its STORE"):
        drafter_specs.make("rest", Runner(base))


def test_the_batch_size_does_not_change_the_store(monkeypatch, tokenizer, tmp_path):
    rows = [{"text": f"w{3 + i % 9} w{3 + i % 4} w5 w6"} for i in range(60)]
    file = records(tmp_path / "a.jsonl", *rows)
    run(tmp_path / "one", tokenizer, file)
    monkeypatch.setattr(documents, "BATCH_CHARACTERS", 50)
    run(tmp_path / "two", tokenizer, file)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_store_that_cannot_be_built_is_refused_in_one_line(tokenizer, tmp_path, capsys):
    good, out = write(tmp_path / "a.txt", "w3 w4 w5"), tmp_path / "store"
    assert "no text file at nowhere.txt" in refusal(capsys, out, tokenizer, "nowhere.txt")
    assert "there is no text in" in refusal(capsys, out, tokenizer, write(tmp_path / "empty.txt", "", " "))
    assert "depth must be at least 2" in refusal(capsys, out, tokenizer, good, more=["--depth", "1"])
    assert "no base at" in refusal(capsys, out, str(tmp_path / "none"), good)
    assert "line 1: no text" in refusal(capsys, out, tokenizer, records(tmp_path / "b.jsonl", {"txt": "w3"}))
    assert "already there" in refusal(capsys, tmp_path, tokenizer, good, more=["--overwrite"])
    assert not out.exists() and not list(tmp_path.glob("*.new"))


def test_a_store_is_replaced_only_with_overwrite_and_an_open_one_stays_intact(tokenizer, tmp_path, capsys):
    first, second = write(tmp_path / "a.txt", "w3 w4 w5"), write(tmp_path / "b.txt", "w6 w7")
    out = tmp_path / "store"
    run(out, tokenizer, first)
    opened = SuffixArray.open(out)
    assert "already there: give another name, or --overwrite" in refusal(capsys, out, tokenizer, second)
    assert documents_of(SuffixArray.open(out)) == [[3, 4, 5]]
    run(out, tokenizer, second, more=["--overwrite"])
    assert documents_of(SuffixArray.open(out)) == [[6, 7]]
    assert documents_of(opened) == [[3, 4, 5]]
