"""``drafters index``: counting n-grams and sorting texts, reading documents, and refusing mistakes."""

import json

import numpy as np
import pytest

from data.tokenizer import tokenizer_hash
from drafters import SuffixArray
from drafters.training_free.corpus import CorpusTable
from inference import drafter_specs, indexes
from inference.indexes import count
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from train.cli import run_drafters as main

each_kind = pytest.mark.parametrize("kind", ["corpus", "datastore"])


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def tokenizer(toy_tokenizer, tmp_path):
    toy_tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def run(kind, out, tokenizer, *files, more=()):
    main(["index", kind, str(out), "--tokenizer", tokenizer, *(f"--files={file}" for file in files), *more])


def refusal(capsys, *arguments, **more):
    with pytest.raises(SystemExit) as ended:
        run(*arguments, **more)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("drafters index: error: ") and message.count("\n") == 1
    return message


def written_alone(base):
    return Session(Runner(base), drafter_specs.make("none", Runner(base))).run([5, 6, 7], 20).tokens


# ---- n-grams


@pytest.mark.slow
def test_a_drafter_accepts_drafts_from_a_corpus(base, tokenizer, tmp_path, capsys):
    line, out = "w5 w6 w7 w8 w9 w10 w11", tmp_path / "new" / "cache"
    files = write(tmp_path / "a.txt", *[line] * 9), write(tmp_path / "b.md", line)
    run("corpus", out, tokenizer, *files, more=["--top", "2"])
    assert "from 70 tokens" in capsys.readouterr().out
    cache = CorpusTable.load(out)
    assert (cache.min_count, cache.num_tokens, cache.sources) == (6, 70, ("a.txt", "b.md"))
    assert cache.retrieve([4, 5], 3) == [(6, 7, 8, 9)]
    assert [path.name for path in out.parent.iterdir()] == ["cache"]
    for spec in (f"corpus={out}:num_chains=2", f"self_draft={out}:gram=3,text_ngrams=false", "self_draft"):
        drafter = drafter_specs.make(spec, Runner(base))
        assert Session(Runner(base), drafter).run([5, 6, 7], 20).tokens == written_alone(base)


def test_no_ngram_crosses_a_blank_line_or_the_end_of_a_record(tokenizer, tmp_path):
    out, half = tmp_path / "cache", "w3 w4 w5 w6"
    lines = write(tmp_path / "a.txt", *["w3 w4", "w5 w6 w7", ""] * 2)
    paragraphs = write(tmp_path / "b.txt", *["w3 w4 w5 w6", "", "w7 w8", ""] * 9)
    question = write(tmp_path / "c.jsonl", *[{"question": half, "answer": "w7"}] * 9)
    run("corpus", out, tokenizer, lines, paragraphs, question, more=["--min-count", "2"])
    cache = CorpusTable.load(out)
    assert cache.grams.tolist() == [[4, 5, 6, 7]] and cache.after([3]) == [(4, 5, 6, 7)]
    assert cache.num_tokens == 2 * 5 + 9 * 6 + 9 * 5


# ---- the datastore


def documents_of(store):
    """The documents of a store, split at their borders."""
    found = [[]]
    for token in store.tokens.tolist():
        found[-1].append(token) if token != store.border else found.append([])
    return found[:-1]


def test_a_drafter_accepts_drafts_from_a_datastore(base, tokenizer, tmp_path, capsys):
    alone = written_alone(base)
    text = write(tmp_path / "a.txt", "w3 w4", "w5", "", " ".join(f"w{token}" for token in (5, 6, 7, *alone)))
    out, records = tmp_path / "new" / "store", write(tmp_path / "b.jsonl", {"question": "w8 w9", "answer": "w10"})
    run("datastore", out, tokenizer, text, records, more=["--depth=26"])
    assert f"{6 + 3 + len(alone)} tokens in 4 documents" in capsys.readouterr().out
    store = SuffixArray.open(out)
    assert (store.depth, store.sources) == (26, ("a.txt", "b.jsonl"))
    assert store.tokenizer_hash == tokenizer_hash(base.tokenizer)
    assert documents_of(store)[:1] + documents_of(store)[2:] == [[3, 4, 5], [8, 9], [10]]
    assert [path.name for path in out.parent.iterdir()] == ["store"]
    for spec in (f"rest={out}", f"rest={out}:num_draft=4,shortest=1"):
        result = Session(Runner(base), drafter_specs.make(spec, Runner(base))).run([5, 6, 7], 20)
        assert result.tokens == alone
        assert sum(step.accepted for step in result.steps) > 2


