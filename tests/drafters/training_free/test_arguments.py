"""Arguments that a drafter without weights refuses by name, in one line."""

import pytest

from drafters import (
    ANPD,
    REST,
    DraftModel,
    Joint,
    Lookahead,
    NgramPool,
    Ouroboros,
    PromptLookup,
    SelfDraft,
    SelfSpeculative,
    SuffixArray,
    TokenRecycling,
)

STORE = SuffixArray.build([[1, 2, 3]], depth=26)
REFUSED = [
    *((kind, value, "at least") for kind, value in ((ANPD, {"order": 1}), (ANPD, {"num_draft": 0}))),
    *((PromptLookup, {name: 0}, "at least") for name in ("max_ngram", "num_draft")),
    *((TokenRecycling, {name: 0}, "at least 1") for name in ("num_nodes", "top_k")),
    *((Lookahead, {name: value}, f"{name} must") for name, value in (("level", 2), ("window", 0), ("guesses", -1))),
    *((Joint, {name: 0}, name) for name in ("num_nodes", "order", "min_probability", "fade")),
    (Joint, {"runner_up": -1}, "runner_up"),
    *((SelfDraft, {name: 0}, f"{name} must be at least 1") for name in ("gram", "num_branches", "max_pad")),
    (SelfDraft, {"branch_len": 2}, "branch_len must be at least 3"),
    *(
        (kind, {name: value}, f"{name} must be at least")
        for kind in (DraftModel, SelfSpeculative)
        for name, value in (("num_draft", 0), ("threshold", 1.0))
    ),
    (DraftModel, {"schedule": "rising"}, "schedule must be one of constant, heuristic, not"),
    *((Ouroboros, {name: 0}, f"{name} must be at least") for name in ("num_draft", "num_phrases", "level")),
    *((REST, {name: 0}, "must be at least 1") for name in ("num_draft", "shortest", "num_hits", "length")),
    (REST, {"longest": 3, "shortest": 4}, "longest must be at least 4"),
    (REST, {"longest": 20}, r"sorted by 26 tokens, and longest \+ length is 30: look up less"),
]
FIRST = {DraftModel: [None], SelfSpeculative: [None], Ouroboros: [None, NgramPool()], REST: [STORE]}


@pytest.mark.parametrize(("kind", "arguments", "said"), REFUSED)
def test_an_argument_out_of_range_is_refused(kind, arguments, said):
    with pytest.raises(ValueError, match=said) as caught:
        kind(*FIRST.get(kind, []), **arguments)
    assert "\n" not in str(caught.value)
