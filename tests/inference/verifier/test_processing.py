"""Logits processors at the nodes of a draft tree: each node is processed with the text of its own path, once."""

import pytest
import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from drafters.tree import ROOT, ChildDistribution, DraftTree
from inference.verifier.processing import ScoreProcessors
from inference.verifier.sampling import Greedy, KeyedSampler, TreeLogits
from tests.inference.verifier.oracles import pearson

VOCAB, TEXT = 6, [4, 1, 0, 4]
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5  # (V, V) after each last token
PROCESSORS = [RepetitionPenaltyLogitsProcessor(3.0), NoRepeatNGramLogitsProcessor(2), TopKLogitsWarper(4)]
ONE_IN_A_THOUSAND = 67  # 36 degrees of freedom


def distribution_after(text):
    scores = LOGITS[text[-1] :][:1].clone()
    for processor in PROCESSORS:
        scores = processor(torch.tensor([text]), scores)
    return scores[0].double().softmax(-1)


def drawn_tree(generator):
    """Two drawn children of the root, and one drawn child of each."""
    probs = (LOGITS[TEXT[-1]] / 2).double().softmax(-1)
    draws = torch.multinomial(probs, 2, True, generator=generator).tolist()
    tokens = list(dict.fromkeys(draws))
    children = torch.multinomial(probs, len(tokens), True, generator=generator).tolist()
    distributions = [ChildDistribution(ROOT, probs, tuple(map(tokens.index, draws)))]
    distributions += [ChildDistribution(node, probs, (len(tokens) + node,)) for node in range(len(tokens))]
    parents = [ROOT] * len(tokens) + list(range(len(tokens)))
    return DraftTree([*tokens, *children], parents, distributions=tuple(distributions))


def chi_square(processors, num_runs=800):
    """Chi-square of two tokens decided through drawn trees against the enumerated distribution of pairs."""
    second = torch.stack([distribution_after([*TEXT, token]) for token in range(VOCAB)])
    expected = (distribution_after(TEXT)[:, None] * second * num_runs).flatten()
    counts, generator = torch.zeros(VOCAB * VOCAB, dtype=torch.float64), torch.Generator().manual_seed(0)
    num_accepted = 0
    for seed in range(num_runs):
        sampler, emitted = KeyedSampler(seed=seed, processors=processors), []
        for tree in (drawn_tree(generator), DraftTree()):
            text = [*TEXT, *emitted]
            logits = LOGITS[[text[-1], *tree.tokens]]
            path, tokens = sampler.accept(tree, sampler.decide(TreeLogits(logits, tree, text)).tolist())
            emitted += tokens
            num_accepted += len(path)
        counts[emitted[0] * VOCAB + emitted[1]] += 1
    assert num_accepted > num_runs / 4
    return pearson(counts, expected)


@pytest.mark.slow
def test_drawn_drafts_do_not_change_the_processed_distribution_of_two_tokens():
    assert chi_square(PROCESSORS) < ONE_IN_A_THOUSAND


class Recorder(LogitsProcessor):
    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        scores.zero_()[0, 5 - len(self.seen)] = 1.0
        return scores


@pytest.mark.parametrize("sampler", [Greedy, lambda processors: KeyedSampler(top_k=1, processors=processors)])
def test_a_processor_is_called_once_for_each_emitted_token_and_not_after_the_end(sampler):
    tree = DraftTree([4, 0, 3, 2, 1], [ROOT, ROOT, 0, 2, 3])  # the recorder picks 4, 3, 2, 1, 0
    logits = torch.randn(6, VOCAB)
    before = logits.clone()
    for eos, decided in (
        (frozenset(), [4, 3, -1, 2, 1, 0]),
        (frozenset({3}), [4, 3, -1, -1, -1, -1]),
        (frozenset({4}), [4, -1, -1, -1, -1, -1]),
    ):
        recorder = Recorder()
        decisions = sampler([recorder]).decide(TreeLogits(logits, tree, [1, 1], eos))
        assert decisions[:, 0].tolist() == decided and torch.equal(logits, before)
        num_calls = sum(token >= 0 for token in decided)
        assert recorder.seen == [[1, 1, 4, 3, 2, 1][: 2 + count] for count in range(num_calls)]


def test_only_processors_known_to_read_nothing_but_a_row_take_all_rows_at_once():
    class MyTopK(TopKLogitsWarper):
        pass

    assert not ScoreProcessors([TopKLogitsWarper(2)]).read_text and not ScoreProcessors().read_text
    for processor in (MyTopK(2), RepetitionPenaltyLogitsProcessor(1.2), Recorder()):
        assert ScoreProcessors([TopKLogitsWarper(2), processor]).read_text
