"""The options that commands share, and their groups of options; what loads a model is imported when it is called."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from data import benchmarks
from data.benchmarks import Question
from data.dtypes import Dtype
from inference.arguments import LOWEST_TEMPERATURE, checks_arguments

MYPY = False  # a block for the checker of types that jsonargparse does not run, as it does one of TYPE_CHECKING

if MYPY:
    import torch
    from transformers import LogitsProcessor

    from inference.prompts import BenchmarkPrompts
    from inference.verifier.base import Base, BaseConfig
    from inference.verifier.sampling import Greedy, KeyedSampler

Format = Literal["md", "csv", "parquet", "latex"]


@dataclass(frozen=True)
class ModelOptions:
    """The base that a command loads.

    Args:
        base: Folder or hub id of the base, also with @REVISION, a commit, tag or branch of the hub, or a GGUF file. By
            default a tiny one that the package contains.
        dtype: Dtype of the weights of the base and of the drafters; int8 and nf4 quantise the base, and int8
            on a CPU the drafters, too.
        device: Device to run on; auto uses the GPU if there is one.
        forward: How the base is run: graphed, its steps as CUDA graphs; eager; packed, with a second copy of the
            weights in the layout in which a CPU multiplies few tokens; or auto, graphed on a GPU and eager on a CPU.
        bitwise: Whether texts are those of the base alone bit for bit; by default in bfloat16 and float16 on a CPU,
            unless steps are graphed.
    """

    base: str = "checkpoints/tiny-chat"
    dtype: Dtype = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    forward: Literal["auto", "eager", "packed", "graphed"] = "auto"
    bitwise: bool | None = None

    def on(self, device: torch.device) -> ModelOptions:
        """The options with which ``auto`` loads the base to a device."""
        graphed = device.type == "cuda" and not self.bitwise
        return replace(self, forward="graphed" if graphed else "eager") if self.forward == "auto" else self

    def load(self) -> Base:
        """Load the base to its device; on a CPU other programs keep the cores that they use."""
        from inference.timing import use_idle_cores
        from inference.verifier.base import resolve_device

        device = resolve_device(self.device)
        if device.type == "cpu":
            use_idle_cores()
        return self.load_on(device)

    def load_on(self, device: torch.device) -> Base:
        """Load the base to a device, and prepare this process for it."""
        from inference.verifier.base import load_base, prepare_process

        graphed = None if self.forward == "auto" else self.forward == "graphed"
        is_half = self.dtype != "float32" and not graphed
        prepare_process(device, sums_alike=is_half if self.bitwise is None else self.bitwise)
        is_packed = self.forward == "packed"
        return load_base(self.base, self.dtype, device, packed=is_packed, bitwise=self.bitwise, graphed=graphed)


@checks_arguments
@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen.

    Args:
        temperature: Sampling temperature; 0 decodes greedily, and so do values below 0.00001.
        top_k: Sample from the k most probable tokens only; 0 keeps all tokens.
        top_p: Sample from the most probable tokens whose probabilities add up to this value; 1 keeps all tokens.
        seed: Seed of the random sampling. Each draw depends only on the seed and the position of its token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)

    def sampler(self, processors: Sequence[LogitsProcessor] = ()) -> Greedy | KeyedSampler:
        """The sampler with these options, behind logits processors; raises ValueError if a value is out of range."""
        from inference.verifier.sampling import Greedy, KeyedSampler

        if self.temperature:
            return KeyedSampler(self.temperature, self.top_k, self.top_p, self.seed, processors)
        if self.top_k or self.top_p != 1:
            option = f"top_k {self.top_k}" if self.top_k else f"top_p {self.top_p}"
            raise ValueError(
                f"{option} is for sampling, and temperature 0 decodes greedily: give a temperature above 0"
            )
        return Greedy(processors)


GREEDY = SamplingOptions()


@dataclass(frozen=True)
class QuestionOptions:
    """The questions of one or several benchmarks, as eval, verify, tune and the scripts of benchmarks/ select them.

    Args:
        benchmark: NAME[:STYLE][=FILE[,FILE]], such as mt_bench or gsm8k:ctc=test.jsonl; may be repeated. By default
            embedded, which the package contains; an unknown name lists all.
        limit: Maximum number of questions of each benchmark; those too long for the base's context are not counted.
        rows: Rows of each benchmark: a slice such as 1200:1260 or ::10, or random:COUNT[:SEED]; by default all.
        max_new_tokens: Maximum number of tokens of an answer; by default what the papers use for each benchmark.
        template: Chat template: vicuna_v1.1, llama2_chat, or tokenizer[:thinking=on|off] for the tokenizer's own.
    """

    benchmark: list[str] | None = None
    limit: int | None = None
    rows: str = ":"
    max_new_tokens: int | None = None
    template: str = "tokenizer"

    def files(self) -> dict[str, str | None]:
        """The files of the questions, by the name of the benchmark; None stands for the benchmark's own source."""
        files: dict[str, str | None] = {}
        for given in self.benchmark or ["embedded"]:
            name, _, file = given.partition("=")
            if name in files:
                raise ValueError(f"the benchmark {name} is named twice: name it once")
            files[name] = file or None
        return files

    def caps(self) -> dict[str, int]:
        """The maximum number of tokens of an answer, by benchmark."""
        found = {name: benchmarks.find_benchmark(name) for name in self.files()}
        caps = {name: style.max_new_tokens or benchmark.max_new_tokens for name, (benchmark, style) in found.items()}
        return caps if self.max_new_tokens is None else dict.fromkeys(caps, self.max_new_tokens)

    def load(self) -> dict[str, list[Question]]:
        """Load the rows of each benchmark; raises ValueError for a mistake in the options, before a base is loaded."""
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, not {self.limit}")
        chosen = _choice_of_rows(self.rows)
        selected: dict[str, list[Question]] = {}
        for name, file in self.files().items():
            questions = benchmarks.load_questions(name, file)
            selected[name] = [questions[row] for row in chosen(len(questions))]
            if not selected[name]:
                raise ValueError(f"--rows {self.rows} selects none of the {len(questions)} questions of {name}")
        return selected

    def select(self, base: Base | BaseConfig, questions: dict[str, list[Question]]) -> dict[str, BenchmarkPrompts]:
        """Select the loaded questions whose first prompt fits into the context, at most ``limit`` of each benchmark.

        A later turn too long ends its answer. Raises ValueError if a prompt is empty, the template refuses a question
        or leaves out its system prompt or tools, a cap is below 1, or no question of a benchmark fits.
        """
        from inference.prompts import BenchmarkPrompts, encode_first_prompt
        from inference.verifier.session import check_prompt

        selected, caps = {name: BenchmarkPrompts(name, base.context_length) for name in questions}, self.caps()
        for name, prompts in selected.items():
            for question in questions[name]:
                if len(prompts.questions) == self.limit:
                    break
                try:
                    prompt = encode_first_prompt(base, question, self.template)
                    if len(prompt) >= base.context_length:
                        prompts.left_out.append(question.question_id)
                        continue
                    check_prompt(base, prompt, caps[name])
                except ValueError as error:
                    raise ValueError(f"{name}, question {question.question_id}: {error}") from error
                prompts.questions.append(question)
                prompts.prompts.append(prompt)
            if not prompts.questions:
                raise ValueError(
                    f"{name}: none of {len(questions[name])} prompts fits into the context of {base.name}, which ends "
                    f"at {base.context_length} tokens: shorten the prompts, or take a base that reads more"
                )
        return selected


