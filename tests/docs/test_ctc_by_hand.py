"""Every number of docs/ctc.md, computed by listing all alignments, as tests/drafters/ctc proves our functions."""

import importlib
import math
import re
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from drafters.ctc.reference import collapse
from tests.docs.conftest import load_script

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "ctc.md").read_text(encoding="utf-8")
WORDS, BLANK = ["very", "good"], 2
ROOT_TOKEN = 2  # `looks`


def text_of(cell):
    """Return the tokens of a cell of words; ∅ is the empty text."""
    return tuple(WORDS.index(word) for word in cell.split() if word != "∅")


def tables():
    """The tables of the page by their header: rows of cells."""
    found = {}
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, flags=re.M):
        header, _, *rows = ([cell.strip() for cell in line.strip()[1:-1].split("|")] for line in block.splitlines())
        assert tuple(header) not in found
        found[tuple(header)] = rows
    return found


TABLES = tables()
FRAMES = np.array([[float(cell) for cell in row[1:]] for row in TABLES["frame", "very", "good", "ε"]])
BIAS = np.array([[0.0, math.log(3), 0.0], [0.0] * 3, [0.0] * 3])  # rows: last token very, good, and the root
T = len(FRAMES)


def is_shown_as(value, cell):
    """Numbers with three decimals may be rounded, shorter ones are exact."""
    return abs(float(cell) - value) <= (0.5e-3 if len(cell.partition(".")[2]) >= 3 else 0) + 1e-9


def check(value, cell):
    assert is_shown_as(value, cell), f"the page says {cell}, not {value}"


def distribution(frame, last, bias):
    weights = FRAMES[frame] * np.exp(bias[last])
    return weights / weights.sum()


def every_alignment(bias, num_frames=T):
    """Return each alignment of the first frames with its text and its probability."""
    for symbols in product(range(3), repeat=num_frames):
        text, last, before, probability = (), ROOT_TOKEN, BLANK, 1.0
        for frame, symbol in enumerate(symbols):
            probability *= distribution(frame, last, bias)[symbol]
            if symbol not in (before, BLANK):
                text, last = (*text, symbol), symbol
            before = symbol
        yield symbols, text, probability


def enumerated(bias):
    """Return P(the text is g) and P(the text begins with g) for every text g of some alignment."""
    is_text, begins = defaultdict(float), defaultdict(float)
    for _, text, probability in every_alignment(bias):
        is_text[text] += probability
        for length in range(len(text) + 1):
            begins[text[:length]] += probability
    return is_text, begins


NO_BIAS = np.zeros_like(BIAS)
IS, BEGINS = enumerated(NO_BIAS)
_, BEGINS_BIASED = enumerated(BIAS)


# ---- why frames, and their texts


def test_positions_mix_two_answers_and_frames_do_not():
    vocab = ["very", "good", "."]
    positions = [{"very": 0.5, "good": 0.5}, {"good": 0.5, ".": 0.5}]
    frames = torch.tensor([[0.5, 0, 0, 0.5], [0, 1, 0, 0], [0, 0, 1, 0]], dtype=torch.float64)
    rows = TABLES["draft's first two tokens", "one distribution per position", "frames with a blank"]
    assert {tuple(row[0].split()) for row in rows} == set(product(*positions))
    for draft, independent, shifted in rows:
        first, second = draft.split()
        check(positions[0][first] * positions[1][second], independent)
        begins = 0.0
        for symbols in product(range(4), repeat=3):
            text = collapse(torch.tensor(symbols), blank=3)
            if text[:2] == [vocab.index(first), vocab.index(second)]:
                begins += frames[range(3), symbols].prod().item()
        check(begins, shifted)


def test_the_alignments_of_the_example_are_all_there_with_their_products():
    rows = TABLES["alignment", "product", "collapses to"]
    listed = {}
    for alignment, probability, text in rows:
        symbols = tuple(BLANK if word == "ε" else WORDS.index(word) for word in alignment.split())
        assert tuple(collapse(torch.tensor(symbols), BLANK)) == text_of(text)
        check(FRAMES[range(T), symbols].prod(), probability)
        listed[symbols] = text_of(text)
    assert listed == {symbols: text for symbols, text, _ in every_alignment(NO_BIAS) if text[:2] == (0, 1)}


