"""Figures of the training-free papers that `drafters eval` does not make: small measurements, a table for each."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import eq

from benchmarks.harness import ResultTable, main, show
from data.benchmarks import Question
from data.benchmarks.texts import bleu_and_chrf, rouge
from data.dtypes import Dtype
from drafters.protocol import RequiredOutputs, StepResult
from drafters.training_free.draft_model import DraftModel
from inference import drafter_specs, model_drafters
from inference.options import QuestionOptions
from inference.prompts import BenchmarkPrompts
from inference.regenerate.answerers import decode_batch
from inference.verifier.base import Base, load_base, prepare_process, resolve_device
from inference.verifier.draft_model import DraftModelSession
from inference.verifier.graphed import make_runner
from inference.verifier.session import Session

BATCH_SIZE = 32  # prompts that are answered at once

FORGETTING = "shuffled, no phrase kept from text to text"
Asked = Mapping[str, BenchmarkPrompts]  # by benchmark


def paper_figures(
    base: str,
    draft_model: str | None = None,
    benchmark: list[str] = ["embedded"],  # noqa: B006
    rows: str = ":",
    limit: int = 20,
    max_new_tokens: int = 64,
    dtype: Dtype = "float32",
    num_draft: int = 20,
    phrases: str = "num_draft=6,level=5,window=18",
    out: str | None = None,
) -> None:
    """Measure what is behind four figures of the papers, on first turns, greedily.

    They are words and tokens (ANPD, Figure 1), answers after noise (Self-Draft, Figure 1), matches of rejected drafts
    (Ouroboros, Table 1) and phrases kept over the texts of several tasks (Ouroboros, Table 17). The last two need a
    draft model.

    Args:
        base: Folder or hub id of the base.
        draft_model: Folder or hub id of a smaller model with the same vocabulary.
        benchmark: NAME[:STYLE][=FILE] as in `drafters eval`; may be repeated.
        rows: Rows of each benchmark, as in `drafters eval`.
        limit: Maximum number of questions of each benchmark.
        max_new_tokens: Maximum number of tokens of an answer.
        dtype: Dtype of both models.
        num_draft: Length of the drafts whose matches are counted; 20 in the paper.
        phrases: Options of `ouroboros` for the order of tasks; those of the paper's Table 17 by default, whose beta is
            level + 1.
        out: Markdown file to write.
    """
    prepare_process(device := resolve_device("auto"), sums_alike=True)
    loaded = load_base(base, dtype, device)
    options = QuestionOptions(benchmark, limit, rows, max_new_tokens)
    asked = options.select(loaded, options.load())
    tables = [words(loaded, asked), noise(loaded, asked, max_new_tokens)]
    if draft_model:
        tables.append(matches(loaded, draft_model, asked, num_draft, max_new_tokens))
        tables.append(orders(loaded, f"ouroboros={draft_model}:{phrases}", asked, max_new_tokens))
    show(tables, loaded.model.device, out)


def words(base: Base, asked: Asked) -> ResultTable:
    """Count the words and the tokens of questions."""
    table = ResultTable("Words and tokens (ANPD, Figure 1)", ["benchmark", "words", "tokens", "tokens per word"])
    for name, own in asked.items():
        texts = [question.turns[0] for question in own.questions]
        num_words = sum(len(text.split()) for text in texts)
        num_tokens = sum(len(base.tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
        means = num_words / len(texts), num_tokens / len(texts), num_tokens / num_words
        table.rows.append([name, *map("{:.2f}".format, means)])
    return table


def noise(base: Base, asked: Asked, max_new_tokens: int, counts: Sequence[int] = (1, 2, 4, 8, 16)) -> ResultTable:
    """Compare answers to prompts that end with random tokens of their own with the answers to the prompts alone."""
    prompts = [prompt for own in asked.values() for prompt in own.prompts]
    texts = {count: _answers(base, prompts, count, max_new_tokens) for count in (0, *counts)}
    pairs = [(Question(0, "", (), text), row) for row, text in enumerate(texts[0]) if text.strip()]
    table = ResultTable("Answers after noise (Self-Draft, Figure 1)", ["random tokens at the end", "BLEU", "ROUGE-L"])
    for count in counts:
        scored = [question for question, _ in pairs], [texts[count][row] for _, row in pairs]
        scores = bleu_and_chrf(*scored)["BLEU"], rouge(*scored)["ROUGE-L"]
        table.rows.append([str(count), *map("{:.1f}".format, scores)])
    table.notes.append(f"Scores against the answers without noise, of at most {max_new_tokens} tokens.")
    return table


def _answers(base: Base, prompts: Sequence[list[int]], num_random: int, max_new_tokens: int) -> list[str]:
    draw = random.Random(0).choices
    padded = [[*prompt, *draw(prompt, k=num_random)] for prompt in prompts]
    order, answers = sorted(range(len(padded)), key=lambda row: -len(padded[row])), dict[int, list[int]]()
    for rows in (order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)):
        texts = decode_batch(base, [padded[row] for row in rows], [max_new_tokens] * len(rows))
        answers |= dict(zip(rows, texts, strict=True))
    return [str(base.tokenizer.decode(answer, skip_special_tokens=True)) for _, answer in sorted(answers.items())]


class Matches(DraftModel):
    """A draft model that counts draft tokens that the base writes at their place too (Ouroboros, equation 10)."""

    required_outputs = RequiredOutputs(top_k=1)
    num_drafts = num_matches = num_accepted = 0

    def observe(self, step: StepResult) -> None:
        if len(step.tree) == self.num_draft:  # not cut at the end of an answer
            is_match = list(map(eq, step.tree.tokens, (row[0] for row in step.top_tokens)))
            self.num_drafts += 1
            self.num_matches += sum(is_match)
            self.num_accepted += [*is_match, False].index(False)


def matches(base: Base, draft_model: str, asked: Asked, num_draft: int, max_new_tokens: int) -> ResultTable:
    """Count how many tokens of a draft match the base, beside those that are accepted."""
    table = ResultTable("Matches of drafts (Ouroboros, Table 1)", ["benchmark", "#Match", "#Accept"])
    for name, own in asked.items():
        runner = make_runner(base)
        drafter = Matches(DraftModelSession(model_drafters.model_runner(draft_model, base)), num_draft)
        for prompt in own.prompts:
            Session(runner, drafter).run(prompt, max_new_tokens, base.eos)
        if not drafter.num_drafts:
            raise ValueError(f"{name}: no answer has room for a draft of {num_draft} tokens: raise max_new_tokens")
        means = drafter.num_matches / drafter.num_drafts, drafter.num_accepted / drafter.num_drafts
        table.rows.append([name, *map("{:.2f}".format, means)])
    table.notes.append(f"Tokens per draft of {num_draft}.")
    return table


def orders(base: Base, spec: str, asked: Asked, max_new_tokens: int) -> ResultTable:
    """Decode the questions of all benchmarks in several orders, keeping the phrases from text to text."""
    tasks = [own.prompts for own in asked.values()]
    shuffled = random.Random(0).sample(list(chain(*tasks)), sum(map(len, tasks)))
    numbers = sorted({min(number, max(map(len, tasks))) for number in (1, 2, 4, 10, 10**9)}, reverse=True)
    arranged = {f"{number} of a task in turn": in_turn(tasks, number) for number in numbers} | {"shuffled": shuffled}
    arranged[FORGETTING] = shuffled
    table = ResultTable("Order of tasks (Ouroboros, Table 17)", ["order", "acceptance length", "draft forwards/token"])
    for name, prompts in arranged.items():
        runner = make_runner(base)
        session = Session(runner, drafter_specs.make(spec + ",history=false" * (name == FORGETTING), runner))
        steps = [step for prompt in prompts for step in session.run(prompt, max_new_tokens, base.eos).steps[1:]]
        num_tokens, forwards = sum(step.emitted for step in steps), sum(step.draft_forwards for step in steps)
        table.rows.append([name, f"{num_tokens / len(steps):.3f}", f"{forwards / num_tokens:.2f}"])
    table.notes.append(f"{spec.partition(':')[2]}; {len(shuffled)} questions of {', '.join(asked)}")
    return table


def in_turn(tasks: Sequence[Sequence[list[int]]], number: int) -> list[list[int]]:
    """The prompts of all tasks, `number` of the first, as many of the second and so on, and then again.

    >>> in_turn([[[1], [2], [3]], [[4], [5]]], 2)
    [[1], [2], [4], [5], [3]]
    """
    starts = range(0, max(map(len, tasks)), number)
    return [prompt for start in starts for task in tasks for prompt in task[start : start + number]]


if __name__ == "__main__":
    main(paper_figures)
