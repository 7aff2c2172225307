"""The search of skip sets: its predictions equal decoding, and it finds the best of few sets."""

import json
import random
from itertools import chain, combinations

import numpy as np
import pytest
import torch

from drafters import DraftTree, RequiredOutputs
from inference.journal import Journal
from inference.tuning import skip_search as module
from inference.tuning.bayesian_search import NOISE, bayesian_search, expected_improvement
from inference.tuning.local_search import as_layers, search
from inference.tuning.skip_probe import Probe, draft_cost, measured_shares, parameter_shares, speed_up
from inference.tuning.skip_search import SkipSearchOptions, SkipSearchQuestions, read_survival, skip_search
from inference.verifier.base import load_base
from inference.verifier.layer_skipping import LayerSkippingSession, read_skips, without_sublayers
from inference.verifier.options import ModelOptions
from inference.verifier.runner import Runner
from inference.verifier.sampling import Greedy
from inference.verify import generate_reference

PROMPTS = [[5, 6, 7], [9], list(range(3, 15))]


def texts_of(base, num_tokens=20):
    return [(prompt, generate_reference(base, prompt, num_tokens, Greedy())) for prompt in PROMPTS]


def subsets(items):
    return [frozenset(some) for some in chain.from_iterable(combinations(items, k) for k in range(len(items) + 1))]


def accepted_by_decoding(base, texts, skips, num_draft, stride):
    """For every root along the texts, the number of draft tokens that the base accepts in real decoding."""
    accepted = []
    for prompt, answer in texts:
        runner = Runner(base)
        for root in range(0, len(answer) - num_draft, stride):
            seq, truth = [*prompt, *answer[: root + 1]], answer[root + 1 :]
            runner.forward(seq[runner.cached : -1], DraftTree(), RequiredOutputs())
            runner.commit([])
            draft = LayerSkippingSession(runner, *skips).write(seq, num_draft).tokens
            same = [mine == theirs for mine, theirs in zip(draft, truth, strict=False)]
            accepted.append((*same, False).index(False))
    return accepted


# ---- the prediction for a set


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize(("num_draft", "stride"), [(1, 1), (3, 2), (4, 5)])
def test_the_drafts_of_one_forward_are_those_of_decoding(make_base, kind, num_draft, stride):
    base = make_base(kind, layers=3)
    texts = texts_of(base)
    probe, seen = Probe(base, texts, num_draft, stride), set()
    for skips in [((), ()), ((1,), ()), ((), (1,)), ((0,), (2,)), ((0, 1, 2), ()), ((0, 1, 2), (0, 1, 2))]:
        expected = accepted_by_decoding(base, texts, skips, num_draft, stride)
        assert probe.agrees(*skips).cumprod(-1).sum(-1).tolist() == expected
        shares = [sum(count > depth for count in expected) / len(expected) for depth in range(num_draft)]
        assert probe.survival(*skips) == pytest.approx(shares)
        seen.update(expected)
    assert {0, num_draft} <= seen, "the sets must differ"


@pytest.mark.slow
def test_answers_that_end_early_are_left_out_and_padding_changes_nothing(make_base):
    base = make_base(layers=3)
    texts = texts_of(base)
    texts[1] = (texts[1][0], texts[1][1][:3])
    alone_first = Probe(base, texts[:1], 4, 4).agrees((1,), (1,))
    together = Probe(base, texts, 4, 4).agrees((1,), (1,))
    assert torch.equal(together[: len(alone_first)], alone_first)
    assert torch.equal(together[len(alone_first) :], Probe(base, texts[2:], 4, 4).agrees((1,), (1,)))
    with pytest.raises(ValueError, match="every answer of toy-llama ends within 4 tokens: lower num_draft"):
        Probe(base, texts[1:2], 4, 4)


@pytest.mark.slow
def test_a_probe_can_be_used_again_after_an_error(make_base):
    base = make_base(layers=3)
    probe = Probe(base, texts_of(base), 3, 3)
    before = probe.survival((1,), ())
    hook = base.model.base_model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        probe.survival((0,), ())
    hook.remove()
    assert probe.survival((1,), ()) == before


