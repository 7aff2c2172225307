"""The rows and prompts of the benchmarks: small files of each form, the columns of the hub, and the real files."""

import json
import re

import datasets
import huggingface_hub
import pyarrow
import pytest
from pyarrow import parquet

from data.benchmarks import BENCHMARKS, Question, find_benchmark, load_questions
from data.benchmarks.question import Checks
from inference.options import QuestionOptions

MT_BENCH = [{"question_id": 81 + n, "category": "writing", "turns": [f"Ask {n}", "Again"]} for n in range(4)]
GSM8K = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]
HUMANEVAL = [
    {
        "task_id": f"HumanEval/{n}",
        "prompt": f'def add{n}(a):\n    """Add {n}."""\n',
        "entry_point": f"add{n}",
        "canonical_solution": f"    return a + {n}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {1 + n}\n",
    }
    for n in range(2)
]
MBPP = [
    {"task_id": n, "text": f"Return {n}.", "code": f"def f():\r\n    return {n}", "test_list": [f"assert f() == {n}"]}
    for n in (1, 2, 3, 10, 11, 510, 511, 600, 601)
]
PLUS = [row | {"prompt": row.pop("text"), "test": "assert f() == 0 or True"} for row in map(dict, MBPP)]
PROBLEMS = [{"problem": f"Find $x_{n}$.", "answer": f"\\frac{{{n}}}{{9}}", "subject": "Algebra"} for n in range(3)]
INSTRUCTIONS = [{"instruction": f"Sort list {n}.", "input": "3 1 2" * (n % 2), "output": "1 2 3"} for n in range(3)]
SPEED = [{"question_id": f"{n:032x}", "category": "rag", "turns": [f"Read {n}", "More"]} for n in range(3)]
CONTESTS = [
    {"question_content": f"Add {n}.", "starter_code": "def f():" * (n % 2), "difficulty": "easy"} for n in range(3)
]
NEWS = [{"article": f"Story {n}. " * 3, "highlights": f"It is {n}.", "id": str(n)} for n in range(3)]
XSUM = [{"document": f"Story {n}.", "summary": f"It is {n}.", "id": str(n)} for n in range(3)]
PAIRS = [{"translation": {"de": f"Satz {n}", "en": f"Sentence {n}"}} for n in range(3)]


# A file of each benchmark, and the text of its row 1.
ROWS = {"mt_bench": MT_BENCH, "spec_bench": MT_BENCH, "arena_hard": MT_BENCH, "file": MT_BENCH, "embedded": MT_BENCH}
ROWS |= {"gsm8k": GSM8K, "humaneval": HUMANEVAL, "humaneval_plus": HUMANEVAL, "mbpp_plus": PLUS, "wmt16": PAIRS}
ROWS |= {"mbpp": MBPP, "mbpp_validation": MBPP, "cnn_dm": NEWS, "xsum": XSUM, "alpaca": INSTRUCTIONS}
ROWS |= {"alpaca_eval": [{"instruction": f"What is {n}?", "dataset": "vicuna", "output": "no"} for n in range(3)]}
ROWS |= {"livecodebench": CONTESTS} | {name: SPEED for name in BENCHMARKS if "speed" in name}
ROWS |= {name: PROBLEMS for name in BENCHMARKS if name.startswith(("math", "aime"))}


