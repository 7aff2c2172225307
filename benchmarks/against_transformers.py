"""Speed of our loop and of transformers' ``generate`` for the same texts: plain, prompt lookup, draft model."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, cast

import numpy as np
import torch

from benchmarks.harness import ResultTable, alternate, main, num_millions, random_llama, show, spread
from data import benchmarks
from drafters import Drafter, DraftModel, NoDrafter, PromptLookup
from inference.prompts import encode_messages
from inference.verifier.base import Base, Dtype, load_base, resolve_device
from inference.verifier.draft_session import DraftModelSession
from inference.verifier.runner import Runner
from inference.verifier.session import Session, StepCost, check_prompt
from inference.verify import first_divergence

PAIRS = ("vanilla", "prompt lookup", "draft model")
OURS, THEIRS = "ours", "transformers"
Decode = Callable[[list[int]], tuple[list[int], list[StepCost]]]  # prompt -> new tokens, and our steps


@dataclass
class TimedDecoder:
    """One way of decoding, with its times and texts.

    Args:
        decode: Continues a prompt.
        seconds: Seconds over all prompts, for each repeat.
        texts: The tokens written, by prompt.
        steps: The steps of our loop, by prompt.
    """

    decode: Decode
    seconds: list[float]
    texts: dict[int, list[int]] = field(default_factory=dict)
    steps: dict[int, list[StepCost]] = field(default_factory=dict)

    def run(self, repeat: int, index: int, prompt: list[int], device: torch.device) -> None:
        """Decode a prompt and add its time to that of the repeat."""
        _wait(device)
        started = time.perf_counter()
        tokens, steps = self.decode(prompt)
        _wait(device)
        self.seconds[repeat] += time.perf_counter() - started
        assert self.texts.setdefault(index, tokens) == tokens, "repeats write the same text"
        self.steps[index] = steps

    def tokens_per_second(self) -> list[float]:
        """Return the tokens per second over all prompts for each repeat, prefill included."""
        num_tokens = sum(map(len, self.texts.values()))
        return [num_tokens / seconds for seconds in self.seconds]

    def acceptance_length(self) -> float:
        """Return the tokens per base forward, without the prefill."""
        steps = [step for steps in self.steps.values() for step in steps[1:]]
        return sum(step.emitted for step in steps) / max(1, len(steps))


Arms = dict[tuple[str, str], TimedDecoder]  # by pair and side


def against_transformers(
    base: str = "checkpoints/tiny-chat",
    draft: str | None = None,
    models: list[Literal["base", "100m", "1b", "7b"]] = ["base", "100m"],  # noqa: B006
    dtypes: list[Dtype] = ["float32", "bfloat16"],  # noqa: B006
    device: Literal["auto", "cpu", "cuda"] = "auto",
    max_new_tokens: int = 128,
    num_prompts: int = 6,
    repeats: int = 5,
    max_ngram: int = 3,
    num_lookup: int = 10,
    num_draft: int = 5,
    threads: int = 0,
    out: str | None = None,
) -> None:
    """Compare the tokens per second of our loop and of transformers' generate, for the same greedy texts.

    Args:
        base: Folder of a trained base, which answers questions of the embedded corpus.
        draft: Folder of its draft model; by default, the first 2 layers of the base.
        models: base for the trained base, or shapes of random LLaMAs with a random draft model of 2 layers.
        dtypes: Dtypes of the weights.
        device: Device to run on; auto uses the GPU if there is one.
        max_new_tokens: Maximum number of tokens of a text.
        num_prompts: Number of prompts.
        repeats: Timed runs of every arm over all prompts, after one warm-up run.
        max_ngram: Length of the longest n-gram that prompt lookup matches, on both sides.
        num_lookup: Number of tokens that prompt lookup drafts, on both sides.
        num_draft: Number of tokens that the draft model drafts, on both sides.
        threads: Number of torch threads; 0 keeps the default.
        out: Markdown file to write the tables to.
    """
    if min(num_prompts, repeats, max_new_tokens) < 1:
        raise ValueError("num_prompts, repeats and max_new_tokens must be at least 1")
    if threads:
        torch.set_num_threads(threads)
    torch_device = resolve_device(device)
    tables = []
    for name in models:
        for dtype in dtypes:
            if name == "base":
                loaded = load_base(base, dtype, torch_device)
                drafting = load_base(draft, dtype, torch_device) if draft else _first_layers(loaded)
                prompts = _questions(loaded, num_prompts)
            else:
                loaded = random_llama(name, 32000, dtype, torch_device)
                drafting = _random_draft(loaded, dtype)
                prompts = _repetitive(num_prompts, 32000)
            for prompt in prompts:
                check_prompt(loaded, prompt, max_new_tokens)
            arms = _arms(loaded, drafting, max_new_tokens, (max_ngram, num_lookup, num_draft), repeats)
            title = f"{loaded.name}, {dtype}"
            _measure(arms, prompts, repeats, title, torch_device)
            tables.append(_table(title, arms, loaded, drafting, prompts, dtype))
            tables[-1].notes += _settings(max_new_tokens, num_prompts, repeats, max_ngram, num_lookup, num_draft)
    show(tables, torch_device, out)


def _arms(base: Base, draft: Base, max_new_tokens: int, sizes: tuple[int, int, int], repeats: int) -> Arms:
    """Return the arms of the three pairs; each arm has its own KV cache and starts each text from scratch."""
    max_ngram, num_lookup, num_draft = sizes
    eos = _eos(base)
    drafters: dict[str, Drafter] = {
        "vanilla": NoDrafter(),
        "prompt lookup": PromptLookup(max_ngram, num_lookup),
        "draft model": DraftModel(DraftModelSession(Runner(draft)), num_draft),
    }
    config = draft.model.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = num_draft, "constant"
    config.assistant_confidence_threshold = 0.0
    options: dict[str, dict[str, Any]] = {
        "vanilla": {},
        "prompt lookup": {"prompt_lookup_num_tokens": num_lookup, "max_matching_ngram_size": max_ngram},
        "draft model": {"assistant_model": draft.model},
    }
    arms = {}
    for pair in PAIRS:
        arms[pair, OURS] = TimedDecoder(_ours(base, drafters[pair], max_new_tokens, eos), [0.0] * repeats)
        arms[pair, THEIRS] = TimedDecoder(_theirs(base, options[pair], max_new_tokens, eos), [0.0] * repeats)
    return arms


def _ours(base: Base, drafter: Drafter, max_new_tokens: int, eos: frozenset[int]) -> Decode:
    session = Session(Runner(base), drafter)

    def decode(prompt: list[int]) -> tuple[list[int], list[StepCost]]:
        result = session.run(prompt, max_new_tokens, eos)
        return result.tokens, result.steps

    return decode


def _theirs(base: Base, options: dict[str, Any], max_new_tokens: int, eos: frozenset[int]) -> Decode:
    # The type of `generate` asks for a class that transformers defines for type checkers only.
    model: Any = base.model

    def decode(prompt: list[int]) -> tuple[list[int], list[StepCost]]:
        ids = torch.tensor([prompt], device=base.model.device)
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(max_new_tokens, base.context_length - len(prompt)),
            eos_token_id=sorted(eos) or None,
            pad_token_id=min(eos, default=0),
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            **options,
        )
        assert isinstance(written, torch.Tensor)
        return written[0, len(prompt) :].tolist(), []

    return decode


def _measure(arms: Arms, prompts: list[list[int]], repeats: int, title: str, device: torch.device) -> None:
    for arm in arms.values():
        arm.decode(prompts[0])
    for repeat, index, key in alternate(list(arms), len(prompts), repeats, title):
        arms[key].run(repeat, index, prompts[index], device)


def _table(title: str, arms: Arms, base: Base, draft: Base, prompts: list[list[int]], dtype: str) -> ResultTable:
    headings = ["arm", "ours", "theirs", "ratio", "range", "noise", "accepted", "same"]
    table = ResultTable(f"{title} ({num_millions(base)}; draft model {draft.name}, {num_millions(draft)})", headings)
    reference = arms["vanilla", THEIRS].texts
    gaps = []
    for pair in PAIRS:
        ours, theirs = arms[pair, OURS], arms[pair, THEIRS]
        mine, other = ours.tokens_per_second(), theirs.tokens_per_second()
        ratios = [a / b for a, b in zip(mine, other, strict=True)]
        for side in (OURS, THEIRS):
            gaps += _gaps(base, prompts, reference, arms[pair, side].texts, f"{pair}, {side}", dtype)
        same = sum(ours.texts[index] == theirs.texts[index] for index in reference)
        table.rows.append(
            [
                pair,
                f"{median(mine):.1f}",
                f"{median(other):.1f}",
                f"{median(ratios):.2f}×",
                f"{min(ratios):.2f}-{max(ratios):.2f}",
                f"{spread(other):.0%}",
                f"{ours.acceptance_length():.2f}",
                f"{same}/{len(reference)}",
            ]
        )
    if gaps:
        near = f"near-ties of {dtype}; logit gap there at most {max(gaps):.3g}"
        table.notes.append(f"{len(gaps)} texts diverge from those of plain generate at {near}.")
    loops = sum(len(set(text[-32:])) <= 8 for text in reference.values())
    degenerate = "; the text of a random base is degenerate, which favours lookups on both sides"
    if base.tokenizer:
        degenerate = ""
    table.notes.append(f"{loops} of {len(reference)} texts end in a loop of at most 8 words{degenerate}.")
    return table


def _gaps(
    base: Base,
    prompts: list[list[int]],
    expected: dict[int, list[int]],
    actual: dict[int, list[int]],
    arm: str,
    dtype: str,
) -> list[float]:
    """Return the logit gaps where texts diverge from transformers' plain greedy texts.

    Raises:
        ValueError: Texts diverge in float32, or by more than the rounding of a shorter dtype explains.
    """
    gaps = []
    for index in [index for index in expected if expected[index] != actual[index]]:
        divergence = first_divergence(base, index, prompts[index], expected[index], actual[index])
        if dtype == "float32" or abs(divergence.logit_gap) > 0.25:
            raise ValueError(
                f"{arm}: another text than that of plain generate: {divergence}; the comparison would be unfair"
            )
        gaps.append(abs(divergence.logit_gap))
    return gaps


def _settings(
    max_new_tokens: int, num_prompts: int, repeats: int, max_ngram: int, num_lookup: int, num_draft: int
) -> list[str]:
    return [
        "ours, theirs: tokens per second, medians over repeats, prefill included; theirs is transformers' generate. "
        "ratio = median (and range) of the repeats' ratios; noise = (largest - smallest) / median of their repeats; "
        "accepted = our acceptance length, prefill excluded; same = texts that are equal on both sides.",
        f"{num_prompts} prompts, at most {max_new_tokens} new tokens, {repeats} repeats after a warm-up run; the arms "
        "alternate on each prompt, starting with another one each time. EOS tokens end a text on both sides; random "
        "bases have none.",
        f"Prompt lookup: n-grams up to {max_ngram}, {num_lookup} tokens. Draft model: {num_draft} tokens a step, "
        "constant, no confidence threshold. The same on both sides. generate: do_sample=False, its own default cache.",
    ]


def _eos(base: Base) -> frozenset[int]:
    return base.eos if base.tokenizer else frozenset()


def _first_layers(base: Base, num_layers: int = 2) -> Base:
    """Return the first layers of the base as a draft model, for bases without one."""
    model = cast(Any, copy.deepcopy(base.model))
    model.base_model.layers = model.base_model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    return Base(f"its first {num_layers} layers", model, base.tokenizer)


def _random_draft(base: Base, dtype: str) -> Base:
    return random_llama("draft", base.model.config.vocab_size, dtype, base.model.device, base.context_length, seed=1)


def _questions(base: Base, count: int) -> list[list[int]]:
    questions = benchmarks.load_questions("embedded", None, 0, count)
    return [encode_messages(base, [("user", question.turns[0])], "tokenizer") for question in questions]


def _repetitive(count: int, vocab: int) -> list[list[int]]:
    """Return prompts of random phrases that are repeated in another order, so that lookups find matches."""
    rng = np.random.default_rng(0)
    prompts = []
    for _ in range(count):
        phrases = rng.integers(3, vocab, (4, 8))
        prompts.append(phrases[rng.integers(0, 4, 16)].flatten().tolist())
    return prompts


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(against_transformers)
