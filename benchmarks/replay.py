"""Drafters that read only tokens, measured on recorded greedy answers without the base that wrote them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas
import torch
from torch import Tensor
from transformers import PretrainedConfig

from benchmarks.harness import main
from benchmarks.recount import recorded_rows
from data.benchmarks import Question, load_questions
from data.conversations import Message, user_message
from data.files import reading
from data.safe_text import safe_text
from data.tokenizer import load_tokenizer
from drafters.protocol import Drafter, RequiredOutputs
from drafters.tree import ROOT, DraftTree
from inference import drafter_specs
from inference.evaluate.answers import Answer, Turn
from inference.evaluate.figures import measure_acceptance
from inference.prompts import encode_question
from inference.verifier.base import BaseConfig
from inference.verifier.runner import ForwardOutput, Runner
from inference.verifier.sampling import Greedy, TreeLogits
from inference.verifier.session import Session, Step

NOT_RECORDED = -1  # the token of a row whose next token the recording does not contain


class RecordedTurn(NamedTuple):
    """A turn of a question as it was answered."""

    question: Question
    prompt: list[int]
    answer: list[int]  # empty if its tokens are unknown
    has_ended: bool  # before the length cap


class RecordedRunner(Runner):
    """Stands in for the base: after any beginning of a recorded ``text``, its argmax is the next recorded token."""

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


def decode(base: BaseConfig, drafter: Drafter, turns: Sequence[RecordedTurn], cap: int) -> Iterator[list[Step]]:
    """Decode recorded turns in order, by the loop that decodes live, and yield the steps of each."""
    session = Session(runner := RecordedRunner(base), drafter, RecordedSampler())
    eos = frozenset([base.tokenizer.eos_token_id, *(turn.answer[-1] for turn in turns if turn.has_ended)])
    for question, prompt, answer, has_ended in turns:
        runner.text = [*prompt, *answer]
        result = session.run(prompt, cap if has_ended else len(answer), eos)
        if result.tokens != answer:
            raise ValueError(f"an answer to {question.question_id} goes on after {result.tokens[-1]}, an end of texts")
        yield result.steps


def read(
    path: str, questions: Mapping[int, Question], base: BaseConfig, template: str, cap: int
) -> Iterator[RecordedTurn]:
    """Read recorded answers. FastChat's texts are tokenised again, with the end-of-sequence token that was cut off."""
    for place, row in recorded_rows(path):
        with reading(place, "it is no recorded answer to --questions"):
            question, choice, messages = questions[row["question_id"]], row["choices"][0], list[Message]()
            for turn, text in enumerate(choice["turns"]):
                messages.append(user_message(question.turns[turn]))
                prompt = encode_question(base, question, messages, template)
                messages.append({"role": "assistant", "content": text})
                if "token_ids" in choice:  # from `drafters eval`
                    tokens, has_ended = choice["token_ids"][turn], choice["ended"][turn]
                    size, fits = len(tokens), choice["prompt_tokens"][turn] == len(prompt)
                else:  # where new_tokens is 0, the base alone wrote one token in each of idxs + 1 steps
                    tokens = base.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
                    size, fits = choice["new_tokens"][turn] or choice["idxs"][turn] + 1, True
                    has_ended = not size == cap == len(tokens)
                    tokens += [base.tokenizer.eos_token_id] * has_ended
                if size > cap or not fits:
                    raise ValueError("other lengths: pass its --tokenizer, --template and --max_new_tokens")
                yield RecordedTurn(question, prompt, tokens if len(tokens) == size else [], has_ended)


def measure(turns: Sequence[tuple[Question, list[Step]]]) -> dict[str, float | None]:
    """The figures of turns from their steps; the first one counts the prefill as a step, the others do not."""
    by_question: dict[int, list[Turn]] = {}
    for question, steps in turns:
        by_question.setdefault(question.question_id, []).append(Turn("", [], 0, steps, 0.0, True))
    answers = [Answer(number, "", "", texts) for number, texts in by_question.items()]
    figures = measure_acceptance(answers)
    return {
        "tokens per forward": figures.conventions["block efficiency (Ouroboros)"],
        "acceptance length": figures.length.value,
        "mean per question": figures.mean.value,
        "fed per step": figures.fed_per_step,
        "draft efficiency": figures.draft_efficiency,
    }


def replay(
    answers: str,
    questions: str,
    tokenizer: str,
    drafter: list[str],
    template: str = "vicuna_v1.1",
    benchmark: str = "mt_bench",
    max_new_tokens: int = 512,
) -> None:
    """Measure drafters that read only tokens on recorded greedy answers. The steps are exactly those of live decoding.

    Args:
        answers: JSONL file of recorded greedy answers, in FastChat's form or as drafters eval writes them.
        questions: File of the questions that were answered.
        tokenizer: Folder of the tokenizer of the base that answered.
        drafter: none, anpd, prompt_lookup or another drafter that reads only tokens; may be repeated.
        template: Chat template of the recording: vicuna_v1.1, llama2_chat, or tokenizer for the tokenizer's own.
        benchmark: Benchmark that the questions belong to, as NAME or NAME:STYLE.
        max_new_tokens: Maximum number of tokens of a turn in the recording.
    """
    config = PretrainedConfig.from_dict({"max_position_embeddings": 1 << 30})
    base, specs = BaseConfig(answers, load_tokenizer(tokenizer), config), drafter_specs.labels(drafter)
    builders = {name: drafter_specs.builder_from_tokens(spec, base) for name, spec in specs.items()}
    by_id = {question.question_id: question for question in load_questions(benchmark, questions)}
    turns = list(read(answers, by_id, base, template, max_new_tokens))
    if not (replayed := [turn for turn in turns if turn.answer]):
        raise ValueError(f"{answers}: none of {len(turns)} turns can be replayed: is --tokenizer the base's?")
    categories = dict.fromkeys(turn.question.category for turn in replayed)
    rows: list[dict[str, Any]] = []
    for name, build in builders.items():
        decoded = decode(base, build(), replayed, max_new_tokens)
        measured = [(turn.question, steps) for turn, steps in zip(replayed, decoded, strict=True)]
        for category in ("all", *categories):
            part = [(question, steps) for question, steps in measured if category in ("all", question.category)]
            rows.append({"drafter": name, "category": category, "turns": len(part), **measure(part)})
    table = pandas.DataFrame(rows).set_index(["drafter", "category"])
    print(safe_text(table.to_string(float_format="{:.3f}".format, na_rep="–")))
    print(f"{len(replayed)} of {len(turns)} turns; tokens per forward count the prefill.")


if __name__ == "__main__":
    main(replay)
