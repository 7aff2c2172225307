"""Chi-squared of many sampled texts against the base's own distribution, with drafters that sample their drafts.

Every text is a request of its own, as users make them: another seed, and a drafter that is built for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import drafters
from benchmarks.harness import ResultTable, main, show
from drafters import checkpoint, registry
from drafters.checkpoint import DrafterConfig
from inference import drafter_specs, generate
from inference.equality import Text, next_probabilities
from inference.verifier.base import Base, load_base, tokenizer_hash
from inference.verifier.options import SamplingOptions
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler
from inference.verifier.session import Session

Door = Callable[[Base, Sequence[int], str, int, SamplingOptions], Sequence[int]]
PROMPT = [3, 4, 5]
TOY_VOCAB = 8
OPTIONS = {  # of the drafters on the toy base
    "ctc": "draws=2,num_nodes=8",
    "eagle": "tree=chain,draws=2,depth=2",
    "eagle3": "tree=chain,draws=2,depth=2",
    "draft_model": "num_draft=2,temperature=1",
}


def save_toy_base(folder: Path, seed: int = 0) -> Path:
    """Write a random LLaMA of one layer with a vocabulary of eight words, and return its folder."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(TOY_VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=TOY_VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_toy_drafters(base: Base, folder: Path) -> dict[str, str]:
    """Write untrained drafters and a draft model for a toy base, and return their specs by name."""
    folders = {"draft_model": save_toy_base(folder / "draft_model", seed=4)}
    for name, kind in (("ctc", drafters.CTC), ("eagle", drafters.EAGLE), ("eagle3", drafters.EAGLE3)):
        options = {"num_frames": 4, "num_labels": 3} if name == "ctc" else {}
        class_path = registry.class_path(kind)
        config = DrafterConfig(class_path, options, base.shape, base.name, tokenizer_hash(base.tokenizer))
        with torch.random.fork_rng():
            torch.manual_seed(1)
            checkpoint.save(folder / name, config.build(), config)
        folders[name] = folder / name
    return {name: f"{name}={folders[name]}:{options}" for name, options in OPTIONS.items()}


# ---- one request, as users make it


def by_generate(
    base: Base, prompt: Sequence[int], spec: str, num_tokens: int, sampling: SamplingOptions
) -> Sequence[int]:
    """One call of `generate`, which builds the drafter."""
    return generate(base, prompt, spec, max_new_tokens=num_tokens, eos=[], **asdict(sampling))[0].token_ids


def by_eval(base: Base, prompt: Sequence[int], spec: str, num_tokens: int, sampling: SamplingOptions) -> Sequence[int]:
    """The objects that one process of `drafters eval` makes, and `verify` and `sweep` as well."""
    runner = Runner(base)
    return Session(runner, drafter_specs.make(spec, runner), sampling.sampler()).run(prompt, num_tokens).tokens


DOORS: dict[str, Door] = {"generate": by_generate, "eval": by_eval}


# ---- texts against the base's own distribution


def text_distribution(
    base: Base, prompt: Sequence[int], num_tokens: int, sampling: SamplingOptions
) -> dict[Text, float]:
    """The probability of every text of ``num_tokens`` tokens that the base may sample, by the model's own forward."""
    sampler = KeyedSampler(sampling.temperature, sampling.top_k, sampling.top_p)
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(num_tokens):
        rows = next_probabilities(base, prompt, list(texts), sampler)
        texts = {
            (*text, token): weight * probability
            for (text, weight), row in zip(texts.items(), rows, strict=True)
            for token, probability in enumerate(row.tolist())
            if probability > 0
        }
    return texts


def chi_squared(texts: Iterable[Text], expected: dict[Text, float]) -> tuple[float, int, float]:
    """Pearson's chi-squared of texts; cells in which fewer than five are expected count as one.

    Returns:
        The statistic (infinite if there is a text that the base never writes), its degrees of freedom, and the
        probability of a statistic at least as large if the texts follow the distribution.
    """
    from scipy.stats import chisquare

    counts = Counter(texts)
    if counts.keys() - expected.keys():
        return math.inf, len(expected) - 1, 0.0
    total = counts.total()
    common = [text for text, probability in expected.items() if probability * total >= 5]
    observed, wanted = [counts[text] for text in common], [expected[text] * total for text in common]
    rest = total - sum(wanted)
    if rest >= 5:
        observed, wanted = [*observed, total - sum(observed)], [*wanted, rest]
    elif rest > 0:  # with the last of the common cells
        observed[-1], wanted[-1] = observed[-1] + total - sum(observed), wanted[-1] + rest
    statistic, p_value = chisquare(observed, wanted)
    return float(statistic), len(wanted) - 1, float(p_value)


def sampled_drafts(
    base: str | None = None,
    drafter: list[str] = [],  # noqa: B006
    num_seeds: int = 1000,
    num_tokens: int = 4,
    temperature: float = 1.5,
    top_k: int = 2,
    prompt: str = "Name a colour.",
    out: str | None = None,
) -> None:
    """Compare sampled texts with the base's own distribution by a chi-squared test.

    Args:
        base: Folder of the base; by default a random one with eight tokens.
        drafter: NAME[=FILE][:key=value,...]; by default every drafter that samples, untrained, on the random base.
        num_seeds: Number of texts of each drafter; text i has seed i.
        num_tokens: Tokens of a text.
        temperature: Sampling temperature.
        top_k: The base samples from its k most probable tokens.
        prompt: Text that a base from a folder continues.
        out: Markdown file to write the table to.
    """
    with TemporaryDirectory() as folder:
        loaded = load_base(base or str(save_toy_base(Path(folder) / "base")), "float32", torch.device("cpu"))
        tokens = list(loaded.tokenizer(prompt).input_ids) if base else PROMPT
        specs = {drafter_specs.label(spec): spec for spec in drafter} or save_toy_drafters(loaded, Path(folder))
        expected = text_distribution(loaded, tokens, num_tokens, SamplingOptions(temperature, top_k))
        table = ResultTable("Sampled drafts", ["drafter", *(f"{door}: chi-squared, p" for door in DOORS)])
        for name, spec in {"none": "none", **specs}.items():
            cells = []
            for door in DOORS.values():
                options = [SamplingOptions(temperature, top_k, seed=seed) for seed in range(num_seeds)]
                texts = [tuple(door(loaded, tokens, spec, num_tokens, each)) for each in options]
                statistic, freedom, p_value = chi_squared(texts, expected)
                cells.append(f"{statistic:.1f} ({freedom} dof), {p_value:.2g}")
            table.rows.append([name, *cells])
        table.notes.append(f"{num_seeds} texts of {num_tokens} tokens, temperature {temperature}, top_k {top_k}")
        show([table], loaded.model.device, out)


if __name__ == "__main__":
    main(sampled_drafts)
