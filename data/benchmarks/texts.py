"""CNN/DM and XSum, news articles to summarise, and WMT16, German sentences to translate into English."""

from collections.abc import Callable, Mapping, Sequence

from data.benchmarks.question import Benchmark, Question, Style, text

# The Stanford Alpaca template with an input and the instruction of the ANPD paper (its Figure 8).
ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nSummarize the following articles.\n\n### Input:\n{question}\n\n### Response:\n"
)
OUROBOROS = "Please summarize the following document within one sentence. Document: {question}  Summary: "
CNN_DM = "hub:abisee/cnn_dailymail@96df5e686bee6baa90b8bee7c28b81fa3fa6223d:3.0.0"
# The hub's parquet conversion, because the repository itself holds a script that `datasets` no longer runs.
XSUM = "hub:EdinburghNLP/xsum@refs/convert/parquet:default"


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


def rouge(questions: Sequence[Question], texts: Sequence[str]) -> dict[str, float]:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L with stemming (Lin 2004), computed by rouge-score."""
    from rouge_score.rouge_scorer import RougeScorer

    names = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
    scorer = RougeScorer(list(names), use_stemmer=True)
    scores = [scorer.score(question.reference, text) for question, text in zip(questions, texts, strict=True)]
    return {names[key]: 100 * sum(one[key].fmeasure for one in scores) / len(scores) for key in names}


def read_wmt16(row: Mapping, index: int) -> Question:
    """Read a row with de and en, or with translation {de, en} as on the hub. The id is the index in the file."""
    pair = row.get("translation", row)
    return Question(index, "translation", (text(pair, "de"),), text(pair, "en"))


def bleu_and_chrf(questions: Sequence[Question], texts: Sequence[str]) -> dict[str, float]:
    """Corpus BLEU and chrF with sacrebleu's defaults."""
    import sacrebleu

    references = [[question.reference or "" for question in questions]]
    bleu, chrf = sacrebleu.corpus_bleu(list(texts), references), sacrebleu.corpus_chrf(list(texts), references)
    return {"BLEU": bleu.score, "chrF": chrf.score}


def _summaries(source: str, fields: str, read: Callable[[Mapping, int], Question], instruction: str) -> Benchmark:
    """The prompts of the ANPD paper give 512 tokens, as the code of Zhang et al. 2023, whose settings it shares."""
    article = "Article: {question}\nSummary:"  # as in the ANPD paper (its Figure 9)
    examples, ends = f"{article} {{answer}}\n", ("\nArticle:",)
    styles = {
        "instruct": Style(f"{instruction}\n\n{{question}}"),  # in our own wording
        "alpaca": Style(ALPACA, is_raw=True, stops=("\n###",), max_new_tokens=512),
        "shot": Style(article, examples, num_shots=1, is_raw=True, stops=ends, max_new_tokens=512),
        "ouroboros": Style(OUROBOROS, is_raw=True),
    }
    return Benchmark(f"{source}:test", fields, read, 128, styles, rouge, shots=f"{source}:train")


BENCHMARKS = {
    "cnn_dm": _summaries(CNN_DM, "article, highlights", read_cnn_dm, "Summarize this article in a few sentences."),
    "xsum": _summaries(XSUM, "document, summary", read_xsum, "Summarize this article in one sentence."),
    "wmt16": Benchmark(
        "hub:wmt/wmt16@41d8a4013aa1489f28fea60ec0932af246086482:de-en:test",
        "de, en",
        read_wmt16,
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
    ),
}