def test_the_speed_up_is_tokens_over_cost_at_the_best_length():
    rng = random.Random(0)
    for _ in range(20):
        lengths = [rng.randrange(6) for _ in range(50)]  # accepted tokens of 50 drafts of five
        survival, cost = [sum(n > depth for n in lengths) / 50 for depth in range(5)], rng.uniform(0.05, 1)
        rates = {k: (1 + sum(min(n, k) for n in lengths) / 50) / (1 + k * cost) for k in range(1, 6)}
        predicted, length = speed_up(survival, cost)
        assert predicted == pytest.approx(max(rates.values())) and rates[length] == pytest.approx(predicted)


def test_drafting_with_all_layers_gains_nothing():
    assert speed_up([1.0] * 8, 1.0)[0] == 1.0


def test_parameter_shares_equal_those_counted_by_hand(make_base):
    base = make_base(layers=3)  # D = 32, four heads of 8, two of them for keys and values, MLP of 64, V = 40
    attention, mlp, head = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 64, 40 * 32
    whole = 3 * (attention + mlp) + head
    shares = parameter_shares(base)
    assert shares == [attention / whole] * 3 + [mlp / whole] * 3
    assert draft_cost(shares, frozenset()) == 1
    assert draft_cost(shares, frozenset({0, 4})) == pytest.approx(1 - (attention + mlp) / whole)
    assert draft_cost(shares, frozenset(range(6))) == pytest.approx(head / whole)


def test_measuring_shares_does_not_change_the_base(make_base):
    base = make_base(layers=3)
    shares = measured_shares(base, [5, 6, 7], repeats=2)
    assert len(shares) == 6 and min(shares) >= 0
    assert 0 < draft_cost(shares, frozenset(range(6))) <= 1
    assert not any("forward" in vars(part) for part in base.model.modules())


# ---- the search


@pytest.mark.slow
def test_on_a_tiny_base_the_best_of_all_sets_is_found(make_base):
    base = make_base(layers=2)
    texts = texts_of(base)
    shares = parameter_shares(base)

    def worth(skips):
        accepted = accepted_by_decoding(base, texts, as_layers(skips, 2), 3, 3)
        rates = [
            (1 + sum(min(n, k) for n in accepted) / len(accepted)) / (1 + k * draft_cost(shares, skips))
            for k in (1, 2, 3)
        ]
        return max(rates)

    probe = Probe(base, texts, 3, 3)
    found = search(
        lambda skips: speed_up(probe.survival(*as_layers(skips, 2)), draft_cost(shares, skips))[0], 4, [frozenset()], 16
    )
    assert worth(found) == pytest.approx(max(map(worth, subsets(range(4)))))


@pytest.mark.parametrize("seed", range(5))
def test_a_search_of_a_quarter_of_the_sets_finds_the_best_of_all(seed):
    """The score of ten sublayers has single and pairwise terms; a quarter of the sets is tried."""
    rng = random.Random(seed)
    single = [rng.gauss(0, 1) for _ in range(10)]
    pair = {frozenset(two): rng.gauss(0, 0.7) for two in combinations(range(10), 2)}

    def worth(skips):
        return sum(single[bit] for bit in skips) + sum(value for two, value in pair.items() if two <= skips)

    scored = []

    def score(skips):
        scored.append(skips)
        return worth(skips)

    found = search(score, 10, [frozenset(), frozenset({1, 3})], 256, seed)
    assert worth(found) == max(map(worth, subsets(range(10))))
    assert len(scored) == len(set(scored)) == 256
    assert scored[:2] == [frozenset(), frozenset({1, 3})]
    first = list(scored)
    scored.clear()
    assert search(score, 10, [frozenset(), frozenset({1, 3})], 256, seed) == found and scored == first
    scored.clear()
    search(score, 10, [frozenset(), frozenset({1, 3})], 100, seed)
    assert scored == first[:100], "a longer search begins as the shorter one"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_bayesian_optimisation_finds_the_best_of_all_sets_in_an_eighth_of_them(seed):
    rng = random.Random(seed)
    single = [rng.gauss(0, 1) for _ in range(10)]
    pair = {frozenset(two): rng.gauss(0, 0.7) for two in combinations(range(10), 2)}

    def worth(skips):
        return sum(single[bit] for bit in skips) + sum(value for two, value in pair.items() if two <= skips)

    scored = []

    def score(skips):
        scored.append(skips)
        return worth(skips)

    found = bayesian_search(score, 10, [frozenset(), frozenset({1, 3})], 128, seed)
    assert worth(found) == max(map(worth, subsets(range(10))))
    assert len(scored) == len(set(scored)) == 128
    assert scored[:2] == [frozenset(), frozenset({1, 3})]
    first = list(scored)
    scored.clear()
    bayesian_search(score, 10, [frozenset(), frozenset({1, 3})], 40, seed)
    assert scored == first[:40], "a longer search begins as the shorter one"