def _choice_of_rows(text: str) -> Callable[[int], Sequence[int]]:
    """Read which of a number of rows are chosen: a slice as Python writes it, or a random sample, with seed 0 if none.

    >>> list(_choice_of_rows("::10")(30)), _choice_of_rows("random:3:7")(30)
    ([0, 10, 20], [4, 10, 12])
    """
    if match := re.fullmatch(r"random:(\d+)(?::(\d+))?", text):
        count, seed = int(match[1]), int(match[2] or 0)
        return lambda size: sorted(random.Random(seed).sample(range(size), min(count, size)))
    try:
        parts = [int(part) if part else None for part in text.split(":")]
    except ValueError:
        parts = []
    if len(parts) not in (2, 3) or 0 in parts[2:]:
        raise ValueError(f"rows must be a slice such as 1200:1260 or ::10, or random:COUNT[:SEED], not {text!r}")
    return lambda size: range(size)[slice(*parts)]


@dataclass(frozen=True)
class EvaluationOptions:
    """How `drafters eval` measures.

    Args:
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; may be repeated. By default
            prompt_lookup and joint; the base alone, none, is always measured too.
        repeats: How often every question is decoded; auto repeats until timing errors are at most 5 %.
        run_code: Run the programs in the answers to humaneval and mbpp in bubblewrap, to measure pass@1.
        server: Measure vllm, or a server that runs: [NAME=]URL, may be repeated; the first is the baseline.
        concurrency: Number of requests at once that a server gets; may be repeated. By default 1, 4 and 16.
        disable_by_batch_size: Let vLLM draft nothing in steps with more requests than this.
    """

    drafter: list[str] | None = None
    repeats: int | Literal["auto"] = "auto"
    run_code: bool = False
    server: list[str] | None = None
    concurrency: list[int] | None = None
    disable_by_batch_size: int | None = None


