"""The merged drafter: the prefixes of a learned drafter and n-grams in one tree, by probability of acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from typing import NamedTuple

from drafters.checks import check_at_least
from drafters.protocol import UNLIMITED, Drafter, LearnedDrafter, Limits, RequiredOutputs, StepResult
from drafters.training_free.joint import Joint, extended
from drafters.tree import ROOT, DraftTree
from drafters.trees.search import SearchLimits, best_first

# ---- one probability from those of two predictors

MIN_PROBABILITY = 1e-3
LEARNING_RATE = 0.02


# By which of two predictors name a token: the weights of the first and the second, and the bias. A CTC drafter and
# n-grams have learned them.
FIRST_WEIGHTS = {
    "both": (1.0, 0.4, 1.2),
    "first": (1.3, 0.3, 0.0),  # the second names other tokens
    "second": (0.7, 1.1, -0.8),
    "first alone": (1.0, 0.0, 0.0),  # the second names no token
    "second alone": (0.0, 1.0, 0.0),
}


class Evidence(NamedTuple):
    """What two predictors say about a token: which of them name it, and their log-odds; 0 if one names no token."""

    agreement: str  # a key of `FIRST_WEIGHTS`
    first: float
    second: float


class LogisticMixer:
    """The probability of a token from the log-odds of two predictors, by logistic regression (Mahoney 2005, PAQ).

    Two predictors that agree are more often right than each of them, which no average of their probabilities says. The
    weights follow what proved right, by one gradient step of the cross-entropy for each judged token.
    """

    def __init__(self) -> None:
        self._weights = {agreement: list(weights) for agreement, weights in FIRST_WEIGHTS.items()}

    def probability(self, evidence: Evidence) -> float:
        """The probability that the token comes next, between 0 and 1."""
        first, second, bias = self._weights[evidence.agreement]
        return 1 / (1 + exp(-(first * evidence.first + second * evidence.second + bias)))

    def learn(self, evidence: Evidence, is_right: bool) -> None:
        """Move the weights towards what was right, none below 0: more confidence never lowers the probability."""
        step = LEARNING_RATE * (is_right - self.probability(evidence))
        weights = self._weights[evidence.agreement]
        weights[0] = max(0.0, weights[0] + step * evidence.first)
        weights[1] = max(0.0, weights[1] + step * evidence.second)
        weights[2] += step


def log_odds(probability: float) -> float:
    """The log-odds of a probability, which is limited to be neither 0 nor 1."""
    probability = min(max(probability, MIN_PROBABILITY), 1 - MIN_PROBABILITY)
    return log(probability / (1 - probability))


def combine(first: dict[int, float], second: dict[int, float]) -> list[tuple[int, Evidence]]:
    """What two predictors say about each token that either of them names.

    Each gives the probabilities of the next tokens it names, which add up to at most one; what they leave is its
    probability for any other token. It names none if it knows nothing.
    """
    pairs = []
    first_left = log_odds(1 - sum(first.values())) if first else 0.0
    second_left = log_odds(1 - sum(second.values())) if second else 0.0
    for token, probability in first.items():
        agreement = "both" if token in second else "first" if second else "first alone"
        other = log_odds(second[token]) if token in second else second_left
        pairs.append((token, Evidence(agreement, log_odds(probability), other)))
    agreement = "second" if first else "second alone"
    for token, probability in second.items():
        if token not in first:
            pairs.append((token, Evidence(agreement, first_left, log_odds(probability))))
    return pairs


# ---- the drafter


@dataclass
class Node:
    """The root or a node of a merged tree."""

    contexts: Sequence[int]  # the n-gram contexts that end with its token
    learned: int | None = ROOT  # the node of the learned drafter's tree with the same path, if there is one
    candidates: list[tuple[int, Evidence]] = field(default_factory=list)  # the tokens that may follow it
    children: dict[int, int] = field(default_factory=dict)  # the places of its children among all nodes, by token


class Merged(Drafter):
    """A learned drafter and n-grams draft one tree together. Our own method.

    The learned drafter's tree says how probable each token is after each of its nodes, and the joint drafter's sources
    say the same after any tokens. Both probabilities are mixed by logistic regression, whose weights are learned online
    from what the base emitted (`LogisticMixer`). The tree takes the most probable nodes first, whoever named them, so
    n-grams continue the learned drafter's prefixes and fill gaps between them.

    The tree is chosen without chance, so sampled text is exact, too, and the same under one seed. The learned drafter
    must give a probability for each node of its trees. It should draft about three times as many nodes as the merged
    tree takes, since some that it finds improbable are those of n-grams too. The options ``num_nodes`` and
    ``min_probability`` of the joint drafter do not matter here; those of the merged tree are those of the command line
    (`inference.model_drafters.merged`). Raises ValueError if one is out of range, or the learned drafter samples its
    drafts.
    """

    def __init__(
        self, learned: LearnedDrafter, ngrams: Joint, num_nodes: int = 32, min_probability: float = 0.01
    ) -> None:
        check_at_least(1, num_nodes=num_nodes)
        if not 0 < min_probability < 1:
            raise ValueError(f"min_probability must be above 0 and below 1, not {min_probability}")
        if learned.samples_drafts:
            raise ValueError(
                "a merged tree would not be exact with drafts that are drawn at random: set draws of the learned "
                "drafter to 0"
            )
        self.learned, self.ngrams = learned, ngrams
        self.num_nodes, self.min_probability = num_nodes, min_probability
        self.required_outputs = RequiredOutputs(learned.required_outputs.hidden_layers, ngrams.required_outputs.top_k)
        self.draft_forwards = learned.draft_forwards
        self._mixer, self._nodes = LogisticMixer(), list[Node]()

    def draft_in_graph(self, num_positions: int) -> None:
        self.learned.draft_in_graph(num_positions)

    def reset(self) -> None:
        self.learned.reset()
        self.ngrams.reset()
        self._mixer, self._nodes = LogisticMixer(), []

    def begin(self, prompt: Sequence[int]) -> None:
        self.learned.begin(prompt)
        self.ngrams.begin(prompt)
        self._nodes = []

    def rewind(self, length: int) -> None:
        self.learned.rewind(length)
        self.ngrams.rewind(length)
        self._nodes = []

    def observe(self, step: StepResult) -> None:
        self._learn(step.emitted)
        self.learned.observe(step)
        self.ngrams.observe(step)

    def _learn(self, emitted: Sequence[int]) -> None:
        """Judge what was said about each emitted token that the tree has candidates for."""
        place: int | None = 0
        for token in emitted if self._nodes else ():
            if place is None:
                return
            node = self._nodes[place]
            for candidate, evidence in node.candidates:
                self._mixer.learn(evidence, candidate == token)
            place = node.children.get(token)

    # ---- drafting

    def propose(self, seq: Sequence[int], limits: Limits) -> DraftTree:
        room, max_depth = min(self.num_nodes, limits.max_nodes), limits.max_depth
        root = Node(self.ngrams.contexts_after(seq))
        self._nodes = [root]
        if min(room, max_depth) < 1:
            self.ngrams.expect(DraftTree(), [root.contexts])
            return DraftTree()
        # Its whole tree, whatever the limit: the nodes that are most probable in view of both are taken.
        learned = self.learned.propose(seq, replace(limits, max_nodes=UNLIMITED.max_nodes))
        self.draft_forwards = self.learned.draft_forwards
        learned_children = _conditional_probabilities(learned)

        def take(parent: int, token: int) -> None:
            above = self._nodes[parent + 1]
            above.children[token] = len(self._nodes)
            child = None if above.learned is None else learned.child(above.learned, token)
            self._nodes.append(Node(extended(above.contexts, token, self.ngrams.order), child))

        def following(place: int, probability: float) -> list[tuple[float, int]]:
            node = self._nodes[place + 1]
            named = {} if node.learned is None else learned_children.get(node.learned, {})
            pairs = self.ngrams.following(node.contexts, self.min_probability / probability)
            node.candidates = combine(named, {token: share for share, token in pairs})
            in_order = sorted(node.candidates)  # of tokens, for those that are equally probable
            return [(self._mixer.probability(evidence), token) for token, evidence in in_order]

        tree = best_first(following, take, SearchLimits(room, max_depth, limits.eos, self.min_probability))
        self.ngrams.expect(tree, [node.contexts for node in self._nodes])
        return tree


def _conditional_probabilities(tree: DraftTree) -> dict[int, dict[int, float]]:
    """Of the root and each node with children, by child token: its probability given the path above, or ValueError."""
    if len(tree) != len(tree.probabilities):
        raise ValueError(
            "this drafter gives no probabilities for the nodes of its tree, so n-grams cannot be merged into it: train "
            "or export it with another kind of tree (CTC: prefix or chain, Medusa: no static tree)"
        )
    children: dict[int, dict[int, float]] = {}
    for token, parent, probability in zip(tree.tokens, tree.parents, tree.probabilities, strict=True):
        above = 1.0 if parent == ROOT else tree.probabilities[parent]
        children.setdefault(parent, {})[token] = probability / above if above else 0.0
    return children
