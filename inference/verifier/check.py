"""The check of a base before it is used: a runner's logits are compared with those of the model's own forward."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from data.files import cause_of
from drafters.protocol import RequiredOutputs
from drafters.tree import DraftTree
from inference.verifier.attention import attention_spans, longrope_border
from inference.verifier.base import Base
from inference.verifier.bitwise import EAGER, SDPA
from inference.verifier.layers import model_logits, run_base, takes_argument, unwrap
from inference.verifier.runner import Runner

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LONGEST_CHECKED = 1024  # windows up to this size are checked with a text that is longer than the window
SHORTEST_CHECKED = 8
TREE = (-1, -1, 0, 1)  # parents: two children of the root, and a child of each
NUM_AFTER = 3  # tokens after the root on each path of the reference: two nodes, and one more after the commit
NUM_ROWS = 4 + NUM_AFTER  # last rows of the reference that are compared
NOTHING = RequiredOutputs()
RANDOM = re.compile("drop|jitter", re.IGNORECASE)  # in the name of a class of modules, or of a number in one
# Differences, relative to the spread of the logits, that are always and never taken for rounding. Between the two, the
# limit is a quarter of the difference that a wrong mask and wrong positions make in this base.
EXACT_LIMITS = 2e-5, 1e-3
ROUNDED_LIMITS = 0.02, 0.2

# Models that passed the check, with their states and row multiples at that time.
_passed: WeakKeyDictionary[Any, set[tuple[int, int | None]]] = WeakKeyDictionary()


def check_config(base: Base) -> None:
    """Raise ValueError if draft trees cannot be fed to a model by its configuration, its mode or autocast."""
    model: Any = base.model
    config = model.config
    if config.is_encoder_decoder:
        raise ValueError(f"{base.name} is an encoder-decoder model: pass a causal language model")
    for size in ("max_position_embeddings", "vocab_size", "num_hidden_layers"):
        if not isinstance(getattr(config, size, None), int):
            raise ValueError(f"{base.name} has no {size} in its config: not supported")
    if unwrap(model).get_output_embeddings() is None:
        raise ValueError(f"{base.name} has no LM head: load it with AutoModelForCausalLM")
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (None, "sdpa", "eager", SDPA, EAGER):
        raise ValueError(f"{attention} takes no tree mask: load {base.name} with attn_implementation='sdpa'")
    if not takes_argument(unwrap(model).__class__, "position_ids"):
        raise ValueError(f"{base.name} takes no position_ids, so draft trees cannot be fed to it: not supported")
    try:
        attention_spans(config)
    except ValueError as error:
        raise ValueError(f"{base.name} cannot drop rejected drafts: {error}") from error
    if part := next((name for name, module in model.named_modules() if is_random(module)), None):
        raise ValueError(f"{base.name} is in training mode, and its {part} drops out at random: call model.eval()")
    if torch.is_autocast_enabled(model.device.type):
        raise ValueError(f"{base.name} decodes in the dtype of its weights: call it outside of torch.autocast")


def is_random(module: Any) -> bool:
    """Whether a module is in training mode, in which it drops out or adds noise."""
    rates = (value for name, value in vars(module).items() if RANDOM.search(f"{type(module).__name__} {name}"))
    numbers = (number for rate in rates for number in (rate.values() if isinstance(rate, dict) else [rate]))
    return module.training and any(type(number) is float and number > 0 for number in numbers)


def model_state(model: Any) -> int:
    """Return a hash of how a model computes, whatever the values of its weights, with the number of threads.

    It changes with the attention implementation and the context, with the dtype or device of a weight, with modules
    that are replaced, get hooks or change to training mode, and with adapters of peft that are added, removed, switched
    on or off, or merged.
    """
    modules = []
    for module in model.modules():
        hooks = (*module._forward_hooks, *module._forward_pre_hooks)  # numbers that are never used again
        weights = [weight for weight in module._parameters.values() if weight is not None]
        # CUDA graphs read the weights where they were.
        places = [(each.dtype, each.device, each.data_ptr() if each.is_cuda else 0) for each in weights]
        modules.append((type(module), module.training, hooks, id(vars(module).get("forward")), *places))
        if hasattr(type(module), "adapter_layer_names"):  # a layer of peft
            modules.append((*module.active_adapters, module.disable_adapters, *module.merged_adapters))
    config, head = model.config, id(model.get_output_embeddings())
    settings = getattr(config, "_attn_implementation", None), config.vocab_size, config.max_position_embeddings
    return hash((tuple(modules), *settings, head, torch.get_num_threads()))


def check_once(base: Base, row_multiple: int | None = None) -> None:
    """Check a base by a new runner with this row multiple, unless it passed in its present state."""
    passed = _passed.setdefault(base.model, set())
    state = model_state(base.model), row_multiple
    if state not in passed:
        runner = Runner(base)
        runner.row_multiple = row_multiple
        check_base(runner)
        passed.add(state)


@torch.inference_mode()
def check_base(runner: Runner) -> None:
    """Compare the logits of a runner with those of the model's own forward on a few tokens.

    Compared are a plain forward, a forward behind a cache, each node of a small draft tree with its path, and the token
    after an accepted path. Sliding windows of up to 1,024 positions are exceeded. A last forward has one token at the
    last position that draft trees may reach, which must not change the logits of the tokens before it (as `longrope`
    scaling does). That takes seven forwards over a short text; the model is left as it was. Raises ValueError if logits
    differ by more than rounding, or the model cannot compute them; the message says where.
    """
    for length in _lengths(runner):
        _check_text(runner, length)
        runner.reset()


def _lengths(runner: Runner) -> Iterator[int]:
    """Yield the lengths of the texts to check: within and, if it is near, behind the border of longrope scaling."""
    config = runner.base.config
    spans = [span for span in attention_spans(config).values() if span <= LONGEST_CHECKED]
    other_spans = (getattr(config, name, None) for name in ("window_size", "attention_window_size", "local_attention"))
    spans += [span for span in other_spans if isinstance(span, int) and span <= LONGEST_CHECKED]
    longest = max([SHORTEST_CHECKED, *(span + NUM_ROWS for span in spans)])
    border = longrope_border(config) or runner.context_length
    for length in (min(longest, border - len(TREE)), border + NUM_ROWS):
        if NUM_AFTER < length <= min(runner.context_length - len(TREE), LONGEST_CHECKED + NUM_ROWS):
            yield length


def _check_text(runner: Runner, length: int) -> None:
    """Compare the logits behind a text of this length, and of a draft tree below its last token."""
    base = runner.base
    tokens = usual_tokens(base.config, length + 2 * NUM_AFTER)
    text, first, second = tokens[:length], tokens[length : length + NUM_AFTER], tokens[length + NUM_AFTER :]
    with _one_line_errors(base, "its own forward"):
        texts = torch.tensor([text + first, text + second], device=base.model.device)
        reference = model_logits(base.model, texts, NUM_ROWS)
    cut, root = length - NUM_AFTER, text[-1:]
    nodes = [first[0], second[0], first[1], second[1]]
    tree_reference = torch.stack([reference[row, place] for row, place in ((0, 3), (0, 4), (1, 4), (0, 5), (1, 5))])

    compared: list[tuple[str, Tensor, Tensor]] = []

    def run(where: str, pending: Sequence[int], tree: DraftTree, expected: Tensor) -> None:
        with _one_line_errors(base, where):
            compared.append((where, runner.forward(pending, tree, NOTHING).logits, expected))

    run("a plain forward", text[:cut], DraftTree(), reference[0, :1])
    runner.commit([])
    run("a forward behind a cache", text[cut:-1], DraftTree(), reference[0, 2:3])
    runner.commit([])
    run("a draft tree", root, DraftTree(nodes, range(-1, 3)), tree_reference)  # as if all nodes were one path
    _, wrong, _ = compared.pop()
    runner.truncate(runner.cached)
    run("a draft tree", root, DraftTree(nodes, TREE), tree_reference)
    runner.commit([1, 3])
    run("a forward after an accepted draft", second[2:], DraftTree(), reference[1, 6:])
    runner.reset()
    positions = [*range(len(text)), runner.prepare(len(text)) - 1]  # one more token at the last position of draft trees
    with _one_line_errors(base, far := "a forward whose last position is far away"):
        fed = runner.attention.feed([*text, *root], DraftTree(), 0, runner.cache, positions)
        compared.append((far, run_base(runner.causal_lm, fed, 5)[0][:4], reference[0, :4]))

    lowest, highest = rounding_limits(base.model, reference.dtype)
    limit = min(max(difference(wrong[2:], tree_reference[2:]) / 4, lowest), highest)
    for where, logits, expected in compared:
        if not (gap := difference(logits, expected)) <= limit:
            raise ValueError(
                f"{base.name} is not supported: in {where} its logits are not those of the model's own forward (they "
                f"differ by {gap:.2g} of their spread, rounding by {limit:.2g} at most); pass check=False to use it "
                "nevertheless"
            )


def difference(logits: Tensor, expected: Tensor) -> float:
    """Return the largest root mean square difference of a row (N, V), relative to its spread (standard deviation)."""
    logits, expected = logits.double(), expected.double()
    differences = torch.where(logits == expected, 0.0, logits - expected)  # also where both are infinite
    spread = torch.where(expected.isinf(), expected.new_tensor(torch.nan), expected)
    spread = (spread - spread.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt()
    return (differences.square().mean(-1).sqrt() / spread.clamp(min=1e-30)).max().item()


def rounding_limits(model: Any, dtype: torch.dtype) -> tuple[float, float]:
    """Return the differences of a model's logits in ``dtype`` that are always and never taken for rounding."""
    is_exact = {dtype, model.dtype} <= {torch.float32, torch.float64}
    is_exact &= getattr(model.config, "quantization_config", None) is None
    is_exact &= torch.get_float32_matmul_precision() == "highest"
    return EXACT_LIMITS if is_exact else ROUNDED_LIMITS


def usual_tokens(config: PretrainedConfig, count: int) -> list[int]:
    """Return token ids, spread over the vocabulary, that are not special; neighbours differ."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "mask_token_id")
    special: set[int] = set()
    for value in (getattr(config, name, None) for name in names):
        special.update([value] if isinstance(value, int) else value or [])
    sample = random.Random(0).sample(range(config.vocab_size), min(config.vocab_size, 64))
    usable = [token for token in sample if token not in special]
    return [usable[index % len(usable)] for index in range(count)]


@contextmanager
def _one_line_errors(base: Base, where: str) -> Iterator[None]:
    """Turn errors of transformers and torch inside the block into a refusal that says where they were raised."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # each model raises its own types of errors
        raise ValueError(
            f"{base.name} is not supported: {where} fails ({type(error).__name__}: {cause_of(error)})"
        ) from error
