"""Every number of docs/ctc.md is computed here: by listing all alignments, and by the drafter's own functions."""

import importlib
import importlib.util
import math
import re
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from drafters.ctc.loss import CTCLossOptions, CTCOutput, ctc_loss, run_recursion
from drafters.ctc.reference import FrameDistributions, collapse, spell
from drafters.ctc.trees import draw, paper_trees
from drafters.losses.anchors import AnchoredFrames
from drafters.losses.divergences import divergence
from drafters.nn.markov import Markov
from drafters.tree import ROOT
from drafters.trees import search as tree_search
from drafters.trees.search import Bias, Candidates, SearchLimits

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
LOG_FRAMES = torch.from_numpy(FRAMES).log()
WITH_ROOT = np.insert(LOG_FRAMES.numpy(), ROOT_TOKEN, -np.inf, axis=1)  # where the root must be of the vocabulary


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
DISTRIBUTIONS = {"no bias": (NO_BIAS, BEGINS), "bias": (BIAS, BEGINS_BIASED)}


def columns(labels, bias):
    """`enter`, `stay` and `blank` of a text, as `run_recursion` takes them."""
    last = [ROOT_TOKEN, *labels]
    at = np.array([[distribution(frame, token, bias) for token in last] for frame in range(T)])  # (T, U + 1, 3)
    index = np.arange(len(labels))
    parts = at[:, index, labels], at[:, index + 1, labels], at[..., BLANK]
    return *(torch.from_numpy(part)[None].log() for part in parts), torch.tensor([labels])


def distributions_of(texts, bias):
    """`spell` of a prefix-closed set of texts, the empty one first."""
    tokens = torch.tensor([text[-1] if text else ROOT_TOKEN for text in texts])
    parents = torch.tensor([texts.index(text[:-1]) if text else ROOT for text in texts])
    biases = torch.from_numpy(np.insert(bias, ROOT_TOKEN, 0.0, axis=1))[tokens]
    frames = FrameDistributions(torch.from_numpy(WITH_ROOT), biases if bias.any() else None)
    return spell(frames, tokens, parents)


def search(num_nodes, bias):
    """The prefix tree, with one distribution for all or one after each token."""
    factors = np.exp(bias)
    given = Bias(factors[None], 1 / (factors @ FRAMES.T)[None]) if bias.any() else None
    candidates = Candidates(np.arange(2)[None], FRAMES[None, :, :2], FRAMES[None, :, BLANK], given)
    (tree,) = tree_search.search(candidates, SearchLimits(num_nodes, T))
    return [tuple(tree.path_tokens(node)) for node in range(len(tree))], tree.parents, np.array(tree.probabilities)


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


def test_each_frame_is_a_distribution():
    assert FRAMES.shape == (3, 3) and np.allclose(FRAMES.sum(1), 1)
    assert [row[0] for row in TABLES["frame", "very", "good", "ε"]] == ["1", "2", "3"] and "T = 3" in PAGE


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
    labels = [0, 1]
    enter, stay, blank, label_ids = columns(labels, NO_BIAS)
    entered, blank_end, label_end = (part.exp()[:, 0] for part in run_recursion(enter, stay, blank, label_ids))
    for t, row in enumerate(rows):
        assert row[0] == str(t)
        for name, cell in zip(header[1:], row[1:], strict=True):
            kind, g = name[0], text_of(name[2:])
            if kind == "e":
                assert (cell == "") == (t == 0)
                if t == 0:
                    continue
                before = {s: text for s, text, _ in every_alignment(NO_BIAS, t - 1)}
                holds = [p for s, text, p in every_alignment(NO_BIAS, t) if text == g and before[s[:-1]] == g[:-1]]
                ours = entered[t - 1, len(g) - 1]
            else:
                ends_blank = kind == "b"
                holds = [
                    p
                    for s, text, p in every_alignment(NO_BIAS, t)
                    if text == g and (s[-1:] in ((), (BLANK,))) == ends_blank
                ]
                ours = (blank_end if ends_blank else label_end)[t, len(g)]
            check(math.fsum(holds), cell)
            check(ours.item(), cell)
    assert len(rows) == T + 1