def test_the_expected_improvement_is_that_of_draws_from_the_gaussian_process():
    known, scores = [frozenset(), frozenset({0, 2}), frozenset({1, 2, 3})], [0.0, 1.0, 3.0]
    candidates = [frozenset({1, 2}), frozenset({0, 1, 2, 3}), frozenset({3})]
    sets = [*known, *candidates]
    covariance = torch.tensor([[np.exp(-len(a ^ b)) for b in sets] for a in sets])  # 4 sublayers: length scale 1
    covariance[:3, :3] += NOISE * torch.eye(3)
    values = (torch.tensor(scores, dtype=torch.float64) - np.mean(scores)) / np.std(scores)
    solved = torch.linalg.solve(covariance[:3, :3], covariance[:3, 3:])
    mean, posterior = solved.T @ values, covariance[3:, 3:] - covariance[3:, :3] @ solved
    normal = torch.distributions.MultivariateNormal(mean, posterior)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = (normal.sample((200_000,)) - values.max()).clamp(min=0).mean(0)
    assert expected_improvement(known, scores, candidates, 4) == pytest.approx(expected.tolist(), abs=0.005)


@pytest.mark.parametrize("search", [search, bayesian_search])
@pytest.mark.parametrize("evaluations", [1, 2, 3, 63, 64, 65])
def test_no_more_sets_are_scored_than_the_limit_or_than_exist(search, evaluations):
    scored = []
    search(lambda skips: scored.append(skips) or len(skips), 6, [frozenset(), frozenset({1})], evaluations)
    assert len(scored) == len(set(scored)) == min(evaluations, 64)


def test_sublayers_below_the_number_of_layers_are_attentions_and_the_others_mlps():
    assert as_layers(frozenset({4, 0, 2, 3, 5}), 3) == ((0, 2), (0, 1, 2))


# ---- the journal


def test_survival_is_read_back_from_a_journal_also_after_an_incomplete_line(tmp_path):
    path = tmp_path / "new" / "x.search.jsonl"
    with Journal(path, {"base": "b"}) as journal:
        journal.append({"skips": [1, 3], "survival": [0.5, 0.25]})
        journal.append({"skips": [], "survival": [1.0, 1.0]})
    with path.open("a") as file:
        file.write('{"skips": [1], "surv')
    known = {frozenset({1, 3}): [0.5, 0.25], frozenset(): [1.0, 1.0]}
    with Journal(path, {"base": "b"}) as again:
        assert read_survival(again) == known
        again.append({"skips": [2], "survival": [0.0, 0.0]})
    assert read_survival(Journal(path, {"base": "b"})) == known | {frozenset({2}): [0.0, 0.0]}


def test_a_journal_written_by_earlier_versions_is_read(tmp_path):
    path = tmp_path / "x.search.jsonl"
    path.write_text('{"base": "b", "limit": 3}\n{"skips": [1, 3], "survival": [0.5, 0.25]}\n')
    assert read_survival(Journal(path, {"limit": 3, "base": "b"})) == {frozenset({1, 3}): [0.5, 0.25]}


