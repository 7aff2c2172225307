"""WMT16: German sentences to translate into English."""

from __future__ import annotations

from collections.abc import Mapping

from data.benchmarks.question import Benchmark, Hub, Question, Style, text


def read(row: Mapping, index: int) -> Question:
    """Read the hub's translation {de, en}, or de and en. The id is the place in the file."""
    pair = row.get("translation", row)
    return Question(index, "translation", (text(pair, "de"),), text(pair, "en"))


BENCHMARKS = {
    "wmt16": Benchmark(
        Hub("wmt/wmt16", "de-en", "test"),
        "newstest2016 as two text files, German and English,",
        "de, en",
        read,
        max_new_tokens=64,
        styles={
            "instruct": Style(
                "the sentence in a chat, with a request of ours",
                lambda question, shots: f"Translate this sentence from German to English.\n\n{question.turns[0]}",
            ),
            "ouroboros": Style(
                "Ouroboros's request, without a chat template",
                lambda question, shots: (
                    f"Translate this German sentence to English. German: {question.turns[0]} English: "
                ),
                is_raw=True,
                stops=("\n", " German:"),
            ),
        },
        parallel=("de", "en"),
    )
}
