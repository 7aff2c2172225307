"""The process of a server: its CPU time with all children, its error, and its end however the evaluation ends."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context

import pytest

from inference.evaluation.served.client import ServerError
from inference.evaluation.served.vllm_server import cpu_seconds, free_port, running
from inference.vllm.command import Launch

# A server that is healthy at once, with a child process.
SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *given): pass
subprocess.Popen(["sleep", "600"])
HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
LOG = "INFO: warming up\nValueError: no folder\nRuntimeError: Engine core initialization failed."
BROKEN = f"import sys; sys.exit({LOG!r})"
BURN = "while time.process_time() < 0.25: pass"
NESTED = f"""
import subprocess, sys, time
subprocess.run([sys.executable, "-c", "import time\\n{BURN}"])
{BURN}
print(flush=True)
time.sleep(600)
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def session_of(pid):
    """Processes of a session that have not ended."""
    found = subprocess.run(["ps", "-s", str(pid), "-o", "stat="], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if not line.startswith("Z")]


def started(tmp_path):
    port = free_port()
    return running(Launch({}, ["-c", SERVER, str(port)]), port, [], tmp_path / "logs" / "log")


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_all_processes_are_ended_with_the_evaluation(error, tmp_path):
    try:
        with started(tmp_path) as (client, session):
            assert client.is_healthy() and len(session_of(session)) == 2
            if error:
                raise error
    except (KeyboardInterrupt, ValueError) as raised:
        assert type(raised) is error
    assert session_of(session) == [] and not client.is_healthy()


def hold(place, connection):
    with started(place) as (_, session):
        connection.send(session)
        time.sleep(600)


@pytest.mark.slow
def test_the_server_ends_when_the_evaluation_is_killed(tmp_path):
    context = get_context("fork")
    ours, theirs = context.Pipe()
    holder = context.Process(target=hold, args=(tmp_path, theirs))
    holder.start()
    session = ours.recv()
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    deadline = time.monotonic() + 30
    while len(session_of(session)) > 1:  # vLLM ends its own children; this server's is left to the test
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(session, signal.SIGKILL)


def test_a_server_that_does_not_start_is_explained_by_the_cause_in_its_log(tmp_path):
    with (
        pytest.raises(ServerError, match=r"^vLLM ended with exit code 1: ValueError: no folder$"),
        running(Launch({}, ["-c", BROKEN]), free_port(), [], tmp_path / "log"),
    ):
        pass


def test_the_server_demands_no_key_that_the_environment_holds(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret-of-vllm")
    program = 'import os, sys; sys.exit(f\'ValueError: {os.environ.get("VLLM_API_KEY")} {os.environ["OTHER"]}\')'
    with (
        pytest.raises(ServerError, match=r"ValueError: None kept$"),
        running(Launch({"OTHER": "kept"}, ["-c", program]), free_port(), [], tmp_path / "log"),
    ):
        pass


@pytest.mark.slow
def test_cpu_seconds_contain_children_that_run_and_that_have_ended():
    process = subprocess.Popen([sys.executable, "-c", NESTED], start_new_session=True, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        assert 0.45 <= cpu_seconds(process.pid) < 1.5
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert cpu_seconds(process.pid) == 0