@dataclass(frozen=True)
class VerifyQuestions(QuestionOptions):
    """The prompts that are decoded: the first turns of the benchmarks' questions."""

    limit: int | None = 20
    max_new_tokens: int | None = 128


@dataclass(frozen=True)
class TuneQuestions(QuestionOptions):
    """The questions whose first turns are decoded."""

    limit: int | None = 8
    max_new_tokens: int | None = 128


@dataclass(frozen=True)
class SearchOptions:
    """What is searched, and how.

    Args:
        space: An option and its values: NAME=4,8,16, NAME=2..6 or NAME=0.0..0.1; may be repeated. `file` varies the
            FILE of NAME=FILE, `skips` (alone) the sublayers that self_speculative leaves out.
        sampler: grid tries all combinations, tpe and gp choose by what was measured, random chooses blindly.
        trials: Maximum number of combinations to try.
        objective: What is maximised: the speed-up over the base alone, tokens per second, or acceptance length.
        search_seed: Seed of the search.
    """

    space: list[str]
    sampler: Literal["grid", "gp", "tpe", "random"] = "tpe"
    trials: int = 50
    objective: Literal["speedup", "tokens_per_second", "acceptance_length"] = "speedup"
    search_seed: int = 0


@dataclass(frozen=True)
class AnswerOptions:
    """Which turns are answered, and at what length.

    Args:
        template: Chat template: vicuna_v1.1, llama2_chat, or tokenizer[:thinking=on|off] for the tokenizer's own.
        turns: Answer all turns of a conversation, each after the new answers to the earlier ones, or only the first.
        limit: Maximum number of conversations; by default all.
        max_new_tokens: Maximum number of tokens of an answer; an answer cut off there has no EOS token.
        max_length: Maximum number of tokens of a conversation; by default the context length of the base.
        num_answers: Answers to each conversation, sampled with different seeds.
        batch_size: Maximum number of prompts decoded together. An interrupted run loses at most this many answers.
        max_tokens: Maximum number of tokens of the prompts that the base reads together, padding included, so that long
            prompts are decoded in small batches. A server gets whole ones.
        own_prompts: Prompts that the base writes itself and then answers, beside those of ``files`` (Magpie).
    """

    template: str = "tokenizer"
    turns: Literal["all", "first"] = "all"
    limit: int | None = None
    max_new_tokens: int = 512
    max_length: int | None = None
    num_answers: int = 1
    batch_size: int = 64
    max_tokens: int = 8192
    own_prompts: int = 0


@dataclass(frozen=True)
class ServerOptions:
    """An OpenAI-compatible server that answers instead of a base in this process.

    Args:
        server: Address of the server, such as http://localhost:8000/v1; by default the base is loaded instead.
        model: Name under which the server offers the base; by default the first model that it lists.
        concurrency: Maximum number of requests to the server at the same time.
    """

    server: str | None = None
    model: str | None = None
    concurrency: int = 16
