"""Damaged files: every reader reads them, or refuses them in one line."""

import gzip
import json
import math
import shutil
from copy import deepcopy
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from tests.fuzz.conftest import bounded, files_below

HOSTILE = [
    *(None, True, 0, -1, 3, 10**8, 10**12, 1 << 63, 10**400, 0.5, -2.5, 1e308, math.nan, math.inf, "", "x", "x" * 3000),
    *("\ud800", "\x1b[31m\x00", "../../etc/passwd", "é" * 50, [], {}, [[]], [None], [1e9], {"a": 1}, [[1, "x"], {}]),
]
places = st.floats(0, 1, exclude_max=True)
byte_edits = st.tuples(
    st.sampled_from(["flip", "flip", "cut", "insert", "drop", "repeat", "zero"]),
    places,
    st.binary(min_size=1, max_size=9),
)
value_edits = st.tuples(
    st.sampled_from(["replace", "replace", "replace", "remove", "copy"]), places, st.sampled_from(range(len(HOSTILE)))
)
raw_texts = st.sampled_from(
    [
        b"",
        b"\n",
        b"{",
        b"\x00" * 99,
        b"\x1f\x8b\x08\x00",
        b'{"a": 1, "a": 2}',
        b"[1e999]",
        b"9" * 5000,
        b"\xff",
    ]
)
damage = st.one_of(
    st.tuples(st.just("bytes"), st.lists(byte_edits, min_size=1, max_size=4)),
    st.tuples(st.just("values"), st.lists(value_edits, min_size=1, max_size=3)),
    st.tuples(st.just("values"), st.lists(value_edits, min_size=1, max_size=3)),
    st.tuples(st.just("raw"), raw_texts),
)


def with_changed_bytes(data, edits):
    data = bytearray(data)
    for kind, place, new in edits:
        at = int(place * len(data))
        if kind == "flip" and data:
            data[at] ^= new[0] or 1
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = new
        elif kind == "drop":
            del data[at : at + len(new)]
        elif kind == "repeat":
            data[at:at] = data[at : at + 200] * 3
        elif kind == "zero":
            data[at : at + 64] = bytes(len(data[at : at + 64]))
    return bytes(data)


def parts(value):
    """Each container in a JSON value, with each of its keys."""
    found, waiting = [], [value]
    while waiting:
        each = waiting.pop(0)
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        found += [(each, key) for key in keys]
        waiting += [each[key] for key in keys]
    return found


def with_changed_values(value, edits):
    """A JSON value, with some values in it replaced, removed or copied."""
    root = [json.loads(json.dumps(value))]
    for kind, place, number in edits:
        # Half of the places are among the first ten, where the structure is.
        every = parts(root)
        near = every[:10] if place < 0.5 else every
        container, key = near[int(2 * place % 1 * len(near))]
        if kind == "replace" or (kind == "remove" and container is root):
            container[key] = deepcopy(HOSTILE[number])
        elif kind == "remove":
            del container[key]
        elif isinstance(container, list):
            container.insert(key, deepcopy(container[key]))
        else:
            container[f"{key}2"] = deepcopy(container[key])
        if not root:
            root.append(None)
    return root[0]


def damaged(name, data, how):
    """The content of a file, damaged: as bytes, as JSON values, or replaced by another text."""
    kind, edits = how
    if kind == "raw":
        return edits
    is_zipped = name.endswith(".gz")
    if kind == "bytes":
        return with_changed_bytes(data, edits)
    try:
        text = gzip.decompress(data) if is_zipped else data
        if name.removesuffix(".gz").endswith(".jsonl"):
            lines = [json.loads(line) for line in text.splitlines()]
            rows = with_changed_values(lines, edits)
            changed = "\n".join(map(json.dumps, rows if isinstance(rows, list) else [rows]))
        elif name.endswith(".safetensors") or name in ("corpus", "datastore"):
            size = 8 + int.from_bytes(text[:8], "little")
            header = json.dumps(with_changed_values(json.loads(text[8:size]), edits)).encode()
            return len(header).to_bytes(8, "little") + header + text[size:]
        else:
            changed = json.dumps(with_changed_values(json.loads(text), edits))
    except ValueError:
        return with_changed_bytes(data, [("flip", place, bytes([1 + number])) for _, place, number in edits])
    return gzip.compress(changed.encode()) if is_zipped else changed.encode()


