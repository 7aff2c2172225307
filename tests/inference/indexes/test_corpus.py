"""``drafters corpus``: counting n-grams, reading files and refusing mistakes."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from drafters.training_free.corpus import CorpusTable
from inference import drafter_specs
from inference.indexes import corpus as module
from inference.indexes import documents
from inference.indexes.corpus import count
from inference.verifier.base import tokenizer_hash
from inference.verifier.runner import Runner
from inference.verifier.session import Session
from train.cli.commands import main


def spelled(keys, node):
    """The context of a node, decoded from the keys."""
    context = []
    while node:
        code = int(keys[node - 1])
        context.append(code & 0xFFFFFFFF)
        node = code >> 32
    return tuple(context)


def counted(tokens, min_count, top):
    """The table by brute force: {context: n-grams, most frequent first}."""
    counts = {}
    for width in (1, 2, 3, 4):
        for i in range(len(tokens) - width - 3):
            window = tuple(tokens[i : i + width + 4])
            if -1 not in window:
                counts.setdefault(window[:width], Counter())[window[width:]] += 1
    result = {}
    for context, grams in counts.items():
        often = sorted((gram for gram in grams if grams[gram] >= min_count), key=lambda gram: (-grams[gram], gram))
        if often:
            result[context] = often[:top]
    return result


@pytest.mark.parametrize(("chunk", "block"), [(1 << 26, 1 << 22), (50, 4), (1, 1000)])
@pytest.mark.parametrize(("min_count", "top"), [(1, 20), (2, 3), (6, 1 << 63), (40, 20)])
def test_the_table_equals_counting_every_window(monkeypatch, tmp_path, chunk, block, min_count, top):
    monkeypatch.setattr(module, "CHUNK", chunk)
    monkeypatch.setattr(module, "BLOCK", block)
    rng = random.Random(min_count)
    words = [[rng.randrange(30) for _ in range(rng.randrange(1, 6))] for _ in range(4)]
    tokens = [
        token for _ in range(150) for token in (rng.choice(words) if rng.random() > 0.1 else [rng.choice([-1, 31])])
    ]
    tokens += range(40, 48)  # the end of a text counts too
    keys, offsets, grams = count(np.array(tokens, dtype=np.int32), min_count, top, str(tmp_path))
    assert (np.diff(keys) > 0).all()
    found = {
        spelled(keys, 1 + index): list(map(tuple, grams[offsets[index] : offsets[index + 1]].tolist()))
        for index in range(len(keys))
    }
    assert len(found) == len(keys)
    assert found == counted(tokens, min_count, top)
    assert found or min_count == 40
    assert not list(tmp_path.iterdir())


def write(path, *texts):
    path.write_text("\n".join(texts), encoding="utf-8")
    return str(path)


@pytest.fixture
def tokenizer(toy_tokenizer, tmp_path):
    toy_tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def run(out, tokenizer, *files, more=()):
    main(["corpus", str(out), "--tokenizer", tokenizer, *(f"--files={file}" for file in files), *more])


def refusal(capsys, *args, **more):
    with pytest.raises(SystemExit) as ended:
        run(*args, **more)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("drafters: error: ") and message.count("\n") == 1
    return message


@pytest.mark.slow
def test_a_drafter_accepts_drafts_from_the_written_cache(base, tokenizer, tmp_path, capsys):
    line = "w5 w6 w7 w8 w9 w10 w11"
    out = tmp_path / "new" / "cache"
    run(out, tokenizer, write(tmp_path / "a.txt", *[line] * 9), write(tmp_path / "b.md", line), more=["--top", "2"])
    assert "from 70 tokens" in capsys.readouterr().out
    cache = CorpusTable.load(out)
    assert (cache.min_count, cache.num_tokens, cache.sources) == (6, 70, ("a.txt", "b.md"))
    assert cache.tokenizer_hash == tokenizer_hash(base.tokenizer)
    assert cache.retrieve([4, 5], 3) == [(6, 7, 8, 9)]
    assert [path.name for path in out.parent.iterdir()] == ["cache"]
    alone = Session(Runner(base), drafter_specs.make("none", Runner(base))).run([5, 6, 7], 20).tokens
    for spec in (f"corpus={out}:num_chains=2", f"self_draft={out}:gram=3,text_ngrams=false", "self_draft"):
        drafter = drafter_specs.make(spec, Runner(base))
        assert Session(Runner(base), drafter).run([5, 6, 7], 20).tokens == alone
    assert drafter_specs.make(f"self_draft={out}", Runner(base)).corpus.retrieve([5], 1) == [(6, 7, 8, 9)]
    assert drafter_specs.make("self_draft:seed=4", Runner(base)).corpus is None


def test_a_cache_of_another_tokenizer_is_refused(base, tmp_path):
    CorpusTable(*count(np.arange(9, dtype=np.int32), 1), tokenizer_hash="0" * 16).save(tmp_path / "cache")
    for spec in (f"corpus={tmp_path / 'cache'}", f"self_draft={tmp_path / 'cache'}"):
        with pytest.raises(ValueError, match=r"built with another tokenizer than that of toy-llama: build it again"):
            drafter_specs.make(spec, Runner(base))
    with pytest.raises(ValueError, match="corpus needs its CORPUS"):
        drafter_specs.make("corpus", Runner(base))


def test_no_ngram_crosses_a_blank_line_or_the_end_of_a_record(tokenizer, tmp_path):
    out, half = tmp_path / "cache", "w3 w4 w5 w6"
    lines = write(tmp_path / "a.txt", *["w3 w4", "w5 w6 w7", ""] * 2)
    paragraphs = write(tmp_path / "b.txt", *["w3 w4 w5 w6", "", "w7 w8", ""] * 9)
    question = write(tmp_path / "c.jsonl", *[json.dumps({"question": half, "answer": "w7"})] * 9)
    run(out, tokenizer, lines, paragraphs, question, more=["--min-count", "2"])
    cache = CorpusTable.load(out)
    assert cache.grams.tolist() == [[4, 5, 6, 7]] and cache.after([3]) == [(4, 5, 6, 7)]
    assert cache.num_tokens == 2 * 5 + 9 * 6 + 9 * 5


def test_the_batch_size_does_not_change_the_cache(monkeypatch, tokenizer, tmp_path):
    lines = [f"w{3 + i % 9} w{3 + i % 4} w5 w6 w7 w8" for i in range(200)]
    file = write(tmp_path / "a.jsonl", *(json.dumps({"text": line}) for line in lines))
    run(tmp_path / "one", tokenizer, file)
    monkeypatch.setattr(documents, "BATCH_CHARACTERS", 50)
    run(tmp_path / "two", tokenizer, file)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_corpus_that_cannot_be_counted_is_refused_in_one_line(tokenizer, tmp_path, capsys):
    good = write(tmp_path / "a.txt", *["w3 w4 w5 w6 w7"] * 9)
    out = tmp_path / "cache"
    assert "no text file at nowhere.txt" in refusal(capsys, out, tokenizer, "nowhere.txt")
    assert "occur 60 times in 45 tokens" in refusal(capsys, out, tokenizer, good, more=["--min-count", "60"])
    assert "there is no text" in refusal(capsys, out, tokenizer, write(tmp_path / "empty.txt", ""))
    assert "at least 1" in refusal(capsys, out, tokenizer, good, more=["--top", "0"])
    assert "no base at" in refusal(capsys, out, str(tmp_path / "none"), good)
    short = write(tmp_path / "short.jsonl", *['{"text": "w3 w4 w5 w6"}'] * 9)
    assert "no 5 tokens in a row" in refusal(capsys, out, tokenizer, short), "no n-gram runs from text to text"
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    assert "latin.txt line 1: not UTF-8" in refusal(capsys, out, tokenizer, str(tmp_path / "latin.txt"))
    records = write(tmp_path / "a.jsonl", '{"text": "w3"}', '{"txt": "w3"}')
    assert "a.jsonl line 2: no text; expected a field `text`" in refusal(capsys, out, tokenizer, records)
    assert "already there" in refusal(capsys, tmp_path, tokenizer, good, more=["--overwrite"])
    assert not out.exists() and not list(tmp_path.glob(".corpus-*"))


def test_a_cache_is_replaced_only_with_overwrite(tokenizer, tmp_path, capsys):
    first, second = (
        write(tmp_path / name, *[line] * 9) for name, line in {"a": "w3 w4 w5 w6 w7", "b": "w8 " * 7}.items()
    )
    out = tmp_path / "cache"
    run(out, tokenizer, first)
    before = out.read_bytes()
    assert "already there: give another name, or --overwrite" in refusal(capsys, out, tokenizer, second)
    assert out.read_bytes() == before
    run(out, tokenizer, second, more=["--overwrite"])
    assert CorpusTable.load(out).retrieve([8], 1) == [(8, 8, 8, 8)]
