"""``drafters serve``: what it refuses before it listens, and how its process ends."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request

import openai
import pytest

from train.cli import run_drafters as main

BASE = "checkpoints/tiny-chat"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--host 0.0.0.0", "other machines can reach 0.0.0.0: set DRAFTERS_API_KEY to an API key, or leave --host out"),
        ("--port 65536", "a port below 65536, not 4096 and 65536"),
        ("--max-tokens 0", "need max_tokens >= 1"),
        ("--port 0 --base nowhere", "no base at nowhere"),
    ],
)
def test_a_mistake_takes_one_line(options, message, capsys, monkeypatch):
    monkeypatch.delenv("DRAFTERS_API_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["serve", *(() if "--base" in options else ("--base", BASE)), *options.split()])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in error and error.count("\n") == 1


def test_a_port_in_use_takes_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(SystemExit):
        main(["serve", "--base", BASE, "--port", str(other.getsockname()[1])])
    error = capsys.readouterr().err
    assert "Address already in use" in error and "127.0.0.1" in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_process_answers_and_ends_by_a_signal(repository):
    environment = os.environ | {"PYTHONPATH": str(repository), "DRAFTERS_API_KEY": "s3cret-key"}
    line = [sys.executable, "-c", "from train.cli import run_drafters as main; main()", "serve", "--base", BASE]
    line += ["--drafter", "anpd", "--port", "0", "--served-name", "tiny"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, cwd=repository, env=environment, **pipes) as process:
        said = process.stdout.readline()
        url = said.split()[3].removesuffix("/v1,")
        assert said.startswith("tiny with anpd: http://127.0.0.1:")
        with urllib.request.urlopen(url, timeout=120) as reply:
            assert reply.status == 200
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="s3cret-key", max_retries=0)
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 300}
        stream = client.chat.completions.create(stream=True, **asked)
        next(stream)
        process.send_signal(signal.SIGTERM)
        chunks = list(stream)  # the running request may end
        out, error = process.communicate(timeout=120)
    assert chunks[-1].choices[0].finish_reason
    assert (process.returncode, out, error) == (-signal.SIGTERM, "", "")
