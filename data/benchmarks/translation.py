"""WMT16: German sentences to translate into English."""

from __future__ import annotations

from collections.abc import Mapping

from data.benchmarks.question import Benchmark, Hub, Question, Style, text


def read(row: Mapping, index: int) -> Question:
    """Read a row with de and en, or with translation {de, en} as on the hub. The id is the index in the file."""
    pair = row.get("translation", row)
    return Question(index, "translation", (text(pair, "de"),), text(pair, "en"))


BENCHMARKS = {
    "wmt16": Benchmark(
        Hub("wmt/wmt16", "de-en", "test", revision="41d8a4013aa1489f28fea60ec0932af246086482"),
        "newstest2016 as two text files, German and English,",
        "de, en",
        read,
        max_new_tokens=64,
        styles={
            "instruct": Style(
                "the sentence with a request to translate it in a chat, in our own wording",
                lambda question, shots: f"Translate this sentence from German to English.\n\n{question.turns[0]}",
            ),
            "ouroboros": Style(
                "the request of Ouroboros, without a chat template",
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
