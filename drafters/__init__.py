"""The drafters, the draft tree, and the folder that a trained drafter is kept in."""

from typing import Any

from drafters.block import Block
from drafters.ctc.drafter import CTC
from drafters.eagle.eagle import EAGLE
from drafters.eagle.eagle3 import EAGLE3
from drafters.hydra import Hydra
from drafters.medusa import Medusa
from drafters.merged import Merged
from drafters.protocol import (
    BaseShape,
    BaseWeights,
    Drafter,
    LearnedDrafter,
    Limits,
    NoDrafter,
    RequiredOutputs,
    StepResult,
    TrainingBatch,
)
from drafters.registry import register, registered
from drafters.training_free.corpus import CorpusCache
from drafters.training_free.draft_model import DraftModel, HorizontalCascade, MaxGram, SelfSpeculative
from drafters.training_free.joint import Joint
from drafters.training_free.lookahead import Lookahead
from drafters.training_free.ngram import ANPD, NgramPool, PromptLookup
from drafters.training_free.ouroboros import Ouroboros
from drafters.training_free.recycling import TokenRecycling
from drafters.training_free.retrieval import REST
from drafters.training_free.self_draft import SelfDraft
from drafters.training_free.suffix_array import SuffixArray
from drafters.tree import DraftTree

__all__ = [
    "ANPD",
    "CTC",
    "EAGLE",
    "EAGLE3",
    "REST",
    "BaseShape",
    "BaseWeights",
    "Block",
    "CorpusCache",
    "DraftModel",
    "DraftTree",
    "Drafter",
    "HorizontalCascade",
    "Hydra",
    "Joint",
    "LearnedDrafter",
    "Limits",
    "Lookahead",
    "MaxGram",
    "Medusa",
    "Merged",
    "NgramPool",
    "NoDrafter",
    "Ouroboros",
    "PromptLookup",
    "RequiredOutputs",
    "SelfDraft",
    "SelfSpeculative",
    "StepResult",
    "SuffixArray",
    "TokenRecycling",
    "TrainingBatch",
    "register",
]


def __getattr__(name: str) -> Any:
    """A registered drafter of this package that the list above leaves out, so that ``drafters.NAME`` always works."""
    for registration in registered().values():
        build = registration.build
        if getattr(build, "__name__", "") == name and build.__module__.startswith("drafters."):
            return build
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
