"""Toy bases built in memory, and the folder `shared` of real files that may be next to the project.

torch and transformers are imported where they are used: the process that only distributes the tests does without them.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported, so that no test uses the network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in the processes that tests start, as in this one
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # as `prepare_process` does
if os.path.exists("/proc/cpuinfo") and "Intel" in open("/proc/cpuinfo").read():  # noqa: SIM115
    os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

import gc
import json
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VOCAB = 40
EOS = 2


def pytest_collection_finish(session):
    """Use one thread, and exclude the objects of the imports from garbage collection, as they stay until the end."""
    import torch

    torch.set_num_threads(1)
    # A forked process makes torch's pool of threads anew at the first use. Two threads that do so at once, as
    # transformers' loader may, break it ("Invalid thread pool"), so it is made while there is only one.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    gc.collect()
    gc.freeze()


@cache
def words(marks=()):
    """A tokenizer of whole words: ``<unk> <s> </s> w3 w4 ... w39``, of which some may be other marks."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<s>": 1, "</s>": EOS} | dict(marks)
    vocab |= {f"w{index}": index for index in range(VOCAB) if index not in vocab.values()}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@cache
def toy_base(
    kind="llama",
    attention="sdpa",
    dtype=None,
    context=64,
    layers=2,
    hidden=32,
    vocab=VOCAB,
    seed=0,
    predictable=False,
):
    """A random base with weights large enough that its greedy text does not repeat a single token.

    A ``predictable`` one is made so that a token is often followed by the next one of its cycle of six, which drafters
    can guess. The dtype is float64 by default.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GPT2Config

    from inference.verifier.base import Base

    common = {"vocab_size": vocab, "bos_token_id": 1, "eos_token_id": EOS, "initializer_range": 0.4}
    if kind == "gpt2":
        config = GPT2Config(n_embd=hidden, n_layer=layers, n_head=4, n_positions=context, **common)
    else:
        config = getattr(transformers, f"{kind.capitalize()}Config")(
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden // 4,
            max_position_embeddings=context,
            **common,
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model = model.to(dtype or torch.float64).eval().requires_grad_(False)
    if predictable:
        with torch.no_grad():
            make_predictable(model)
    return Base(f"toy-{kind}", model, words())


def make_predictable(model):
    """Let a model's layers add less to its hidden state, and its LM head favour the next token of a cycle of six."""
    import torch

    model.config.tie_word_embeddings = False
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    share = 0.07 if model.config.model_type == "gpt2" else 0.035
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "c_proj.weight")):
            weight *= share
    favoured = head.weight.clone()
    for first in range(3, len(favoured) - 5, 6):
        cycle = torch.arange(first, first + 6)
        favoured[cycle.roll(-1)] += 2 * embedding[cycle]
    head.weight = torch.nn.Parameter(favoured, requires_grad=False)


def fresh_cache(base, tokens):
    """Return the cache after one plain forward of a base over token ids."""
    import torch
    from transformers import DynamicCache

    from inference.verifier.layers import cache_argument

    cache = DynamicCache(config=base.model.config)
    base.model(torch.tensor([tokens]), use_cache=True, **cache_argument(base.model, cache))
    return cache


def check_tree(tree, vocab_size):
    """Raise AssertionError if a drafter built a malformed tree."""
    candidates, pairs = tree.num_candidates, list(zip(tree.parents, tree.tokens, strict=False))
    assert len(tree.tokens) == len(tree.parents), "a node has one token and one parent"
    assert 0 <= tree.num_scratch <= len(tree.tokens), "num_scratch is out of range"
    assert all(-1 <= parent < node for node, parent in enumerate(tree.parents)), "parents come before children"
    assert all(parent < candidates for parent in tree.parents[:candidates]), "candidates hang on candidates"
    assert len(set(pairs[:candidates])) == candidates, "candidate siblings have distinct tokens"
    assert all(0 <= token < vocab_size for token in tree.tokens), "a token is outside the vocabulary"
    assert len(tree.probabilities) in (0, candidates), "either every candidate has a probability or none has"
    for each in tree.distributions:
        assert all(tree.parents[node] == each.parent for node in each.draws), "draws are children of their parent"
        assert all(node < candidates for node in each.draws), "a sampled node is a candidate"