# ---- the readers: what is written, and how it is read


def write_conversations(folder, tiny):
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello there"}]
    rows = [{"id": f"n{n}", "conversations": talk} for n in range(3)]
    rows.append({"question": "Who?", "answer": "She."})
    (folder / "talk.json").write_text(json.dumps(rows))
    lines = "\n".join(map(json.dumps, rows))
    (folder / "talk.jsonl").write_text(lines)
    (folder / "talk.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows[:3]), folder / "talk.parquet")


def read_conversations(folder, name):
    from data.sharegpt import load_conversations

    load_conversations([str(folder / name)])


def write_texts(folder, tiny):
    write_conversations(folder, tiny)
    (folder / "text.txt").write_text("one two three\n\nfour five\n" * 5)
    (folder / "text.txt.gz").write_bytes(gzip.compress(b"one two three\n\nfour five\n" * 50))
    (folder / "talk.parquet").unlink()


def read_texts(folder, name):
    from data import texts

    list(texts.read_texts([str(folder / name)]))


def write_questions(folder, tiny):
    row = {"question_id": 1, "category": "x", "turns": ["Who is it?", "And why?"], "reference": ["a", "b"]}
    (folder / "questions.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"question_id": 2}))


def read_questions(folder, name):
    from data.benchmarks import load_questions

    load_questions("mt_bench", str(folder / name))


def stored_rows():
    from datasets import Dataset

    return Dataset.from_dict({"input_ids": [[5, 6, 7]], "loss_mask": [[0, 1, 1]], "id": ["a"]})


def write_feature_store(folder, tiny):
    from data.feature_store.shards import row_keys, write_shard
    from data.feature_store.store import Manifest

    ids = torch.tensor([5, 6, 7])
    row = {"id": "a", "input_ids": ids, "loss_mask": ids > 5, "labels": ids, "hidden": torch.ones(3, 8)}
    shard = write_shard(folder / "shard-00000.safetensors", row_keys(stored_rows()), [row], (0, -1), "int8")
    named = dict.fromkeys(["base", "base_dtype", "base_hash", "tokenizer", "template", "template_name", "rows"], "")
    sizes = {"max_length": 9, "hidden_size": 4, "num_rows": 1, "num_tokens": 3, "shard_bytes": 99}
    manifest = Manifest(**named, **sizes, layers=(0, -1), dtype="int8", shards=(shard,), is_complete=True)
    manifest.save(folder)


def read_feature_store(folder, name):
    from data.feature_store.store import FeatureStore, Manifest

    if name == "manifest.json":
        Manifest.read(folder)
    else:  # a shard of the right size with another content
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["shards"][0]["num_bytes"] = (folder / name).stat().st_size
        (folder / "manifest.json").write_text(json.dumps(manifest))
    store = FeatureStore(folder)
    store.check("", "", "", 9)
    for place in store.find(stored_rows()):
        store.read(place)


def write_drafter(folder, tiny):
    from drafters import CTC, checkpoint, recipe
    from drafters.protocol import BaseShape

    shape = BaseShape(16, 40, 2, 2, 8, 24)
    arguments = {"trunk": {"num_frames": 4, "num_layers": 1}, "loss": {"num_labels": 3}}
    config = checkpoint.DrafterConfig("drafters.CTC", arguments, shape, "toy", "0123456789abcdef", {"steps": 3})
    checkpoint.save(folder, recipe.build(CTC, shape, arguments), config)


def read_drafter(folder, name):
    from drafters import checkpoint

    checkpoint.load(folder)


def toy_base():
    from drafters.protocol import BaseShape, BaseWeights
    from tests.conftest import words

    weights = torch.linspace(-1, 1, 40 * 16).view(40, 16)
    return SimpleNamespace(
        name="toy", tokenizer=words(), shape=BaseShape(16, 40, 2, 2, 8, 24), base_weights=BaseWeights(weights, weights)
    )


def write_public(folder, tiny):
    from safetensors.torch import save_file

    from drafters import EAGLE3, recipe
    from train.export.formats.eagle3 import eagle3_config, eagle3_weights
    from train.export.formats.speculators import Verifier

    base = toy_base()
    arguments = {"hidden_layers": [1, 1, 1], "own_head": True, "draft_vocab_size": 9}
    drafter = recipe.build(EAGLE3, base.shape, arguments)
    config = eagle3_config(drafter, base.shape, Verifier("toy", ["LlamaForCausalLM"], 64, "float32"))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(eagle3_weights(drafter), folder / "model.safetensors")


def read_public(folder, name):
    from train.export import import_drafter
    from train.export.formats.public_checkpoint import read_public_checkpoint

    source = read_public_checkpoint(folder)
    public = import_drafter.read(source, import_drafter.kind_of(source), toy_base())
    source.check_all_taken()
    import_drafter.build(public, toy_base(), folder)


def write_corpus(folder, tiny):
    from drafters.training_free.corpus import CorpusTable

    keys = np.array([3, 4, (1 << 32) | 7], np.int64)
    grams = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.int32)
    CorpusTable(keys, np.array([0, 1, 3, 4], np.int64), grams, "0" * 16, 1, 9, ("a",)).save(folder / "corpus")


def read_corpus(folder, name):
    from drafters.training_free.corpus import CorpusTable

    table = CorpusTable.load(folder / name)
    for seq in ([3], [4], [7, 3], [9, 9]):
        table.retrieve(seq, 3)
        table.after(seq)


def write_datastore(folder, tiny):
    from drafters.training_free.suffix_array import SuffixArray

    SuffixArray.build([[1, 2, 3, 1, 2, 4], [1, 2, 3, 5]], 4, "0" * 16, ("a",)).save(folder / "datastore")


def read_datastore(folder, name):
    from drafters.training_free.suffix_array import SuffixArray

    store = SuffixArray.open(folder / name)
    for seq in ([1, 2], [2, 3], [9], [1, 2, 3]):
        first, last, length = store.longest_match(seq, 3, 1)
        store.continuations(first, min(last, first + 5), length, 2)


def write_small_files(folder, tiny):
    (folder / "cost.json").write_text(json.dumps({"nodes": [0, 1, 8], "seconds": [0.1, 0.2, 0.5]}))
    (folder / "skips.json").write_text(json.dumps({"attention": [1], "mlp": [0], "num_layers": 2, "base": "b"}))
    (folder / "tree.json").write_text(json.dumps({"paths": [[0], [0, 0], [1]], "acceptance_length": 2.0}))
    trial = {"tokens": 9, "seconds": 1.5, "base_forwards": 5, "draft_forwards": 4, "steps": 4, "gained": 8}
    (folder / "trials.json").write_text(json.dumps({json.dumps(["b"]): {"ouroboros": trial | {"step_drafts": 3}}}))


def read_small_files(folder, name):
    from drafters.trees.step_cost import read_costs
    from inference.drafter_specs import _read_entry
    from inference.tuning.trials import TrialFile
    from inference.verifier.layer_skipping import read_skips

    readers = {
        "cost.json": read_costs,
        "skips.json": lambda path: read_skips(path, 2),
        "tree.json": lambda path: _read_entry(str(path), "paths"),
        "trials.json": lambda path: TrialFile(str(path), ("b",)).get("ouroboros"),
    }
    readers[name](folder / name)


def recorded_answers():
    from inference.results.records import Answer, Turn
    from inference.verifier.session import StepCost

    step = StepCost(2, 1, 1, 3, 0, 0, (0.1, 0.2, 0.0, 0.0, 0.1))
    turn = Turn("Hello", [5, 6, 7, 8], 9, [step, step], 0.5)
    return {
        name: [Answer(number, "math", name, [turn, turn], [True, False], None, 0.9) for number in (1, 2)]
        for name in ("none", "anpd")
    }


def write_results(folder, tiny):
    from inference.reporting import report
    from inference.results import metrics, records

    answers = recorded_answers()
    summaries = {"embedded": {name: metrics.summarise(own, answers["none"]) for name, own in answers.items()}}
    for name, own in answers.items():
        records.write(folder / "answers" / "embedded" / f"{name}.jsonl", own)
    report.write_results(folder, summaries, {"base": str(tiny), "dtype": "float32", "command": "drafters eval"})


def read_results(folder, name):
    from rich.console import Console

    from inference.reporting import conventions, report, tables
    from inference.results import answer_files
    from inference.results.folders import read_all

    (results,) = read_all([str(folder)])
    decode = report.decoder(results)
    with open("/dev/null", "w", encoding="utf-8") as nowhere:
        for part in tables.table(results.summaries):
            Console(file=nowhere).print(part)
    report.markdown(results.summaries, results.context)
    report.write_page(folder.parent, [(results, decode)])
    if name.endswith(".jsonl"):
        own = answer_files.read(folder / name)
        pairs = conventions.pair(own, answer_files.read(folder / "answers/embedded/anpd.jsonl"))
        conventions.figures(pairs)
        conventions.markdown(pairs)


def write_journals(folder, tiny):
    from inference.journal import Journal
    from inference.results import metrics, records

    answers = recorded_answers()
    with Journal(folder / "answers.jsonl", {"base": "b", "caps": {"x": 3}}) as journal:
        journal.append({"load": 0.1, "gpu_use": None})
        for place, answer in enumerate(answers["anpd"]):
            entry = {"benchmark": "embedded", "repeat": 0, "place": place, "load": 0.2}
            journal.append(entry | {"answer": records.to_json(answer)})
    with Journal(folder / "skips.jsonl", {"base": "b"}) as journal:
        journal.append({"skips": [0, 3], "survival": [0.5, 0.25]})
    with Journal(folder / "cells.jsonl", {"base": "b"}) as journal:
        summary = asdict(metrics.summarise(answers["anpd"], answers["none"]))
        journal.append({"spec": "anpd", "files": "", "summary": summary, "alone": 3.5})
    with Journal(folder / "batches.jsonl", {"base": "b"}) as journal:
        journal.append([0, [[0, [5, 6]], [1, [7]]]])
        journal.append([1, [[0, [5]]]])


def read_journals(folder, name):
    from inference.evaluation.collected import _read_load
    from inference.evaluation.worker import read_answers
    from inference.journal import Journal
    from inference.regenerate.regenerate import _read_batch
    from inference.regenerate.responders import LocalResponder
    from inference.tuning.skip_search import read_survival
    from inference.tuning.sweep import _read_cell

    journal = Journal(folder / name, {"base": "b", "caps": {"x": 3}} if name == "answers.jsonl" else {"base": "b"})
    if name == "answers.jsonl":
        for by_slot in read_answers(journal).values():
            [answer.seconds for answer in by_slot.values()]
        list(journal.entries(_read_load))
    elif name == "skips.jsonl":
        read_survival(journal)
    elif name == "cells.jsonl":
        list(journal.entries(_read_cell))
    else:
        config = SimpleNamespace(vocab_size=40)
        responder = LocalResponder(SimpleNamespace(model=SimpleNamespace(config=config)))
        dict(journal.entries(lambda entry: _read_batch(responder, entry)))


def write_checkpoints(folder, tiny):
    from drafters import CTC, recipe
    from drafters.protocol import BaseShape

    shape = BaseShape(16, 40, 2, 2, 8, 24)
    arguments = {"trunk": {"num_frames": 4, "num_layers": 1}, "loss": {"num_labels": 3}}
    drafter = recipe.build(CTC, shape, arguments)
    saved = {
        "hyper_parameters": {
            "drafter": {"class_path": "drafters.CTC", "init_args": arguments},
            "learning_rate": 0.1,
            "val_answers": "greedy",
        },
        "base": {"shape": asdict(shape), "name": "toy", "tokenizer_hash": "0" * 16},
        "state_dict": {f"drafter.{name}": weight for name, weight in drafter.state_dict().items()},
        "global_step": 3,
        "optimizer_states": [],
    }
    torch.save(saved, folder / "last.ckpt")


def read_checkpoints(folder, name):
    from train.checkpointing.checkpoint_reader import hyper_parameters, read_checkpoint
    from train.checkpointing.checkpoints import check_complete
    from train.export.export import drafter_of, model_card

    saved = read_checkpoint(folder / name)
    if "drafter" in (arguments := hyper_parameters(saved)):
        model_card(drafter_of(saved, arguments)[1], 3)
    check_complete(folder / name)


def write_base(folder, tiny):
    for path in tiny.iterdir():
        shutil.copy(path, folder)


def read_base(folder, name):
    from data.conversation import encode_prompt
    from inference.generation import generate
    from inference.verifier.base import load_base, load_base_info

    load_base_info(str(folder))
    base = load_base(str(folder))
    prompt = encode_prompt([("user", "Hi")], base.tokenizer, "vicuna_v1.1")
    generate(base, prompt, "anpd", max_new_tokens=3)


def write_configs(folder, tiny):
    (folder / "config.yaml").write_text(
        "model: &m\n  base: tiny\n  drafter: {class_path: drafters.CTC, init_args: {num_frames: 4}}\n"
        "data: {files: [embedded:4], other: *m}\ntrainer:\n  max_steps: 2\n  callbacks:\n  - a\n  - b\n"
    )


def read_config_files(folder, name):
    from train.cli.class_paths import with_new_class_paths
    from train.cli.lightning_cli import names_a_class, read_configs

    configs = read_configs(["--config", str(folder / name)])
    with_new_class_paths(configs)
    names_a_class(configs)


def write_replies(folder, tiny):
    reply = {"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}}
    (folder / "reply.json").write_text(json.dumps(reply))


def read_replies(folder, name):
    from inference.regenerate.endpoint import RequestRefused, _parsed

    try:
        _parsed((folder / name).read_bytes())
    except (LookupError, TypeError, AttributeError, RequestRefused) as error:  # as `Endpoint.chat` handles them
        raise ValueError(repr(error)) from error


READERS = {
    "conversations": (write_conversations, read_conversations, 60),
    "texts": (write_texts, read_texts, 60),
    "questions": (write_questions, read_questions, 40),
    "feature store": (write_feature_store, read_feature_store, 60),
    "drafter": (write_drafter, read_drafter, 50),
    "public drafter": (write_public, read_public, 50),
    "corpus": (write_corpus, read_corpus, 60),
    "datastore": (write_datastore, read_datastore, 60),
    "small files": (write_small_files, read_small_files, 80),
    "results": (write_results, read_results, 12),
    "journals": (write_journals, read_journals, 80),
    "checkpoints": (write_checkpoints, read_checkpoints, 50),
    "base": (write_base, read_base, 15),
    "configs": (write_configs, read_config_files, 40),
    "replies": (write_replies, read_replies, 60),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_in_one_line(fuzz, tmp_path, tiny, name):
    write, read, examples = READERS[name]
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    whole.mkdir()
    write(whole, tiny)
    names = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
    for file in names:
        shutil.copytree(whole, changed)
        read(changed, file)  # what is whole can be read
        shutil.rmtree(changed)

    def check(example):
        file, how = example
        shutil.copytree(whole, changed)
        try:
            (changed / file).write_bytes(damaged(file.rpartition("/")[2], (whole / file).read_bytes(), how))
            before = files_below(whole)
            with bounded():
                try:
                    read(changed, file)
                except ValueError as error:
                    assert str(error).strip()
                except OSError as error:
                    assert error.filename, error
            assert files_below(whole) == before
        finally:
            shutil.rmtree(changed)

    fuzz(st.tuples(st.sampled_from(names), damage), check, examples)
