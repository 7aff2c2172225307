"""``drafters eval`` and ``drafters report``: options and help. What does the work is imported when it is called."""

from inference.evaluate.options import EvaluationOptions, Format
from inference.prompts import QuestionOptions
from inference.verifier.options import ModelOptions, SamplingOptions


def evaluate(
    model: ModelOptions,
    selection: QuestionOptions,
    sampling: SamplingOptions,
    options: EvaluationOptions,
    out: str | None = None,
    overwrite: bool = False,
) -> None:
    """Decode the questions of benchmarks with several drafters and compare speed, acceptance length and text.

    With --server the answers come from a server, which is asked with several numbers of requests at once. Prints a
    table for each benchmark. With --out it also writes the answers as FastChat-style JSONL, results.json, results.csv,
    results.md and report.html. An interrupted evaluation continues when the same command is run again; its results are
    those of an uninterrupted one, except for the times.

    Args:
        out: Folder for the results; by default nothing is written.
        overwrite: Start over and replace the results that the folder already holds.
    """
    from inference.evaluate import run

    run.evaluate(model, selection, sampling, options, out, overwrite)


def report(
    folders: list[str] | None = None,
    answers: list[str] | None = None,
    baseline: str | None = None,
    tokenizer: str | None = None,
    out: str | None = None,
    overwrite: bool = False,
    compare: bool = False,
    format: list[Format] | None = None,
) -> None:
    """Make one page of one or many evaluations, compare two, or count published answers by every convention.

    Folders of `drafters eval --out` become one self-contained HTML page, with a table of all their drafters and a part
    for each evaluation.

    With --compare, two folders are compared question by question: acceptance length and speed-up of each drafter, with
    intervals of their change. The exit code is 1 if there is a regression, or if the second folder lacks a benchmark, a
    drafter or an answer of the first one, so that a script notices what was not compared.

    With --answers and --baseline, the command reads answer files in FastChat's form, such as those of EAGLE, Spec-Bench
    and the original CTC-drafter, and prints their acceptance lengths and speed-ups by every counting convention.

    Args:
        folders: Folders that `drafters eval --out` wrote, one after the other.
        answers: JSONL file of recorded answers; may be repeated.
        baseline: JSONL file of the base's own answers to the same questions.
        tokenizer: Folder of the base's tokenizer, for the steps of the answers; by default that of the base.
        out: The page, an HTML file; by default report.html in the only folder.
        overwrite: Replace a page that is already there.
        compare: Compare the second folder with the first.
        format: Write the tables also as md or latex, or all figures as csv or parquet, beside the page; may be
            repeated.
    """
    if compare and (not folders or len(folders) != 2 or answers or baseline is not None):
        raise ValueError("--compare takes two folders that drafters eval wrote: first the old one, then the new one")
    if format and out is None and (compare or not folders or len(folders) > 1):
        raise ValueError("--format writes files beside the page: give --out PAGE")
    from inference.evaluate.report import compare_folders, recount_files, report_folders

    if folders and compare:
        compare_folders(folders, out, overwrite, format or ["md"])
    elif folders and not answers and baseline is None:
        report_folders(folders, tokenizer, out, overwrite, format or [])
    elif answers and not folders and baseline is not None:
        recount_files(answers, baseline, out, overwrite, format or ["md"])
    else:
        raise ValueError("give folders that drafters eval wrote, or --answers FILE and --baseline FILE")
