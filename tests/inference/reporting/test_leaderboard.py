"""The leaderboard compares only what is comparable, escapes every text, and sorts and filters in a browser."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from inference.reporting import report
from inference.reporting.leaderboard import all_entries, comparable_sets, leaderboard, result_folders, set_names
from inference.results.folders import read
from inference.results.metrics import summarise
from inference.results.records import Answer, Turn
from inference.results.served_figures import served_name
from inference.results.served_runs import ServedRun, summarise_run
from inference.verifier.session import StepCost

BROWSER = shutil.which("chromium")
CONTEXT = {"base": "tiny", "dtype": "float32", "decoding": "greedy", "device": "cpu", "template": "tokenizer"}
ABOUT = {"mt_bench": {"prompts": "abc", "max_new_tokens": 64}}
HOSTILE = """</script><img src=x onerror=alert(1)>'"&\u202e"""


def answer(drafter, question_id, emitted):
    costs = [StepCost(n, n - 1, 1, 4 * (n > 1), 0, 0, (0.0, 0.1, 0.0, 0.0, 0.0)) for n in [1, *emitted]]
    turn = Turn("", [3] * (1 + sum(emitted)), 5, costs, 0.1 * len(costs))
    return Answer(question_id, "all", drafter, [turn], [True])


def write(folder, drafters, about=ABOUT, **changes):
    """Write results: for each drafter the tokens that its steps emit."""
    base = [answer("none", at, [1] * 9) for at in range(4)]
    summaries = {"none": summarise(base, base)}
    for name, emitted in drafters.items():
        own = summarise([answer(name, at, emitted) for at in range(4)], base)
        summaries[name] = replace(own, timing_error=0.02)
    summaries |= changes.pop("summaries", {})
    folder.mkdir()
    report.write_results(folder, {"mt_bench": summaries}, CONTEXT | changes, about)
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "one", {"slow": [2, 1, 2, 1, 2, 1], HOSTILE: [3, 3, 3]}, date="2026-11-22")
    write(folder / "two", {"fast": [5, 4]})
    write(folder / "halves", {"fast": [5, 4]}, dtype="bfloat16")
    write(folder / "capped", {"fast": [5, 4]}, {"mt_bench": {"prompts": "abc", "max_new_tokens": 32}})
    write(folder / "older", {"fast": [5, 4]}, None)
    write(folder / "older2", {"fast": [5, 4]}, None, decoding="temperature 0.7, top_k 0, top_p 1.0, seed 0")
    return folder