def test_the_text_before_the_tables_is_right():
    assert collapse(torch.tensor([0, 0, 1]), BLANK) == [0, 1]
    assert [symbols for symbols, text, _ in every_alignment(NO_BIAS) if text == (0, 0)] == [(0, BLANK, 0)]
    probabilities = {symbols: probability for symbols, _, probability in every_alignment(NO_BIAS)}
    assert sum(probabilities.values()) == pytest.approx(1)
    assert max(probabilities, key=probabilities.get) == (BLANK, 1, 1) and BEGINS[(0,)] > BEGINS[(1,)]


# ---- the recursion


def test_the_recursion_table_is_the_sum_over_the_alignments_of_the_frames_so_far():
    header = ("t", "b ∅", "e very", "n very", "b very", "e very good", "n very good", "b very good")
    rows = TABLES[header]
    for t, row in enumerate(rows):
        assert row[0] == str(t)
        before = {s: text for s, text, _ in every_alignment(NO_BIAS, max(t - 1, 0))}
        for name, cell in zip(header[1:], row[1:], strict=True):
            kind, g = name[0], text_of(name[2:])
            if kind == "e" and t == 0:
                assert cell == ""
                continue
            holds = [
                p
                for s, text, p in every_alignment(NO_BIAS, t)
                if text == g
                and (before[s[:-1]] == g[:-1] if kind == "e" else (s[-1:] in ((), (BLANK,))) == (kind == "b"))
            ]
            check(math.fsum(holds), cell)
    assert len(rows) == T + 1


def test_the_table_of_prefixes_is_complete_and_has_their_next_token_distributions():
    rows = TABLES["g", "P(begins g)", "P(is g)", "q(very)", "q(good)", "stop"]
    texts = [text_of(row[0]) for row in rows]
    assert sorted(texts) == sorted(BEGINS)
    for text, (_, begins, is_text, very, good, stop) in zip(texts, rows, strict=True):
        check(BEGINS[text], begins)
        check(IS.get(text, 0.0), is_text)
        for token, cell in enumerate((very, good)):
            check(BEGINS.get((*text, token), 0.0) / BEGINS[text], cell)
        check(IS.get(text, 0.0) / BEGINS[text], stop)


# ---- the trees


def most_probable(begins, count):
    """The texts that are most often begun: the nodes of the prefix tree."""
    return sorted((text for text in begins if text), key=begins.get, reverse=True)[:count]


def test_the_tree_of_four_nodes_has_the_texts_that_are_most_often_begun():
    rows = TABLES["node", "prefix", "parent", "P(begins)", "sum so far"]
    paths = most_probable(BEGINS, len(rows))
    assert [text_of(row[1]) for row in rows] == paths
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4]
    assert [row[2] for row in rows] == ["root" if len(path) == 1 else str(paths.index(path[:-1]) + 1) for path in paths]
    for node, row in enumerate(rows):
        check(BEGINS[paths[node]], row[3])
        check(math.fsum(BEGINS[path] for path in paths[: node + 1]), row[4])


def test_the_papers_tree_is_the_collapse_of_the_most_probable_raw_sequences():
    rows = TABLES["node of a raw sequence", "its best completion", "text", "fed", "sum so far"]
    raw = {symbols: FRAMES[range(T), symbols].prod() for symbols in product(range(3), repeat=T)}
    completions = {}
    for symbols in sorted(raw, key=raw.get, reverse=True):
        for length in range(1, T + 1):
            completions.setdefault(symbols[:length], raw[symbols])
    best = sorted(completions, key=lambda symbols: (-round(completions[symbols], 9), len(symbols)))
    fed = []
    for sequence, row in zip(best, rows, strict=False):
        text = tuple(collapse(torch.tensor(sequence), BLANK))
        assert row[0].split() == [[*WORDS, "ε"][symbol] for symbol in sequence]
        assert text_of(row[2]) == text and row[3] == ("yes" if text and text not in fed else "no")
        check(completions[sequence], row[1])
        if row[3] == "yes":
            fed.append(text)
        check(math.fsum(BEGINS[text] for text in fed), row[4])
    assert len(rows) == 4

    (said,) = re.findall(r"(\d+) raw sequences are more probable than any that spells \*good very\*", PAGE)
    spelling = max(p for symbols, p in raw.items() if tuple(collapse(torch.tensor(symbols), BLANK)) == (1, 0))
    assert sum(p > spelling + 1e-9 for p in raw.values()) == int(said)
    good = max(p for symbols, p in raw.items() if tuple(collapse(torch.tensor(symbols), BLANK)) == (1,))
    sums = re.search(r"\*good\* counts with (\d+\.\d+) of its (\d+\.\d+)", PAGE)
    check(good, sums[1])
    check(BEGINS[(1,)], sums[2])


# ---- the Markov bias