def test_the_table_of_prefixes_is_complete_and_has_their_next_token_distributions():
    rows = TABLES["g", "P(begins g)", "P(is g)", "q(very)", "q(good)", "stop"]
    texts = [text_of(row[0]) for row in rows]
    assert sorted(texts) == sorted(BEGINS)
    prefixes = distributions_of(texts, NO_BIAS)
    following, stops = prefixes.next_token_probs(), prefixes.stop
    for index, (text, row) in enumerate(zip(texts, rows, strict=True)):
        begins, is_text, very, good, stop = row[1:]
        check(BEGINS[text], begins)
        check(IS.get(text, 0.0), is_text)
        check(prefixes.prefix[index].item(), begins)
        for token, cell in enumerate((very, good)):
            check(BEGINS.get((*text, token), 0.0) / BEGINS[text], cell)
            check(following[index, token].item(), cell)
        check(IS.get(text, 0.0) / BEGINS[text], stop)
        check(stops[index].item(), stop)
        if text:
            states = run_recursion(*columns(list(text), NO_BIAS))
            check(states.exact[0, -1].exp().item(), is_text)
            check(states.prefix[0, -1].exp().item(), begins)


# ---- the trees


def test_the_tree_is_the_prefix_search_and_no_other_four_nodes_gain_more():
    rows = TABLES["node", "prefix", "parent", "P(begins)", "sum so far"]
    paths, parents, reached = search(len(rows), NO_BIAS)
    assert [text_of(row[1]) for row in rows] == paths
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4]
    assert [row[2] for row in rows] == ["root" if parent == ROOT else str(parent + 1) for parent in parents]
    for node, row in enumerate(rows):
        check(reached[node], row[3])
        check(BEGINS[paths[node]], row[3])
        check(math.fsum(reached[: node + 1]), row[4])
        most = sorted((p for text, p in BEGINS.items() if text), reverse=True)[: node + 1]
        check(math.fsum(most), row[4])


def test_the_papers_tree_is_the_collapse_of_the_most_probable_raw_sequences():
    rows = TABLES["raw sequence", "probability", "text", "fed", "sum so far"]
    raw = {}
    for length in range(1, T + 1):
        for symbols in product(range(3), repeat=length):
            raw[symbols] = FRAMES[range(length), symbols].prod()
    best = sorted(raw, key=raw.get, reverse=True)
    assert raw[best[3]] > raw[best[4]] + 1e-9, "no tie decides what is fed"
    fed = []
    for count, (sequence, row) in enumerate(zip(best, rows, strict=False), 1):
        text = tuple(collapse(torch.tensor(sequence), BLANK))
        assert row[0].split() == [[*WORDS, "ε"][symbol] for symbol in sequence]
        assert text_of(row[2]) == text and row[3] == ("yes" if text and text not in fed else "no")
        check(raw[sequence], row[1])
        if row[3] == "yes":
            fed.append(text)
        check(math.fsum(BEGINS[text] for text in fed), row[4])
        candidates = Candidates(np.arange(2)[None], FRAMES[None, :, :2], FRAMES[None, :, BLANK])
        (tree,) = paper_trees(candidates, SearchLimits(count, T))
        assert {tuple(tree.path_tokens(node)) for node in range(len(tree))} == set(fed)
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
    bias = markov()(torch.tensor([0, 1, ROOT_TOKEN]))
    torch.testing.assert_close(bias, torch.from_numpy(BIAS))
    for row in rows:
        frame = int(row[0]) - 1
        for probability, cell in zip((LOG_FRAMES[frame] + bias[0]).softmax(-1).tolist(), row[1:], strict=True):
            check(probability, cell)
    shares = re.search(r"Frame 2 becomes ([\d.]+), ([\d.]+), ([\d.]+) over", PAGE).groups()
    for weight, cell in zip(FRAMES[1] * np.exp(BIAS[0]), shares, strict=True):
        check(weight, cell)


def markov():
    """The example's bias as a module of rank 1; its third token is the root."""
    bias = Markov(num_tokens=3, rank=1, num_columns=3).double()
    with torch.no_grad():
        bias.left.copy_(torch.tensor([[1.0], [0.0], [0.0]]))
        bias.right.copy_(torch.tensor([[0.0], [math.log(3)], [0.0]], dtype=torch.float64))
    return bias.requires_grad_(False)


