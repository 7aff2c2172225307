"""Tables and the report: what they say, and that a model's text can do no harm."""

import io
import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from inference import report
from inference.metrics import summarise
from inference.record import Answer, Turn
from inference.session import StepCost

WORDS = ["The", " cat", " <script>alert(1)</script>", "\n sat", " & on", " a", " mat", ".", "</s>"]
TEXT = "".join(WORDS)
STEPS = {"none": [1] * 9, "ctc": [1, 4, 3, 1], "ngram": [1, 2, 2, 2, 2]}  # tokens each step emits
CONTEXT = {"base": "tiny|chat", "command line": "drafters eval <x>"}


def decode(token_ids):
    return "".join(WORDS[token] for token in token_ids)


def answer(drafter, question_id, category, token_ids=tuple(range(9))):
    costs = [StepCost(n, n - 1, 1, 4, 0, 0, (0.001, 0.1, 0.001, 0.001, 0.001)) for n in STEPS[drafter]]
    turn = Turn(decode(token_ids), list(token_ids), 5, costs, 0.11 * len(costs))
    return Answer(question_id, category, drafter, [turn, turn], [True, True])


@pytest.fixture
def answers():
    """Two benchmarks; in the second ngram writes another fourth token."""
    given = {
        name: {drafter: [answer(drafter, q, f"kind {q % 2}") for q in range(1, 5)] for drafter in STEPS}
        for name in ("mt_bench", "gsm8k")
    }
    given["gsm8k"]["ngram"][2] = answer("ngram", 3, "kind 1", (0, 1, 2, 5, 4, 5, 6, 7, 8))
    return given


@pytest.fixture
def summaries(answers):
    return {name: {drafter: summarise(of[drafter], of["none"]) for drafter in of} for name, of in answers.items()}


class Page(HTMLParser):
    """The tags of a page, and the text of each answer as a browser would show it."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.answers, self.depth = [], [], 0
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if attributes.get("class") == "text":
            self.answers.append("")
            self.depth = 1
        elif self.depth:
            self.depth += 1

    def handle_endtag(self, tag):
        self.depth = max(0, self.depth - 1)

    def handle_data(self, data):
        if self.depth:
            self.answers[-1] += data


@pytest.fixture
def page(tmp_path, summaries, answers):
    return Page(report.write_report(tmp_path, summaries, CONTEXT, answers, decode).read_text(encoding="utf-8"))


def test_the_report_needs_nothing_but_itself(page):
    links = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "srcset", "href")]
    assert len(links) == 2 * 2 * 4  # benchmarks, themes, plots
    assert all(link.startswith("data:image/png;base64,") for link in links)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}


def test_the_spans_of_the_steps_hold_the_whole_answer_and_escape_it(page):
    assert page.answers == [TEXT] * 2 * 8  # turns of eight answers; <script> is text here, no tag


def test_the_plots_are_files_too(page, tmp_path):
    plots = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert plots == [
        f"{name}-{p}.png" for name in ("gsm8k", "mt_bench") for p in ("categories", "depths", "phases", "speedup")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "plots").iterdir())


def test_a_step_shows_accepted_tokens_apart_from_the_bonus_token():
    spans = report.step_spans(answer("ctc", 1, "math").turns[0], decode)
    assert [(span.accepted, span.bonus) for span in spans] == [
        ("", "The"),
        (" cat <script>alert(1)</script>\n sat", " & on"),
        (" a mat", "."),
        ("", "</s>"),
    ]


def test_a_character_of_several_tokens_is_not_torn_apart():
    whole = "né日本".encode()
    steps = [
        StepCost(1, 0, 1, 0, 0, 0, (0.0,) * 5),
        StepCost(3, 2, 1, 4, 0, 0, (0.0,) * 5),
        StepCost(5, 5, 1, 5, 0, 0, (0.0,) * 5),
    ]
    turn = Turn("", list(whole), 1, steps, 1.0)
    spans = report.step_spans(turn, lambda token_ids: bytes(token_ids).decode("utf-8", errors="replace"))
    assert [(span.accepted, span.bonus) for span in spans] == [("", "n"), ("é", ""), ("日本", "")]


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_tables_fit_and_tell_who_is_not_lossless(summaries, width):
    console = Console(width=width, record=True, file=io.StringIO())
    for part in report.table(summaries):
        console.print(part)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"ctc +2\.67 +2\.25× +20\.5 +5\.0 +100 % \(4/4\)", text)
    assert re.search(r"ngram .* 75 % \(3/4\) †", text)
    assert "question 3, turn 1, after 3 equal tokens" in " ".join(text.split())


def test_the_headline_names_the_fastest_drafter(summaries):
    expected = "ctc writes the same text as the base, 2.2x faster, 2.7 tokens per base forward"
    assert report.markdown({"mt_bench": summaries["mt_bench"]}, {}).startswith(f"**{expected}.**")
    assert report.markdown(summaries, {}).startswith(f"**{expected} (geometric means over 2 benchmarks).**")


def test_the_headline_does_not_hide_other_text_or_lost_speed(summaries):
    of = summaries["gsm8k"]
    text = report.markdown({"gsm8k": {"none": of["none"], "ngram": of["ngram"]}}, {})
    assert text.startswith("**ngram writes in 3 of 4 answers the same text as the base, 1.8x faster")
    assert report.markdown({"gsm8k": {"none": of["none"]}}, {}).startswith(
        "**Only none was run: 9.1 tokens per second."
    )


def test_markdown_has_the_same_rows_and_the_context(summaries):
    text = report.markdown(summaries, CONTEXT)
    assert "| ctc | **2.67** | **2.67** | **2.67** | **2.25×** | **20.5** | 5.0 | 0.0 | 0.0 | 100 % (4/4) |" in text
    assert "| kind 1 | **2.67 2.25×** | 2.00 " in text
    assert "- base: tiny\\|chat\n- command line: drafters eval \\<x\\>\n" in text
    assert "- counting: Acceptance length = emitted tokens / base forwards, prefill excluded, micro average." in text


def test_results_hold_every_number(tmp_path, summaries):
    results = json.loads(report.write_results(tmp_path, summaries, CONTEXT).read_text(encoding="utf-8"))
    assert results["context"]["base"] == "tiny|chat"
    assert results["results"]["mt_bench"]["ctc"]["acceptance_length"] == pytest.approx(8 / 3)
    assert results["results"]["gsm8k"]["ngram"]["first_divergence"] == [3, 0, 3]
