"""The drafters. A new one of this package gets its line here, and those of others by `registry.MODULES`."""

# ruff: noqa: F401

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
from drafters.registry import register
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
