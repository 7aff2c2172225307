"""``drafters serve``: what it refuses before it listens, and how its process ends."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request

import openai
import pytest

from inference.serve.command import read_key
from train.cli import run_drafters as main

BASE = "checkpoints/tiny-chat"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--host 0.0.0.0", "other machines can reach 0.0.0.0: give --api-key-file, or leave --host out"),
        ("--api-key-file nowhere", "nowhere: no such file or directory"),
        ("--api-key-file @empty", "must hold the API key and nothing else"),
        ("--api-key-file @two", "must hold the API key and nothing else"),
        ("--port 65536", "cannot listen on 127.0.0.1 port 65536"),
        ("--host 192.0.2.1 --api-key-file @key", "cannot listen on 192.0.2.1 port 8000"),
        ("--max-tokens 0", "max_tokens must be at least 1, not 0"),
        ("--port 0 --base nowhere", "no base at nowhere"),
    ],
)
def test_a_mistake_takes_one_line_and_no_key_is_shown(options, message, tmp_path, capsys):
    for name, content in (("empty", "\n"), ("two", "s3cret\ns3cret\n"), ("key", "s3cret\n")):
        (tmp_path / name).write_text(content)
    words = [str(tmp_path / word[1:]) if word.startswith("@") else word for word in options.split()]
    with pytest.raises(SystemExit) as ended:
        main(["serve", *(() if "--base" in words else ("--base", BASE)), *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in error and error.count("\n") == 1 and "s3cret" not in error


def test_a_port_in_use_takes_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(SystemExit):
        main(["serve", "--base", BASE, "--port", str(other.getsockname()[1])])
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_the_key_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    assert read_key("localhost", None) is None
    monkeypatch.setenv("DRAFTERS_API_KEY", "from-environment")
    assert read_key("0.0.0.0", None) == "from-environment"
    (tmp_path / "key").write_text("from-file\r\n")
    assert read_key("127.0.0.1", str(tmp_path / "key")) == "from-file"


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
