"""``drafters verify``: does a drafter change a single token of what the base writes alone?"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import torch

from data import benchmarks
from drafters.protocol import NoDrafter
from inference.api.prompts import select_questions
from inference.engine.base import Base, Dtype, load_base, resolve_device
from inference.engine.runner import Runner
from inference.engine.sampling import Greedy, Sampler, make_sampler
from inference.engine.session import Session, check_prompt
from inference.registry import catalogue


@dataclass(frozen=True)
class Divergence:
    """Where two texts part.

    Args:
        prompt: Index of the prompt.
        position: First differing token of the answer.
        base_token: What the base alone writes there.
        drafted_token: What was written with the drafter.
        logit_gap: Base's logit of its own token less that of the other.
    """

    prompt: int
    position: int
    base_token: int
    drafted_token: int
    logit_gap: float


def alone(base: Base, prompt: list[int], max_new_tokens: int, sampler: Sampler) -> list[int]:
    """What the base writes without a drafter.

    Greedily by transformers' own `generate`, independent of this project's engine; sampled by the engine itself, as
    only it draws by position.
    """
    check_prompt(base, prompt, max_new_tokens)
    if not isinstance(sampler, Greedy):
        return Session(Runner(base), NoDrafter(), sampler).run(prompt, max_new_tokens, base.eos).tokens
    ids = torch.tensor([prompt], device=base.model.device)
    room = min(max_new_tokens, base.context_length - len(prompt))
    return base.greedy(ids, torch.ones_like(ids), room)[0].tolist()


@torch.inference_mode()
def first_divergence(base: Base, index: int, prompt: list[int], expected: list[int], got: list[int]) -> Divergence:
    """Look at the first differing position with one plain forward of the common text."""
    pairs = zip([*expected, -1], [*got, -1], strict=False)
    position = next(i for i, (mine, theirs) in enumerate(pairs) if mine != theirs)
    ids = torch.tensor([[*prompt, *expected[:position]]], device=base.model.device)
    logits = base.model(ids).logits[0, -1].float()
    tokens = [text[position] if position < len(text) else min(base.eos, default=0) for text in (expected, got)]
    return Divergence(index, position, *tokens, (logits[tokens[0]] - logits[tokens[1]]).item())


def compare(
    session: Session, prompts: list[list[int]], expected: list[list[int]], max_new_tokens: int
) -> tuple[int, float, list[Divergence]]:
    """Decode every prompt with a drafter and compare: identical texts, acceptance length, divergences."""
    base = session.runner.base
    tokens = steps = 0
    divergences = []
    for index, (prompt, wanted) in enumerate(zip(prompts, expected, strict=True)):
        result = session.run(prompt, max_new_tokens, base.eos)
        tokens, steps = tokens + sum(s.emitted for s in result.steps[1:]), steps + len(result.steps) - 1
        if result.tokens != wanted:
            divergences.append(first_divergence(base, index, prompt, wanted, result.tokens))
    return len(prompts) - len(divergences), tokens / max(1, steps), divergences


def verify(
    base: str,
    drafter: list[str],
    benchmark: str = "embedded",
    questions: str | None = None,
    limit: int = 20,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    template: str = "tokenizer",
    dtype: Dtype = "float32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> None:
    """Decode prompts with and without each drafter and compare token by token.

    Greedy text is compared with transformers' own generate; sampled text with our vanilla decoding under the same
    seed. Exit code 1 where a float32 text differs; in bfloat16 near-ties may flip, and the logit gap says how near.

    Args:
        base: Folder or hub id of the base.
        drafter: NAME[=FILE][:key=value,...], such as joint, anpd:order=4 or ctc=FOLDER; a wrong name lists all; may be
            repeated.
        benchmark: Whose first turns are the prompts: one that `drafters eval` knows.
        questions: File of the benchmark, where it is not to come from the hub.
        limit: Prompts at most; those that do not fit into the base's context are left out and not counted.
        max_new_tokens: Tokens of an answer at most.
        temperature: 0 decodes greedily, above it samples.
        top_k: Sampling keeps the k most probable tokens; 0 keeps all.
        top_p: Sampling keeps the most probable tokens up to this probability.
        seed: Of the sampling.
        template: Chat template: the tokenizer's own, vicuna_v1.1 or llama2_chat.
        dtype: Number format of base and drafter.
        device: auto takes the GPU where there is one.
    """
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    benchmarks.check_selection(0, limit)
    chosen = benchmarks.load(benchmark, questions)
    loaded = load_base(base, dtype, resolve_device(device))
    picks = make_sampler(temperature, top_k, top_p, seed)
    asked = select_questions(loaded, benchmark, chosen, template, max_new_tokens, limit)
    prompts = asked.prompts
    runner = Runner(loaded)
    sessions = [(spec, Session(runner, catalogue.make(spec, runner), picks)) for spec in drafter]
    expected = [alone(loaded, prompt, max_new_tokens, picks) for prompt in prompts]
    console = Console()
    how = f"temperature {temperature}, seed {seed}" if temperature > 0 else "greedy"
    console.print(f"{base} · {dtype} · {how} · {len(prompts)} prompts", markup=False)
    for line in asked.notes():
        console.print(f"left out: {line}", markup=False, highlight=False)
    table = Table()
    for column in ("drafter", "identical texts", "acceptance length"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    lines, differing = [], 0
    silent = not sys.stderr.isatty()
    for spec, session in track(sessions, "verify", console=Console(stderr=True), transient=True, disable=silent):
        identical, length, divergences = compare(session, prompts, expected, max_new_tokens)
        differing += len(divergences)
        colour = "green" if identical == len(prompts) else "red"
        table.add_row(catalogue.label(spec), f"[{colour}]{identical}/{len(prompts)}[/]", f"{length:.2f}")
        for found in divergences[:3]:
            words = [repr(loaded.tokenizer.decode([token])) for token in (found.base_token, found.drafted_token)]
            lines.append(
                f"{catalogue.label(spec)}: prompt {found.prompt} differs from token {found.position} on: the base "
                f"writes {words[0]}, with the drafter {words[1]}; logit gap {found.logit_gap:.3g}"
            )
    console.print(table)
    for line in lines:
        console.print(line, style="red", markup=False)
    if not differing:
        console.print("Nothing is lost: every text is the base's own, token for token.", style="green")
    elif dtype == "float32":
        sys.exit(1)
