"""Options that several commands share: which base is loaded, and how its tokens are sampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import LogitsProcessor

from inference.arguments import checks_arguments
from inference.bases import Dtype
from inference.verifier.base import Base, load_base, prepare_process, resolve_device
from inference.verifier.sampling import LOWEST_TEMPERATURE, Greedy, KeyedSampler


@dataclass(frozen=True)
class ModelOptions:
    """The base that a command loads.

    Args:
        base: Folder or hub id of the base, also with @REVISION, a commit, tag or branch of the hub, or a GGUF file. By
            default a tiny one that the package contains.
        dtype: Dtype of the weights of the base and of the drafters; int8 and nf4 quantise the base only.
        device: Device to run on; auto uses the GPU if there is one.
        forward: How the base is run: eager; packed, with a second copy of the weights in the layout in which a CPU
            multiplies few tokens; or compiled, with steps of fixed shape by torch.compile.
        bitwise: Whether texts are those of the base alone bit for bit; by default in bfloat16 and float16 on a CPU,
            unless steps are compiled.
    """

    base: str = "checkpoints/tiny-chat"
    dtype: Dtype = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    forward: Literal["eager", "packed", "compiled"] = "eager"
    bitwise: bool | None = None

    @property
    def compile(self) -> bool:
        """Whether decoding steps are compiled."""
        return self.forward == "compiled"

    def load(self, may_compile: bool = False) -> Base:
        """Load the base; a command may compile if it passes `compile` on to `make_runner`."""
        if self.compile and not may_compile:
            raise ValueError("only eval, verify and chat have compiled steps: pass --forward eager or packed")
        return self.load_on(resolve_device(self.device))

    def load_on(self, device: torch.device) -> Base:
        """Load the base to a device, and prepare this process for it."""
        is_half = self.dtype in ("bfloat16", "float16") and not self.compile
        prepare_process(device, sums_alike=is_half if self.bitwise is None else self.bitwise)
        return load_base(self.base, self.dtype, device, packed=self.forward == "packed", bitwise=self.bitwise)


@checks_arguments
@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen.

    Args:
        temperature: Sampling temperature; 0 decodes greedily, and so do values below 0.00001.
        top_k: Sample from the k most probable tokens only; 0 keeps all tokens.
        top_p: Sample from the most probable tokens whose probabilities add up to this value; 1 keeps all tokens.
        seed: Seed of the random sampling. Each draw depends only on the seed and the position of its token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)

    def sampler(self, processors: Sequence[LogitsProcessor] = ()) -> Greedy | KeyedSampler:
        """The sampler with these options, behind logits processors; raises ValueError if a value is out of range."""
        if self.temperature:
            return KeyedSampler(self.temperature, self.top_k, self.top_p, self.seed, processors)
        if self.top_k or self.top_p != 1:
            option = f"top_k {self.top_k}" if self.top_k else f"top_p {self.top_p}"
            raise ValueError(
                f"{option} is for sampling, and temperature 0 decodes greedily: give a temperature above 0"
            )
        return Greedy(processors)


GREEDY = SamplingOptions()
