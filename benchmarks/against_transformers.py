"""Our drafters beside transformers' own `generate`: alone, with prompt lookup, and with a draft model."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.harness import ResultTable, alternate, main, show
from data.dtypes import Dtype
from inference import drafter_specs
from inference.options import QuestionOptions
from inference.verifier.base import Base, load_base, prepare_process, resolve_device
from inference.verifier.graphed import make_runner
from inference.verifier.session import Session

NONE = "none"
Decode = Callable[[list[int]], tuple[list[int], int]]  # from a prompt to an answer and the forwards after its prefill
HEADINGS = ["decoded by", "acceptance length", "tokens/s", "x transformers alone", "answers as without drafts"]


def against_transformers(
    base: str,
    drafter: list[str] = ["prompt_lookup", "joint"],  # noqa: B006
    draft_model: str | None = None,
    benchmark: list[str] = ["embedded"],  # noqa: B006
    rows: str = ":",
    limit: int = 5,
    max_new_tokens: int = 64,
    dtype: Dtype = "bfloat16",
    num_lookup: int = 10,
    out: str | None = None,
) -> None:
    """Answer first turns greedily, in turns in one process; every answer's time counts from its prompt on.

    Args:
        base: Folder or hub id of the base.
        drafter: NAME[=FOLDER][:key=value,...] as in `drafters eval`; may be repeated.
        draft_model: Folder or hub id of a draft model for transformers' assisted generation.
        benchmark: NAME[:STYLE][=FILE] as in `drafters eval`; may be repeated.
        rows: Rows of each benchmark, as in `drafters eval`.
        limit: Maximum number of questions of each benchmark.
        max_new_tokens: Maximum number of tokens of an answer.
        dtype: Dtype of the models.
        num_lookup: Number of tokens that transformers' prompt lookup drafts.
        out: Markdown file to write.
    """
    prepare_process(device := resolve_device("auto"), sums_alike=True)
    loaded = load_base(base, dtype, device)
    options = QuestionOptions(benchmark, limit, rows, max_new_tokens)
    assistant = load_base(draft_model, dtype, loaded.model.device).model if draft_model else None
    tables = []
    for name, asked in options.select(loaded, options.load()).items():
        arms = {f"transformers: {NONE}": theirs(loaded, max_new_tokens)}
        arms["transformers: prompt lookup"] = theirs(loaded, max_new_tokens, prompt_lookup_num_tokens=num_lookup)
        if assistant:
            arms["transformers: draft model"] = theirs(loaded, max_new_tokens, assistant_model=assistant)
        for label, spec in drafter_specs.labels([NONE, *drafter]).items():
            arms[f"ours: {label}"] = ours(loaded, spec, max_new_tokens)
        tables.append(compare(name, arms, asked.prompts))
    show(tables, loaded.model.device, out)


def theirs(base: Base, max_new_tokens: int, **options: Any) -> Decode:
    """Decode with transformers' `generate`, greedily, whatever the model's generation_config says."""
    model: Any = base.model
    config = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=sorted(base.eos), pad_token_id=0)

    def decode(prompt: list[int]) -> tuple[list[int], int]:
        forwards: list[None] = []
        hook = model.register_forward_pre_hook(lambda *_: forwards.append(None))
        given = torch.tensor([prompt], device=model.device)
        before, model.generation_config = model.generation_config, config
        text = model.generate(given, config, attention_mask=torch.ones_like(given), **options)
        model.generation_config = before
        hook.remove()
        return text[0, len(prompt) :].tolist(), len(forwards) - 1

    return decode


def ours(base: Base, spec: str, max_new_tokens: int) -> Decode:
    """Decode with a drafter in a session of its own."""
    runner = make_runner(base)
    session = Session(runner, drafter_specs.make(spec, runner))

    def decode(prompt: list[int]) -> tuple[list[int], int]:
        result = session.run(prompt, max_new_tokens, base.eos)
        return result.tokens, len(result.steps) - 1

    return decode


@torch.inference_mode()
def compare(title: str, arms: dict[str, Decode], prompts: list[list[int]]) -> ResultTable:
    """Answer each prompt in every way, after one that does not count."""
    first, texts, forwards, seconds = next(iter(arms)), {}, dict.fromkeys(arms, 0), {}
    for decode in arms.values():
        decode(prompts[0][::-1])  # some drafters would remember the answer to a prompt
    for _, item, arm in alternate(list(arms), len(prompts), 1, title):
        started = time.perf_counter()
        texts[arm, item], num_forwards = arms[arm](prompts[item])
        seconds[arm, item] = time.perf_counter() - started
        forwards[arm] += num_forwards
    table, items = ResultTable(title, HEADINGS), range(len(prompts))
    for arm in arms:
        num_tokens = sum(len(texts[arm, item]) for item in items)
        speed = num_tokens / sum(seconds[arm, item] for item in items)
        per_token = [[seconds[one, item] / len(texts[one, item]) for item in items] for one in (first, arm)]
        ratio = median(alone / own for alone, own in zip(*per_token, strict=True))
        alone = f"{arm.partition(':')[0]}: {NONE}"
        same = sum(texts[arm, item] == texts[alone, item] for item in items)
        length = (num_tokens - len(prompts)) / max(1, forwards[arm])
        table.rows.append([arm, f"{length:.2f}", f"{speed:.1f}", f"{ratio:.2f}", f"{same} of {len(prompts)}"])
    table.notes.append("Ratios of the time per token, prefill included: medians over the questions.")
    return table


if __name__ == "__main__":
    main(against_transformers)
