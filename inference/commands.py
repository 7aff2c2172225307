"""The typed entries of `drafters` commands, whose docstrings are their help; what they call is imported when they run.

So help, and the error for a misspelt option, need neither torch nor transformers.
"""

import sys
from typing import Literal

from inference.options import (
    AnswerOptions,
    EvaluationOptions,
    Format,
    ModelOptions,
    QuestionOptions,
    SamplingOptions,
    SearchOptions,
    ServerOptions,
    TuneQuestions,
    VerifyQuestions,
)


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


def tune(
    model: ModelOptions,
    selection: TuneQuestions,
    sampling: SamplingOptions,
    search: SearchOptions,
    drafter: str,
    out: str,
) -> None:
    """Search the options of a drafter, and print the best ones as a --drafter.

    Needs the extra `tune`: pip install 'ctc-drafters[tune]'. OUT holds the results in tune.json and the trials in
    study.db, which optuna-dashboard draws. These are not repeated, so an interrupted command continues when it is
    repeated. The options found are the best for these questions: measure them on others with `drafters eval`.

    Args:
        drafter: NAME[=FILE][:key=value,...], the part that all trials have in common.
        out: Folder for the results.
    """
    from inference import tune

    tune.tune(model, selection, sampling, search, drafter, out)


def report(
    folders: list[str],
    tokenizer: str | None = None,
    out: str | None = None,
    overwrite: bool = False,
    compare: bool = False,
    format: list[Format] | None = None,
) -> None:
    """Make one page of one or many evaluations, or compare two.

    Folders of `drafters eval --out` become one self-contained HTML page, with a table of all their drafters and a part
    for each evaluation.

    With --compare, two folders are compared question by question: acceptance length and speed-up of each drafter, with
    intervals of their change. The exit code is 1 if there is a regression, or if the second folder lacks a benchmark, a
    drafter or an answer of the first one, so that a script notices what was not compared.

    Args:
        folders: Folders that `drafters eval --out` wrote, one after the other.
        tokenizer: Folder of the base's tokenizer, for the steps of the answers; by default that of the base.
        out: The page, an HTML file; by default report.html in the only folder.
        overwrite: Replace a page that is already there.
        compare: Compare the second folder with the first.
        format: Write the tables also as md or latex, or all figures as csv or parquet, beside the page; may be
            repeated.
    """
    from inference.evaluate.report import compare_folders, report_folders

    if compare and len(folders) != 2:
        raise ValueError("--compare takes two folders that drafters eval wrote: first the old one, then the new one")
    if format and out is None and (compare or len(folders) > 1):
        raise ValueError("--format writes files beside the page: give --out PAGE")
    if compare:
        compare_folders(folders, out, overwrite, format or ["md"])
    else:
        report_folders(folders, tokenizer, out, overwrite, format or [])


def verify(
    model: ModelOptions,
    selection: VerifyQuestions,
    sampling: SamplingOptions,
    drafter: list[str],
    texts: int = 400,
    text_tokens: int = 4,
) -> None:
    """Decode prompts with and without each drafter, and compare the answers token by token.

    Greedy answers are compared with transformers' own generate, sampled ones with this project's decoding without a
    drafter under the same seed. So are greedy ones where rows are bit-identical (in bfloat16, on most CPUs), and their
    logits bit for bit. The exit code is 1 if such an answer or its logits differ, or an answer in float32. Without
    bit-identical rows, tokens with almost equal logits may be exchanged in bfloat16; the logit gap shows how close
    they were.

    With a temperature, a two-sample test also compares the distribution of short texts with that of the base alone, on
    at most four of the prompts, and says how small a bias it would have found. It alone decides about drafters that
    sample their drafts, because these write other texts under the same seed. The exit code is 1 if it finds a
    difference, which happens by chance in 1 % of runs.

    Args:
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; an unknown name lists all of
            them. May be repeated.
        texts: Number of texts of each drafter for the test with a --temperature above 0; 0 leaves it out.
        text_tokens: Number of tokens of such a text.
    """
    from inference import verify

    verify.verify(model, selection, sampling, drafter, texts, text_tokens)


def chat(
    model: ModelOptions,
    sampling: SamplingOptions,
    drafter: str = "joint",
    system: str = "",
    max_new_tokens: int = 512,
    template: str = "tokenizer",
) -> None:
    """Talk to a base; accepted draft tokens are green, and acceptance length and speed are shown below each answer.

    In the chat, /help lists the commands, such as /drafter, which changes the drafter, or with none leaves it out.
    Questions may also come from a pipe, one per line.

    Args:
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; an unknown name lists all.
        system: System message before the first turn; empty for none.
        max_new_tokens: Maximum number of tokens of an answer.
        template: Chat template: vicuna_v1.1, llama2_chat, or tokenizer[:thinking=on|off] for the tokenizer's own.
    """
    from inference import chat

    chat.chat(model, sampling, drafter, system, max_new_tokens, template)


