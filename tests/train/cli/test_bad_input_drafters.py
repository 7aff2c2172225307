"""Every mistake with a drafter's spec, or with a command that makes or measures one, ends in one line and does nothing.

Standard error is all that is written: every file in the folder stays as it was.
"""

import json

import pytest

from data import embedded
from train.cli import commands

SAID = "the cat sat on the mat and looked at the other cat"


@pytest.fixture(scope="module")
def place(tiny, make_tiny, tiny_tokenizer, tmp_path_factory):
    """A folder of broken files, and of valid ones that do not fit together."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "tiny").symlink_to(tiny)
    other = embedded.train_tokenizer(embedded.conversations(100, seed=5), vocab_size=400)
    (folder / "other-words").symlink_to(make_tiny("other-words", tokenizer=other))
    (folder / "more-words").symlink_to(make_tiny("more-words", vocab_size=416))
    (folder / "hollow").mkdir()

    question, count = {"question_id": 1, "category": "x", "turns": ["hello"]}, len(tiny_tokenizer(SAID).input_ids) + 1
    answer = {"question_id": 1, "choices": [{"turns": [SAID], "new_tokens": [count], "idxs": [count]}]}
    skips = {"attention": [0], "mlp": []}
    for name, text in {
        "text.txt": f"{SAID}\n\n" * 9,
        "blank.txt": "\n \n",
        "empty.txt": "",
        "empty.jsonl": "",
        "broken.jsonl": '{"text": "whole"}\n{oops\n',
        "no-text.jsonl": '{"text": "whole"}\n{"txt": "x"}\n',
        "broken.json": "[",
        "questions.jsonl": json.dumps(question),
        "huge.jsonl": json.dumps(question | {"turns": ["many words " * 900]}),
        "other-questions.jsonl": json.dumps(question | {"question_id": 2}),
        "answers.jsonl": json.dumps(answer),
        "no-answers.jsonl": json.dumps({"question_id": 1, "choices": []}),
        "other-answers.jsonl": json.dumps(answer).replace(f"[{count}]", "[3]"),
        "skips.json": json.dumps(skips),
        "skips-beyond.json": json.dumps(skips | {"mlp": [2]}),
        "skips-twice.json": json.dumps(skips | {"mlp": [1, 1]}),
        "skips-words.json": json.dumps(skips | {"mlp": "01"}),
        "skips-number.json": json.dumps(skips | {"mlp": 1}),
        "skips-half.json": json.dumps({"attention": [0]}),
        "skips-list.json": "[]",
        "skips-deep.json": json.dumps(skips | {"num_layers": 9, "base": "deep"}),
        "skips.search.jsonl": '{"of": "another search"}\n',
        "lone.json": "{}",
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "latin.txt").write_bytes(b"Gr\xfc\xdfe")
    (folder / "latin.search.jsonl").write_bytes(b"Gr\xfc\xdfe\n")
    (folder / "latin.jsonl").write_bytes(b'{"question_id": "Gr\xfc\xdfe"}')
    for command in ("corpus", "datastore"):
        for name, base in ((command, "tiny"), (f"{command}-of-others", "other-words")):
            made, whole = [command, folder / name, "--tokenizer", folder / base], folder / command
            commands.main([*map(str, made), "--files", str(folder / "text.txt")])
        (folder / f"{command}-cut").write_bytes(whole.read_bytes()[:-40])
        (folder / f"{command}-head").write_bytes(whole.read_bytes()[:40])
        (folder / f"{command}-garbled").write_bytes(whole.read_bytes().replace(b"format", b"farmot"))
    (folder / "flat").mkdir()
    made = ["datastore", "@flat/store", "--tokenizer", "@tiny", "--files", "@text.txt", "--depth", "8"]
    commands.main([word.replace("@", f"{folder}/") for word in made])
    (folder / "results").mkdir()
    (folder / "results" / "results.json").write_text("{}")
    return folder


def everything(folder):
    """All that lies in a folder, and when it was last written."""
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def refused(call, place, row):
    """The one line that a command ends in; ``@name`` is a path in the folder of broken things."""
    before = everything(place)
    outcome = call(commands.main, *(word.replace("@", f"{place}/") for word in row.split()))
    said = outcome.one_line_error("drafters")
    assert everything(place) == before
    return said


TEMPERATURE = "temperature must be a number above 0, or 0 to decode greedily, not"
SPECS = {
    # ---- of the text alone
    "none:num_draft=3": "none takes no arguments; not 'num_draft=3'",
    "none=@tiny": "none has no weights: write none:key=value, without a folder",
    "anpd:order=1": "order must be at least 2 and num_draft at least 1, got 1 and 7",
    "anpd:num_draft=0": "num_draft at least 1, got 5 and 0",
    "anpd:update=maybe": "update must be bool, not 'maybe'",
    "anpd:order=3,,num_draft=2": "anpd takes order, num_draft, update; not ''",
    "prompt_lookup:max_ngram=0": "max_ngram and num_draft must be at least 1, got 0 and 10",
    "prompt_lookup:num_draft=-1": "max_ngram and num_draft must be at least 1, got 3 and -1",
    "prompt_lookup:num_draft=1e3": "num_draft must be int, not '1e3'",
    "lookahead:level=2": "need level >= 3",
    "lookahead:window=0": "window >= 1",
    "lookahead:guesses=-1": "guesses >= 0",
    "lookahead:pool=3": "lookahead takes level,",
    "token_recycling:num_nodes=0": "num_nodes and top_k must be at least 1, got 0 and 8",
    "token_recycling:top_k=0": "num_nodes and top_k must be at least 1, got 80 and 0",
    "token_recycling:needs=3": "token_recycling takes num_nodes, top_k, template; not 'needs=3'",
    "joint:num_nodes=0": "need num_nodes >= 1",
    "joint:order=1": "order >= 2",
    "joint:runner_up=-1": "runner_up >= 0",
    "joint:min_probability=nan": "0 < min_probability < 1",
    "joint:fade=2": "0 < fade <= 1",
    "joint=@nowhere": "no corpus cache at",
    # ---- with a draft model
    "draft_model": "the drafter draft_model needs its MODEL: write draft_model=MODEL",
    "draft_model=@nowhere": "no base at",
    "draft_model=@hollow": "is a folder without config.json",
    "draft_model=@other-words": "the tokenizer of the draft model",
    "draft_model=@more-words": "has 416 tokens and the base",
    "draft_model=@tiny:num_draft=0": "need num_draft >= 1 and 0 <= threshold < 1, not 0 and 0.0",
    "draft_model=@tiny:threshold=1": "0 <= threshold < 1",
    "draft_model=@tiny:threshold=nan": "0 <= threshold < 1",
    "draft_model=@tiny:temperature=-1": TEMPERATURE,
    "draft_model=@tiny:temperature=nan": TEMPERATURE,
    "draft_model=@tiny:temperature=1,top_k=-1": "top_k must be at least 0, not -1",
    "draft_model=@tiny:temperature=1,top_p=0": "top_p must be above 0 and at most 1, not 0",
    "draft_model=@tiny:temperature=1,seed=-1": "seed must be at least 0, not -1",
    "draft_model=@tiny:inner_ngram=2": "draft_model takes num_draft,",
    "cascade": "the drafter cascade needs its MODEL",
    "cascade=@more-words": "pass a model of the same vocabulary",
    "cascade=@tiny:num_draft=0": "need num_draft >= 1",
    "cascade=@tiny:inner_ngram=0": "max_ngram and num_draft must be at least 1, got 0 and 5",
    "cascade=@tiny:inner_draft=0": "max_ngram and num_draft must be at least 1, got 3 and 0",
    "merged": "the drafter merged needs its FOLDER: write merged=FOLDER",
    "merged=@nowhere": "no drafter at",
    "merged=@tiny": "is not a drafter's configuration",
    "merged=@nowhere:num_nodes=many": "num_nodes must be int, not 'many'",
    "ouroboros": "the drafter ouroboros needs its MODEL",
    "ouroboros=@nowhere": "no base at",
    "ouroboros=@other-words": "pass a model of the same vocabulary",
    "ouroboros=@tiny:num_draft=0": "need num_draft >= 1",
    "ouroboros=@tiny:num_phrases=0": "num_phrases >= 1",
    "ouroboros=@tiny:level=2": "need level >= 3",
    "ouroboros=@tiny:window=0": "window >= 1",
    "ouroboros=@tiny:window=-1,phrases_draft=false": "window >= 1",
    # ---- with a file
    "self_draft:branch_len=2": "need branch_len >= 3",
    "self_draft:gram=6": "1 <= gram < branch_len",
    "self_draft:num_branches=0": "num_branches, max_pad and cache_size >= 1",
    "self_draft:max_pad=0": "num_branches, max_pad and cache_size >= 1",
    "self_draft:cache_size=0": "num_branches, max_pad and cache_size >= 1",
    "self_draft:corpus=x": "self_draft takes branch_len,",
    "self_draft=@corpus-cut": "is not a corpus cache",
    "corpus": "the drafter corpus needs its CORPUS",
    "corpus=@nowhere": "no corpus cache at",
    "corpus=@hollow": "no corpus cache at",
    "corpus=@corpus-cut": "build it again with `drafters corpus OUT`",
    "corpus=@corpus-head": "build it again with `drafters corpus OUT`",
    "corpus=@corpus-garbled": "is not a corpus cache",
    "corpus=@empty.txt": "is not a corpus cache",
    "corpus=@text.txt": "is not a corpus cache",
    "corpus=@datastore": "is not a corpus cache",
    "corpus=@corpus-of-others": "built with another tokenizer than that of",
    "corpus=@corpus:num_chains=0": "num_chains must be at least 1, got 0",
    "rest": "the drafter rest needs its STORE",
    "rest=@nowhere": "no datastore at",
    "rest=@datastore-cut": "build it again with `drafters datastore OUT`",
    "rest=@datastore-head": "build it again with `drafters datastore OUT`",
    "rest=@datastore-garbled": "build it again with `drafters datastore OUT`",
    "rest=@empty.txt": "is not a datastore",
    "rest=@text.txt": "is not a datastore",
    "rest=@corpus": "is not a datastore",
    "rest=@datastore-of-others": "built with another tokenizer than that of",
    "rest=@flat/store": "sorted by 8 tokens, and longest + length is 26",
    "rest=@datastore:num_draft=0": "must be at least 1 and longest at least shortest, got 0,",
    "rest=@datastore:shortest=0": "must be at least 1 and longest at least shortest",
    "rest=@datastore:longest=1": "must be at least 1 and longest at least shortest",
    "rest=@datastore:num_hits=0": "must be at least 1 and longest at least shortest",
    "rest=@datastore:length=0": "must be at least 1 and longest at least shortest",
    # ---- of the base itself
    "self_speculative=@nowhere.json": "make one by `drafters skip-search`",
    "self_speculative=@hollow": "hollow: is a directory",
    "self_speculative=@empty.txt": "holds no skip set",
    "self_speculative=@latin.txt": "holds no skip set",
    "self_speculative=@broken.json": "holds no skip set",
    "self_speculative=@skips-half.json": "holds no skip set",
    "self_speculative=@skips-list.json": "holds no skip set",
    "self_speculative=@skips-number.json": "holds no skip set",
    "self_speculative=@skips-words.json": "skips-words.json holds no skip set",
    "self_speculative=@skips-beyond.json": "cannot skip mlp [2]: name layers 0 to 1 of",
    "self_speculative=@skips-twice.json": "cannot skip mlp [1, 1]",
    "self_speculative=@skips-deep.json": "is for deep with 9 layers, and this base has 2",
    "self_speculative:num_draft=0": "need num_draft >= 1",
    "self_speculative:threshold=1.5": "0 <= threshold < 1",
    "self_speculative:temperature=-1": TEMPERATURE,
    "self_speculative:temperature=1,top_p=2": "top_p must be above 0 and at most 1, not 2",
    "self_speculative:layers=3": "self_speculative takes num_draft,",
}


@pytest.mark.slow
@pytest.mark.parametrize("spec, said", SPECS.items(), ids=SPECS)
def test_a_wrong_drafter_spec_ends_with_one_line(call, place, spec, said):
    row = f"verify --base @tiny --questions @questions.jsonl --max-new-tokens 1 --drafter {spec}"
    assert said in refused(call, place, row)


def test_every_drafter_without_training_is_in_the_table():
    from drafters.registry import registered
    from inference.drafter_specs import split

    assert {split(spec)[0] for spec in SPECS} == {
        name for name, known in registered().items() if not known.learned_class
    }


CORPUS, STORE = "corpus --tokenizer @tiny", "datastore --tokenizer @tiny"
REPLAY = "replay --tokenizer @tiny --answers @answers.jsonl --questions @questions.jsonl --out @new"
OUROBOROS = "ouroboros-search --base @tiny --drafter-model @tiny --limit 1 --max-new-tokens 4 --out @new.json"
SKIPS = "skip-search --base @tiny --limit 1 --max-new-tokens 9 --evaluations 2 --out @new.json"
STEP_COST = "step-cost --base @tiny --max-nodes 2 --context 4 --repeats 1 --out @new.json"
VERIFY = "verify --base @tiny --limit 1 --max-new-tokens 4 --drafter anpd"
EVAL = "eval --base @tiny --benchmark embedded --limit 1 --max-new-tokens 4 --drafter anpd --out @new"
ROWS = {
    # ---- corpus and datastore
    **{
        f"{command} {row}": said
        for command in (CORPUS, STORE)
        for row, said in {
            "@new": "files",
            "@new --files @nowhere.txt": "no text file at",
            "@new --files @text.txt --files @hollow": "hollow: give .txt, .jsonl or .json files",
            "@new --files @empty.txt": "there is no text in",
            "@deep/new --files @blank.txt --files @empty.jsonl": "there is no text in",
            "@new --files @latin.txt": "latin.txt line 1: not UTF-8",
            "@new --files @broken.jsonl": "broken.jsonl line 2: invalid JSON",
            "@new --files @broken.json": "broken.json line 1: invalid JSON",
            "@new --files @text.txt --files @no-text.jsonl": "no-text.jsonl line 2: no text; expected a field `text`",
            "@new --files @text.txt --tokenizer @nowhere": "no base at",
            "@new --files @text.txt --tokenizer @hollow": "is a folder without config.json",
            "@corpus --files @text.txt": "corpus is already there: give another name, or --overwrite",
            "@corpus --files @empty.txt --overwrite": "there is no text in",
            "@hollow --files @text.txt --overwrite": "hollow is already there: give another name",
            "@text.txt/new --files @text.txt": "text.txt is a file; give another name",
            "@new --files @text.txt more": "more",
        }.items()
    },
    f"{CORPUS} @new --files @text.txt --min-count 0": "min_count and top must be at least 1, not 0 and 20",
    f"{CORPUS} @new --files @text.txt --top -1": "min_count and top must be at least 1, not 6 and -1",
    f"{CORPUS} @new --files @text.txt --min-count 99": "give more text, or a smaller --min-count",
    f"{STORE} @new --files @text.txt --depth 1": "depth must be at least 2, not 1",
    # ---- replay
    f"{REPLAY} --drafter": "drafter",
    f"{REPLAY} --drafter token_recycling": "needs the base itself and cannot be replayed",
    f"{REPLAY} --drafter lookahead": "needs the base itself and cannot be replayed",
    f"{REPLAY} --drafter draft_model=@tiny": "needs the base itself and cannot be replayed",
    f"{REPLAY} --drafter self_speculative": "needs the base itself and cannot be replayed",
    f"{REPLAY} --drafter anpt": "unknown drafter 'anpt'",
    f"{REPLAY} --drafter corpus=@corpus-of-others": "built with another tokenizer",
    f"{REPLAY} --drafter rest=@datastore-cut": "is not a datastore",
    f"{REPLAY} --drafter anpd --drafter anpd": "the drafter anpd is named twice",
    f"{REPLAY} --drafter anpd --tokenizer @nowhere": "no base at",
    f"{REPLAY} --drafter anpd --answers @nowhere.jsonl": "nowhere.jsonl: no such file",
    f"{REPLAY} --drafter anpd --answers @hollow": "hollow is a folder; give a JSONL file of recorded answers in it",
    f"{REPLAY} --drafter anpd --answers @empty.jsonl": "empty.jsonl: no turn to replay",
    f"{REPLAY} --drafter anpd --answers @broken.jsonl": "broken.jsonl line 2: invalid JSON",
    f"{REPLAY} --drafter anpd --answers @latin.jsonl": "latin.jsonl line 1: not UTF-8",
    f"{REPLAY} --drafter anpd --answers @no-answers.jsonl": "no-answers.jsonl line 1: not a recorded answer",
    f"{REPLAY} --drafter anpd --answers @other-answers.jsonl": "is --tokenizer the base's?",
    f"{REPLAY} --drafter anpd --questions @nowhere.jsonl": "nowhere.jsonl: no such file",
    f"{REPLAY} --drafter anpd --questions @empty.jsonl": "no question selected",
    f"{REPLAY} --drafter anpd --questions @other-questions.jsonl": "pass the --questions that were answered",
    f"{REPLAY} --drafter anpd --template chatml": "unknown chat template 'chatml'",
    f"{REPLAY} --drafter anpd --benchmark mtbench": "unknown benchmark 'mtbench'",
    f"{REPLAY} --drafter anpd --max-new-tokens 3": "pass its --max-new-tokens",
    f"{REPLAY} --drafter anpd --out @text.txt/deep/new": "text.txt is a file; give another name",
    f"{REPLAY} --drafter anpd --limit 0": "limit must be at least 1, not 0",
    f"{REPLAY} --drafter anpd --limit -1": "limit must be at least 1, not -1",
    f"{REPLAY} --drafter anpd --out @results": "already holds results",
    f"{REPLAY} --drafter anpd --out @text.txt": "text.txt is a file; give another name",
    # ---- ouroboros-search
    f"{OUROBOROS} --base @nowhere": "no base at",
    f"{OUROBOROS} --drafter-model @nowhere": "no base at",
    f"{OUROBOROS} --drafter-model @other-words": "pass a model of the same vocabulary",
    f"{OUROBOROS} --questions @nowhere.jsonl": "nowhere.jsonl: no such file",
    f"{OUROBOROS} --questions @empty.jsonl": "no question selected",
    f"{OUROBOROS} --questions @huge.jsonl": "shorten the prompt",
    f"{OUROBOROS} --template chatml": "unknown chat template 'chatml'",
    f"{OUROBOROS} --questions @latin.jsonl": "latin.jsonl line 1: not UTF-8",
    f"{OUROBOROS} --limit 0": "limit at least 1, not 0 and 0",
    f"{OUROBOROS} --offset -1": "offset must be at least 0",
    f"{OUROBOROS} --max-new-tokens 0": "max_new_tokens must be at least 1, not 0",
    f"{OUROBOROS} --homogeneity some": "homogeneity",
    f"{OUROBOROS} --num-phrases 0": "num_phrases >= 1",
    f"{OUROBOROS} --draft-cost -0.1": "--draft-cost must be at least 0 and finite, not -0.1",
    f"{OUROBOROS} --draft-cost .nan": "--draft-cost must be at least 0 and finite, not nan",
    f"{OUROBOROS} --draft-cost .inf": "--draft-cost must be at least 0 and finite, not inf",
    f"{OUROBOROS} --out @text.txt/deep/new.json": "text.txt is a file; give another name",
    f"{OUROBOROS} --out @hollow": "hollow holds no trials of ouroboros-search: give another --out",
    f"{OUROBOROS} --out @text.txt": "text.txt holds no trials of ouroboros-search: give another --out",
    # ---- skip-search
    f"{SKIPS} --base @nowhere": "no base at",
    f"{SKIPS} --questions @nowhere.jsonl": "nowhere.jsonl: no such file",
    f"{SKIPS} --questions @empty.jsonl": "no question selected",
    f"{SKIPS} --questions @latin.jsonl": "latin.jsonl line 1: not UTF-8",
    f"{SKIPS} --questions @huge.jsonl": "shorten the prompt",
    f"{SKIPS} --questions @huge.jsonl --out @skips.json --overwrite": "shorten the prompt",
    f"{SKIPS} --template chatml": "unknown chat template 'chatml'",
    f"{SKIPS} --limit 0": "limit at least 1, not 0 and 0",
    f"{SKIPS} --max-new-tokens 8": "max_new_tokens larger than num_draft",
    f"{SKIPS} --evaluations 0": "evaluations must be at least 1",
    f"{SKIPS} --cost time": "cost",
    f"{SKIPS} --out @lone.json": "pass --overwrite, or choose another --out",
    f"{SKIPS} --out @skips.json": "pass --overwrite to start over, or choose another --out",
    f"{SKIPS} --out @latin.json": "latin.search.jsonl line 1 is damaged",
    f"{SKIPS} --out @hollow": "hollow is already there: give another name",
    f"{SKIPS} --out @text.txt/deep/new.json": "text.txt is a file; give another name",
    # ---- step-cost
    f"{STEP_COST} --base @nowhere": "no base at",
    f"{STEP_COST} --max-nodes 0": "max_nodes, context and repeats must be at least 1, not 0, 4 and 1",
    f"{STEP_COST} --context 0": "max_nodes, context and repeats must be at least 1, not 2, 0 and 1",
    f"{STEP_COST} --repeats -1": "max_nodes, context and repeats must be at least 1, not 2, 4 and -1",
    f"{STEP_COST} --context 510": "pass a smaller --context or --max-nodes",
    f"{STEP_COST} --dtype float8": "dtype",
    f"{STEP_COST} --out @hollow": "hollow is already there: give another name",
    f"{STEP_COST} --out @text.txt": "text.txt is already there: give another name, or --overwrite",
    f"{STEP_COST} --out @text.txt/deep/new.json": "text.txt is a file; give another name",
    # ---- verify
    f"{VERIFY} --drafter corpus=@corpus-cut": "is not a corpus cache",
    f"{VERIFY} --drafter anpd --questions @latin.jsonl": "latin.jsonl line 1: not UTF-8",
    f"{VERIFY} --drafter anpd --limit -1": "limit at least 1, not 0 and -1",
    # ---- eval
    f"{EVAL} --questions @latin.jsonl": "latin.jsonl line 1: not UTF-8",
    f"{EVAL} --typical": "typical acceptance is a rule for sampling: give a --temperature above 0",
    f"{EVAL} --typical --temperature -1": f"{TEMPERATURE} -1",
    f"{EVAL} --temperature nan": "--temperature takes a number, not 'nan'",
    f"{EVAL} --temperature .inf": f"{TEMPERATURE} inf",
    f"{EVAL} --temperature 1 --top-k -1": "top_k must be at least 0, not -1",
    f"{EVAL} --temperature 1 --top-p 0": "top_p must be above 0 and at most 1, not 0",
    f"{EVAL} --temperature 1 --seed -1": "seed must be at least 0, not -1",
    f"{EVAL} --top-k 5": "top_k 5 is for sampling",
    f"{EVAL} --top-p 0.5": "top_p 0.5 is for sampling, and temperature 0 decodes greedily: give a temperature above 0",
    f"{VERIFY} --top-p 0.5": "top_p 0.5 is for sampling",
    f"{EVAL} --out @text.txt/deep/new": "text.txt is a file",
    f"{EVAL} --out @results --overwrite --drafter corpus=@corpus-cut": "is not a corpus cache",
}


@pytest.mark.slow
@pytest.mark.parametrize("row, said", ROWS.items(), ids=ROWS)
def test_a_wrong_option_of_a_command_ends_with_one_line(call, place, row, said):
    assert said in refused(call, place, row)
