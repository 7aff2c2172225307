"""Max-Gram and the horizontal cascade: their chains against fresh lookups, and the base's own text."""

import numpy as np
import pytest

from drafters import DraftModel, DraftTree, HorizontalCascade, Limits, MaxGram, PromptLookup
from drafters.training_free.corpus import CorpusTable
from inference.indexes import count
from inference.verifier.draft_model import DraftModelSession
from inference.verifier.runner import Runner
from inference.verifier.sampling import KeyedSampler
from inference.verifier.session import Session
from tests.conftest import check_tree

FAR = Limits(max_depth=100)


@pytest.fixture(scope="module")
def table():
    """The corpus repeats 1 2 3 4, with one 1 9 between."""
    return CorpusTable(*count(np.array([1, 2, 3, 4] * 5 + [1, 9] + [1, 2, 3, 4] * 2, dtype=np.int32), 1, 20))


def test_max_gram_drafts_bigrams_only_where_nothing_matches(table):
    drafter = MaxGram(table, num_draft=4)
    drafter.begin([7, 5, 8, 6, 5])
    assert drafter.propose([7, 5, 8, 6, 5], FAR) == DraftTree([8, 6, 5], range(-1, 2))
    drafter.begin([7, 1])
    assert drafter.propose([7, 1], FAR) == DraftTree([2, 3, 4, 1], range(-1, 3))
    assert drafter.propose([7, 1], Limits(1)) == DraftTree([2], range(-1, 0))
    assert drafter.propose([7, 1], Limits(9, eos=frozenset({2}))) == DraftTree([2], range(-1, 0))
    assert len(drafter.propose([7, 1, 6], FAR)) == 0
    plain = MaxGram()
    plain.begin([7, 1])
    assert len(plain.propose([7, 1], FAR)) == 0
    text = [2, 3, 4, 7, 1, 2, 3, 4, 9, 1, 2, 3, 4]
    plain.begin(text)
    assert plain.propose(text, FAR).tokens[0] == 9, "the longest match, not the leftmost of three tokens"


def appended_chains(drafter):
    """Compare every appended chain with a fresh lookup over the text and the draft; return the chains."""
    chains, propose = [], drafter.propose

    def compare(seq, limits):
        tree = propose(seq, limits)
        num_drafted = min(drafter.num_draft, len(tree))
        chain, text = list(tree.tokens[num_drafted:]), [*seq, *tree.tokens[:num_drafted]]
        fresh = PromptLookup(3, 6)
        fresh.begin(text)
        if num_drafted == drafter.num_draft and text[-1] not in limits.eos:
            room = Limits(limits.max_depth - num_drafted, limits.max_nodes - num_drafted, limits.eos)
            assert chain == list(fresh.propose(text, room).tokens)
            chains.append(chain)
        check_tree(tree, 12)
        assert tree.pruned(limits.max_depth, limits.max_nodes, limits.eos) is tree
        return tree

    drafter.propose = compare
    return chains


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("max_nodes", [1024, 3])
def test_a_lookup_in_the_text_and_the_draft_continues_the_draft(pseudo_runner, ends, max_nodes):
    inner = DraftModelSession(pseudo_runner(1, noise=0.3), MaxGram(None, 3, 4))
    drafter = HorizontalCascade(inner, MaxGram(None, 3, 6), num_draft=2)
    chains = appended_chains(drafter)
    session, accepted = Session(pseudo_runner(1, noise=0.05), drafter, max_nodes=max_nodes), 0
    for prompt in ([5, 6, 7], [1], [5, 6, 7, 8]):
        text = pseudo_runner(1, noise=0.05).greedy(prompt, 60)
        eos = frozenset([max(text, key=text.index)] if ends else [])  # the last token to occur for the first time
        result = session.run(prompt, 60, eos)
        assert result.tokens == pseudo_runner(1, noise=0.05).greedy(prompt, 60, eos)
        accepted = max([accepted, *(step.accepted for step in result.steps)])
    assert any(chains)
    assert max_nodes == 3 or ends or accepted > drafter.num_draft


@pytest.mark.slow
def test_an_appended_chain_leaves_the_sampled_part_as_it_is(make_base):
    base = make_base()
    sessions = [DraftModelSession(Runner(base), sampler=KeyedSampler(0.9)) for _ in range(2)]
    plain, drafter = DraftModel(sessions[0], 3), HorizontalCascade(sessions[1], MaxGram(), 3)
    seq = [5, 6, 7, 5, 6, 7]
    for proposer in (plain, drafter):
        proposer.begin(seq)
    for seed in range(30):
        limits = Limits(9, draft_seed=seed)
        sampled, tree = plain.propose(seq, limits), drafter.propose(seq, limits)
        assert tree.tokens[:3] == sampled.tokens
        assert [drawn.draws for drawn in tree.distributions] == [drawn.draws for drawn in sampled.distributions]
        assert list(tree.parents) == list(range(-1, len(tree) - 1))
