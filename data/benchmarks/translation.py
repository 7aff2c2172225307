"""WMT16: German sentences to translate into English."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from data.benchmarks.question import Benchmark, Question, Style, text


def read(row: Mapping, index: int) -> Question:
    """Read a row with de and en, or with translation {de, en} as on the hub. The id is the index in the file."""
    pair = row.get("translation", row)
    return Question(index, "translation", (text(pair, "de"),), text(pair, "en"))


def bleu_and_chrf(questions: Sequence[Question], texts: Sequence[str]) -> dict[str, float]:
    """Corpus BLEU and chrF with sacrebleu's defaults."""
    import sacrebleu

    references = [[question.reference or "" for question in questions]]
    return {
        "BLEU": sacrebleu.corpus_bleu(list(texts), references).score,
        "chrF": sacrebleu.corpus_chrf(list(texts), references).score,
    }


BENCHMARKS = {
    "wmt16": Benchmark(
        "hub:wmt/wmt16@41d8a4013aa1489f28fea60ec0932af246086482:de-en:test",
        "newstest2016 as two text files, German and English,",
        "de, en",
        read,
        max_new_tokens=64,
        styles={
            "instruct": Style("Translate this sentence from German to English.\n\n{question}"),  # in our own wording
            "ouroboros": Style(
                "Translate this German sentence to English. German: {question} English: ",
                is_raw=True,
                stops=("\n", " German:"),
            ),
        },
        score=bleu_and_chrf,
        parallel=("de", "en"),
    )
}