class PseudoBase:
    """The attributes that a session reads from a base."""

    name, context_length, config = "pseudo", 4096, None


class PseudoRunner:
    """A base without weights, for fast tests of drafters in the real decoding loop.

    Its next token is a function of the last ``order`` tokens it sees, which are those of the node's own path: a node
    that is not an ancestor can change nothing. A small vocabulary makes texts that repeat themselves.
    """

    def __init__(self, seed=0, vocab=12, order=2, context=4096, noise=0.1):
        self.base = PseudoBase()
        self.base.context_length = self.context_length = context
        self.seed, self.vocab_size, self.order, self.noise = seed, vocab, order, noise
        self.forwards, self.known = 0, {}
        self.reset()

    def reset(self, reserve=0):
        self.text, self.fed = [], ([], None)

    def capture(self, drafter):
        pass

    def most_nodes(self, length):
        return 1024

    @property
    def cached(self):
        return len(self.text)

    def next(self, seq):
        """Return the token after a text, which depends on the last ``order`` tokens except at a few positions."""
        seen = tuple(seq[-6 * self.order :])
        if seen not in self.known:  # to seed a generator takes longer than all else
            rng = random.Random(str((self.seed, seen[-self.order :])))
            token = rng.randrange(self.vocab_size)
            if rng.random() < self.noise:
                token = random.Random(str((self.seed, seen))).randrange(self.vocab_size)
            self.known[seen] = token
        return self.known[seen]

    def greedy(self, prompt, length, eos=()):
        """Return its greedy continuation."""
        seq = list(prompt)
        while len(seq) < min(len(prompt) + length, self.context_length):
            seq.append(self.next(seq))
            if seq[-1] in eos:
                break
        return seq[len(prompt) :]

    def forward(self, pending, tree, required_outputs):
        import torch

        from inference.verifier.runner import ForwardOutput

        check_tree(tree, self.vocab_size)
        assert pending and max(tree.depths, default=0) <= self.context_length - self.cached - len(pending)
        self.forwards += 1
        self.fed = (list(pending), tree)
        known = self.text + list(pending)
        picks = [self.next(known), *(self.next(known + tree.path_tokens(node)) for node in range(len(tree)))]
        return ForwardOutput(torch.nn.functional.one_hot(torch.tensor(picks), self.vocab_size).float(), None)

    def commit(self, path):
        pending, tree = self.fed
        assert all(node < tree.num_candidates for node in path)
        self.text += pending + (tree.path_tokens(path[-1]) if path else [])

    max_rows = 2**31

    def prepare(self, length):
        return self.context_length

    def truncate(self, length):
        assert length <= len(self.text)
        del self.text[length:]


class ChatServer(ThreadingHTTPServer):
    """A small chat server that answers with the reversed prompt, and fails if the prompt requests it."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), ChatHandler)
        self.seen, self.tries, self.open, self.most_open = [], Counter(), 0, 0
        self.encode = None  # makes of an answer the token ids that are reported

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    """Logs nothing, and can send a reply as a whole."""

    def reply(self, code, content, headers=None):
        self.send_response(code)
        for name, value in ((headers or {}) | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *given):
        pass


@contextmanager
def serving(server):
    """The server runs in a thread inside the block."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class ChatHandler(Handler):
    def do_GET(self):
        model = {"id": "m", "object": "model", "created": 1, "owned_by": "x", "max_model_len": 40}
        return self.reply(200, json.dumps({"object": "list", "data": [model]}).encode())

    def do_POST(self):
        self.server.open += 1
        self.server.most_open = max(self.server.most_open, self.server.open)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, dict(self.headers), body))
        if self.path == "/v1/completions":  # three messages, of which every fourth is cut off
            self.server.open -= 1
            row = body["seed"] % 12
            choice = {"text": f" number {row % 3} ", "finish_reason": "length" if row % 4 == 0 else "stop"}
            return self.reply(200, json.dumps({"choices": [choice]}).encode())
        asked = body["messages"][-1]["content"]
        self.server.tries[asked] += 1
        time.sleep(0.05 if asked.startswith("slow") else 0)
        self.server.open -= 1
        word, _, number = asked.partition(" ")
        if word == "fail" and self.server.tries[asked] <= int(number.split()[1]):
            return self.reply(int(number.split()[0]), b"{}", {"Location": self.server.url, "Retry-After": "0.001"})
        if asked == "hang up":
            return self.connection.close()
        if asked == "babble":
            return self.reply(200, b'{"choices": []}')
        if asked == "strict" and "return_token_ids" in body:
            return self.reply(422, b"{}")
        words = asked.split()[::-1]
        kept = words[: body["max_tokens"]]
        message = {"role": "assistant", "content": " ".join(kept)}
        if body.get("chat_template_kwargs", {}).get("enable_thinking"):
            message["reasoning_content"] = "the other way round"
        choice = {
            "message": message,
            "finish_reason": "stop" if kept == words else "length",
        }
        if body.get("return_token_ids") and self.server.encode:
            choice["token_ids"] = self.server.encode(message["content"])
        usage = {"prompt_tokens": len(words), "completion_tokens": len(kept)}
        return self.reply(200, json.dumps({"choices": [choice], "usage": usage}).encode())


