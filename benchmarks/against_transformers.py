"""Our loop against `generate` of transformers, the same text from both: vanilla, prompt lookup, a draft model."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import numpy as np
import torch

from benchmarks.harness import Measured, in_turn, main, num_millions, random_llama, show, spread
from data import benchmarks
from drafters import Drafter, DraftModel, NoDrafter, PromptLookup
from inference.api.prompts import encode_messages
from inference.engine.base import Base, Dtype, load_base, resolve_device
from inference.engine.draft_session import DraftModelSession
from inference.engine.runner import Runner
from inference.engine.session import Session, StepCost, check_prompt
from inference.evaluation.verify import first_divergence

PAIRS = ("vanilla", "prompt lookup", "draft model")
OURS, THEIRS = "ours", "transformers"
Decode = Callable[[list[int]], tuple[list[int], list[StepCost]]]  # prompt -> new tokens, and our steps


@dataclass
class Arm:
    """One way to decode, and what its runs took: seconds by repeat, tokens by prompt."""

    decode: Decode
    seconds: list[float]
    texts: dict[int, list[int]] = field(default_factory=dict)
    steps: dict[int, list[StepCost]] = field(default_factory=dict)

    def run(self, repeat: int, index: int, prompt: list[int], device: torch.device) -> None:
        _wait(device)
        started = time.perf_counter()
        tokens, steps = self.decode(prompt)
        _wait(device)
        self.seconds[repeat] += time.perf_counter() - started
        assert self.texts.setdefault(index, tokens) == tokens, "the same run gives the same text"
        self.steps[index] = steps

    def tokens_per_second(self) -> list[float]:
        """One number a repeat, over all prompts, prefill included."""
        num_tokens = sum(map(len, self.texts.values()))
        return [num_tokens / seconds for seconds in self.seconds]

    def acceptance_length(self) -> float:
        """Tokens per base forward, without the prefill."""
        steps = [step for steps in self.steps.values() for step in steps[1:]]
        return sum(step.emitted for step in steps) / max(1, len(steps))


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
    """Tokens per second of our loop and of transformers' generate, for the same greedy texts.

    Args:
        base: Folder of a trained base; it answers questions of the embedded corpus.
        draft: Folder of its draft model; without it the base's own first 2 layers draft.
        models: base, and random LLaMAs by shape, with a random draft model of 2 layers.
        dtypes: Number formats.
        device: auto takes the GPU where there is one.
        max_new_tokens: Tokens of a text at most.
        num_prompts: Prompts.
        repeats: Runs of every arm over all prompts, after one to warm up.
        max_ngram: Longest n-gram that prompt lookup matches, on both sides.
        num_lookup: Tokens that prompt lookup drafts, on both sides.
        num_draft: Tokens that the draft model drafts, on both sides.
        threads: Of torch; 0 leaves them as they are.
        out: Markdown file for the tables.
    """
    if min(num_prompts, repeats, max_new_tokens) < 1:
        raise ValueError("num_prompts, repeats and max_new_tokens must be at least 1")
    if threads:
        torch.set_num_threads(threads)
    place = resolve_device(device)
    tables = []
    for name in models:
        for dtype in dtypes:
            if name == "base":
                loaded = load_base(base, dtype, place)
                drafting = load_base(draft, dtype, place) if draft else _first_layers(loaded)
                prompts = _questions(loaded, num_prompts)
            else:
                loaded = random_llama(name, 32000, dtype, place)
                drafting = _random_draft(loaded, dtype)
                prompts = _repetitive(num_prompts, 32000)
            for prompt in prompts:
                check_prompt(loaded, prompt, max_new_tokens)
            arms = _arms(loaded, drafting, max_new_tokens, (max_ngram, num_lookup, num_draft), repeats)
            title = f"{loaded.name}, {dtype}"
            _measure(arms, prompts, repeats, title, place)
            tables.append(_table(title, arms, loaded, drafting, prompts, dtype))
            tables[-1].notes += _settings(max_new_tokens, num_prompts, repeats, max_ngram, num_lookup, num_draft)
    show(tables, place, out)


def _arms(
    base: Base, draft: Base, max_new_tokens: int, sizes: tuple[int, int, int], repeats: int
) -> dict[tuple[str, str], Arm]:
    """Three pairs. Every arm has its model's cache for itself and makes what it needs anew for each text."""
    max_ngram, num_lookup, num_draft = sizes
    eos = _eos(base)
    made: dict[str, Drafter] = {
        "vanilla": NoDrafter(),
        "prompt lookup": PromptLookup(max_ngram, num_lookup),
        "draft model": DraftModel(DraftModelSession(Runner(draft)), num_draft),
    }
    config = draft.model.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = num_draft, "constant"
    config.assistant_confidence_threshold = 0.0
    options = {
        "vanilla": {},
        "prompt lookup": {"prompt_lookup_num_tokens": num_lookup, "max_matching_ngram_size": max_ngram},
        "draft model": {"assistant_model": draft.model},
    }
    arms = {}
    for pair in PAIRS:
        arms[pair, OURS] = Arm(_ours(base, made[pair], max_new_tokens, eos), [0.0] * repeats)
        arms[pair, THEIRS] = Arm(_theirs(base, options[pair], max_new_tokens, eos), [0.0] * repeats)
    return arms