# ---- both


def test_an_index_of_another_tokenizer_is_refused(base, tmp_path):
    CorpusTable(*count(np.arange(9, dtype=np.int32), 1), tokenizer_hash="0" * 16).save(tmp_path / "cache")
    SuffixArray.build([[3, 4, 5]], tokenizer_hash="0" * 16).save(tmp_path / "store")
    for spec in ("corpus=cache", "self_draft=cache", "rest=store"):
        with pytest.raises(ValueError, match=r"built with another tokenizer than that of toy-llama: build it again"):
            drafter_specs.make(spec.replace("=", f"={tmp_path}/"), Runner(base))


@each_kind
def test_the_batch_size_does_not_change_the_file(kind, monkeypatch, tokenizer, tmp_path):
    lines = [{"text": f"w{3 + i % 9} w{3 + i % 4} w5 w6 w7 w8"} for i in range(200)]
    file = write(tmp_path / "a.jsonl", *lines)
    run(kind, tmp_path / "one", tokenizer, file)
    monkeypatch.setattr(indexes, "BATCH_SIZE", 7)
    run(kind, tmp_path / "two", tokenizer, file)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@each_kind
def test_texts_that_cannot_be_indexed_are_refused_in_one_line(kind, tokenizer, tmp_path, capsys):
    good, out = write(tmp_path / "a.txt", *["w3 w4 w5 w6 w7"] * 9), tmp_path / "out"
    assert "no text file at nowhere.txt" in refusal(capsys, kind, out, tokenizer, "nowhere.txt")
    assert "there is no text" in refusal(capsys, kind, out, tokenizer, write(tmp_path / "empty.txt", "", " "))
    assert "no base at" in refusal(capsys, kind, out, str(tmp_path / "none"), good)
    assert "b.jsonl line 1: no turns" in refusal(
        capsys, kind, out, tokenizer, write(tmp_path / "b.jsonl", {"txt": "w3"})
    )
    assert "already there" in refusal(capsys, kind, tmp_path, tokenizer, good, more=["--overwrite"])
    for option, message in {"--top 0": "must be at least 1", "--depth 1": "depth must be at least 2"}.items():
        assert message in refusal(capsys, kind, out, tokenizer, good, more=option.split())
    if kind == "corpus":
        message = refusal(capsys, kind, out, tokenizer, good, more=["--min-count", "60"])
        assert "no 5 tokens in a row occur 60 times in 45 tokens" in message
    assert not out.exists()


@each_kind
def test_an_index_is_replaced_only_with_overwrite_and_an_open_one_stays_intact(kind, tokenizer, tmp_path, capsys):
    first, second = write(tmp_path / "a", *["w3 w4 w5 w6 w7"] * 9), write(tmp_path / "b", *["w8 " * 7] * 9)
    out = tmp_path / "out"
    run(kind, out, tokenizer, first)
    before = out.read_bytes()
    opened = SuffixArray.open(out) if kind == "datastore" else None
    assert "already there: give another name, or --overwrite" in refusal(capsys, kind, out, tokenizer, second)
    assert out.read_bytes() == before
    run(kind, out, tokenizer, second, more=["--overwrite"])
    if opened:
        assert documents_of(SuffixArray.open(out)) == [[8] * 63] and documents_of(opened) == [[3, 4, 5, 6, 7] * 9]
    else:
        assert CorpusTable.load(out).retrieve([8], 1) == [(8, 8, 8, 8)]
