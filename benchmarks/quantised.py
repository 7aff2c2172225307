"""A base in 8 bits on a CPU beside bfloat16: how well it predicts texts, and the time of a decoding step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.harness import ResultTable, main, num_millions, show
from benchmarks.steps import bushy, measure
from data.conversations import load_conversations
from data.rows import tokenise
from drafters.protocol import RequiredOutputs
from drafters.tree import DraftTree
from inference.runs import progress_bars
from inference.verifier.base import Base, load_base, prepare_process
from inference.verifier.graphed import make_runner
from inference.verifier.runner import Runner

REFERENCE, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
MAX_LENGTH, CONTEXT = 512, 256
MAX_ROWS = 64  # of the steps whose rows are compared


def quantised(
    base: str,
    files: list[str] = [],  # noqa: B006
    tokens: int = 20_000,
    template: str = "tokenizer",
    nodes: list[int] = [0, 3, 7, 15],  # noqa: B006
    repeats: int = 30,
    threads: int = 1,
    out: str | None = None,
) -> None:
    """Compare a base in int8 and in bfloat16, with packed weights, on this CPU.

    Args:
        base: Folder, hub id or GGUF file of the base.
        files: Conversations on which both are compared with float32, each file on its own.
        tokens: Number of tokens of each file that are predicted.
        template: Template of the conversations.
        nodes: Numbers of nodes of the steps that are timed, without the root; none for no times.
        repeats: Timed steps of each number of nodes; the two bases alternate.
        threads: Number of threads.
        out: Markdown file to write the tables to.
    """
    if min(tokens, threads) < 1 or min(nodes, default=0) < 0 or repeats < 2:
        raise ValueError("tokens and threads must be at least 1, nodes at least 0, and repeats at least 2")
    torch.set_num_threads(threads)
    prepare_process(sums_alike=True)
    bases = {BFLOAT16: load_base(base, "bfloat16", packed=True), INT8: load_base(base, "int8")}
    title, tables = f"{base} ({num_millions(bases[BFLOAT16])})", []
    if files:
        all_bases = {REFERENCE: replace(bases[BFLOAT16], model=load_base(base, "float32").model), **bases}
        tables.append(_quality(title, all_bases, files, tokens, template))
    if nodes:
        tables.append(_steps(title, bases, nodes, repeats))
    show(tables, torch.device("cpu"), out)


@torch.inference_mode()
def _quality(title: str, bases: dict[str, Base], files: list[str], tokens: int, template: str) -> ResultTable:
    headings = ["text", "dtype", "perplexity", "/ float32's", "KL from float32", "same first token"]
    table = ResultTable(f"Quality of {title}", headings)
    tokenizer = bases[INT8].tokenizer
    for file in files:
        conversations, _ = load_conversations([file])
        texts = tokenise(conversations, tokenizer, template, MAX_LENGTH)
        sums = {name: torch.zeros(3, dtype=torch.float64) for name in bases}
        count = 0
        with progress_bars(transient=True) as progress:
            task = progress.add_task(file, total=tokens)
            for row in texts:
                ids = torch.tensor([row["input_ids"]])
                log_probs = {name: _log_probs(each, ids) for name, each in bases.items()}
                expected, following = log_probs[REFERENCE], ids[0, 1:]
                for name, each in log_probs.items():
                    sums[name] += torch.stack(
                        [
                            -each.gather(1, following[:, None]).sum(),
                            (expected.exp() * (expected - each)).sum(),
                            (expected.argmax(-1) == each.argmax(-1)).sum(),
                        ]
                    )
                count += len(following)
                progress.advance(task, len(following))
                if count >= tokens:
                    break
        perplexity = {name: (total[0] / count).exp().item() for name, total in sums.items()}
        for name, (_, divergence, same) in sums.items():
            ratio = perplexity[name] / perplexity[REFERENCE]
            cells = [f"{perplexity[name]:.3f}", f"{ratio:.4f}", f"{divergence / count:.5f}", f"{same / count:.1%}"]
            table.rows.append([f"{file.rsplit('/', 1)[-1]}, {count:,} tokens", name, *cells])
    table.notes.append(f"Conversations are cut at {MAX_LENGTH} tokens; all of their tokens are predicted.")
    return table


def _log_probs(base: Base, ids: Tensor) -> Tensor:
    """Log-probabilities (S - 1, V) of the next tokens of a text (1, S)."""
    return base.model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)


def _steps(title: str, bases: dict[str, Base], nodes: list[int], repeats: int) -> ResultTable:
    runners = {name: make_runner(base) for name, base in bases.items()}
    trees = {count: bushy(count, bases[INT8].config.vocab_size) for count in dict.fromkeys([0, *nodes])}
    table = measure(f"Steps of {title}, context {CONTEXT}", bases[BFLOAT16], runners, trees, CONTEXT, repeats)
    equal = ", ".join(f"{name} {_equal_rows(runner)}" for name, runner in runners.items())
    table.notes.append(
        f"Of the rows of steps with 1 to {MAX_ROWS} of them, those with the bits that their text has alone: {equal}."
    )
    return table


def _equal_rows(runner: Runner) -> str:
    """How many rows of steps of every size have the logits that their texts have alone, and how many there are."""
    whole = bushy(MAX_ROWS - 1, runner.base.config.vocab_size)
    texts = [[1], *([1, *whole.path_tokens(node)] for node in range(len(whole)))]
    expected, num_equal = torch.cat([_logits(runner, text, DraftTree()) for text in texts]), 0
    for count in range(MAX_ROWS):
        rows = _logits(runner, [1], whole.first(count))
        num_equal += int((rows == expected[: count + 1]).all(1).sum())
    return f"{num_equal:,} of {MAX_ROWS * (MAX_ROWS + 1) // 2:,}"


def _logits(runner: Runner, pending: list[int], tree: DraftTree) -> Tensor:
    """Logits (1 + M, V) of the root and the nodes behind the cached text."""
    logits = runner.forward(pending, tree, RequiredOutputs()).logits.clone()
    runner.truncate(CONTEXT)
    return logits


if __name__ == "__main__":
    main(quantised)
