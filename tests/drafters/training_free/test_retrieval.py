"""REST, against its definition: scan the full text, count every prefix, sort them all."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from drafters import REST, DraftTree, SuffixArray
from drafters.protocol import Limits
from tests.conftest import check_tree, refusal
from tests.drafters.conftest import paths_of

FAR = Limits(max_depth=100)
WIDE = 70_000  # an id that needs more than 16 bits


def documents_of(seed, count=25, vocab=4, longest=40, shift=0):
    rng = random.Random(seed)
    return [[shift + rng.randrange(vocab) for _ in range(rng.randrange(longest))] for _ in range(count)]


def laid_out(documents):
    """Return the text with None between documents."""
    return [token for document in documents if document for token in (*document, None)]


def slow_continuations(documents, seq, longest, shortest, length, num_hits, depth=32):
    """Continuations after each match of the longest suffix of ``seq`` that has any, in the suffix array's order."""
    text = [10**9 if token is None else token for token in laid_out(documents)]
    for width in range(min(longest, len(seq)), shortest - 1, -1):
        hits = [
            place
            for place in range(len(text) - width)
            if text[place : place + width] == seq[-width:] and text[place + width] != 10**9
        ]
        if hits:
            hits.sort(key=lambda place: (text[place : place + depth], place))
            return [until_border(text[place + width : place + width + length]) for place in hits[:num_hits]]
    return []


def until_border(tokens):
    return tuple(tokens[: tokens.index(10**9)] if 10**9 in tokens else tokens)


def slow_prefixes(continuations, most, eos=()):
    """Return the most frequent prefixes; ties go to the shorter, then to smaller tokens."""
    counts = Counter(path[:end] for path in continuations for end in range(1, len(path) + 1))
    allowed = [prefix for prefix in counts if not set(prefix[:-1]) & set(eos)]
    return sorted(allowed, key=lambda prefix: (-counts[prefix], len(prefix), prefix))[:most]


# ---- the suffix array


@pytest.mark.parametrize("depth", [2, 3, 5, 8, 26, 32])
@pytest.mark.parametrize("shift", [0, WIDE])
def test_positions_are_sorted_by_their_suffixes(depth, shift):
    documents = documents_of(depth, vocab=2, shift=shift)
    array = SuffixArray.build(documents, depth)
    text = [array.border if token is None else token for token in laid_out(documents)]
    assert array.tokens.tolist() == text
    assert array.tokens.dtype == (np.int32 if shift else np.uint16)
    places = [place for place, token in enumerate(text) if token != array.border]
    assert array.suffixes.tolist() == sorted(places, key=lambda place: (text[place : place + depth], place))
    assert array.num_documents == sum(map(bool, documents))


@pytest.mark.parametrize("shift", [0, WIDE])
def test_a_saved_array_opens_unchanged_without_being_read(tmp_path, shift):
    array = SuffixArray.build(documents_of(2, shift=shift), 30, "hash", ("a.txt", "b.jsonl"))
    array.save(tmp_path / "store")
    opened = SuffixArray.open(tmp_path / "store")
    for name in ("tokens", "suffixes", "heads"):
        assert getattr(opened, name).dtype == getattr(array, name).dtype
        np.testing.assert_array_equal(getattr(opened, name), getattr(array, name))
        assert not getattr(opened, name).flags.owndata
    assert (opened.depth, opened.tokenizer_hash, opened.sources) == (30, "hash", ("a.txt", "b.jsonl"))
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    seq = [shift + 1, shift + 2]
    assert REST(opened, shortest=1).propose(seq, FAR) == REST(array, shortest=1).propose(seq, FAR) != DraftTree()


def damages(data):
    """Return a datastore's bytes, damaged in several ways."""
    size = int.from_bytes(data[:8], "little")
    header, arrays = json.loads(data[8 : 8 + size]), data[8 + size :]

    def with_header(header):
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + arrays

    about = json.loads(header["__metadata__"]["suffix_array"])
    return {
        "nothing": b"",
        "cut short": data[:-9],
        "no description": with_header({**header, "__metadata__": {}}),
        "unknown field": with_header({**header, "__metadata__": {"suffix_array": json.dumps({**about, "wings": 2})}}),
        "array missing": with_header({name: header[name] for name in header if name != "heads"}),
        "types": with_header({**header, "tokens": {**header["tokens"], "dtype": "I32"}}),
        "border": data.replace(b"\xff\xff", b"\x01\x00"),
        "alignment": with_header(
            {k: v if k == "__metadata__" else {**v, "data_offsets": [1, 2]} for k, v in header.items()}
        ),
    }


def test_a_file_that_is_no_datastore_is_refused_in_one_line(tmp_path):
    path = tmp_path / "store"
    with pytest.raises(ValueError, match="no such file or directory; make a datastore with `drafters index"):
        SuffixArray.open(path)
    SuffixArray.build(documents_of(2)).save(path)
    for data in damages(path.read_bytes()).values():
        path.write_bytes(data)
        assert "make a datastore with" in refusal(SuffixArray.open, path)


def test_a_text_without_tokens_and_a_depth_of_one_are_refused():
    with pytest.raises(ValueError, match="takes 1 to 4294967295 tokens, borders included, not 0"):
        SuffixArray.build([[], []])
    with pytest.raises(ValueError, match="depth must be at least 2, not 1"):
        SuffixArray.build([[1, 2]], depth=1)


# ---- the draft


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("vocab", "shift"), [(2, 0), (4, 0), (9, 0), (4, WIDE)])
def test_the_draft_equals_a_count_of_every_prefix(seed, vocab, shift):
    rng = random.Random(seed)
    documents = documents_of(seed, vocab=vocab, shift=shift)
    store = SuffixArray.build(documents)
    for _ in range(25):
        longest, length = rng.choice([(1, 1), (3, 4), (16, 10)])
        num_draft, shortest = rng.choice([1, 5, 16, 64]), rng.choice([1, min(2, longest)])
        num_hits = rng.choice([1, 2, 7, 5000])
        drafter = REST(store, num_draft, longest, shortest, num_hits, length)
        source = rng.choice([document for document in documents if document])
        seq = source[: rng.randrange(1, len(source) + 1)]
        eos = rng.choice([(), (shift,)])
        depth, nodes = rng.choice([(100, 1024), (2, 1024), (100, 3)])
        continuations = slow_continuations(documents, seq, longest, shortest, min(length, depth), num_hits)
        expected = slow_prefixes(continuations, min(num_draft, nodes), eos)
        limits = Limits(depth, nodes, frozenset(eos))
        tree = drafter.propose(seq, limits)
        assert paths_of(tree) == expected
        check_tree(tree, shift + vocab)
        assert tree.pruned(limits.max_depth, limits.max_nodes, limits.eos) is tree


def test_a_context_that_the_datastore_lacks_gives_no_draft():
    drafter = REST(SuffixArray.build([[1, 2, 3, 4]]))
    assert len(drafter.propose([2], FAR)) == 0, "shorter than the shortest suffix"
    for seq in ([2, 1], [0xFFFF, 0xFFFF], [WIDE, 2]):
        assert len(drafter.propose(seq, FAR)) == 0
    assert paths_of(drafter.propose([WIDE, 1, 2], FAR)) == []
    assert paths_of(REST(drafter.store, longest=2).propose([WIDE, 1, 2], FAR)) == [(3,), (3, 4)]
