"""Runs programs that a model wrote in bubblewrap, where they can do little harm; without it they are not run.

A program gets namespaces of its own (no network, no other process), a read-only root that holds Python and the system's
libraries only, a private /tmp in memory, an empty environment, and limits of time, memory, processes and output (the
kernel does not count the processes of root; all of them end with the time). This is no virtual machine: a bug in the
kernel lets a program escape, and it can find in its own memory the token that proves that it finished. Use a virtual
machine for code that is written to attack.
"""

import os
import secrets
import shutil
import site
import subprocess
import sys
import tempfile
from functools import cache, lru_cache

INSTALL = "install bubblewrap (apt-get install bubblewrap), or leave out --run_code"
SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
TMP_BYTES = 1 << 26
LIMITS = {"RLIMIT_AS": 1 << 30, "RLIMIT_FSIZE": 1 << 24, "RLIMIT_NPROC": 16, "RLIMIT_NOFILE": 64, "RLIMIT_CORE": 0}
FOLDER = "/tmp/program"  # of the program
ENVIRONMENT = {"HOME": FOLDER, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Runs the program that it reads, and writes the token only behind its last line: one that fails or exits before has not
# finished. Without the module `site`, whose .pth files take longer than everything else.
RUNNER = """
import builtins, os, resource, sys
limits, packages, token = (eval(sys.stdin.readline()) for _ in range(3))
for name, value in limits.items():
    resource.setrlimit(getattr(resource, name), (value, value))
program = sys.stdin.read()
sys.path.extend(packages)
builtins.exit = builtins.quit = sys.exit
exec(compile(program, "program.py", "exec", dont_inherit=True), {"__name__": "program"})
os.write(1, token)
os._exit(0)
"""


@lru_cache(maxsize=4096)
def finishes(program: str, seconds: float = 10.0) -> bool:
    """Run a Python program and tell whether it ran to its last line, without an exception and without exiting before.

    It is stopped after some seconds of wall time. Equal programs, as lossless drafters write them, are run once. Raises
    ValueError if bubblewrap is not installed or does not work here, so that the program was not run.
    """
    require()
    return _run(program, seconds)[0]


@cache
def require() -> None:
    """Raise `ValueError` unless bubblewrap works here."""
    if not shutil.which("bwrap"):
        raise ValueError(f"the programs in the answers run in bubblewrap, which is not installed: {INSTALL}")
    has_finished, output = _run("", 60.0)
    if not has_finished:
        raise ValueError(f"bubblewrap does not work here ({output.strip()[-200:]}): {INSTALL}")


def _run(program: str, seconds: float) -> tuple[bool, str]:
    """Whether the program ran to its last line, and what it and bubblewrap wrote."""
    readable = [sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages(), *SYSTEM]
    command = ["bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
    for path in dict.fromkeys(path for path in readable if os.path.exists(path)):
        command += ["--ro-bind", path, path]
    # A folder of its own, as the environment of this process may itself be in /tmp.
    command += ["--dir", FOLDER, "--remount-ro", "/", "--chdir", FOLDER, "--clearenv"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    command += ["--", sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", RUNNER]
    token = secrets.token_hex(16).encode()
    order = f"{LIMITS}\n{site.getsitepackages()}\n{token!r}\n{program}".encode("utf-8", "replace")
    with tempfile.TemporaryFile() as output:  # a file, because the limit of a file's size holds for it too
        try:
            subprocess.run(command, input=order, stdout=output, stderr=output, timeout=seconds)
        except subprocess.TimeoutExpired:
            return False, "it ran too long"
        output.seek(0)
        output_bytes = output.read()
    return output_bytes.endswith(token), output_bytes[:4000].decode("utf-8", "replace")