@pytest.fixture
def write(tmp_path):
    def write(rows, name="questions.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("name", "rows", "reason"),
    [
        ("mt_bench", [MT_BENCH[0], "{"], "line 2: invalid JSON"),
        ("mt_bench", [{**MT_BENCH[0], "question_id": float("inf")}], "line 1: not a question of mt_bench"),
        ("mt_bench", [MT_BENCH[0], GSM8K[0]], r"line 2: not a question of mt_bench, expected the fields question_id"),
        ("gsm8k", [*GSM8K, MT_BENCH[0]], "line 5: not a question of gsm8k, expected the fields question, answer"),
        ("gsm8k", [], "the file is empty"),
        ("humaneval", [HUMANEVAL[0], MBPP[0]], "line 2: not a question of humaneval, expected the fields task_id"),
        ("mbpp", [MBPP[0]], "holds no question of mbpp: give another file"),
        ("cnn_dm", [{"docs": [], "result": {"text": "a"}}], "line 1: not a question of cnn_dm"),
        ("aime25", [{"problem": "a", "answer": True}], "line 1.*answer is neither a text nor an integer"),
        ("file", [{"turns": ["a"]}, {"turns": [{"content": 5}]}], "line 2.*content is not a text"),
        ("file", [{"turns": [{"content": None}]}], "line 1.*content is not a text"),
        ("file", [{"turns": [{"role": "user"}]}], "line 1.*no 'content'"),
        ("file", [[{"role": "user"}]], "line 1.*a list instead of an object"),
        ("file", ["null"], "line 1.*a NoneType instead of an object"),
        ("file", [{"turns": [{"role": "assistant", "content": "a"}]}], "line 1.*not a list of texts of the user"),
        *(
            (name, [{**MT_BENCH[0], "turns": turns}], "line 1: not a question of .*turns is not a list")
            for name in ("file", "mt_bench", "spec_bench", "speed_bench", "alpaca")
            for turns in (["a", None], None, [["a"]])
        ),
        *(
            (name, [row | {key: value}], r"line 1: .*half of a character")
            for name, row, key, value in (
                ("file", MT_BENCH[0], "turns", ["Smile \ud83d"]),
                ("file", MT_BENCH[0], "system", "\ud83d"),
                ("file", MT_BENCH[0], "tools", [{"name": "a\ud83d"}]),
                ("mt_bench", MT_BENCH[0], "category", "\ud83d"),
                ("gsm8k", GSM8K[0], "answer", "\ud83d 5"),
                ("humaneval", HUMANEVAL[0], "prompt", "\ud83d"),
            )
        ),
        ("file", [MT_BENCH[0], MT_BENCH[0]], "line 2: the question_id 81 is there twice"),
        (
            "speed_bench",
            [SPEED[0] | {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]}],
            "line 1.*has to be fetched first",
        ),
    ],
)
def test_a_malformed_file_is_named_with_its_line(write, name, rows, reason):
    with pytest.raises(ValueError, match=reason):
        load_questions(name, write(rows))