def test_a_damaged_journal_is_refused(tmp_path):
    path = tmp_path / "x.search.jsonl"
    path.write_text('{"base": "b"}\n{"skips": 3}\n')
    with pytest.raises(ValueError, match=r"x\.search\.jsonl line 2 is damaged"):
        read_survival(Journal(path, {"base": "b"}))


# ---- the command


@pytest.fixture(scope="module")
def folder(make_base, tmp_path_factory):
    base, path = make_base(layers=2, dtype=torch.float32, context=256), tmp_path_factory.mktemp("base")
    base.model.save_pretrained(path)
    base.tokenizer.save_pretrained(path)
    return str(path)


def run_search(
    base, out, evaluations=400, num_draft=8, stride=4, overwrite=False, device="auto", search=None, **questions
):
    options = SkipSearchOptions(num_draft=num_draft, stride=stride, evaluations=evaluations, **search or {})
    skip_search(ModelOptions(base, device=device), SkipSearchQuestions(**questions), options, out, overwrite)


@pytest.fixture
def asked(folder, tmp_path):
    questions = tmp_path / "questions.jsonl"
    rows = [{"question_id": i, "category": "toy", "turns": [f"w{i} w{i + 3} w{9 + i}"]} for i in range(4, 8)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "base": folder, "benchmark": "mt_bench", "questions": str(questions), "limit": 3, "max_new_tokens": 16,
        "num_draft": 3, "device": "cpu",
    }  # fmt: skip


@pytest.mark.slow
def test_the_command_writes_a_set_that_the_drafter_reads(asked, tmp_path, capsys):
    out = tmp_path / "deep" / "skips.json"
    run_search(**asked, out=str(out), evaluations=16)
    found = json.loads(out.read_text())
    assert read_skips(out, 2) == (tuple(found["attention"]), tuple(found["mlp"]))
    base = load_base(asked["base"])
    bits = frozenset([*found["attention"], *(2 + layer for layer in found["mlp"])])
    assert found["draft_cost"] == draft_cost(parameter_shares(base), bits)
    assert found["base"] == asked["base"] and found["predicted_speedup"] >= 1
    said = capsys.readouterr().out
    assert "no measurement" in said and f"self_speculative={out}:num_draft={found['num_draft']},threshold=0" in said
    assert f"predicted speed-up {found['predicted_speedup']:.2f}" in said
    assert f"agreement {found['agreement']:.1%}" in said
    assert sorted(path.name for path in out.parent.iterdir()) == ["skips.json", "skips.search.jsonl"]


@pytest.mark.slow
def test_the_fastest_set_is_found_by_decoding_and_is_not_measured_again(asked, tmp_path, monkeypatch, capsys):
    base, measured, decoding_speed = load_base(asked["base"]), [], module.decoding_speed
    assert decoding_speed(Runner(base), ((1,), (0,)), PROMPTS, 2, 8) > 0
    out, by_speed = tmp_path / "skips.json", {"objective": "speed", "method": "bayesian"}

    def speed(runner, layers, *arguments):  # that of a real run depends on the machine
        measured.append(layers)
        return {((1,), (0,)): 30.0}.get(layers, 20.0 - len(layers[0]))

    monkeypatch.setattr(module, "decoding_speed", speed)
    run_search(**asked, out=str(out), evaluations=16, search=by_speed)
    found = json.loads(out.read_text())
    assert read_skips(out, 2) == ((1,), (0,)) and len(measured) == len(set(measured)) == 16
    assert (found["tokens_per_second"], found["num_draft"], found["objective"]) == (30.0, 3, "speed")
    assert "30.0 tokens per second" in capsys.readouterr().out
    run_search(**asked, out=str(out), evaluations=16, search=by_speed)
    assert len(measured) == 16 and json.loads(out.read_text()) == found
    with pytest.raises(ValueError, match="was started with more settings"):
        run_search(**asked, out=str(out), evaluations=16)


