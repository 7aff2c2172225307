"""Tables and the HTML report: their contents, combined folders, and escaping of the model's text."""

import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from inference.reporting import answer_viewer, plots, report, tables
from inference.reporting.headline import Speed, headline, measured_speeds
from inference.results import folders, records
from inference.results.metrics import summarise
from inference.results.records import Answer, Turn
from inference.verifier.session import StepCost

BROWSER = shutil.which("chromium")
WORDS = ["The", " cat", " <script>alert(1)</script>", "\n sat", " & on", " a", " mat", ".", "</s>"]
TEXT = "".join(WORDS)
STEPS = {"none": [1] * 9, "ctc": [1, 4, 3, 1], "ngram": [1, 2, 2, 2, 2]}  # emitted tokens of each step
CONTEXT = {"base": "tiny|chat", "command line": "drafters eval <x>"}


def decode(token_ids):
    return "".join(WORDS[token] for token in token_ids)


def answer(drafter, question_id, category, token_ids=tuple(range(9))):
    costs = [StepCost(n, n - 1, 1, 4, 0, 0, (0.001, 0.1, 0.001, 0.001, 0.001)) for n in STEPS[drafter]]
    turn = Turn(decode(token_ids).removesuffix("</s>"), list(token_ids), 5, costs, 0.11 * len(costs))
    return Answer(question_id, category, drafter, [turn, turn], [True, True])


def two_benchmarks():
    """Answers to two benchmarks; in the second, ngram writes a different fourth token."""
    given = {
        name: {drafter: [answer(drafter, q, f"kind {q % 2}") for q in range(1, 5)] for drafter in STEPS}
        for name in ("mt_bench", "gsm8k")
    }
    given["gsm8k"]["ngram"][2] = answer("ngram", 3, "kind 1", (0, 1, 2, 5, 4, 5, 6, 7, 8))
    return given


def summarised(answers):
    return {name: {drafter: summarise(of[drafter], of["none"]) for drafter in of} for name, of in answers.items()}


@pytest.fixture
def answers():
    return two_benchmarks()


@pytest.fixture
def summaries(answers):
    return summarised(answers)