def test_an_unknown_benchmark_and_a_missing_file_are_named(tmp_path):
    with pytest.raises(ValueError, match=f"'mtbench'; choose one of: {', '.join(BENCHMARKS)}"):
        load_questions("mtbench")
    with pytest.raises(ValueError, match="no such file"):
        load_questions("gsm8k", str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match=r"spec_bench has no copy on the hub; download .*question\.jsonl"):
        load_questions("spec_bench")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Serves rows as the hub does; returns what it was asked for: the name, the configuration and the options."""
    rows, asked = [], []

    def load_dataset(name, configuration, **options):
        asked.append((name, configuration, options))
        return datasets.Dataset.from_list(rows)

    def hf_hub_download(name, file, **options):
        asked.append((name, file, options))
        lines = "\n".join(map(json.dumps, rows))
        (tmp_path / file).write_text(json.dumps(rows) if file.endswith(".json") else lines)
        return str(tmp_path / file)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    return rows, asked


@pytest.mark.parametrize("name", [name for name, each in BENCHMARKS.items() if (each.source or "").startswith("hub:")])
def test_the_columns_of_the_hub_are_read_at_a_fixed_revision(hub, monkeypatch, write, name):
    rows, asked = hub
    rows += ROWS[name]
    if name == "mt_bench":
        rows[:] = [{"prompt": ["a", "b"], "category": "math", "prompt_id": 7, "reference": []}]
        assert load_questions(name) == [Question(7, "math", ("a", "b"), None)]
    else:
        assert load_questions(name) == load_questions(name, write(rows))
    (repository, _, options), benchmark = asked[0], find_benchmark(name)[0]
    assert benchmark.source.startswith(f"hub:{repository}@{options['revision']}")
    # xsum stands on the branch that the hub converts to Parquet, which has no commit of its own to rely on
    assert re.fullmatch("[0-9a-f]{40}", options["revision"]) or name == "xsum"

    def unreachable(*arguments, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(ValueError, match=rf"{repository}.*\(no network\).*; or download .* and give that file"):
        load_questions(name)


def test_few_shot_examples_come_from_the_train_split_on_the_hub(hub):
    rows, asked = hub
    rows += NEWS
    shown = f"Article: {NEWS[0]['article']}\nSummary: It is 0.\nArticle: {NEWS[0]['article']}\nSummary:"
    assert load_questions("cnn_dm:shot")[0].turns == (shown,)
    assert [options["split"] for _, _, options in asked] == ["test", "train"]
    assert [configuration for _, configuration, _ in asked] == ["3.0.0", "3.0.0"]


def test_a_parquet_file_has_the_same_questions_as_a_jsonl_file(write, tmp_path):
    rows = [*SPEED, SPEED[0] | {"question_id": "x", "category": None, "turns": ["a", "b"]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    questions = load_questions("speed_bench", str(tmp_path / "test.parquet"))
    assert questions == load_questions("speed_bench", write(rows)) and questions[-1].category == "no category"


def test_mathematics_is_asked_with_a_box_whether_or_not_the_file_contains_the_request(write):
    request = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    rows = [{"prompt": f"Find $x$.{request}", "answer": 27}, {"prompt": "Find $y$.", "answer": "3"}]
    for name, end in (("aime24", request), ("aime24:plain", "")):
        questions = load_questions(name, write(rows))
        assert [question.turns for question in questions] == [(f"Find $x$.{end}",), (f"Find $y$.{end}",)]
        assert [question.reference for question in questions] == ["27", "3"]


def test_any_file_of_turns_is_read(write):
    rows = [
        {"turns": ["a", "b"], "category": "c", "question_id": 7},
        {"turns": [{"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}, {"content": "f"}]},
        {"prompt": "g", "uid": "12ab", "category": "hard"},  # as in Arena-Hard
    ]
    assert load_questions("file", write(rows)) == [
        Question(7, "c", ("a", "b")),
        Question(1, "no category", ("d", "f")),
        Question(2, "hard", ("g",)),
    ]
    assert load_questions("arena_hard", write(rows)) == load_questions("file", write(rows))
    assert [q.turns for q in load_questions("alpaca", write(INSTRUCTIONS))][1] == ("Sort list 1.\n\n3 1 2",)
    assert load_questions("alpaca_eval", write(ROWS["alpaca_eval"]))[1] == Question(1, "vicuna", ("What is 1?",))
    assert load_questions("alpaca", write(rows[:1])) == [Question(7, "c", ("a", "b"))]  # as EAGLE publishes it
    (first, second, _) = load_questions("livecodebench", write(CONTESTS))
    assert first.turns[0].startswith("Add 0.") and first.turns[0].endswith("Read stdin, write to stdout.")
    assert second.category == "easy" and "```python\ndef f():\n```" in second.turns[0]


def test_programs_are_judged_by_the_tests_of_their_benchmark_and_split(write):
    question = load_questions("mbpp_plus", write(PLUS))[0]
    assert "assert f() == 1\n```" in question.turns[0] and "or True" not in question.turns[0]
    assert question.checks == Checks("", "", "assert f() == 0 or True")
    first = load_questions("humaneval", write(HUMANEVAL))[1]
    assert first.checks == Checks(HUMANEVAL[1]["prompt"], "add1", f"{HUMANEVAL[1]['test']}\ncheck(add1)\n")
    file = write(MBPP)
    assert [question.question_id for question in load_questions("mbpp", file)] == [11, 510]
    assert [question.question_id for question in load_questions("mbpp_validation", file)] == [511, 600]
    assert load_questions("mbpp", file)[0].checks == Checks("", "", "assert f() == 11")


def test_spec_bench_has_six_tasks_of_which_mt_bench_is_one(write):
    rows = [
        {"question_id": 1, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 2, "category": "rag", "turns": ["c"], "reference": [["d", "e"]]},
        {"question_id": 3, "category": "translation", "turns": ["f"], "reference": ["g"]},
    ]
    assert load_questions("spec_bench", write(rows)) == [
        Question(1, "mt_bench", ("a", "b")),
        Question(2, "rag", ("c",), "d\n\ne"),
        Question(3, "translation", ("f",), "g"),
    ]


def test_summaries_are_read_from_every_public_format(write):
    row = {"query": "a whole prompt", "docs": ["The article."], "result": {"text": "1####The summary."}}
    whole = {
        "article": "###\nArticle: Some news.\n\nSummarize the above article in 1 sentence.\n",
        "summary_gt": "News.",
    }
    for name, form, article, summary in (
        ("cnn_dm:ouroboros", row, "The article.", "The summary."),
        ("xsum:ouroboros", whole, "Some news.", "News."),
    ):
        question = load_questions(name, write([form]))[0]
        assert question.turns[0].endswith(f"Document: {article}  Summary: ") and question.reference == summary


def test_a_few_shot_style_reads_its_examples_from_the_second_file(write):
    train = [{"question": f"Q{n}", "answer": f"A{n} #### {n}"} for n in range(9)]
    files = f"{write(GSM8K)},{write(train, 'train.jsonl')}"
    question = load_questions("gsm8k:shots", files)[3]
    shown = "".join(f"Q: Q{n}\nA: A{n} #### {n}\n\n" for n in range(8))
    assert question == Question(
        3, "math", (f"{shown}Q: What is 3 + 1?\nA:",), "#### 4", is_raw=True, stops=("\nQ:",)
    )  # nine were there, eight are shown


def test_mbpp_examples_come_from_its_prompt_split(write):
    question = load_questions("mbpp:shots", write(MBPP))[0]
    assert question.turns[0].count("[DONE]") == 3 and question.turns[0].count("expert Python programmer") == 4
    assert "Return 3." in question.turns[0] and "Return 10." not in question.turns[0]
    assert question.turns[0].endswith("Return 11. Your code should pass these tests:\n\nassert f() == 11\n[BEGIN]\n")


@pytest.mark.parametrize(
    ("name", "files", "reason"),
    [
        ("gsm8k:shots", "{0}", r"gsm8k:shots shows examples of the train split: give .*,TRAIN_FILE"),
        ("gsm8k:shots", "{0},{0}", "shows 8 examples, but the files hold only 4"),
        ("gsm8k", "{0},{0}", "rows.jsonl: no such file, and 2 files, which commas separate, do not fit gsm8k"),
        ("gsm8k:five", "{0}", "gsm8k has no prompt style 'five'; choose one of: plain, ctc, shots"),
        ("mt_bench:ctc", "{0}", "choose one of: plain"),
        ("file", "a, missing.jsonl", "^a, missing.jsonl: no such file, and 2 files, which commas separate, do not fit"),
        ("file", "", "^file has no copy on the hub; write file=FILE$"),
    ],
)
def test_files_and_styles_that_do_not_fit_are_refused(write, name, files, reason):
    with pytest.raises(ValueError, match=reason):
        load_questions(name, files.format(write(GSM8K, "a,b.jsonl" if files == "{0}" else "rows.jsonl")))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_prompt_of_every_style_contains_the_complete_question(name):
    benchmark, rows = BENCHMARKS[name], ROWS[name]
    bare = benchmark.read(rows[1], 1)
    shots = [benchmark.read(row, index) for index, row in enumerate(rows) if index != 1]
    for name, style in benchmark.styles.items():
        asked = style.put(bare, shots[: style.num_shots])
        assert bare.turns[0].rstrip() in asked.turns[0] and asked.turns[1:] == bare.turns[1:]
        assert asked.reference == bare.reference and asked.checks == bare.checks
        assert (bare.reference or "no answer") not in asked.turns[0]
        assert not style.stops or style.is_raw
        assert name != "plain" or asked == bare, "nothing is added to the text of the row"


def test_length_limits_are_those_of_the_papers():
    def caps(*names):
        return list(QuestionOptions([*names]).caps().values())

    ouroboros = "humaneval", "mbpp", "gsm8k:shots", "cnn_dm:ouroboros", "wmt16:ouroboros"
    assert caps(*ouroboros) == [512, 512, 256, 128, 64], "section 4.1 of its paper"
    assert caps("gsm8k:ctc", "mt_bench") == [512, 512], "the baseline answers of the CTC paper's authors"
    anpd = "cnn_dm:alpaca", "cnn_dm:shot", "xsum:alpaca", "xsum:shot"
    assert caps(*anpd) == [512] * 4, "the code of Zhang et al. 2023"
    assert caps("gsm8k", "cnn_dm") == [256, 128]


REAL = [  # files, and the number of questions in them
    ("mt_bench", "mt_bench/question.jsonl", 80),
    ("spec_bench", "spec_bench/question.jsonl", 480),
    ("gsm8k", "gsm8k/test.jsonl", 1319),
    ("gsm8k:shots", "gsm8k/test.jsonl,gsm8k/train.jsonl", 1319),
    ("math500", "math500/test.jsonl", 500),
    ("aime24", "aime/aime24.jsonl", 30),
    ("aime25:plain", "aime/aime25.jsonl", 30),
    ("aime26", "aime/aime26.jsonl", 30),
    ("humaneval", "humaneval/HumanEval.jsonl.gz", 164),
    ("mbpp", "mbpp/mbpp.jsonl", 500),
    ("mbpp_validation:shots", "mbpp/mbpp.jsonl", 90),
    ("cnn_dm", "summarization/cnndm.jsonl", 100),
    ("xsum", "summarization/xsum_0shot.jsonl", 1000),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "files", "count"), REAL)
def test_the_real_files_are_read(shared, name, files, count):
    questions = load_questions(name, ",".join(str(shared(f"data/{file}")) for file in files.split(",")))
    assert len(questions) == len({question.question_id for question in questions}) == count
    assert all(turn.strip() for question in questions for turn in question.turns)
    if name not in ("mt_bench", "spec_bench"):
        assert all(question.reference.strip() for question in questions)
    if name == "spec_bench":
        assert {question.category for question in questions} == {
            *("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
        }
