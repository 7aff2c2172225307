"""CNN/DM and XSum: news articles to summarise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from data.benchmarks.question import Benchmark, Hub, Question, Style, text

# The Stanford Alpaca template with an input and the instruction of the ANPD paper (its Figure 8).
ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nSummarize the following articles.\n\n### Input:\n{article}\n\n### Response:\n"
)
OUROBOROS = "Please summarize the following document within one sentence. Document: {article}  Summary: "


def read_cnn_dm(row: Mapping, index: int) -> Question:
    """Read a row with article and highlights as on the hub, or with docs and result.

    The text of a result starts with a number and ####.
    """
    if "article" in row:
        return Question(index, "summarization", (text(row, "article"),), text(row, "highlights", "summary"))
    article, summary = text({"docs": next(iter(row["docs"]), None)}, "docs"), text(row["result"], "text")
    return Question(index, "summarization", (article,), summary.partition("####")[2])


def read_xsum(row: Mapping, index: int) -> Question:
    """Read a row with document and summary as on the hub, or with H2O's article (a whole prompt) and summary_gt."""
    article = text(row, "document", "article")
    article = article.removeprefix("###\nArticle: ").partition("\n\nSummarize the above article in 1 sentence.")[0]
    return Question(index, "summarization", (article,), text(row, "summary", "summary_gt"))


def _fill(template: str) -> Callable[[Question, Sequence[Question]], str]:
    return lambda question, shots: template.replace("{article}", question.turns[0])


def after_shot(question: Question, shots: Sequence[Question]) -> str:
    """Build the one-shot prompt of the ANPD paper (its Figure 9)."""
    shown = "".join(f"Article: {shot.turns[0]}\nSummary: {shot.reference}\n" for shot in shots)
    return f"{shown}Article: {question.turns[0]}\nSummary:"


def _styles(instruction: str) -> dict[str, Style]:
    return {
        "instruct": Style(
            "the article with a request to summarise it in a chat, in our own wording",
            _fill(f"{instruction}\n\n{{article}}"),
        ),
        "alpaca": Style(
            "the zero-shot prompt of ANPD (its Figure 8), without a chat template",
            _fill(ALPACA),
            is_raw=True,
            stops=("\n###",),
        ),
        "shot": Style(
            "the one-shot prompt of ANPD (its Figure 9) with an example of the train split, without a chat template",
            after_shot,
            num_shots=1,
            is_raw=True,
            stops=("\nArticle:",),
        ),
        "ouroboros": Style(
            "the request of Ouroboros for one sentence, without a chat template", _fill(OUROBOROS), is_raw=True
        ),
    }


BENCHMARKS = {
    "cnn_dm": Benchmark(
        Hub("abisee/cnn_dailymail", "3.0.0", "test", "train", "96df5e686bee6baa90b8bee7c28b81fa3fa6223d"),
        "the test split of CNN/DM as JSONL",
        "article, highlights",
        read_cnn_dm,
        max_new_tokens=128,
        styles=_styles("Summarize this article in a few sentences."),
    ),
    "xsum": Benchmark(
        # The hub's parquet conversion, because the repository itself holds a script that `datasets` no longer runs.
        Hub("EdinburghNLP/xsum", "default", "test", "train", revision="refs/convert/parquet"),
        "the test split of XSum as JSONL",
        "document, summary",
        read_xsum,
        max_new_tokens=128,
        styles=_styles("Summarize this article in one sentence."),
    ),
}