def _ours(base: Base, drafter: Drafter, max_new_tokens: int, eos: frozenset[int]) -> Decode:
    session = Session(Runner(base), drafter)

    def decode(prompt: list[int]) -> tuple[list[int], list[StepCost]]:
        result = session.run(prompt, max_new_tokens, eos)
        return result.tokens, result.steps

    return decode


def _theirs(base: Base, options: dict, max_new_tokens: int, eos: frozenset[int]) -> Decode:
    def decode(prompt: list[int]) -> tuple[list[int], list[StepCost]]:
        ids = torch.tensor([prompt], device=base.model.device)
        written = base.model.generate(
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
        return written[0, len(prompt) :].tolist(), []

    return decode


def _measure(arms: dict, prompts: list[list[int]], repeats: int, title: str, device: torch.device) -> None:
    for arm in arms.values():
        arm.decode(prompts[0])
    for repeat, index, key in in_turn(list(arms), len(prompts), repeats, title):
        arms[key].run(repeat, index, prompts[index], device)


def _table(title: str, arms: dict, base: Base, draft: Base, prompts: list[list[int]], dtype: str) -> Measured:
    headings = ["arm", "ours", "theirs", "ratio", "range", "noise", "accepted", "same"]
    table = Measured(f"{title} ({num_millions(base)}; draft model {draft.name}, {num_millions(draft)})", headings)
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
        table.notes.append(f"{len(gaps)} texts part from plain generate's at {near}.")
    loops = sum(len(set(text[-32:])) <= 8 for text in reference.values())
    degenerate = "" if base.tokenizer else "; a random base's text is degenerate, which favours lookups on both sides"
    table.notes.append(f"{loops} of {len(reference)} texts end in a loop of at most 8 words{degenerate}.")
    return table


def _gaps(base: Base, prompts: list, wanted: dict, got: dict, arm: str, dtype: str) -> list[float]:
    """Logit gaps where texts part from transformers' plain greedy ones.

    Raises:
        ValueError: They part in float32, or by more than the rounding of a shorter format explains.
    """
    gaps = []
    for index in [index for index in wanted if wanted[index] != got[index]]:
        found = first_divergence(base, index, prompts[index], wanted[index], got[index])
        if dtype == "float32" or abs(found.logit_gap) > 0.25:
            raise ValueError(f"{arm}: another text than plain generate's: {found}; the comparison would be unfair")
        gaps.append(abs(found.logit_gap))
    return gaps


def _settings(
    max_new_tokens: int, num_prompts: int, repeats: int, max_ngram: int, num_lookup: int, num_draft: int
) -> list[str]:
    return [
        "ours, theirs: tokens per second, medians over repeats, prefill included; theirs is transformers' generate. "
        "ratio = median (and range) of the repeats' ratios; noise = (largest - smallest) / median of their repeats; "
        "accepted = our acceptance length, prefill excluded; same = texts alike on both sides.",
        f"{num_prompts} prompts, at most {max_new_tokens} new tokens, {repeats} repeats after one run to warm up; arms "
        "in turn on each prompt, another one first each time. End-of-sequence tokens end a text on both sides; random "
        "bases have none.",
        f"Prompt lookup: n-grams up to {max_ngram}, {num_lookup} tokens. Draft model: {num_draft} tokens a step, "
        "constant, no confidence threshold. The same on both sides. generate: do_sample=False, its own default cache.",
    ]


def _eos(base: Base) -> frozenset[int]:
    return base.eos if base.tokenizer else frozenset()


def _first_layers(base: Base, num_layers: int = 2) -> Base:
    """The base cut short: the nearest thing to a draft model where none is given."""
    model = copy.deepcopy(base.model)
    model.base_model.layers = model.base_model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    return Base(f"its first {num_layers} layers", model, base.tokenizer)


def _random_draft(base: Base, dtype: str) -> Base:
    return random_llama("draft", base.model.config.vocab_size, dtype, base.model.device, base.context_length, seed=1)


def _questions(base: Base, count: int) -> list[list[int]]:
    asked = benchmarks.load("embedded", None, 0, count)
    return [encode_messages(base, [("user", question.turns[0])], "tokenizer") for question in asked]


def _repetitive(count: int, vocab: int) -> list[list[int]]:
    """Random phrases said again in another order, so that lookups hit."""
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
