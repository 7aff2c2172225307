"""What proposes: the drafters, the draft tree, and the folder a trained drafter is kept in."""

from drafters.learned.ctc.drafter import CTC
from drafters.protocol import BaseShape, Borrowed, Drafter, LearnedDrafter, Limits, Needs, NoDrafter, StepResult
from drafters.training_free.draft_model import DraftModel
from drafters.training_free.ngram import ANPD, PromptLookup
from drafters.tree import DraftTree

__all__ = [
    "ANPD",
    "CTC",
    "BaseShape",
    "Borrowed",
    "DraftModel",
    "DraftTree",
    "Drafter",
    "LearnedDrafter",
    "Limits",
    "Needs",
    "NoDrafter",
    "PromptLookup",
    "StepResult",
]
