"""Quality scores of answers, against values computed by hand and the real references."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from importlib.util import find_spec

import pytest

from data.benchmarks import Question, find_benchmark, load_questions, mathematics, needs_package, score
from data.benchmarks.mathematics import final_number
from data.benchmarks.question import Checks

judged = pytest.mark.skipif(not find_spec("math_verify"), reason="math-verify is not installed")

ADD = Checks(
    'import math\n\n\ndef one():\n    return 1\n\n\ndef add(a):\n    """Add one."""\n', "add", "assert add(2) == 3"
)


def run(program):
    """Run a program of this file in this process; `inference.sandbox` runs those that a model wrote."""
    try:
        exec(program, {"__name__": "program"})
    except BaseException:
        return False
    return True


def questions(*references, category="math"):
    return [Question(index, category, ("?",), reference) for index, reference in enumerate(references)]


def code(checks=ADD, stops=()):
    return Question(0, "coding", ("?",), "a", checks, stops=stops)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", 18),
        ("so 3 + 4 = 7\n#### 1,080\n", 1080),
        ("#### $1,080.50", "1080.5"),
        ("#### -5", -5),
        ("#### 18.", 18),
        ("#### 18 dollars, not 20", 20),  # the number is followed by text, so the last one counts
        ("### 12", 12),  # as CTC-drafter's prompt asks
        ("### 3. Third step\nSo it is 45.", 45),  # a heading is not an answer
        ("#### 7\nQ: What is 8?\n#### 9", 7),  # the text continues
        ("The answer is 42.", 42),
        ("He pays $1,200.50.", "1200.5"),
        ("5-3=2", 2),
        ("it fell by -7 degrees", -7),
        ("18.00", 18),
        ("x2 is not a number, 4th is none", 4),
        ("1,2 and 3,4", 4),
        ("12,345,678 people", 12345678),
        ("50%", 50),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_final_number_of_a_text(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


def test_exact_match_counts_the_answers_with_the_right_number():
    asked = questions("a\n#### 1,000", "b\n#### 5", "c\n#### -2", "d\n#### 0")
    assert score("gsm8k", asked, ["It is $1000.00.", "It is 6.", "#### -2", ""]) == {"exact match": 50.0}


def test_neither_the_prompt_style_nor_text_after_a_stop_string_counts():
    asked = [Question(0, "math", ("?",), "#### 5", stops=("\nQ:",))]
    assert score("gsm8k:ctc", asked, [" It is 5.\nQ: And 6?"]) == {"exact match": 100.0}


@pytest.mark.slow
def test_rouge_equals_a_count_by_hand():
    # 3 of 4 words and 1 of 3 pairs are shared; the longest common subsequence is "the cat sat"
    found = score("xsum", questions("the cat sat down"), ["the big cat sat"])
    assert found == pytest.approx({"ROUGE-1": 75, "ROUGE-2": 100 / 3, "ROUGE-L": 75})
    assert (
        score("cnn_dm", questions("dogs", "x"), ["dog", "y"])["ROUGE-1"] == 50
    )  # words are stemmed; the score is a mean over questions


def test_bleu_and_chrf_are_computed_over_the_corpus():
    asked = questions("the cat is on the mat today", "a dog barks at night loudly")
    exact = score("wmt16", asked, [question.reference for question in asked])
    assert exact == pytest.approx({"BLEU": 100, "chrF": 100})
    half = score("wmt16", asked, [asked[0].reference, "completely other words were said here"])
    # of 13, 11, 9 and 7 n-grams, 7, 6, 5 and 4 are right; both texts are as long as their references
    assert half["BLEU"] == pytest.approx(100 * (7 / 13 * 6 / 11 * 5 / 9 * 4 / 7) ** 0.25)
    assert 0 < half["chrF"] < 100


def test_spec_bench_is_scored_by_task():
    asked = [
        Question(1, "math_reasoning", ("?",), "#### 5"),
        Question(2, "translation", ("?",), "a cat is on the mat"),
        Question(3, "summarization", ("?",), "a cat"),
        Question(4, "qa", ("?",), "who knows"),
        Question(5, "mt_bench", ("?", "?")),
    ]
    found = score("spec_bench", asked, ["5", "a cat is on the mat", "a cat", "nobody", "hello"])
    assert set(found) == {"exact match", "ROUGE-1", "ROUGE-2", "ROUGE-L", "BLEU", "chrF"}
    assert found["exact match"] == found["ROUGE-1"] == 100 and found["BLEU"] == pytest.approx(100)


def test_a_question_or_a_benchmark_without_a_reference_is_not_scored():
    assert score("gsm8k", questions(None, "#### 1"), ["a", "1"]) == {"exact match": 100.0}
    assert score("gsm8k", questions(None), ["a"]) == score("embedded", questions("x"), ["a"]) == {}


RIGHT = {
    "a body": "    return a + one()\n",
    "a body that lost its first spaces": "return a + one()",
    "a body of several lines that lost its first spaces": "for _ in range(1):\n        a += 1\n    return a",
    "a body after an empty line": "\n    return a + 1",
    "a function": "def add(a):\n    return math.floor(a + one())",
    "a fence": "Sure!\n\n```python\ndef add(a):\n    return a + 1\n```\nThis adds one.",
    "a fence with its own imports": "```python\nfrom math import floor\n\ndef add(a):\n    return floor(a + 1)\n```",
    "a body in a fence": "```\n    return a + 1\n```",
    "the second fence": "```python\nprint(1)\n```\n then\n```python\ndef add(a):\n    return a + 1\n```",
    "a fence in a list": "1. The function:\n\n   ```python\n   def add(a):\n       return a + 1\n   ```\n2. It adds.",
    "a fence that was cut off": "```python\ndef add(a):\n    return a + 1\n",
}
WRONG = {
    "another number": "    return a + 2",
    "no code": "I do not know.",
    "nothing": "",
    "a syntax error": "    return a +",
    "no return": "    a + 1",
    "an early exit": "    return 0\n\nimport sys\nsys.exit(0)",
}


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_right_programs_pass_and_wrong_ones_do_not(name):
    assert score("humaneval", [code()], [(RIGHT | WRONG)[name]], run) == {"pass@1": 100.0 * (name in RIGHT)}


def test_a_completion_ends_where_the_function_or_a_fence_ends():
    asked = replace(code(stops=("\ndef ", "\nprint(")), is_raw=True)
    for behind in ("\ndef add(a):\n    return 0", "```\nThis adds one.", "```\n\n```python\nprint(f(1))\n```"):
        assert score("humaneval", [asked], [f"    return a + 1\n{behind}"], run) == {"pass@1": 100.0}


def test_mbpp_runs_the_program_without_a_prefix():
    asked = code(Checks("", "", "assert twice(2) == 4"), stops=("[DONE]",))
    texts = ["def twice(a):\n    return 2 * a\n[DONE]\nnonsense", "```python\ndef twice(a):\n    return a\n```"]
    assert score("mbpp", [asked, asked], texts, run) == {"pass@1": 50.0}


def test_code_is_not_run_unless_it_is_allowed():
    assert score("humaneval", [code()], ["    return a + 1"]) == {}
    assert find_benchmark("humaneval:completion")[0].runs_code and not find_benchmark("gsm8k")[0].runs_code


@pytest.mark.slow
def test_the_real_references_of_gsm8k_are_right_and_those_of_other_questions_are_wrong(shared):
    asked = load_questions("gsm8k", str(shared("data/gsm8k/test.jsonl")))
    references = [question.reference for question in asked]
    assert score("gsm8k", asked, references) == {"exact match": 100.0}
    assert score("gsm8k", asked, references[1:] + references[:1])["exact match"] < 10


@pytest.mark.parametrize("style", ["instruct", "completion"])
def test_real_solutions_of_humaneval_and_mbpp_pass_and_others_fail(shared, style):
    asked = load_questions(f"humaneval:{style}", str(shared("data/humaneval/HumanEval.jsonl.gz")))
    chosen = [asked[number] for number in (0, 10, 32, 38, 50)]  # some use functions that the prompt defines
    right = [question.reference for question in chosen]
    if style == "instruct":
        right = [f"Here:\n```python\n{q.checks.prefix}{q.reference}```" for q in chosen]
    assert score("humaneval", chosen, [*right], run) == {"pass@1": 100.0}
    stripped = [text.strip() for text in right]  # as `drafters eval` records answers
    assert score("humaneval", chosen, stripped, run) == {"pass@1": 100.0}
    assert score("humaneval", chosen, ["    return None"] * 5, run) == {"pass@1": 0.0}
    asked = load_questions("mbpp", str(shared("data/mbpp/mbpp.jsonl")))[:5]
    right = [question.reference for question in asked]
    assert score("mbpp", asked, right, run) == {"pass@1": 100.0}
    assert score("mbpp", asked, right[1:] + right[:1], run) == {"pass@1": 0.0}


@pytest.mark.slow  # to import math-verify
def test_mathematics_is_judged_by_math_verify_or_not_at_all():
    asked = questions("\\left( 3, \\frac{\\pi}{2} \\right)", "\\frac{14}{3}", "277", "p - q")
    texts = ["So \\boxed{(3, \\pi/2)}.", "it is $\\dfrac{14}{3}$", "2 + 275 = 277, \\boxed{278}", "no answer"]
    if find_spec("math_verify"):
        assert score("math500", asked, texts) == score("aime26", asked, texts) == {"exact match": 50}
    else:
        assert score("math500", asked, texts) == {} and needs_package("math500:plain")
    assert not needs_package("gsm8k")


RIGHT_MATHS = {"exact match": 100.0}
REFERENCES = [  # in the style of MATH-500
    *("\\frac{7}{12}", "-\\frac{3}{8}", "5\\sqrt{2}", "(-\\infty, 4]", "(2,9)\\cup(11,\\infty)", "1,-2", "\\text{(B)}"),
    *(
        "\\left( 4, \\frac{\\pi}{3} \\right)",
        "3\\sqrt{5}, -3\\sqrt{5}",
        "\\text{Tuesday}",
        "48\\text{ cm}^2",
        "17^\\circ",
    ),
    *("x^2-5x+6", "y = 3x - 7", "\\begin{pmatrix} 1 & 4 \\\\ -2 & 5 \\end{pmatrix}", "2 + 7i", "10,400", "\\$32.75"),
    *("35\\%", "1101_2"),
]


@judged
@pytest.mark.slow
@pytest.mark.parametrize("answer", ["\\boxed{%s}", "So $1 + 1 = 2$.\n\nThe final answer is $\\boxed{%s}$.", "$%s$"])
def test_references_in_the_style_of_math_500_are_right_answers_to_themselves_alone(answer):
    asked = questions(*REFERENCES)
    wrong = [at for at, text in enumerate(REFERENCES) if score("math500", [asked[at]], [answer % text]) != RIGHT_MATHS]
    assert not wrong
    assert score("math500", asked, [answer % text for text in REFERENCES[1:] + REFERENCES[:1]]) == {"exact match": 0}


@judged
@pytest.mark.slow
@pytest.mark.parametrize("name", ["math500", "aime24", "aime25", "aime26"])
def test_every_real_reference_of_math_500_and_aime_is_a_right_answer_to_itself(shared, name):
    folder = "math500/test" if name == "math500" else f"aime/{name}"
    asked = load_questions(name, str(shared(f"data/{folder}.jsonl")))
    texts = [f"It follows that $1 < 2$, so the answer is $\\boxed{{{question.reference}}}$." for question in asked]
    assert score(name, asked, texts) == RIGHT_MATHS


@judged
@pytest.mark.slow
def test_a_formula_that_takes_too_long_is_counted_as_not_judged_instead_of_wrong(monkeypatch):
    assert score("math500", questions("1"), ["1"]) == RIGHT_MATHS  # the first one takes longer than others
    monkeypatch.setattr(mathematics, "JUDGEMENT_SECONDS", 0.3)
    asked, endless = questions("4", "5", "6", "7"), "\\boxed{1000001!}"
    found = score("math500", asked, ["\\boxed{4}", endless, "\\boxed{7}", "7"])
    assert found == pytest.approx({"exact match": 200 / 3, "not judged": 25})
    assert score("math500", asked[1:2], [endless]) == {"not judged": 100}


@judged
@pytest.mark.slow
def test_formulas_are_judged_in_any_thread_and_equal_answers_once(monkeypatch):
    asked, texts = questions("\\frac{5}{21}"), ["$\\boxed{5/21}$"]
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(score, "math500", asked, texts).result() == RIGHT_MATHS
    monkeypatch.setattr(mathematics, "computing_limit", None)  # without which nothing is judged
    assert score("math500", asked, texts) == RIGHT_MATHS
