"""The OpenAI-compatible server as `drafters serve-command` starts it, with the real client."""

import os
import re
import shlex
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from openai import APIConnectionError, OpenAI

from data import benchmarks
from inference.server_process import free_port, running_server

SECONDS_TO_START = 300
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def server(trained, tmp_path_factory):
    """The address of a running server."""
    port = free_port()
    command = [sys.executable, "-c", "import sys; from train.cli import run_drafters; run_drafters(sys.argv[1:])"]
    command += ["serve-command", str(trained("ctc")), "--port", str(port), "--dtype", "float32"]
    words = shlex.split(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    start = words.index("python")
    environment = {**os.environ, **dict(word.split("=", 1) for word in words[:start])}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # set for the engines inside the test process
    words = [sys.executable, *words[start + 1 :], "--max-model-len", "512", "--max-num-seqs", "8"]
    log, address = tmp_path_factory.mktemp("server") / "log", f"http://127.0.0.1:{port}"
    with running_server("vLLM", words, log, partial(answers, address), environment, SECONDS_TO_START):
        yield address


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
