"""The check of a base before it is used: a runner's logits are compared with those of the model's own forward."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from logging import getLogger
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from data.files import cause_of
from drafters.protocol import RequiredOutputs
from drafters.tree import ROOT, DraftTree, Growth
from inference.verifier.attention import attention_spans, longrope_border
from inference.verifier.bitwise import BLOCK, EAGER, MAX_DEPTH, SDPA, use_own_attention, use_transformers_attention
from inference.verifier.layers import takes_argument, unwrap

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from inference.verifier.base import Base

LONGEST_CHECKED = 1024  # windows up to this size are checked with a text that is longer than the window
SHORTEST_CHECKED = 8
TREE = (-1, -1, 0, 1)  # parents: two children of the root, and a child of each
NUM_AFTER = 3  # tokens after the root on each path of the reference: two nodes, and one more after the commit
NUM_ROWS = 4 + NUM_AFTER  # last rows of the reference that are compared
NOTHING = RequiredOutputs()
RANDOM = re.compile("drop|jitter", re.IGNORECASE)  # in the name of a class of modules, or of a number in one
VECTORS = 32  # values that torch's elementwise functions compute at once, in float32 with AVX-512
PATH_LENGTH, TREE_SIZES, CHAINS = 6, (12, 18, 60), (1, 5)  # the trees and chains that `row_multiple` tries,
CUTS = 4, 12, 24, 28, 48, 56, 76  # and where it cuts the text
# Differences, relative to the spread of the logits, that are always and never taken for rounding. Between the two, the
# limit is a quarter of the difference that a wrong mask and wrong positions make in this base.
EXACT_LIMITS = 2e-5, 1e-3
ROUNDED_LIMITS = 0.02, 0.2


# What was found of models, by their states, as long as they live.
_passed: WeakKeyDictionary[Any, set[object]] = WeakKeyDictionary()
_multiples: WeakKeyDictionary[Any, dict[object, int | None]] = WeakKeyDictionary()


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
    found = (value for name, value in vars(module).items() if RANDOM.search(f"{type(module).__name__} {name}"))
    numbers = (number for value in found for number in (value.values() if isinstance(value, dict) else [value]))
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
        places = [(weight.dtype, weight.device) for weight in module._parameters.values() if weight is not None]
        modules.append((type(module), module.training, hooks, id(vars(module).get("forward")), *places))
        if hasattr(type(module), "adapter_layer_names"):  # a layer of peft
            modules.append((*module.active_adapters, module.disable_adapters, *module.merged_adapters))
    config, head = model.config, id(model.get_output_embeddings())
    read = getattr(config, "_attn_implementation", None), config.vocab_size, config.max_position_embeddings
    return hash((tuple(modules), *read, head, torch.get_num_threads()))


def check_once(model: Any, state: object, make_runner: Callable[[], Any]) -> None:
    """Check a model by a runner made for that, unless it was found right in this state."""
    passed = _passed.setdefault(model, set())
    if state not in passed:
        check_base(make_runner())
        passed.add(state)


@torch.inference_mode()
def check_base(runner: Any) -> None:
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


def _lengths(runner: Any) -> Iterator[int]:
    """Yield the lengths of the texts to check: within and, if it is near, behind the border of longrope scaling."""
    config = runner.base.model.config
    spans = [span for span in attention_spans(config).values() if span <= LONGEST_CHECKED]
    other_spans = (getattr(config, name, None) for name in ("window_size", "attention_window_size", "local_attention"))
    spans += [span for span in other_spans if isinstance(span, int) and span <= LONGEST_CHECKED]
    wanted = max([SHORTEST_CHECKED, *(span + NUM_ROWS for span in spans)])
    border = longrope_border(config) or runner.context_length
    for length in (min(wanted, border - len(TREE)), border + NUM_ROWS):
        if NUM_AFTER < length <= min(runner.context_length - len(TREE), LONGEST_CHECKED + NUM_ROWS):
            yield length


def _check_text(runner: Any, length: int) -> None:
    """Compare the logits behind a text of this length, and of a draft tree below its last token."""
    base = runner.base
    tokens = usual_tokens(base.model.config, length + 2 * NUM_AFTER)
    text, first, second = tokens[:length], tokens[length : length + NUM_AFTER], tokens[length + NUM_AFTER :]
    own = _own_logits(base, [text + first, text + second])
    cut, root = length - NUM_AFTER, text[-1:]
    nodes = [first[0], second[0], first[1], second[1]]
    own_tree = torch.stack([own[0, 3], own[0, 4], own[1, 4], own[0, 5], own[1, 5]])

    compared: list[tuple[str, Tensor, Tensor]] = []

    def run(where: str, pending: Sequence[int], tree: DraftTree, expected: Tensor) -> None:
        with _one_line_errors(base, where):
            compared.append((where, runner.forward(pending, tree, NOTHING).logits, expected))

    run("a plain forward", text[:cut], DraftTree(), own[0, :1])
    runner.commit([])
    run("a forward behind a cache", text[cut:-1], DraftTree(), own[0, 2:3])
    runner.commit([])
    run("a draft tree", root, DraftTree(nodes, range(-1, 3)), own_tree)  # as if all nodes were one path
    _, wrong, _ = compared.pop()
    runner.rollback()
    run("a draft tree", root, DraftTree(nodes, TREE), own_tree)
    runner.commit([1, 3])
    run("a forward after an accepted draft", second[2:], DraftTree(), own[1, 6:])
    runner.reset()
    positions = [*range(len(text)), runner.prepare(len(text)) - 1]  # one more token at the last position of draft trees
    with _one_line_errors(base, far := "a forward whose last position is far away"):
        compared.append((far, runner.forward_at([*text, *root], positions, 5)[:4], own[0, :4]))

    lowest, highest = rounding_limits(base.model, own.dtype)
    limit = min(max(difference(wrong[2:], own_tree[2:]) / 4, lowest), highest)
    for where, logits, expected in compared:
        if not (found := difference(logits, expected)) <= limit:
            raise ValueError(
                f"{base.name} is not supported: in {where} its logits are not those of the model's own forward (they "
                f"differ by {found:.2g} of their spread, rounding by {limit:.2g} at most); pass check=False to use it "
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


def _own_logits(base: Base, texts: list[list[int]]) -> Tensor:
    """Return the last `NUM_ROWS` logits (B, NUM_ROWS, V) of the model's own forward over B texts of equal length."""
    model: Any = base.model
    keep = {"logits_to_keep": NUM_ROWS} if takes_argument(unwrap(model).__class__, "logits_to_keep") else {}
    with _one_line_errors(base, "its own forward"):
        return model(torch.tensor(texts, device=model.device), use_cache=False, **keep).logits[:, -NUM_ROWS:]


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


