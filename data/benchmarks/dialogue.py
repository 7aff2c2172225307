"""MT-Bench (two turns, eight categories), Spec-Bench (six tasks) and the project's own questions."""

from __future__ import annotations

from collections.abc import Mapping

from data.benchmarks.question import Benchmark, Hub, Question

MT_BENCH_CATEGORIES = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip


def read_turns(row: Mapping, index: int) -> Question:
    """Read a row of MT-Bench (question_id, category, turns) or of its copy on the hub (prompt_id, category, prompt)."""
    turns = row["turns"] if "turns" in row else row["prompt"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise ValueError("turns is not a list of texts")
    number = row["question_id"] if "question_id" in row else row["prompt_id"]
    reference = "\n\n".join(_flat(row.get("reference") or [])) or None
    return Question(int(number), str(row["category"]), tuple(turns), reference)


def read_spec_bench(row: Mapping, index: int) -> Question:
    """Read a row of Spec-Bench. Its 80 questions from MT-Bench form one of its six tasks, ``mt_bench``."""
    question = read_turns(row, index)
    category = "mt_bench" if question.category in MT_BENCH_CATEGORIES else question.category
    return Question(question.question_id, category, question.turns, question.reference)


def _flat(reference: object) -> list[str]:
    """Flatten a reference: Spec-Bench has single texts, lists of texts and nested lists."""
    if isinstance(reference, list):
        return [text for part in reference for text in _flat(part)]
    return [str(reference)]


FIELDS = "question_id, category, turns"
BENCHMARKS = {
    # 512 is the limit of the baseline answers released with CTC-drafter; Spec-Bench's own limit is 1024.
    "mt_bench": Benchmark(
        Hub("HuggingFaceH4/mt_bench_prompts", None, "train"),
        "question.jsonl of lm-sys/FastChat",
        FIELDS,
        read_turns,
        max_new_tokens=512,
    ),
    "spec_bench": Benchmark(
        None, "data/spec_bench/question.jsonl of hemingkx/Spec-Bench", FIELDS, read_spec_bench, max_new_tokens=1024
    ),
    "embedded": Benchmark(None, "nothing, the project generates it", FIELDS, read_turns, max_new_tokens=256),
}