def serve_command(
    drafter: str,
    base: str | None = None,
    engine: Literal["vllm", "llama.cpp"] = "vllm",
    num_tokens: int | None = None,
    dtype: str = "auto",
    port: int = 8000,
    disable_by_batch_size: int | None = None,
) -> None:
    """Print the command that starts an OpenAI-compatible server of a base with a drafter.

    The drafter is loaded and compared with the base's tokenizer and dimensions, so that a mistake shows here and not
    when the engine has started. The texts are those of the base alone, whatever the drafter.

    Args:
        drafter: Folder of a CTC or block drafter, or of one exported with ``--format vllm``; or a drafter that reads
            only tokens, such as anpd or joint:runner_up=0. For llama.cpp, a folder exported with ``--format gguf``.
        base: Folder or hub id of the base, or for llama.cpp its GGUF file; by default the one that the drafter was
            trained for.
        engine: The engine, vllm or llama.cpp.
        num_tokens: Largest number of draft tokens per step; by default what the drafter was trained for, else 6.
        dtype: Dtype of the base, as vLLM names it: auto, float32, bfloat16 or float16. llama.cpp takes the file's.
        port: Port of the server.
        disable_by_batch_size: vLLM drafts nothing in steps with more requests than this; by default it always drafts.
    """
    if engine == "llama.cpp":
        from inference import llama_cpp

        if disable_by_batch_size is not None:
            raise ValueError("llama.cpp has no --disable_by_batch_size: leave it out, or serve with --engine vllm")

        return print(llama_cpp.server_line(base, drafter, num_tokens, port))
    from inference.vllm.command import installed_vllm, make_launch

    launch = make_launch(base, drafter, num_tokens, dtype, port, disable_by_batch_size)
    if not installed_vllm()[1]:
        print("vLLM is not installed here, so its version is not checked", file=sys.stderr)
    print(launch.line)


def regenerate(
    base_model: ModelOptions,
    answers: AnswerOptions,
    sampling: SamplingOptions,
    source: ServerOptions,
    out: str,
    files: list[str] = [],  # noqa: B006
    overwrite: bool = False,
) -> None:
    """Let the base answer the prompts of conversations, or its own; drafters learn best from the base's own text.

    Training reads the written records back with exactly the tokens that the base wrote. If the command is interrupted,
    repeat it to continue. With --server, an OpenAI-compatible server answers (with the API key in OPENAI_API_KEY),
    and only the tokenizer of the base is loaded. Every sampled answer has a seed of its own, made of the seed given,
    the place of its conversation in the files, the number of the answer and the turn.

    Args:
        files: Conversations, as data.files of a training; their own answers are ignored. May be repeated.
        out: JSONL file to write. Until it is complete, OUT.partial holds the answers so far, OUT.prompts own prompts.
        overwrite: Replace an existing file, and the partial file of another command.
    """
    from inference.regenerate import command

    command.regenerate(base_model, answers, sampling, source, out, files, overwrite)


def index(
    kind: Literal["corpus", "datastore"],
    out: str,
    tokenizer: str,
    files: list[str],
    min_count: int = 6,
    top: int = 20,
    depth: int = 32,
    overwrite: bool = False,
) -> None:
    """Index texts for drafters: a corpus for self_draft, joint and corpus, a datastore for rest.

    A corpus counts which four tokens follow each sequence of one to four tokens. A datastore sorts the texts by their
    tokens; it takes 14 bytes per token (16 with more than 65,535 token ids). Both take about 50 bytes of memory per
    token while they are built.

    A record of a .jsonl or .json file is one document if it has a field `text`; of questions with answers and of
    conversations, each part is a document. In other files, blank lines separate documents. No n-gram, match or draft
    crosses the end of a document.

    Args:
        kind: What is built: corpus or datastore.
        out: File to write.
        tokenizer: Folder or hub id of the base, or of its tokenizer.
        files: Text files, or records as .jsonl or .json, also compressed as .gz. May be repeated.
        min_count: Leave n-grams out of a corpus that occur less often.
        top: Maximum number of n-grams of a corpus for each context.
        depth: Number of tokens by which a datastore is sorted; rest's longest match and draft together.
        overwrite: Replace an existing file.
    """
    from inference import indexes

    indexes.index(kind, out, tokenizer, files, min_count, top, depth, overwrite)