# ---- bit-identical rows


def row_multiple(runner: Any) -> int | None:
    """Return the `measure_row_multiple` of a runner's model, measured once for each state of it.

    A model that has one then attends by `bitwise.attend`.
    """
    model, config = runner.base.model, runner.causal_lm.config
    if any("expert" in name for name, _ in model.named_modules()):
        return None  # an expert multiplies few rows, however many are fed
    use_own_attention(config)
    known, state = _multiples.setdefault(model, {}), (model_state(model), runner.multiples)
    if state not in known:
        try:
            known[state] = measure_row_multiple(runner)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # layers that do something else with the mask raise errors of many types
            if runner.base.bitwise:
                raise ValueError(f"{runner.base.name} has no bit-identical rows here ({cause_of(error)})") from error
            getLogger(__name__).debug("no bit-identical rows", exc_info=error)
            known[state] = None
    if known[state] is None:
        use_transformers_attention(config)
    return known[state]


def measure_row_multiple(runner: Any) -> int | None:
    """Find the smallest number of whose multiples a runner must feed its rows to keep their bits, if there is one.

    Compared are the logits of a random text: token by token behind a prompt that is read in one piece, and in draft
    trees of several sizes behind a prompt that is read in two. The answer depends on the model, its dtype and device,
    on packed weights and on the number of threads.
    """
    length = min(2 * MAX_DEPTH + BLOCK - 4, runner.context_length - PATH_LENGTH - 1)  # the trees cross a border
    chance = random.Random(0)
    text = [chance.randrange(runner.vocab_size) for _ in range(max(length, 2) + PATH_LENGTH)]
    trees = [tree_around(text[-PATH_LENGTH:], num_nodes, runner.vocab_size, chance) for num_nodes in TREE_SIZES]
    trees += [(DraftTree.chain(text[-PATH_LENGTH:][:depth]), list(range(depth))) for depth in CHAINS]
    try:
        for multiple in runner.multiples:
            runner.row_multiple = multiple
            # The last values of an activation are computed without vectors, which may round differently, but rarely.
            fills_vectors = multiple * getattr(runner.base.config, "intermediate_size", 0) % VECTORS == 0
            if fills_vectors and _rows_agree(runner, text, trees):
                return multiple
        return None
    finally:
        runner.row_multiple = None
        runner.reset()


def _rows_agree(runner: Any, text: Sequence[int], trees: Sequence[tuple[DraftTree, list[int]]]) -> bool:
    """Whether each node of the trees that is in the text, and the root, has the logits of decoding token by token."""
    root = len(text) - PATH_LENGTH - 1
    required_outputs = RequiredOutputs((runner.base.config.num_hidden_layers,)) if runner.compares_states else NOTHING

    def read(*pieces: Sequence[int]) -> Tensor:
        """Read a text from its beginning, and return the last states of all tokens, or the logits of each piece."""
        runner.reset()
        states = []
        for piece in pieces:
            output = runner.forward(piece, DraftTree(), required_outputs)
            states.append(output.logits if output.hidden is None else output.hidden)
            runner.commit([])
        return torch.cat(states)

    whole = read(text[:root])
    single = []
    for token in text[root:]:
        single.append(runner.forward([token], DraftTree(), NOTHING).logits[0])
        runner.commit([])
    cuts = [0, *(cut for cut in CUTS if cut < root), root]  # the last row of a piece may round differently
    if not torch.equal(read(*(text[start:end] for start, end in pairwise(cuts)))[-len(whole) :], whole):
        return False
    for tree, nodes in trees:
        logits = runner.forward(text[root : root + 1], tree, NOTHING).logits[[0, *(1 + node for node in nodes)]]
        runner.rollback()
        if not torch.equal(logits, torch.stack(single[: 1 + len(nodes)])):
            return False
    return True


def tree_around(
    path: Sequence[int], num_nodes: int, vocab_size: int, chance: random.Random
) -> tuple[DraftTree, list[int]]:
    """A tree of about ``num_nodes`` nodes, of which all but the returned ones on the path are random."""
    grown, node, nodes = Growth(), ROOT, list[int]()
    for token in path:
        for _ in range((num_nodes - len(path)) // len(path)):
            grown.child(chance.choice([ROOT, *range(len(grown.tokens))]), chance.randrange(vocab_size))
        node = grown.child(node, token)
        nodes.append(node)
    return DraftTree(grown.tokens, grown.parents), nodes
