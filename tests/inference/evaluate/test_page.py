"""Tables and pages of evaluations: what they show, and that no text of a model or a user changes them."""

import csv
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from inference.commands import report
from inference.evaluate import page as pages
from inference.evaluate import plots, tables
from inference.evaluate.answers import Turn
from inference.evaluate.conditions import DrafterConditions, RunRecord
from inference.evaluate.intervals import Estimate
from inference.evaluate.results import read
from inference.verifier.session import Step
from tests.inference.evaluate.conftest import write_folder

BROWSER = shutil.which("chromium")
HOSTILE = "</script><img src=x onerror=alert(1)>'\"&\u202e\x1b[2J\x9b|\ry"


class Page(HTMLParser):
    """Parser for the tags of a page and the text of each answer as a browser shows it."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.answers, self.depth = [], [], 0
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag == "div" and attributes.get("class") == "text":
            self.answers.append("")
            self.depth = 1
        elif self.depth:
            self.depth += 1

    def handle_endtag(self, tag):
        self.depth = max(0, self.depth - 1)

    def handle_data(self, data):
        if self.depth:
            self.answers[-1] += data

    def links(self):
        return [value for _, attrs in self.tags for key, value in attrs.items() if key in ("src", "srcset", "href")]


def written(folder, *parts, decode=None):
    pages.write_page(folder / "report.html", [(part, decode) for part in parts], folder / "plots")
    return (folder / "report.html").read_text(encoding="utf-8")


def shown(results, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(*tables.terminal(results), sep="\n")
    return console.export_text()


def with_speed(summary, value=None, interval=None, **changes):
    known = {"speedup": Estimate(summary.speed.speedup.value if value is None else value, interval)}
    return replace(summary, speed=replace(summary.speed, **known | changes))


@pytest.fixture
def no_plots(monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda summaries, colours: {})  # to draw them takes longest


# ---- one evaluation


@pytest.mark.slow
def test_the_page_is_self_contained_and_the_plots_are_also_files(evaluation, words, tmp_path):
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "holiday.png").touch()
    page = Page(written(tmp_path, evaluation, decode=words.decode))
    assert len(page.links()) == 2 * 3  # benchmarks, plots
    assert all(link.startswith("data:image/png;base64,") for link in page.links())
    assert not {"link", "iframe"} & {tag for tag, _ in page.tags}
    assert [attrs for tag, attrs in page.tags if tag == "script"] == [{}]
    drawn = sorted((tmp_path / "plots").glob("*-*.png"))
    assert [path.name for path in drawn] == [
        f"{name}-{plot}.png" for name in ("gsm8k", "mt_bench") for plot in ("acceptance", "depths", "speedup")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    one = replace(evaluation, summaries={"gsm8k": evaluation.summaries["gsm8k"]})
    written(tmp_path, one, decode=words.decode)
    left = {path.name for path in (tmp_path / "plots").glob("*.png")}
    assert left == {"holiday.png", *(path.name for path in drawn[:3])}, "only pictures of ours go"


def test_the_steps_join_to_the_full_escaped_answer(make, answers, words, tmp_path, no_plots):
    order = ("none", "ngram", "ctc")
    evaluation = make({name: {drafter: by[drafter] for drafter in order} for name, by in answers.items()})
    page = Page(written(tmp_path, evaluation, decode=words.decode))
    text, other = words.decode(range(9)), words.decode((0, 1, 2, 5, 4, 5, 6, 7, 8))
    assert page.answers[:16] == [text] * 2 * 8  # turns of eight answers of ctc; <script> is text here, not a tag
    assert sorted(page.answers[16:]) == sorted([text] * 2 * 7 + [other] * 2)  # and of ngram
    blocks = [(attrs["data-drafter"], "hidden" in attrs) for _, attrs in page.tags if "data-drafter" in attrs]
    assert blocks == [("ctc", False), ("ngram", True)], "the fastest is shown first"


def test_a_step_distinguishes_accepted_tokens_from_the_bonus_token(evaluation, words):
    spans = pages.step_spans(evaluation.answers["mt_bench"]["ctc"][0].turns[0], words.decode)
    assert [(span.accepted, span.bonus) for span in spans] == [
        ("", "The"),
        (" cat <script>alert(1)</script>\n sat", " & on"),
        (" a mat", "."),
        ("", "</s>"),
    ]


def test_a_character_of_several_tokens_stays_in_one_step():
    counts = [(1, 0, 0), (3, 2, 4), (5, 5, 5)]
    steps = [Step(emitted, accepted, 1, fed, 0, 0, (0.0,) * 5) for emitted, accepted, fed in counts]
    turn = Turn("", list("né日本".encode()), 1, steps, 1.0, True)
    spans = pages.step_spans(turn, lambda token_ids: bytes(token_ids).decode("utf-8", errors="replace"))
    assert [(span.accepted, span.bonus) for span in spans] == [("", "n"), ("é", ""), ("日本", "")]


def test_a_very_long_answer_is_shown_without_its_steps(make, answers, words, monkeypatch):
    monkeypatch.setattr(pages, "MAX_DIVIDED", 0)
    turns = [turn for answer in pages.choose_answers(make(answers), words)[0]["answers"] for turn in answer["turns"]]
    assert turns and not any(turn["spans"] for turn in turns)


def test_the_tokenizer_of_the_base_splits_the_answers_into_steps(make_folder, words, tmp_path, no_plots):
    def save_tokenizer(folder, order):
        tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(order)}, unk_token="</s>"))
        tokenizer.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
        return str(folder)

    own, others = save_tokenizer(tmp_path / "base", words.words), save_tokenizer(tmp_path / "other", words.words[::-1])
    found = read(make_folder("a", base=own))
    turn = found.answers["mt_bench"]["ctc"][0].turns[0]
    assert pages.step_spans(turn, pages.find_decoder(found)) == pages.step_spans(turn, words.decode)
    assert pages.find_decoder(found, others) is None, "its words are not the recorded ones"
    with pytest.raises(ValueError, match="no base at"):
        pages.find_decoder(found, "./nowhere")
    lost = make_folder("b", base="nowhere/at/all")
    report([lost])
    html = (Path(lost) / "report.html").read_text(encoding="utf-8")
    assert Page(html).answers == [words.decode(range(8))] * 2 * 2 * 4 and "--tokenizer FOLDER" in html


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_tables_fit_and_mark_drafters_that_are_not_lossless(evaluation, width):
    text = shown(evaluation, width)
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"ctc +2\.67 +2\.25× +2\.25× +20\.5 +5\.0 +100 % \(4/4\)", text)
    assert re.search(r"ngram .* 75 % \(3/4\) †", text)
    assert "question 3, turn 1, after 3 equal tokens" in " ".join(text.split())


def test_scores_are_shown(make, answers):
    found = make({"gsm8k": answers["gsm8k"]})
    graded = {name: replace(s, quality={"exact match": 12.5}) for name, s in found.summaries["gsm8k"].items()}
    found = replace(found, summaries={"gsm8k": graded})
    assert "Task quality, %:\n\n| drafter | exact match |\n| --- | ---: |\n| none | 12.50 |" in tables.markdown(found)
    assert re.search(r"Task quality, %\n.*\n.*\n.*\nnone +12\.50", shown(found))


# ---- one sentence


def test_the_headline_names_the_fastest_drafter_differing_text_or_a_base_alone(evaluation):
    def of_gsm8k(*names):
        summaries = {"gsm8k": {name: evaluation.summaries["gsm8k"][name] for name in names}}
        return tables.headline(replace(evaluation, summaries=summaries))

    expected = "ctc writes the same text as the base at 2.25x {}its speed, 2.7 tokens per base forward, over"
    of = dict(evaluation.summaries["mt_bench"])
    of["ctc"] = with_speed(of["ctc"], interval=(2.0, 2.5))
    one = tables.headline(replace(evaluation, summaries={"mt_bench": of}))
    assert one == expected.format("(2.00 to 2.50) ") + " 4 questions."
    assert tables.headline(evaluation) == expected.format("") + " 8 questions of 2 benchmarks (geometric means)."
    other = of_gsm8k("none", "ngram")
    assert other.startswith("ngram writes in 3 of 4 answers the same text as the base at 1.80x its speed")
    assert of_gsm8k("none") == "Only none was run: 9.1 tokens per second."


# ---- several evaluations


@pytest.fixture
def parts(make, answers):
    """Three evaluations under different conditions, with hostile names."""
    given = {"mt_bench": answers["mt_bench"]}
    drafters = {"none": DrafterConditions("none"), "ctc": DrafterConditions("ctc")}
    lossy = {"mt_bench": {name: own for name, own in answers["mt_bench"].items() if name != "ngram"}}
    return [
        make(given, "a"),
        make(lossy, "b", base=HOSTILE, dtype="bfloat16", drafters=drafters, record=RunRecord(warnings=[HOSTILE])),
        make({"gsm8k": answers["gsm8k"]}, "c", template=HOSTILE),
    ]


def test_the_page_of_several_evaluations_has_a_part_for_each_and_escapes_every_text(parts, tmp_path, no_plots):
    html = written(tmp_path, *parts)
    page = Page(html)
    assert all(link.startswith("#part-") for link in page.links()) and "img" not in dict(page.tags)
    assert "<td><span>a: ctc</span></td>" in html, "in the table of all drafters"
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not any(mark in html for mark in ("\x1b", "\x9b", "\u202e", "\r"))
    assert {attrs.get("id") for tag, attrs in page.tags if tag == "article"} == {"part-1", "part-2", "part-3"}
    text = "".join(map(tables.markdown, parts))
    assert "\x1b" not in text and "\u202e" not in text


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_a_browser_shows_the_chosen_drafter_with_the_same_answers_open(parts, words, tmp_path, no_plots):
    script = """<script>
    const all = (selector) => [...document.querySelectorAll(selector)];
    const choose = (select, value) => { select.value = value; select.dispatchEvent(new Event("change")); };
    const states = {};
    all("[data-drafter=ctc] details")[2].open = true;
    choose(document.querySelector("article select"), "ngram");
    states.blocks = all("#part-1 [data-drafter]").map((block) => [block.dataset.drafter, block.hidden]);
    states.open = all("#part-1 [data-drafter=ngram] details").map((each) => each.open);
    const told = { id: "states", textContent: JSON.stringify(states) };
    document.body.append(Object.assign(document.createElement("pre"), told));
    </script>"""
    html = written(tmp_path, *parts, decode=words.decode)
    (tmp_path / "page.html").write_text(html + script, encoding="utf-8")
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    ran = subprocess.run([*command, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120)
    states = json.loads(re.search('<pre id="states">(.*?)</pre>', ran.stdout)[1])
    assert states["blocks"] == [["ctc", True], ["ngram", False]] and states["open"] == [True, False, True, False]


# ---- files


def test_every_format_has_the_same_figures(make_folder, tmp_path, no_plots):
    import pandas

    folder = make_folder("a")
    report([folder], out=str(tmp_path / "page.html"), format=["csv", "parquet", "latex", "md"])
    with (tmp_path / "page.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = pandas.read_parquet(tmp_path / "page.parquet").to_dict("records")
    summary = read(folder).summaries["mt_bench"]["ctc"]
    for row in (rows[1], table[1]):
        assert float(row["acceptance.length.value"]) == summary.acceptance.length.value == pytest.approx(8 / 3)
        assert float(row["speed.speedup.interval.low"]) == summary.speed.speedup.interval[0]
        assert float(row["acceptance.rates.2.rate.value"]) == summary.acceptance.rates[1].rate.value
        assert (row["base"], row["benchmark"], int(row["identical"])) == ("tiny|chat", "mt_bench", 4)
    latex = (tmp_path / "page.tex").read_text()
    assert r"\toprule" in latex and "ctc & 2.67" in latex
    assert (tmp_path / "page.md").read_text().startswith("**ctc writes")


def test_tables_hold_hostile_names_as_text(tmp_path):
    import pandas

    hostile, row = "a_b\n50% \\input{x} $y$ #~^&\x1b", tables.Row(["a_b\n50% \\input{x} $y$ #~^&\x1b", "1.0"])
    latex = tables.Table(hostile, ["name", hostile], [row]).latex()
    escaped = r"a\_b 50\% \textbackslash input\{x\} \$y\$ \#\textasciitilde \textasciicircum \&␛"
    assert f"{escaped} & 1.0" in latex and f"name & {escaped}" in latex
    comment, _, table = latex.partition("\n")
    assert comment == "% a_b 50% \\input{x} $y$ #~^&␛" and "\x1b" not in latex and r"\input" not in table
    rows = [
        {"name": 'a,"b', "value": None, "x\n\x1b": text, "n": -1.5} for text in ("=1+1", " @f", "-x\x9b", "+1", "a=b")
    ]
    tables.write_tables(tmp_path / "t.html", ["csv", "parquet"], "", [], rows)
    with (tmp_path / "t.csv").open(newline="") as file:
        read_back = list(csv.DictReader(file))
    assert [each["x ␛"] for each in read_back] == ["'=1+1", "' @f", "'-x\ufffd", "'+1", "a=b"]
    assert {(each["name"], each["value"], each["n"]) for each in read_back} == {('a,"b', "", "-1.5")}
    assert pandas.read_parquet(tmp_path / "t.parquet")["x ␛"][0] == "=1+1", "which is no spreadsheet's"


def test_two_evaluations_are_compared_and_a_regression_ends_with_exit_code_1(make, answers, tmp_path, capsys):
    def folder(name, emitted):
        own = {"none": [replace(answers["mt_bench"]["none"][0], question_id=at) for at in range(12)]}
        own["ctc"] = [
            replace(answer, drafter="ctc", turns=[replaced(answer.turns[0], emitted)]) for answer in own["none"]
        ]
        own["none"] = [replace(answer, turns=answer.turns[:1]) for answer in own["none"]]
        write_folder(tmp_path / name, make({"mt_bench": own}, name))
        return str(tmp_path / name)

    def replaced(turn, emitted):
        return replace(turn, steps=[Step(n, n - 1, 1, 4, 0, 0, (0.0, 0.1, 0.0, 0.0, 0.0)) for n in emitted])

    old, new = folder("old", [1, 4, 4]), folder("new", [1, 3, 3, 2])
    with pytest.raises(SystemExit) as caught:
        report([old, new], out=str(tmp_path / "c.html"), compare=True, format=["md", "csv"])
    assert caught.value.code == 1
    assert "| ctc | acceptance length | 12 | 4.00 | 2.67 | -33.3 % |" in (tmp_path / "c.md").read_text()
    with (tmp_path / "c.csv").open() as file:
        assert next(csv.DictReader(file))["verdict"] == "regression"
    report([new, new + "/."], compare=True)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "-33.3 %" in printed and "regression" in printed and "none found" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"folders": ["a"], "compare": True}, "--compare takes two folders"),
        ({"folders": ["a", "b"]}, "needs a name: give --out PAGE"),
        ({"folders": [".", "./."], "out": "page.html"}, "is named twice: name each folder once"),
        ({"folders": ["."], "out": __file__}, "is already there: give another name, or --overwrite"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        report(**arguments)