@pytest.fixture(scope="module")
def page_file(results, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    leaderboard([str(results)], str(path))
    return path


class Rows(HTMLParser):
    """Parser for the rows of the table, with what is hidden, and for the tags of the page."""

    def __init__(self, html):
        super().__init__()
        self.rows, self.tags = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if "data-row" in attributes:
            self.rows.append(json.loads(attributes["data-row"]) | {"hidden": "hidden" in attributes})


def sets_of(folder):
    return comparable_sets(all_entries([read(each) for each in result_folders([str(folder)])]))


def test_rows_are_comparable_only_under_equal_conditions_and_with_known_prompts(results):
    sets = sets_of(results)
    assert sorted(entry.evaluation for entry in sets[0]) == ["one", "one", "two"]
    assert sorted(own[0].evaluation for own in sets[1:]) == ["capped", "halves", "older", "older2"]
    assert [entry.summary.drafter for entry in sets[0]] == ["fast", HOSTILE, "slow"], "the fastest first"
    remarks = {own[0].evaluation: own[0].remarks for own in sets}
    assert remarks["two"] == () and remarks["older"] == ("prompts unknown",)
    assert {own[0].evaluation: own[0].temperature for own in sets}["older2"] == "0.7"


def test_a_base_is_known_by_its_files_rather_than_by_what_was_typed(tmp_path):
    write(tmp_path / "one", {"a": [5, 4]}, base="checkpoints/tiny", base_fingerprint="1" * 16)
    write(tmp_path / "two", {"b": [5, 4]}, base="/home/me/checkpoints/tiny", base_fingerprint="1" * 16)
    write(tmp_path / "trained again", {"c": [5, 4]}, base="checkpoints/tiny", base_fingerprint="2" * 16)
    sets = sets_of(tmp_path)
    assert [sorted(entry.summary.drafter for entry in own) for own in sets] == [["a", "b"], ["c"]]
    assert [own[0].conditions["base"] for own in sets] == ["checkpoints/tiny (11111111)", "checkpoints/tiny (22222222)"]


def test_length_caps_of_other_benchmarks_do_not_separate_rows(tmp_path):
    decodings = [
        "greedy",
        "greedy, at most 64 new tokens a turn",
        "greedy, at most 64 (mt_bench), 9 (x) new tokens a turn",
    ]
    for at, decoding in enumerate(decodings):
        write(tmp_path / str(at), {"ctc": [5, 4]}, decoding=decoding)
    (own,) = sets_of(tmp_path)
    assert len(own) == 3 and own[0].conditions["decoding"] == "greedy" and own[0].conditions["length cap"] == "64"


def test_what_speaks_against_a_row_is_said(tmp_path):
    base = [answer("none", at, [1] * 9) for at in range(4)]
    own = replace(summarise([answer("x", at, [3, 3, 3]) for at in range(4)], base), timing_error=0.02)
    changed = {
        "typical (lossy)": (replace(own, drafter="typical (lossy)"), "lossy"),
        "other": (replace(own, drafter="other", identical=3), "texts differ from the base's"),
        "loaded": (replace(own, drafter="loaded", timing_error=0.31), "timing ± 31 %"),
        "once": (replace(own, drafter="once", timing_error=None), "timing error unknown"),
        "old": (replace(own, drafter="old", speedup=None), "speed-up by wall time"),
        "auto": (replace(own, drafter="auto"), "automatic budget: acceptance depends on times"),
    }
    folder = write(tmp_path / "run", {}, summaries={name: s for name, (s, _) in changed.items()}, budget="yes: auto")
    found = {entry.summary.drafter: entry.remarks for entry in all_entries([read(folder)])}
    assert found == {name: (remark,) for name, (_, remark) in changed.items()}


def test_the_page_is_self_contained_and_escapes_every_text(page_file):
    html = page_file.read_text(encoding="utf-8")
    page = Rows(html)
    assert not [attrs for _, attrs in page.tags if attrs.keys() & {"src", "href", "onerror"}]
    assert [tag for tag, _ in page.tags].count("script") == 1 and "img" not in dict(page.tags)
    assert "\u202e" not in html and len(page.rows) == 7
    assert [row["hidden"] for row in page.rows] == 3 * [False] + 4 * [True], "one comparable set is shown"
    assert [row["identical"] for row in page.rows] == 7 * ["4/4"]


def test_rows_of_a_server_are_comparable_at_the_same_number_of_requests_only(tmp_path):
    def run(drafter, level, seconds):
        own = [Answer(1, "a", served_name(drafter, level), [Turn("x", [5, 6], 3, [], 1.0)], [False])]
        return ServedRun(own, seconds, None, None)

    for folder, seconds in (("one", 4.0), ("two", 2.0)):
        runs = {(drafter, level): run(drafter, level, seconds) for drafter in ("none", "ctc") for level in (1, 16)}
        served = {
            served_name(drafter, level): summarise_run(own, runs["none", level], "vLLM 0", drafter, level)
            for (drafter, level), own in runs.items()
        }
        write(tmp_path / folder, {}, summaries=served)
    sets = sets_of(tmp_path)
    assert [[entry.summary.drafter for entry in own] for own in sets] == [["ctc @ 1"] * 2, ["ctc @ 16"] * 2]
    assert [name.rpartition(", ")[2] for name in set_names([own[0] for own in sets])] == [
        "1 requests at once",
        "16 requests at once",
    ]


def test_no_two_sets_have_the_same_name(results):
    names = set_names([own[0] for own in sets_of(results)])
    assert names[0] == "mt_bench, tiny, float32, temperature 0, at most 64 tokens"
    assert len(set(names)) == len(names) == 5
    entry = sets_of(results)[0][0]
    others = [replace(entry, conditions=entry.conditions | {"prompts": own}) for own in ("abc", "def")]
    assert [name.rpartition(", ")[2] for name in set_names(others)] == ["prompts: abc", "prompts: def"]


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_a_browser_sorts_filters_and_warns_of_mixed_sets(page_file, tmp_path):
    script = """<script>
    const choose = (select, value) => { select.value = value; select.dispatchEvent(new Event("change")); };
    const filter = (name, value) => choose(document.querySelector(`[data-filter=${name}]`), value);
    const all = (selector) => [...document.querySelectorAll(selector)];
    const states = [];
    const look = () => states.push({
      rows: all("[data-row]:not([hidden])").map((row) => JSON.parse(row.dataset.row).evaluation),
      set: document.getElementById("set").value,
      options: all("#set option:not([hidden])").map((option) => option.value),
      empty: !document.getElementById("empty").hidden,
      mixed: !document.getElementById("mixed").hidden,
    });
    look();
    filter("dtype", "bfloat16"); look();
    filter("temperature", "0.7"); look();
    filter("dtype", ""); look();
    filter("temperature", ""); look();
    choose(document.getElementById("set"), "");
    document.querySelector("[data-key=fed]").click();
    document.querySelector("[data-key=fed]").click();
    filter("dtype", "float32"); look();
    const told = { id: "states", textContent: JSON.stringify(states) };
    document.body.append(Object.assign(document.createElement("pre"), told));
    </script>"""
    (tmp_path / "page.html").write_text(page_file.read_text(encoding="utf-8") + script, encoding="utf-8")
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    ran = subprocess.run([*command, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120)
    first, halves, none, warm, again, mixed = json.loads(re.search('<pre id="states">(.*?)</pre>', ran.stdout)[1])
    assert sorted(first["rows"]) == ["one", "one", "two"] and first["set"] == "1" and len(first["options"]) == 6
    assert halves["rows"] == ["halves"] and halves["options"] == [halves["set"], ""], "the filter chooses its set"
    assert none["rows"] == [] and none["empty"] and not any(each["empty"] for each in (first, halves, warm, again))
    assert warm["rows"] == ["older2"] == again["rows"] and len(again["options"]) == 6
    assert not any(each["mixed"] for each in (first, halves, none, warm, again))
    assert mixed["mixed"] and len(mixed["rows"]) == 6
    page = Rows(ran.stdout)
    fed = [row["fed"] for row in page.rows]
    assert fed == sorted(fed) and fed[0] < fed[-1]
    assert [row["hidden"] for row in page.rows] == [row["dtype"] != "float32" for row in page.rows]
    assert ran.stdout.count("<circle") == 6


def test_folders_without_results_or_drafters_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no results\.json"):
        leaderboard([str(tmp_path)], str(tmp_path / "page.html"))
    write(tmp_path / "alone", {})
    with pytest.raises(ValueError, match="no drafter besides the base alone"):
        leaderboard([str(tmp_path)], str(tmp_path / "page.html"))
