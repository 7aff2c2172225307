"""The OpenAI-compatible server as `drafters serve-command` starts it, with the real client."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import APIConnectionError, OpenAI

from data import benchmarks

MINUTES_TO_START = 5
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def server(trained, tmp_path_factory):
    """The address of a running server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "import sys; from train.cli import run_drafters; run_drafters(sys.argv[1:])"]
    command += ["serve-command", str(trained("ctc")), "--port", str(port), "--dtype", "float32"]
    words = shlex.split(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    start = words.index("python")
    environment = {**os.environ, **dict(word.split("=", 1) for word in words[:start])}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # set for the engines inside the test process
    words = [sys.executable, *words[start + 1 :], "--max-model-len", "512", "--max-num-seqs", "8"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(words, env=environment, stdout=out, stderr=out)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60 * MINUTES_TO_START
        while not answers(address):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def answers(address):
    try:
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0).models.list()
    except APIConnectionError:
        return False
    return True


@pytest.fixture
def client(server):
    return OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def test_answers_to_eight_clients_are_those_of_the_base(client, server, tiny_chat, expected):
    questions = [question.turns[0] for question in benchmarks.load_questions("embedded")[: len(expected)]]

    def ask(question):
        messages = [{"role": "user", "content": question}]
        answer = client.chat.completions.create(
            model="checkpoints/tiny-chat", messages=messages, temperature=0, max_tokens=NUM_TOKENS
        )
        return answer.choices[0].message.content

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, questions))
    assert texts == [tiny_chat.tokenizer.decode(text, skip_special_tokens=True) for text in expected]
    metrics = urllib.request.urlopen(f"{server}/metrics").read().decode()
    accepted = re.search(r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)$", metrics, re.M)
    assert float(accepted[1]) > sum(map(len, expected)) / 4