def test_the_biased_frames_are_the_softmax_of_the_example():
    rows = TABLES["frame after *very*", "very", "good", "ε"]
    assert [row[0] for row in rows] == ["2", "3"] and "B(very, good) = ln 3, all else 0, rank 1" in PAGE
    for row in rows:
        for probability, cell in zip(distribution(int(row[0]) - 1, 0, BIAS), row[1:], strict=True):
            check(probability, cell)
    shares = re.search(r"Frame 2 becomes ([\d.]+), ([\d.]+), ([\d.]+) over", PAGE).groups()
    for weight, cell in zip(FRAMES[1] * np.exp(BIAS[0]), shares, strict=True):
        check(weight, cell)


def test_the_biased_column_sums_over_all_alignments():
    rows = TABLES["g", "P(begins g)", "with the bias"]
    texts = [text_of(row[0]) for row in rows]
    assert sorted([(), *texts]) == sorted(BEGINS) == sorted(BEGINS_BIASED)
    assert BEGINS_BIASED[()] == pytest.approx(1)
    for text, (_, plain, biased) in zip(texts, rows, strict=True):
        check(BEGINS[text], plain)
        check(BEGINS_BIASED[text], biased)


def test_copies_add_half_of_the_passage_to_half_of_what_the_frames_say():
    passage = text_of("good very good")
    for cell, plain, copied in TABLES["g", "P(begins g)", "with copies"]:
        text = text_of(cell)
        check(BEGINS[text], plain)
        check((BEGINS[text] + (passage[: len(text)] == text)) / 2, copied)


# ---- loss and sampling


@pytest.mark.parametrize("row", TABLES["labels", "P(is)", "P(begins)", "full CTC", "prefix"], ids=lambda row: row[0])
def test_both_losses_are_those_of_the_example(row):
    labels = text_of(row[0])
    check(IS[labels], row[1])
    check(BEGINS[labels], row[2])
    check(-math.log(IS[labels]) / len(labels), row[3])
    weights = [0.9**u for u in range(len(labels))]
    survival = [-math.log(BEGINS[labels[: u + 1]]) for u in range(len(labels))]
    check(math.fsum(w * s for w, s in zip(weights, survival, strict=True)) / math.fsum(weights), row[4])
    assert "falling by a factor of 0.9 from label" in PAGE


# ---- numbers between the tables


def sections():
    for section in re.split(r"^## ", PAGE, flags=re.M):
        title, _, body = section.partition("\n")
        yield title, body


EQUATIONS = [
    pytest.param(span, BEGINS_BIASED if "know the last token" in title else BEGINS, id=span)
    for title, body in sections()
    for span in re.findall(r"`([^`\n]+)`", body)
    if " = " in span
]


@pytest.mark.parametrize("span, begins", EQUATIONS)
def test_each_equation_with_numbers_holds(span, begins):
    *sides, shown = span.split(" = ")
    assert sides
    for side in sides:
        named = re.fullmatch(r"P\((is|begins) ([\w ]+)\)", side)
        if named:
            value = (IS if named[1] == "is" else begins)[text_of(named[2])]
        else:
            assert re.fullmatch(r"[\d.·+/() ]+", side), side
            value = eval(side.replace("·", "*"))
        check(value, shown)


def test_every_decimal_of_the_text_is_in_a_table_or_an_equation():
    checked = {cell for rows in TABLES.values() for row in rows for cell in row}
    checked |= {number for param in EQUATIONS for number in re.findall(r"\d+\.\d+", param.values[0])}
    checked |= {"0.9", "1.5"}  # the loss's weights and the biased frame's share, each read by its test
    prose = re.sub(r"^\|.*$|\]\([^)]*\)|section \d+\.\d+", "", PAGE, flags=re.M)
    assert set(re.findall(r"\d+\.\d+", prose)) <= checked


def test_every_function_the_page_names_exists():
    named = re.findall(r"`((?:ctc|trees)\.\w+)\.(\w+)`", PAGE)
    assert len(named) >= 5
    for module, function in named:
        assert callable(getattr(importlib.import_module(f"drafters.{module}"), function))


@pytest.mark.slow
def test_the_picture_is_drawn_from_the_pages_frames(tmp_path):
    script = load_script("ctc_picture")
    assert np.array_equal(script.FRAMES, FRAMES) and script.WORDS == WORDS
    script.draw(tmp_path / "ctc.png")
    assert (tmp_path / "ctc.png").stat().st_size > 0 and (DOCS / "ctc.png").exists() and "](ctc.png)" in PAGE
