"""Hostile input for every reader and every command line, made by hypothesis from real files and the commands' options.

What must hold for each input: it is read, or refused by an error of one line; it takes at most `MAX_SECONDS` and
`MAX_BYTES` of further memory; and no file that was there is changed. `test_readers.py` damages files (flipped bytes,
cuts, values of other types, huge numbers, nesting, surrogates), `test_commands.py` puts hostile values into command
lines and runs them in this process.

In continuous integration the same inputs are tried at every run, for about a minute. ``make fuzz`` goes on with new
ones for FUZZ_MINUTES (30 by default), and prints how many were tried. FUZZ_SEED is the number of the first round: a
failure prints its own, and ``FUZZ_SEED=7 pytest tests/fuzz -k corpus`` repeats it. A defect that is found gets a test
of its own next to the tests of the reader.
"""

import os
import resource
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager

import hypothesis
import pytest

MAX_SECONDS = 10
MAX_BYTES = 1 << 30
TRIED = Counter()
MINUTES = float(os.environ.get("FUZZ_MINUTES", 0))
FIRST_SEED = int(os.environ.get("FUZZ_SEED", 0))


ALLOWED: list[str] = []  # folders below which the block of `bounded` may write; everywhere if empty
WRITES = {"os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.truncate": 1, "os.chmod": 1, "os.link": 2}


def refuse_writes_elsewhere(event, arguments):
    """An audit hook: whoever runs the suite, as root too, a hostile name such as /dev/null must not be replaced."""
    if not ALLOWED:
        return
    paths = arguments[: WRITES.get(event, 0)]
    if event == "os.symlink":
        paths = arguments[1:2]
    if event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
        paths = arguments[:1]
    for path in paths:
        if isinstance(path, (str, bytes, os.PathLike)):
            place = os.path.realpath(os.fsdecode(path))
            if place != os.devnull and not any(place == root or place.startswith(root + "/") for root in ALLOWED):
                raise PermissionError(13, "outside the folder of the test", os.fsdecode(path))
            if place == os.devnull and event != "open":
                raise PermissionError(13, "a device", os.fsdecode(path))


sys.addaudithook(refuse_writes_elsewhere)


@contextmanager
def bounded(allowed=()):
    """Let the block take `MAX_SECONDS` of processor time, four times as much waiting, and `MAX_BYTES` of memory."""

    def stop(signal_number, frame):
        raise TimeoutError(f"more than {MAX_SECONDS} seconds")

    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    previous = [signal.signal(each, stop) for each in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    signal.alarm(4 * MAX_SECONDS)  # something that waits, on a busy machine
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, limits[1]))
    ALLOWED[:] = [os.path.realpath(folder) for folder in allowed]
    try:
        yield
    finally:
        ALLOWED.clear()
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for each, handler in zip((signal.SIGPROF, signal.SIGALRM), previous, strict=True):
            signal.signal(each, handler)


def files_below(folder):
    """Every file with its size and the time of its last change."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def fuzz(request):
    """``fuzz(strategy, check, examples)`` checks inputs: always the same, or new ones for a share of FUZZ_MINUTES."""

    def run(strategy, check, examples):
        num_tests = sum("fuzz" in item.fixturenames for item in request.session.items)
        deadline = time.monotonic() + 60 * MINUTES / max(1, num_tests)
        seed = FIRST_SEED
        while True:

            def counted(value):
                TRIED[request.node.nodeid] += 1
                check(value)

            options = hypothesis.settings(
                max_examples=examples,
                deadline=None,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
                report_multiple_bugs=False,
                phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink] if MINUTES else [hypothesis.Phase.generate],
            )
            test = hypothesis.given(strategy)(counted)
            try:
                hypothesis.seed(seed)(options(test))()
            except BaseException as error:
                error.add_note(f"in round FUZZ_SEED={seed}") if hasattr(error, "add_note") else None
                raise
            seed += 1
            if time.monotonic() > deadline:
                return

    return run


def pytest_terminal_summary(terminalreporter):
    if TRIED:
        terminalreporter.write_line(f"hostile inputs tried: {sum(TRIED.values()):,}")
        if MINUTES:
            for name, count in TRIED.items():
                terminalreporter.write_line(f"  {count:>8,}  {name}")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folder of a random base with two small layers and the tokenizer of tiny-chat."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-base")
    tokenizer = AutoTokenizer.from_pretrained("checkpoints/tiny-chat")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, eos_token_id=2, **sizes)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
