"""``drafters replay``: measure drafters that read only tokens on recorded greedy answers, without the base."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor
from transformers import PretrainedConfig

from data.benchmarks import Question, load_questions
from data.conversations import Message, user_message
from data.files import read_json_lines, reading
from data.safe_text import SafeConsole
from data.tokenizer import load_tokenizer
from drafters.protocol import Drafter, RequiredOutputs
from drafters.tree import ROOT, DraftTree
from inference import drafter_specs
from inference.prompts import encode_question
from inference.verifier.base import BaseConfig
from inference.verifier.runner import ForwardOutput, Runner
from inference.verifier.sampling import Greedy, TreeLogits
from inference.verifier.session import Session, Step, acceptance_length

NOT_RECORDED = -1  # the token of a row whose next token the recording does not contain
COLUMNS = "tokens per forward", "acceptance length", "mean per question", "fed per step", "hit ratio"

# A turn: its question, prompt and answer (empty if its tokens are unknown), and whether it ended before the length cap.
Recording = tuple[Question, list[int], list[int], bool]


class RecordedRunner(Runner):
    """Stands in for the base: after any beginning of an answer ``text``, its argmax is the next recorded token."""

    def __init__(self, base: BaseConfig, text: Sequence[int] = ()) -> None:
        self.base: Any = base
        self.text, self.context_length, self.vocab_size = text, base.context_length, len(base.tokenizer)

    def reset(self, reserve: int = 0) -> None:
        self.cached = self._num_pending = 0

    def prepare(self, length: int) -> int:
        return self.context_length

    def forward(self, pending: Sequence[int], tree: DraftTree, required_outputs: RequiredOutputs) -> ForwardOutput:
        """Return tokens (1 + M, 1) in place of logits."""
        self._num_pending, continuation = len(pending), self.text[self.cached + len(pending) :]
        picks = [NOT_RECORDED] * (1 + len(tree))
        for node, token in zip([ROOT, *tree.follow(continuation)], continuation, strict=False):
            picks[1 + node] = token
        return ForwardOutput(torch.tensor(picks)[:, None], None)

    def commit(self, path: Sequence[int]) -> None:
        self.cached += self._num_pending + len(path)


class RecordedSampler(Greedy):
    """The sampler of a `RecordedRunner`, whose rows are tokens already."""

    def decide(self, rows: TreeLogits) -> Tensor:
        return rows.logits


def decode(base: BaseConfig, drafter: Drafter, recorded: Sequence[Recording], cap: int) -> Iterator[list[Step]]:
    """Decode the recorded turns in order, by the loop that decodes live, and yield the steps of each."""
    session = Session(runner := RecordedRunner(base), drafter, RecordedSampler())
    eos = frozenset([base.tokenizer.eos_token_id, *(tokens[-1] for _, _, tokens, ended in recorded if ended)])
    for question, prompt, tokens, ended in recorded:
        runner.text = [*prompt, *tokens]
        result = session.run(prompt, cap if ended else len(tokens), eos)
        if result.tokens != tokens:
            raise ValueError(f"an answer to {question.question_id} goes on after {result.tokens[-1]}, an end of texts")
        yield result.steps


def read(
    path: str, questions: Mapping[int, Question], base: BaseConfig, template: str, cap: int
) -> Iterator[Recording]:
    """Read recorded answers. FastChat's texts are tokenised again, with the end-of-sequence token that was cut off."""
    for place, row in read_json_lines(path):
        with reading(place, "it is no recorded answer to --questions"):
            question, choice, messages = questions[row["question_id"]], row["choices"][0], list[Message]()
            for turn, text in enumerate(choice["turns"]):
                messages.append(user_message(question.turns[turn]))
                prompt = encode_question(base, question, messages, template)
                messages.append({"role": "assistant", "content": text})
                if "token_ids" in choice:  # `drafters eval` wrote it
                    tokens, ended = choice["token_ids"][turn], choice["ended"][turn]
                    size, fits = len(tokens), choice["prompt_tokens"][turn] == len(prompt)
                else:  # where new_tokens is 0, the base alone wrote one token in each of idxs + 1 steps
                    tokens = base.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
                    size, fits = choice["new_tokens"][turn] or choice["idxs"][turn] + 1, True
                    ended = not size == cap == len(tokens)
                    tokens += [base.tokenizer.eos_token_id] * ended
                if size > cap or not fits:
                    raise ValueError("other lengths: pass its --tokenizer, --template and --max_new_tokens")
                yield question, prompt, tokens if len(tokens) == size else [], ended


def measure(turns: Sequence[tuple[Question, list[Step]]]) -> list[float]:
    """The figures of `COLUMNS`; the first counts the prefill as a step, the others leave it out."""
    questions: dict[int, list[list[Step]]] = {}
    for question, steps_of_turn in turns:
        questions.setdefault(question.question_id, []).append(steps_of_turn)
    lengths = [length for texts in questions.values() if (length := acceptance_length(texts)) is not None]
    steps, later = ([step for _, steps_of_turn in turns for step in steps_of_turn[skip:]] for skip in (0, 1))
    return [
        sum(step.emitted for step in steps) / len(steps),
        sum(step.emitted for step in later) / max(1, len(later)),
        sum(lengths) / max(1, len(lengths)),
        sum(step.fed for step in later) / max(1, len(later)),
        sum(step.accepted for step in later) / max(1, sum(step.fed_candidates for step in later)),
    ]


def replay(
    answers: str, questions: str, tokenizer: str, drafter: list[str], template: str, benchmark: str,
    max_new_tokens: int,
) -> None:  # fmt: skip
    """Run `drafters replay`, see `inference.commands.replay`."""
    config = PretrainedConfig.from_dict({"max_position_embeddings": 1 << 30})
    base, specs = BaseConfig(answers, load_tokenizer(tokenizer), config), drafter_specs.labels(drafter)
    chosen = {name: drafter_specs.builder_from_tokens(spec, base) for name, spec in specs.items()}
    by_id = {question.question_id: question for question in load_questions(benchmark, questions)}
    recordings = list(read(answers, by_id, base, template, max_new_tokens))
    if not (recorded := [turn for turn in recordings if turn[2]]):
        raise ValueError(f"{answers}: none of {len(recordings)} turns can be replayed: is --tokenizer the base's?")
    table, all_asked = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False), [question for question, *_ in recorded]
    for heading in ("drafter", "category", "turns", *COLUMNS):
        table.add_column(heading, min_width=max(map(len, heading.split())), no_wrap=heading in ("drafter", "category"))
    for name, build in chosen.items():
        turns = list(zip(all_asked, decode(base, build(), recorded, max_new_tokens), strict=True))
        for category in ("all", *dict.fromkeys(question.category for question in all_asked)):
            rows = [turn for turn in turns if category in ("all", turn[0].category)]
            figures = (f"{figure:.3f}" for figure in measure(rows))
            table.add_row(name if category == "all" else "", category, str(len(rows)), *figures)
    SafeConsole().print(table, f"{len(recorded)} of {len(recordings)} turns; tokens per forward count the prefill.")