def test_the_biased_column_sums_over_all_alignments_and_all_functions_give_it():
    rows = TABLES["g", "P(begins g)", "with the bias"]
    texts = [(), *(text_of(row[0]) for row in rows)]
    assert sorted(texts) == sorted(BEGINS) == sorted(BEGINS_BIASED)
    assert BEGINS_BIASED[()] == pytest.approx(1)
    for column, (bias, begins) in enumerate(DISTRIBUTIONS.values(), 1):
        prefixes = distributions_of(texts, bias)
        paths, _, reached = search(99, bias)
        for index, row in enumerate(rows, 1):
            check(begins[texts[index]], row[column])
            check(prefixes.prefix[index].item(), row[column])
            check(reached[paths.index(texts[index])], row[column])
            states = run_recursion(*columns(list(texts[index]), bias))
            check(states.prefix[0, -1].exp().item(), row[column])


def test_the_bias_changes_the_order_of_the_tree_as_the_page_describes():
    paths, _, reached = search(4, BIAS)
    assert "Node 2 is now *very good*, node 3 *good*" in PAGE
    assert paths[:3] == [(0,), (0, 1), (1,)]
    check(reached.sum(), re.search(r"tree of four gains `[^`]* = ([\d.]+)`", PAGE.replace("\n", " "))[1])


# ---- loss and sampling


@pytest.mark.parametrize("row", TABLES["labels", "P(is)", "P(begins)", "full CTC", "prefix"], ids=lambda row: row[0])
def test_both_losses_are_those_of_the_example(row):
    labels = text_of(row[0])
    check(IS[labels], row[1])
    check(BEGINS[labels], row[2])
    weights = [0.9**u for u in range(len(labels))]
    survival = [-math.log(BEGINS[labels[: u + 1]]) for u in range(len(labels))]
    expected = {
        "ctc": -math.log(IS[labels]) / len(labels),
        "prefix": math.fsum(w * s for w, s in zip(weights, survival, strict=True)) / math.fsum(weights),
    }
    assert "falling by a factor of 0.9 from label" in PAGE
    head = torch.eye(2, 3, dtype=torch.float64)  # the frames' states are their log-probabilities
    blank_row, blank_bias = torch.eye(3, dtype=torch.float64)[BLANK], torch.zeros((), dtype=torch.float64)
    valid = torch.ones(1, len(labels), dtype=torch.bool)
    anchored = AnchoredFrames(LOG_FRAMES[None], torch.tensor([labels]), valid)
    for cell, (objective, value) in zip(row[3:], expected.items(), strict=True):
        options = CTCLossOptions(objective=objective, weights="decay", decay=0.9)
        ours, _ = ctc_loss(anchored, head, CTCOutput(blank_row, blank_bias), options)
        check(value, cell)
        assert ours.item() == pytest.approx(value, abs=1e-5)


def test_the_expected_number_of_accepted_labels_is_the_sum_of_the_prefixes():
    begin = run_recursion(*columns([0, 1], NO_BIAS)).prefix
    assert "`0.515 + 0.35 = 0.865`" in PAGE
    check(begin.exp().sum().item(), "0.865")


def test_total_variation_from_the_base_of_the_example_is_the_probability_to_stop():
    rows = {row[0]: row for row in TABLES["g", "P(begins g)", "P(is g)", "q(very)", "q(good)", "stop"]}
    assert "`0.023 + 0.68 = 0.703`" in PAGE and "probability 0.2" in PAGE
    draft = torch.tensor([[float(cell) for cell in rows["very"][3:5]]], dtype=torch.float64)
    total_variation = divergence("tv", torch.tensor([[0.2, 0.8]], dtype=torch.float64), draft)
    check(total_variation.item(), rows["very"][5])


def test_sampled_children_have_the_next_token_distribution_without_the_stop():
    generator = np.random.default_rng(0)
    tree = draw(torch.from_numpy(WITH_ROOT), ROOT_TOKEN, 64, SearchLimits(99, T), generator)
    (at_root,) = (distribution for distribution in tree.distributions if distribution.parent == ROOT)
    said = re.search(r"`[\d./]+ = ([\d.]+)` for \*very\* and\n?\s*`[\d./]+ = ([\d.]+)` for \*good\*", PAGE)
    for token in range(2):
        check(at_root.probs[token].item(), said[token + 1])
        check(BEGINS[(token,)] / (1 - IS[()]), said[token + 1])


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
    spec = importlib.util.spec_from_file_location("ctc_picture", DOCS / "ctc_picture.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert np.array_equal(script.FRAMES, FRAMES) and script.WORDS == WORDS
    script.draw(tmp_path / "ctc.png")
    assert (tmp_path / "ctc.png").stat().st_size > 0 and (DOCS / "ctc.png").exists() and "](ctc.png)" in PAGE
