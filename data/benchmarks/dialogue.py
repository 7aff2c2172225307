"""MT-Bench, Spec-Bench, SPEED-Bench, Alpaca, Arena-Hard, the project's own questions, and questions in any file."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from data.benchmarks.mathematics import exact_match
from data.benchmarks.question import Benchmark, Question, text
from data.benchmarks.texts import bleu_and_chrf, rouge

FIELDS = "question_id, category, turns"
MT_BENCH_CATEGORIES = "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"
SPEED_BENCH_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
SPEED_BENCH_CONFIGURATIONS = {"speed_bench": "qualitative"}
SPEED_BENCH_CONFIGURATIONS |= {f"speed_bench_{n}k": f"throughput_{n}k" for n in (1, 2, 8, 16, 32)}


def read_turns(row: Mapping, index: int) -> Question:
    """Read a row of MT-Bench (question_id, category, turns) or of its copy on the hub (prompt_id, category, prompt)."""
    turns = row["turns"] if "turns" in row else row["prompt"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise ValueError("turns is not a list of texts")
    number = row["question_id"] if "question_id" in row else row["prompt_id"]
    reference = "\n\n".join(_flat(row.get("reference") or [])) or None
    return Question(int(number), str(row["category"]), tuple(turns), reference)


def _flat(reference: object) -> list[str]:
    """Flatten a reference: Spec-Bench has single texts, lists of texts and nested lists."""
    if isinstance(reference, list):
        return [text for part in reference for text in _flat(part)]
    return [str(reference)]


def read_spec_bench(row: Mapping, index: int) -> Question:
    """Read a row of Spec-Bench. Its 80 questions from MT-Bench form one of its six tasks, ``mt_bench``."""
    question = read_turns(row, index)
    return replace(question, category="mt_bench") if question.category in MT_BENCH_CATEGORIES else question


def score_by_task(questions: Sequence[Question], texts: Sequence[str]) -> dict[str, float]:
    """Score the tasks of Spec-Bench that have a measure: mathematics, summaries and translations."""
    measures = {"math_reasoning": exact_match, "summarization": rouge, "translation": bleu_and_chrf}
    scores: dict[str, float] = {}
    for task, measure in measures.items():
        pairs = [pair for pair in zip(questions, texts, strict=True) if pair[0].category == task]
        if pairs:
            scores |= measure(*map(list, zip(*pairs, strict=True)))
    return scores


def read_any(row: Mapping, index: int) -> Question:
    """Read a row with turns, and perhaps question_id, category, system and tools; also Arena-Hard's, with a prompt.

    Turns are texts or messages with a ``content``; only those of the user are kept. The id is that of the row if it
    is an integer, else the index in the file. Rows of SPEED-Bench whose text has to be fetched first are refused.
    """
    rounds = row["turns"] if "turns" in row else [text(row, "prompt")]
    if not isinstance(rounds, list):
        raise ValueError("turns is not a list")
    of_user = [turn for turn in rounds if not (isinstance(turn, Mapping) and turn.get("role", "user") != "user")]
    turns = tuple(text(turn, "content") if isinstance(turn, Mapping) else turn for turn in of_user)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError("turns is not a list of texts of the user")
    if any(SPEED_BENCH_PLACEHOLDER in turn for turn in turns):
        raise ValueError("its text has to be fetched first by SPEED-Bench's own script, prepare_data.py")
    number = row.get("question_id")
    question_id = number if isinstance(number, int) and not isinstance(number, bool) else index
    system, tools = row.get("system") or "", row.get("tools") or []
    if not isinstance(system, str):
        raise ValueError("system is not a text")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools is not a list of objects")
    return Question(question_id, str(row.get("category") or "no category"), turns, system=system, tools=tuple(tools))


def read_instruction(row: Mapping, index: int) -> Question:
    """Read a row of Alpaca or AlpacaEval: instruction and input, which may be empty; or turns, as EAGLE's 80 questions.

    The input stands below the instruction, without Stanford's template. The id is the index in the file, or that of a
    row with turns.
    """
    if "turns" in row:
        return read_any(row, index)
    instruction, given = text(row, "instruction"), row.get("input") or ""
    if not isinstance(given, str):
        raise ValueError("input is not a text")
    category = str(row.get("dataset") or "instruction")  # AlpacaEval's questions are those of five data sets
    return Question(index, category, (f"{instruction}\n\n{given}" if given else instruction,))


BENCHMARKS = {
    # 512 is the limit of the baseline answers released with CTC-drafter; Spec-Bench's own limit is 1024.
    "mt_bench": Benchmark(
        "hub:HuggingFaceH4/mt_bench_prompts@e3a795c5e9a82ee40611c416b8a7786c73198991",
        FIELDS,
        read_turns,
        max_new_tokens=512,
        download="question.jsonl of lm-sys/FastChat",
    ),
    "spec_bench": Benchmark(
        None,
        FIELDS,
        read_spec_bench,
        max_new_tokens=1024,
        download="data/spec_bench/question.jsonl of hemingkx/Spec-Bench",
        score=score_by_task,
    ),
    **{
        name: Benchmark(
            f"hub:nvidia/SPEED-Bench@487aa718444e816458d1a0a52bfce7a454285cf4:{configuration}:test",
            "category, turns",
            read_any,
            max_new_tokens=1024,
            download=f"speed/{configuration}/test.parquet as SPEED-Bench's prepare_data.py writes it",
        )
        for name, configuration in SPEED_BENCH_CONFIGURATIONS.items()
    },
    "alpaca": Benchmark(
        "hub:tatsu-lab/alpaca@dce01c9b08f87459cf36a430d809084718273017",
        "instruction, input (or turns)",
        read_instruction,
        max_new_tokens=512,
        download="the instructions of tatsu-lab/stanford_alpaca as JSONL",
    ),
    # 805 open questions of one turn, which no drafter was tuned on and whose answers copy little.
    "alpaca_eval": Benchmark(
        "hub:tatsu-lab/alpaca_eval@2955709b93b0e08df511a752a3874b0a89b8910b/alpaca_eval.json",
        "instruction, dataset",
        read_instruction,
        max_new_tokens=512,
        download="alpaca_eval.json of tatsu-lab/alpaca_eval",
    ),
    "arena_hard": Benchmark(
        "hub:lmarena-ai/arena-hard-auto-v0.1@2a69efe86cff85c593cfd4c2b4491c128e52c6f1",
        "turns (or prompt)",
        read_any,
        max_new_tokens=1024,
        download="question.jsonl of lmarena-ai/arena-hard-auto",
    ),
    "file": Benchmark(None, "turns", read_any, max_new_tokens=512),
    "embedded": Benchmark("embedded", FIELDS, read_turns, max_new_tokens=256),
}