def recorded_trees(drafter):
    """The list to which every tree is added that a drafter proposes from now on."""
    trees, propose = [], drafter.propose
    drafter.propose = lambda seq, limits: trees.append(propose(seq, limits)) or trees[-1]
    return trees


def refusal(function, *arguments, **options):
    """The message of one line with which a function refuses its arguments."""
    with pytest.raises(ValueError) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@contextmanager
def full_disk(num_bytes):
    """No file can grow beyond a number of bytes, as if the disk were full then."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)


@pytest.fixture
def emulated_graphs(monkeypatch):
    """CUDA graphs on the CPU: what is captured during the test is recorded and replayed."""
    from drafters.nn import graph
    from tests.devices.graphs import EmulatedGraphs

    graphs = EmulatedGraphs()
    monkeypatch.setattr(graph, "captured", graphs)
    return graphs


@pytest.fixture
def chat_server():
    """A `ChatServer` running in a thread."""
    with serving(ChatServer()) as server:
        yield server


@pytest.fixture(scope="session")
def pseudo_runner():
    """Build a `PseudoRunner`."""
    return PseudoRunner


@pytest.fixture(scope="session")
def make_base():
    """Build a toy base; the same arguments give the same base."""
    return toy_base


@pytest.fixture(scope="session")
def thinking_tokenizer():
    """The toy tokenizer with a template that knows a thinking switch, tools and system prompts; two words are marks."""
    tokenizer = words((("<think>", 5), ("</think>", 8)))
    tokenizer.chat_template = (
        "{%- for tool in tools or [] %}{{- tool['name'] + ' ' }}{%- endfor %}"
        "{%- for message in messages %}{{- 'w30 ' if message['role'] == 'system' else '' }}"
        "{{- message['content'] + ' ' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'w31' }}"
        "{%- if enable_thinking is defined and not enable_thinking %}{{- ' <think> </think>' }}{%- endif %}{%- endif %}"
    )
    return tokenizer


@pytest.fixture(scope="session")
def base(make_base):
    """The default toy base: a LLaMA of two layers in float64, vocabulary 40, context 64."""
    return make_base()


@pytest.fixture(scope="session")
def toy_tokenizer():
    return words()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """Returns a function that fills a folder once per test run, whichever pytest-xdist worker asks first.

    ``shared_folder("tiny-base", fill)`` calls ``fill(folder)`` unless another worker has done so, waits while another
    worker is doing so, and returns the folder. Tests only read what they find there.
    """
    from filelock import FileLock

    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # each worker has a folder of its own in the one of the run

    def make(name: str, fill: Callable[[Path], object]) -> Path:
        folder, done = root / name, root / f"{name}.done"
        with FileLock(root / f"{name}.lock"):
            if not done.exists():
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return make


@pytest.fixture(scope="session")
def repository():
    return ROOT


@pytest.fixture(scope="session")
def shared():
    """Return a path below ``shared`` next to the repository, and skip the test if it is missing."""

    def path(relative):
        found = ROOT.parent / "shared" / relative
        if not found.exists():
            pytest.skip(f"shared/{relative} is not next to the project")
        return found

    return path