class Page(HTMLParser):
    """Parser for the tags of a page and the text of each answer as a browser shows it."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.answers, self.options, self.depth, self.is_option = [], [], [], 0, False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.is_option = tag == "option"
        self.tags.append((tag, attributes))
        if attributes.get("class") == "text":
            self.answers.append("")
            self.depth = 1
        elif self.depth:
            self.depth += 1

    def handle_endtag(self, tag):
        self.depth = max(0, self.depth - 1)
        self.is_option = False

    def handle_data(self, data):
        if self.depth:
            self.answers[-1] += data
        elif self.is_option and data.strip():
            self.options.append(data)

    @property
    def scripts(self):
        return [tag for tag, _ in self.tags].count("script")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    answers = two_benchmarks()
    return report.write_report(tmp_path_factory.mktemp("page"), summarised(answers), CONTEXT, answers, decode)


@pytest.fixture(scope="module")
def page(page_file):
    return Page(page_file.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_page_is_self_contained(page):
    links = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "srcset", "href")]
    assert len(links) == 2 * 2 * 5  # benchmarks, themes, plots
    assert all(link.startswith("data:image/png;base64,") for link in links)
    assert not {"link", "iframe"} & {tag for tag, _ in page.tags}
    assert page.scripts == 1 and not any(attrs for tag, attrs in page.tags if tag == "script")


def test_the_steps_join_to_the_full_escaped_answer(page):
    other = decode((0, 1, 2, 5, 4, 5, 6, 7, 8))
    assert page.answers[:16] == [TEXT] * 2 * 8  # turns of eight answers of ctc; <script> is text here, not a tag
    assert sorted(page.answers[16:]) == sorted([TEXT] * 2 * 7 + [other] * 2)  # and of ngram


def test_the_menu_lists_all_drafters_and_the_fastest_is_shown_first(page):
    assert page.options == ["ctc", "ngram"]
    blocks = [attrs for tag, attrs in page.tags if "data-drafter" in attrs]
    assert [(attrs["data-drafter"], "hidden" in attrs) for attrs in blocks] == [("ctc", False), ("ngram", True)]


@pytest.mark.slow
def test_the_page_shows_the_same_few_questions_for_each_of_many_drafters(answers):
    own = answers["mt_bench"]
    many = {f"ctc {index}": [replace(a, drafter=f"ctc {index}") for a in own["ctc"]] for index in range(20)}
    told = {"mt_bench": {"none": own["none"], **many}}
    told["gsm8k"] = {name: [replace(a, question_id=a.question_id + 10) for a in of] for name, of in many.items()}
    found = summarised({"mt_bench": told["mt_bench"]})
    for count in (1, 3, 20):
        few = {benchmark: dict(list(of.items())[: count + 1]) for benchmark, of in told.items()}
        few["gsm8k"] = {name: few["gsm8k"][name] for name in few["mt_bench"] if name != "none"}
        chosen = answer_viewer.choose_answers(found, few, decode)
        shown = [[(each["benchmark"], each["answer"].question_id) for each in one["shown"]] for one in chosen]
        assert len(chosen) == count and all(each == shown[0] for each in shown)
        assert shown[0][:2] == [("mt_bench", 1), ("gsm8k", 11)], "benchmarks take turns"
        assert sum(map(len, shown)) <= answer_viewer.MAX_SHOWN_ANSWERS and len(shown[0]) == {1: 8, 3: 8, 20: 2}[count]
        assert {one["num_answers"] for one in chosen} == {8}


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_a_browser_shows_the_chosen_drafter_and_the_questions_that_were_unfolded(page_file, tmp_path):
    chosen = """<script>
    document.querySelectorAll("[data-drafter=ctc] details")[2].open = true;
    const select = document.querySelector("select");
    select.value = "ngram";
    select.dispatchEvent(new Event("change"));
    </script>"""
    (tmp_path / "page.html").write_text(page_file.read_text(encoding="utf-8") + chosen, encoding="utf-8")
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    ran = subprocess.run([*command, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120)
    shown = Page(ran.stdout)
    blocks = {attrs["data-drafter"]: "hidden" in attrs for _, attrs in shown.tags if "data-drafter" in attrs}
    assert blocks == {"ctc": True, "ngram": False}
    unfolded = ["open" in attrs for tag, attrs in shown.tags if tag == "details"]
    assert unfolded == 2 * [True, False, True, *[False] * 5]


def test_the_plots_are_also_written_as_files(page_file):
    drawn = sorted((page_file.parent / "plots").iterdir())
    assert [path.name for path in drawn] == [
        f"{name}-{plot}.png"
        for name in ("gsm8k", "mt_bench")
        for plot in ("acceptance", "categories", "depths", "phases", "speedup")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_a_step_distinguishes_accepted_tokens_from_the_bonus_token():
    spans = answer_viewer.step_spans(answer("ctc", 1, "math").turns[0], decode)
    assert [(span.accepted, span.bonus) for span in spans] == [
        ("", "The"),
        (" cat <script>alert(1)</script>\n sat", " & on"),
        (" a mat", "."),
        ("", "</s>"),
    ]


def test_a_character_of_several_tokens_stays_in_one_step():
    whole = "né日本".encode()
    steps = [
        StepCost(1, 0, 1, 0, 0, 0, (0.0,) * 5),
        StepCost(3, 2, 1, 4, 0, 0, (0.0,) * 5),
        StepCost(5, 5, 1, 5, 0, 0, (0.0,) * 5),
    ]
    turn = Turn("", list(whole), 1, steps, 1.0)
    spans = answer_viewer.step_spans(turn, lambda token_ids: bytes(token_ids).decode("utf-8", errors="replace"))
    assert [(span.accepted, span.bonus) for span in spans] == [("", "n"), ("é", ""), ("日本", "")]


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_tables_fit_and_mark_drafters_that_are_not_lossless(summaries, width):
    console = Console(width=width, record=True, file=io.StringIO())
    for part in report.table(summaries):
        console.print(part)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"ctc +2\.67 +2\.25× +2\.25× +20\.5 +5\.0 +100 % \(4/4\)", text)
    assert re.search(r"ngram .* 75 % \(3/4\) †", text)
    assert "question 3, turn 1, after 3 equal tokens" in " ".join(text.split())


def test_the_headline_names_the_fastest_drafter(summaries):
    expected = "ctc writes the same text as the base, 2.3x faster, 2.7 tokens per base forward, over"
    assert report.markdown({"mt_bench": summaries["mt_bench"]}, {}).startswith(f"**{expected} 4 questions.**")
    assert report.markdown(summaries, {}).startswith(f"**{expected} 8 questions of 2 benchmarks (geometric means).**")


def test_the_headline_mentions_differing_text_and_lower_speed(summaries):
    of = summaries["gsm8k"]
    text = report.markdown({"gsm8k": {"none": of["none"], "ngram": of["ngram"]}}, {})
    assert text.startswith("**ngram writes in 3 of 4 answers the same text as the base, 1.8x faster")
    assert report.markdown({"gsm8k": {"none": of["none"]}}, {}).startswith(
        "**Only none was run: 9.1 tokens per second."
    )


def test_the_headline_names_no_drafter_whose_interval_overlaps_the_next_ones(summaries):
    of = summaries["mt_bench"]

    def said(**intervals):
        changed = {name: replace(of[name], speedup_interval=bounds) for name, bounds in intervals.items()}
        return headline({"mt_bench": of | changed})

    assert said(ctc=(2.0, 2.5), ngram=(1.6, 1.9)).startswith("ctc writes the same text as the base, 2.3x faster")
    assert said(ctc=(1.9, 2.5), ngram=(1.6, 2.0)) == (
        "ctc and ngram are not apart: they write the same text as the base, at 2.25x (1.90 to 2.50) and 1.80x (1.60 to "
        "2.00) its speed, 2.7 and 2.0 tokens per base forward, over 4 questions."
    )
    assert said(ctc=(2.0, 2.5), ngram=None).startswith("ctc and ngram are not apart"), "one interval is unknown"
    third = {"third": replace(of["ngram"], drafter="third", speedup=2.2, speedup_interval=(2.1, 2.2))}
    assert headline({"mt_bench": of | third}).startswith("ctc writes")
    third["third"] = replace(third["third"], speedup_interval=(2.1, 2.4))
    assert headline({"mt_bench": of | third}).startswith("ctc and third are not apart"), "ngram is apart from both"


def test_the_speed_over_benchmarks_has_the_interval_of_a_mean_of_independent_logarithms(summaries):
    ctc = summaries["mt_bench"]["ctc"]
    four = {str(at): {"ctc": replace(ctc, speedup=2.0, speedup_interval=(1.0, 4.0))} for at in range(4)}
    assert measured_speeds(four)["ctc"] == Speed(2.0, (pytest.approx(2**0.5), pytest.approx(2**1.5)))


def test_markdown_has_the_same_rows_and_the_context(summaries):
    text = report.markdown(summaries, CONTEXT)
    speeds = "**2.25×** | – | **2.25×** | 0.0 % | **20.5**"
    assert f"| ctc | **2.67** | **2.67** | **2.67** | **2.25** | {speeds} | 5.0 | 100 % (4/4) |" in text
    assert "| kind 1 | **2.67 2.25×** | 2.00 " in text
    assert "- base: tiny\\|chat\n- command line: drafters eval \\<x\\>\n" in text
    assert f"- counting: {tables.COUNTING_RULE}" in text
    assert tables.COUNTING_RULE.startswith("Acceptance length = emitted tokens / base forwards, prefill excluded,")
    assert tables.COUNTING_RULE.endswith("(micro average).")


def test_results_json_contains_every_number(tmp_path, summaries):
    folders = json.loads(report.write_results(tmp_path, summaries, CONTEXT).read_text(encoding="utf-8"))
    assert folders["context"]["base"] == "tiny|chat"
    assert folders["results"]["mt_bench"]["ctc"]["acceptance_length"] == pytest.approx(8 / 3)
    assert folders["results"]["gsm8k"]["ngram"]["first_divergence"] == [3, 0, 3]


def test_empty_columns_are_left_out_and_intervals_are_below_their_numbers(summaries):
    of = summaries["mt_bench"]
    headings, _ = tables.drafter_rows(of)
    assert "peak MiB" not in headings and "draft forwards/step" not in headings
    of["ctc"] = replace(of["ctc"], peak_bytes=3 * 2**20, acceptance_interval=(2.5, 2.75), speedup_interval=(2.0, 2.5))
    of["ctc"] = replace(of["ctc"], cpu_seconds=9.0, core_share=0.5)
    headings, rows = tables.drafter_rows(of)
    cells = dict(zip(headings, rows[1].cells, strict=True))
    assert cells["peak MiB"] == "3" and cells["acceptance length"] == "2.67"
    assert {headings[at]: told for at, told in rows[1].small.items()} == {
        "acceptance length": "2.50 – 2.75",
        "speed-up": "2.00 – 2.50",
        "CPU ms/token": "wall/CPU 2.00",
    }
    assert cells["CPU ms/token"] == "125.00"
    assert "| **2.67** (2.50 – 2.75) |" in report.markdown(summaries, {})
    assert tables.legend(headings, rows).startswith("Small: 95 % intervals")


@pytest.mark.slow
def test_answers_cut_at_the_length_cap_are_counted(answers, tmp_path):
    def page():
        graded = {"gsm8k": answers["gsm8k"]}
        found = summarised(graded)["gsm8k"]
        of = {name: replace(summary, quality={"exact match": 12.5}) for name, summary in found.items()}
        context = {"decoding": "greedy", "length cap": "9 new tokens a turn"}
        path = report.write_report(tmp_path, {"gsm8k": of}, context, graded, decode)
        return path.read_text(encoding="utf-8")

    assert "<small>8 of 8</small>" in page() and "were cut" not in page()
    answers["gsm8k"]["ctc"][:3] = [replace(own, ended=[False, True]) for own in answers["gsm8k"]["ctc"][:3]]
    cut = page()
    assert cut.count("<small>5 of 8</small>") == 1 and "Ended by EOS: over the turns that ended" in cut
    assert cut.count("25 % of the graded answers were cut at the length cap of 9 tokens and graded") == 1


def save_tokenizer(folder, words):
    model = WordLevel({word: index for index, word in enumerate(words)}, unk_token="</s>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    return str(folder)


def test_task_quality_is_in_markdown_and_in_the_terminal(summaries):
    of = summaries["mt_bench"]
    assert tables.quality_rows(of)[1] == [], "nothing was scored"
    summaries["mt_bench"] = {name: replace(summary, quality={"exact match": 12.5}) for name, summary in of.items()}
    assert "Task quality, %:\n\n| drafter | exact match |\n| --- | ---: |\n| none | 12.50 |" in report.markdown(
        summaries, {}
    )
    console = Console(width=80, record=True, file=io.StringIO())
    for part in report.table(summaries):
        console.print(part)
    assert re.search(r"mt_bench, task quality, %\n.*\n.*\n.*\nnone +12\.50", console.export_text())


@pytest.fixture
def make_folder(tmp_path, answers):
    """Write the folder of `drafters eval --out` for some of the drafters of one benchmark."""

    def make(name, drafters=("ctc", "ngram"), benchmark="mt_bench", **context):
        folder, given = tmp_path / name, answers[benchmark]
        found = {drafter: summarise(given[drafter], given["none"]) for drafter in ("none", *drafters)}
        told = {"base": "tiny", "decoding": "greedy, at most 9", "command": f"drafters eval --out {name}"} | context
        report.write_results(folder, {benchmark: found}, told)
        for drafter in found:
            records.write(folder / "answers" / benchmark / f"{drafter}.jsonl", given[drafter])
        return str(folder)

    return make


def test_a_folder_is_read_back_as_it_was_written(make_folder, answers, summaries):
    run = folders.read(make_folder("one"))
    assert run.summaries == {"mt_bench": summaries["mt_bench"]}
    assert run.answers == {"mt_bench": answers["mt_bench"]}


def test_results_of_an_older_version_are_read_too(make_folder):
    folder = Path(make_folder("old"))
    told = json.loads((folder / "results.json").read_text())
    for summary in told["results"]["mt_bench"].values():
        del summary["noise"], summary["speedup_interval"], summary["quality"]
        for new in ("timing_error", "wall_speedup", "wall_speedup_interval", "typical_seconds", "cpu_seconds"):
            del summary[new]
        for category in summary["by_category"].values():
            del category["wall_speedup"]
    (folder / "results.json").write_text(json.dumps(told))
    found = folders.read(folder).summaries["mt_bench"]
    summary = found["ctc"]
    assert summary.speedup is None and summary.wall_speedup == pytest.approx(2.25), "it was one of wall times"
    assert summary.timing_error is summary.cpu_seconds is summary.by_category["kind 1"].speedup is None
    headings, _ = tables.drafter_rows(found)
    assert "wall speed-up" in headings and not {"speed-up", "timing error", "CPU ms/token"} & set(headings)
    # The interval was not written, so nothing shows that ctc is faster than ngram.
    assert headline({"mt_bench": found}) == (
        "ctc and ngram are not apart: they write the same text as the base, at 2.25x and 1.80x its speed, 2.7 and 2.0 "
        "tokens per base forward, over 4 questions, by wall time."
    )
    assert (
        summary.noise is None
        and summary.speedup_interval is None
        and summary.quality == {}
        and summary.acceptance_length > 2
    )


def test_folders_of_the_same_conditions_share_a_table_and_keep_their_own_ratios(make_folder):
    (run,) = folders.read_all([make_folder("a", ["ctc"]), make_folder("b", ["ctc", "ngram"])])
    assert list(run.summaries["mt_bench"]) == ["none", "ctc", "none (b)", "ctc (b)", "ngram"]
    baselines = {name: summary.baseline for name, summary in run.summaries["mt_bench"].items()}
    assert baselines == {
        "none": "none",
        "ctc": "none",
        "none (b)": "none (b)",
        "ctc (b)": "none (b)",
        "ngram": "none (b)",
    }
    assert [s.is_baseline for s in run.summaries["mt_bench"].values()] == [True, False, True, False, False]
    assert {own[0].drafter for own in run.answers["mt_bench"].values()} == set(run.summaries["mt_bench"])
    assert run.context == {
        "base": "tiny",
        "decoding": "greedy, at most 9",
        "a, command": "drafters eval --out a",
        "b, command": "drafters eval --out b",
        "counting": tables.COUNTING_RULE,
    }


def test_drafters_of_several_weights_are_named_by_their_folders(make_folder):
    a = make_folder("a", ["ctc"], command="drafters eval --drafter ctc=weights/a --out a")
    b = make_folder("b", ["ctc", "ngram"], command="drafters eval --drafter ctc=weights/b --drafter ngram --out b")
    (run,) = folders.read_all([a, b])
    assert list(run.summaries["mt_bench"]) == ["none", "ctc=weights/a", "none (b)", "ctc=weights/b", "ngram"]


def test_other_length_caps_bases_and_budgets_are_not_merged(make_folder):
    run = folders.read(make_folder("a", ["ctc"], benchmark="gsm8k", decoding="greedy, at most 9 new tokens a turn"))
    (context,) = run.contexts.values()

    def is_mergeable(ours=(), **changes):
        first, other = ({"": context | dict(own)} for own in (ours, changes))
        return folders.is_comparable(replace(run, contexts=first), replace(run, contexts=other))

    assert run.conditions["decoding"] == "greedy" and run.length_cap("gsm8k") == 9
    assert is_mergeable(**{"length cap": "9 (gsm8k), 99 (mt_bench) new tokens a turn"})
    assert not is_mergeable(**{"length cap": "99 new tokens a turn"})
    assert is_mergeable({"base_fingerprint": "a1"}, base="./tiny", base_fingerprint="a1")
    assert not is_mergeable({"base_fingerprint": "a1"}, base_fingerprint="b2")
    assert not is_mergeable(budget="automatic, so acceptance depends on times: ctc")
    assert is_mergeable(budget="automatic, so acceptance depends on times: another")


@pytest.mark.parametrize("other", [{"base": "large"}, {"decoding": "greedy, at most 99"}, {"device": "cuda"}])
def test_other_bases_caps_and_machines_never_share_a_ratio(make_folder, other):
    runs = folders.read_all([make_folder("a"), make_folder("b", **other), make_folder("c")])
    assert [run.name for run in runs] == ["a, c", "b"]


def test_other_questions_or_another_baseline_text_never_share_a_ratio(make_folder, answers):
    first = make_folder("a")
    answers["mt_bench"] = {drafter: own[:3] for drafter, own in answers["mt_bench"].items()}
    assert len(folders.read_all([first, make_folder("b")])) == 2
    assert len(folders.read_all([first, make_folder("c", benchmark="gsm8k")])) == 1, (
        "another benchmark is not a conflict"
    )


@pytest.mark.slow
def test_the_page_of_several_folders_is_self_contained(make_folder, tmp_path, capsys):
    folders = [make_folder("a"), make_folder("b", base="large", warnings="the machine was busy"), make_folder("c")]
    report.report(folders, out=str(tmp_path / "page"))
    html = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    links = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "srcset", "href")]
    assert all(link.startswith(("data:image/png;base64,", "#part-")) for link in links)
    assert not {"link", "iframe"} & {tag for tag, _ in page.tags} and page.scripts == 1
    assert {attrs.get("id") for tag, attrs in page.tags if tag == "article"} == {"part-1", "part-2"}
    told = re.findall("<tr><th>(.*?)</th>(.*?)</tr>", html.partition(">What was run<")[2], re.DOTALL)
    told = {key: re.findall(r"<td(?: colspan=\"(\d)\")?>(.*?)</td>", cells) for key, cells in told}
    assert told["decoding"] == [("3", "greedy, at most 9")], "shared values appear once"
    assert told["base"] == [("", "tiny"), ("", "tiny"), ("", "large")], "a column for each folder: a, c, b"
    assert told["warnings"] == [("", "–"), ("", "–"), ("", "the machine was busy")]
    assert "2 evaluations side by side" in html and '<p class="note">Warning: the machine was busy.</p>' in html
    assert "Warning: the machine was busy." in capsys.readouterr().out
    markdown = (tmp_path / "page" / "results.md").read_text(encoding="utf-8")
    assert markdown.count("# a, c\n") == markdown.count("# b\n") == 1
    assert (tmp_path / "page" / "plots" / "2-mt_bench-speedup.png").is_file()


@pytest.mark.slow
def test_without_the_tokenizer_answers_are_shown_in_one_piece(make_folder, tmp_path, capsys):
    folder = make_folder("a", base="nowhere/at/all")
    report.report([folder])
    html = (Path(folder) / "report.html").read_text(encoding="utf-8")
    assert Page(html).answers == [TEXT.removesuffix("</s>")] * 2 * 2 * 4
    assert "drafters report --tokenizer FOLDER" in html


def test_the_tokenizer_of_the_base_splits_the_answers_into_steps(make_folder, tmp_path):
    own, others = save_tokenizer(tmp_path / "base", WORDS), save_tokenizer(tmp_path / "other", WORDS[::-1])
    run = folders.read(make_folder("a", base=own))
    turn = run.answers["mt_bench"]["ctc"][0].turns[0]
    assert answer_viewer.step_spans(turn, report.decoder(run)) == answer_viewer.step_spans(turn, decode)
    assert report.decoder(run, others) is None, "its words are not the recorded ones"
    with pytest.raises(ValueError, match="no base at"):
        report.decoder(run, "./nowhere")


@pytest.mark.slow
def test_budget_curves_join_specs_that_differ_in_their_budget_only(summaries):
    ctc = summaries["mt_bench"]["ctc"]
    named = {
        name: replace(ctc, drafter=name, fed_per_step=fed)
        for name, fed in {
            "ctc": 5.0,
            "ctc:num_nodes=8": 9.0,
            "ctc:num_nodes=8 (b)": 9.5,
            "ctc=other:num_nodes=8": 9.0,
            "joint:order=3,num_nodes=4": 3.0,
            "joint:num_nodes=8,order=3": 6.0,
            "joint:num_nodes=8": 6.0,
        }.items()
    }
    assert plots.budgets(named) == {
        "ctc": ["ctc", "ctc:num_nodes=8", "ctc:num_nodes=8 (b)"],
        "joint:order=3": ["joint:order=3,num_nodes=4", "joint:num_nodes=8,order=3"],
    }
    assert "budget" in plots.applicable(named) and "budget" not in plots.applicable(summaries["mt_bench"])
    assert plots.draw("budget", named, plots.choose_colours(named.values()))["dark"].startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("plot", ["speedup", "depths"])
def test_the_plot_for_a_dark_page_is_the_one_that_its_style_draws(summaries, plot):
    of = summaries["mt_bench"]
    colours, png = plots.choose_colours(of.values()), io.BytesIO()
    with matplotlib.rc_context(plots._style("dark")):
        plots.PLOTS[plot](of, colours).savefig(png, format="png")
    assert plots.draw(plot, of, colours)["dark"] == png.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(("shares", "top"), [([0.0], 10), ([0.31, 0.05], 40), ([0.4], 40), ([1.0, 0.9], 100)])
def test_the_axis_of_depths_ends_with_the_data(summaries, shares, top):
    summaries = {"ctc": replace(summaries["mt_bench"]["ctc"], acceptance_by_depth=shares)}
    figure = plots.plot_depths(summaries, plots.choose_colours(summaries.values()))
    assert figure.axes[0].get_ylim() == (0, top)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (None, "holds no results.json: give a folder that `drafters eval --out` wrote"),
        ("{", "results.json line 1: invalid JSON"),
        ("[]", "was not written by `drafters eval --out` (TypeError"),
        ('{"context": {}, "results": {}}', "was not written by `drafters eval --out` (ValueError: no results)"),
        ('{"context": {}, "results": {"anpd": {"turns": 3}}}', "was not written by `drafters eval --out` (TypeError"),
    ],
)
def test_a_folder_without_results_is_refused_in_one_line(tmp_path, told, said):
    if told is not None:
        (tmp_path / "results.json").write_text(told)
    with pytest.raises(ValueError) as error:
        report.report([str(tmp_path)])
    assert said in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_results_that_name_another_drafter_than_their_key_are_refused(make_folder):
    path = Path(make_folder("a")) / "results.json"
    content = json.loads(path.read_text())
    next(iter(content["results"].values()))["ctc"]["drafter"] = "another"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"results.json was not written by .* name the drafters .*another"):
        report.report([str(path.parent)])


def test_several_folders_need_an_output_folder(make_folder, tmp_path):
    folders = [make_folder("a"), make_folder("b")]
    with pytest.raises(ValueError, match="needs a folder of its own: give --out FOLDER"):
        report.report(folders)
    with pytest.raises(ValueError, match="is named twice: name each folder once"):
        report.report([folders[0], folders[0]], out=str(tmp_path / "page"))
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "report.html").write_text("mine")
    with pytest.raises(ValueError, match="is already there: give another --out, or --overwrite"):
        report.report(folders, out=str(tmp_path / "page"))


@pytest.mark.slow
def test_control_characters_and_halves_of_a_pair_change_neither_the_page_nor_the_tables(tmp_path):
    (tmp_path / "report.html").write_text("an earlier page")
    hostile = "x\ud83d\x1b[2J\x9b\u202e|\ry"
    answers = {
        benchmark: {name: [replace(each, category=hostile) for each in own] for name, own in by_drafter.items()}
        for benchmark, by_drafter in two_benchmarks().items()
    }
    context = CONTEXT | {"base": hostile}
    page = report.write_report(tmp_path, summarised(answers), context, answers, decode).read_text(encoding="utf-8")
    results = report.write_results(tmp_path, summarised(answers), context)
    text = report.markdown(summarised(answers), context)
    text.encode("utf-8")
    for shown in (page, text):
        assert "x�␛" in shown and not any(mark in shown for mark in ("\x1b", "\x9b", "\u202e", "\r"))
    assert json.loads(results.read_text(encoding="utf-8"))["context"]["base"] == hostile