@pytest.mark.slow
def test_an_interrupted_search_continues_where_it_stopped(asked, tmp_path, monkeypatch):
    probed = []

    class Counted(Probe):
        def survival(self, attention, mlp):
            if len(probed) == 5:
                raise KeyboardInterrupt
            probed.append((attention, mlp))
            return super().survival(attention, mlp)

    run_search(**asked, out=str(tmp_path / "whole.json"), evaluations=12)
    monkeypatch.setattr(module, "Probe", Counted)
    with pytest.raises(KeyboardInterrupt):
        run_search(**asked, out=str(tmp_path / "part.json"), evaluations=12)
    assert not (tmp_path / "part.json").exists()
    monkeypatch.setattr(module, "Probe", Probe)
    first = (tmp_path / "part.search.jsonl").read_text()
    run_search(**asked, out=str(tmp_path / "part.json"), evaluations=12)
    assert (tmp_path / "part.search.jsonl").read_text().startswith(first) and first.count("\n") == 6
    for ending in ("json", "search.jsonl"):
        assert (tmp_path / f"part.{ending}").read_text() == (tmp_path / f"whole.{ending}").read_text()


@pytest.mark.slow
def test_the_result_of_another_search_is_kept_unless_overwritten(asked, tmp_path):
    out = tmp_path / "skips.json"
    out.write_text("{}")
    with pytest.raises(ValueError, match=r"skips\.json exists, but .* pass --overwrite, or choose another --out"):
        run_search(**asked, out=str(out), evaluations=1)
    assert out.read_text() == "{}"
    run_search(**asked, out=str(out), evaluations=1, overwrite=True)
    with pytest.raises(ValueError, match="was started with limit 3 instead of 2"):
        run_search(**asked | {"limit": 2}, out=str(out), evaluations=1)
    run_search(**asked | {"limit": 2}, out=str(out), evaluations=1, overwrite=True)
    assert json.loads(out.read_text())["limit"] == 2


@pytest.mark.parametrize("name", ["skips.json", "skips.search.jsonl", "file/a/skips.json"])
def test_an_unwritable_file_is_refused_before_the_base_is_loaded(asked, tmp_path, monkeypatch, name):
    if "/" in name:
        (tmp_path / "file").write_text("")
    else:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(ModelOptions, "load", lambda self: pytest.fail("the base was loaded"))
    out = tmp_path / name.replace(".search.jsonl", ".json")
    with pytest.raises(ValueError, match="give another name"):
        run_search(**asked, out=str(out), overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {name.split("/")[0], "questions.jsonl"}


def test_a_search_without_a_draft_leaves_no_journal(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "generate_reference", lambda *arguments: [5])
    with pytest.raises(ValueError, match="ends within 3 tokens"):
        run_search(**asked, out=str(tmp_path / "x.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["questions.jsonl"]


@pytest.mark.parametrize("wrong", [{"num_draft": 0}, {"evaluations": 0}, {"stride": 0}, {"max_new_tokens": 3}])
def test_impossible_numbers_are_refused(asked, tmp_path, wrong):
    with pytest.raises(ValueError, match="num_draft, stride and evaluations must be at least 1"):
        run_search(**asked | {"out": str(tmp_path / "x.json")} | wrong)


@pytest.mark.slow
def test_drafts_with_skipped_layers_differ_from_those_with_all_layers(make_base):
    """A negative control: if the probe skipped nothing, every set would look perfect."""
    base = make_base(layers=3)
    probe = Probe(base, texts_of(base), 3, 3)
    assert probe.survival((), ()) == [1.0] * 3
    whole, probe.model = probe.model, without_sublayers(base.model.base_model, (0, 1), (0, 1))
    broken = probe.agrees((), ())
    probe.model = whole
    assert not broken.all() and torch.equal(broken, probe.agrees((0, 1), (0, 1)))
