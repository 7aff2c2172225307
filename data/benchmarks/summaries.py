"""CNN/DM and XSum: news articles to summarise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from data.benchmarks.question import Benchmark, Hub, Question, Style, text

ALPACA = (  # Stanford Alpaca's template with an input (ANPD, Figure 8); the instruction is ANPD's
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nSummarize the following articles.\n\n### Input:\n{article}\n\n### Response:\n"
)
OUROBOROS = "Please summarize the following document within one sentence. Document: {article}  Summary: "


def read_cnn_dm(row: Mapping, index: int) -> Question:
    """Read the hub's article and highlights, or docs and result, whose text begins with its number and ####."""
    if "article" in row:
        return Question(index, "summarization", (text(row, "article"),), text(row, "highlights", "summary"))
    summary = text(row["result"], "text")
    return Question(index, "summarization", (text(dict(enumerate(row["docs"])), 0),), summary.partition("####")[2])


def read_xsum(row: Mapping, index: int) -> Question:
    """Read the hub's document and summary, or H2O's article and summary_gt, where the article is a whole prompt."""
    article = text(row, "document", "article")
    article = article.removeprefix("###\nArticle: ").partition("\n\nSummarize the above article in 1 sentence.")[0]
    return Question(index, "summarization", (article,), text(row, "summary", "summary_gt"))


def _fill(template: str):
    return lambda question, shots: template.replace("{article}", question.turns[0])


def after_shot(question: Question, shots: Sequence[Question]) -> str:
    """Ask in ANPD's 1-shot template (its Figure 9)."""
    shown = "".join(f"Article: {shot.turns[0]}\nSummary: {shot.reference}\n" for shot in shots)
    return f"{shown}Article: {question.turns[0]}\nSummary:"


def _styles(instruction: str) -> dict[str, Style]:
    return {
        "instruct": Style("the article in a chat, with a request of ours", _fill(f"{instruction}\n\n{{article}}")),
        "alpaca": Style(
            "ANPD's 0-shot: Alpaca's template (its Figure 8), without a chat template",
            _fill(ALPACA),
            is_raw=True,
            stops=("\n###",),
        ),
        "shot": Style(
            "ANPD's 1-shot (its Figure 9): an article and summary of the train part, without a chat template",
            after_shot,
            num_shots=1,
            is_raw=True,
            stops=("\nArticle:",),
        ),
        "ouroboros": Style(
            "Ouroboros's request for one sentence, without a chat template", _fill(OUROBOROS), is_raw=True
        ),
    }


BENCHMARKS = {
    "cnn_dm": Benchmark(
        Hub("abisee/cnn_dailymail", "3.0.0", "test", "train"),
        "the test part of CNN/DM as JSONL",
        "article, highlights",
        read_cnn_dm,
        max_new_tokens=128,
        styles=_styles("Summarize this article in a few sentences."),
    ),
    "xsum": Benchmark(
        # The hub's own conversion: the repository itself holds a script, which `datasets` no longer runs.
        Hub("EdinburghNLP/xsum", "default", "test", "train", revision="refs/convert/parquet"),
        "the test part of XSum as JSONL",
        "document, summary",
        read_xsum,
        max_new_tokens=128,
        styles=_styles("Summarize this article in one sentence."),
    ),
}
