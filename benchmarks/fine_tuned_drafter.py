"""A drafter for a fine-tune of its base: what training it on the fine-tune's own answers gains, by their number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import process_time
from typing import Any

import torch

from benchmarks import experiment
from benchmarks.experiment import Arm, GreedyAnswer, SharedSettings
from benchmarks.harness import ResultTable, main, show
from data.batches import BucketSampler, collate
from data.conversations import Conversation, load_conversations
from data.dtypes import Dtype
from data.files import atomic_folder, read_json, short_hash, write_text
from data.hub import find_base
from data.rows import lengths as token_counts
from data.rows import tokenise
from drafters import checkpoint, recipe
from drafters.registry import find_class
from inference.drafter_specs import drafter_folder
from inference.options import GREEDY, AnswerOptions, ModelOptions, ServerOptions
from inference.prompts import encode_messages
from inference.regenerate.command import regenerate
from inference.runs import fingerprint
from inference.verifier.base import load_base, prepare_process

BATCH_SIZE, MAX_LENGTH = 8, 384  # conversations of a step, of the adapter or of a drafter; tokens of each
ADAPTER_RATE = 2e-3
SCRATCH_RATE = 8e-3  # of Muon, for random weights
NODES, SEED = 7, 0
ADAPTER = "adapter.json"  # what its training took


def fine_tuned_drafter(
    base: str,
    drafter: str,
    files: list[str],
    out: str,
    conversations: list[int] = [100, 400, 1600],  # noqa: B006
    scratch: list[int] = [1600],  # noqa: B006
    steps: int = 50,
    learning_rate: float = 4e-3,
    adapter_steps: int = 40,
    general: str = "embedded",
    questions: int = 40,
    max_new_tokens: int = 128,
    dtype: Dtype = "bfloat16",
    table: str | None = None,
) -> None:
    """Fine-tune a base, train its drafter on the fine-tune's own answers, and simulate decoding before and after.

    The first conversations are the questions that drafters are measured on, those after them the prompts whose answers
    they learn, and the last the text of a LoRA adapter, which is merged into the base. What was done is kept: repeat
    the command to continue an interrupted run, or to add numbers of conversations.

    Args:
        base: Folder, hub id or GGUF file of the base.
        drafter: Folder of a drafter for the base, or its name on the hub.
        files: Conversations of the domain.
        out: Folder for the fine-tune, its answers, the drafters and their results.
        conversations: Numbers of conversations on which the drafter is trained further.
        scratch: Numbers of conversations on which the same drafter is trained from random weights.
        steps: Smallest number of training steps, of 8 conversations each; more conversations are read once.
        learning_rate: Peak learning rate of Muon in the further training.
        adapter_steps: Training steps of the adapter, of 8 conversations each.
        general: A benchmark of other questions: embedded, or such as mt_bench=FILE.
        questions: Number of questions, of the domain and of the other benchmark.
        max_new_tokens: Maximum number of tokens of an answer.
        dtype: Dtype of the base and of the fine-tune; with bfloat16, all training is in mixed precision.
        table: Markdown file to write the table to.
    """
    folder, numbers = Path(out), sorted({*conversations, *scratch})
    texts, _ = load_conversations(files)
    if len(texts) < (needed := questions + numbers[-1] + adapter_steps * BATCH_SIZE):
        raise ValueError(f"{', '.join(files)}: {len(texts):,} conversations, but {needed:,} are needed")
    folder.mkdir(parents=True, exist_ok=True)
    conditions = {  # of all that is kept in the folder
        "base": fingerprint(find_base(base)),
        "drafter": fingerprint(drafter_folder(drafter)),
        "texts": short_hash(json.dumps([text.messages for text in texts])),
        "numbers": [questions, adapter_steps, max_new_tokens, dtype],
    }
    path = folder / "conditions.json"
    if path.exists() and read_json(path) != conditions:
        raise ValueError(f"{out} holds another base, drafter or text, or other options: give another --out")
    write_text(path, json.dumps(conditions))
    if not (tuned := folder / "fine_tune").exists():
        adapt(base, texts[len(texts) - adapter_steps * BATCH_SIZE :], dtype == "bfloat16", tuned)
    answered = {}  # by number of conversations: the file of the answers, and the CPU minutes that they took
    records, seconds, shipped = "", 0.0, drafter_folder(drafter)
    for start, end in pairwise([0, *numbers]):
        if not (part := folder / f"answers_{start}_{end}.jsonl").exists():
            answer(tuned, texts[questions + start : questions + end], max_new_tokens, dtype, part)
        records += part.read_text(encoding="utf-8")
        seconds += read_json(part.with_suffix(".json"))["seconds"]
        write_text(path := folder / f"answers_{end}.jsonl", records)
        answered[end] = path, seconds / 60

    bases = {name: load_base(name, dtype) for name in (base, str(tuned))}
    asked: dict[str, list[list[GreedyAnswer]]] = {}
    for name, each in bases.items():
        (place := folder / ("of_base" if name == base else "of_fine_tune")).mkdir(exist_ok=True)
        firsts = [next(at for at, m in enumerate(text.messages) if m["role"] == "user") for text in texts[:questions]]
        asked_of = [text.messages[: first + 1] for text, first in zip(texts, firsts, strict=False)]
        prompts = [encode_messages(each, messages, "tokenizer") for messages in asked_of]
        domain = experiment.own_answers(each, prompts, max_new_tokens, place / "domain.json")
        benchmark, _, file = general.partition("=")
        asked[name] = [domain, experiment.decoded_answers(each, benchmark, file, 0, questions, max_new_tokens, place)]

    def lengths(exported: Path, name: str, known: Path) -> list[str]:
        """Return the acceptance length of a drafter on one of the bases' answers, of the domain and of others."""

        def measure(text: Sequence[GreedyAnswer]) -> dict[str, Any]:
            return experiment.simulate(
                checkpoint.load(exported, bases[name].model.dtype)[0], bases[name], text, (NODES,)
            )

        found = [experiment.remembered(known, [name], text, partial(measure, text)) for text in asked[name]]
        return [f"{result['length'][str(NODES)]:.2f}" for result in found]

    headings = ["drafter", "conversations", "answers, CPU minutes", "steps", "CPU minutes", "domain", benchmark]
    adapter = read_json(tuned / ADAPTER)
    notes = [
        f"Acceptance lengths, simulated with {NODES} nodes on answers to {questions} questions, of at most "
        f"{max_new_tokens} tokens; one seed.",
        f"The adapter: {adapter_steps} steps, {adapter['seconds'] / 60:.1f} CPU minutes, loss "
        f"{adapter['losses'][0]:.2f} to {adapter['losses'][-1]:.2f}.",
    ]
    result = ResultTable("A drafter for a fine-tune", headings, notes=notes)
    for title, name in (("as it is, on its own base", base), ("as it is", str(tuned))):
        result.rows.append([title, "", "", "", "", *lengths(shipped, name, folder / "shipped.json")])
    config = checkpoint.read_config(shipped)
    kind = find_class(config.class_path)
    arguments = {  # without options of the loss that are no longer there
        name: {key: options[key] for key in options.keys() & recipe.defaults(group)}
        for name, group in recipe.groups(kind).items()
        if (options := config.init_args.get(name))
    }
    further = {"optimizer": "muon", "learning_rate": learning_rate, "initial_drafter": drafter}
    runs = [("trained further", number, further) for number in conversations]
    runs += [
        ("from random weights", number, {"optimizer": "muon", "learning_rate": SCRATCH_RATE}) for number in scratch
    ]
    for title, number, model in runs:
        text, time = answered[number]
        count = max(steps, -(-number // BATCH_SIZE))
        settings = SharedSettings(str(tuned), [str(text)], count, None, dtype, BATCH_SIZE, MAX_LENGTH)
        arm = Arm(f"{title.replace(' ', '_')}_{number}_{model['learning_rate']:g}", kind.__name__, arguments, model)
        exported = experiment.train(arm, SEED, settings, folder)
        minutes = read_json(exported.parent / experiment.TIME)["cpu_seconds"] / 60
        found = lengths(exported, str(tuned), exported.parent / "simulated.json")
        result.rows.append([title, f"{number:,}", f"{time:.1f}", str(count), f"{minutes:.1f}", *found])
        print(result.rows[-1], flush=True)
    show([result], torch.device("cpu"), table)


def adapt(base: str, texts: Sequence[Conversation], is_mixed: bool, folder: Path) -> None:
    """Train a LoRA adapter of a base on the assistant's turns, merge it, and write the fine-tune as a folder."""
    from peft import LoraConfig, get_peft_model

    prepare_process()
    frozen, started, losses = load_base(base), process_time(), []
    torch.manual_seed(SEED)
    model: Any = get_peft_model(frozen.model, LoraConfig(target_modules=["q_proj", "v_proj"])).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    rows = tokenise(texts, frozen.tokenizer, "tokenizer", MAX_LENGTH)
    batches = list(BucketSampler(token_counts(rows), BATCH_SIZE, SEED))
    optimizer = torch.optim.AdamW(weights, lr=ADAPTER_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, ADAPTER_RATE, total_steps=len(batches), pct_start=0.1)
    for batch in batches:
        padded = collate([rows[row] for row in batch])
        ids, labels = padded["input_ids"], padded["input_ids"].masked_fill(~padded["loss_mask"], -100)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            loss = model(input_ids=ids, labels=labels).loss  # padding is on the right, where no token attends to it
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        print(f"adapter, step {len(losses)} of {len(batches)}: loss {losses[-1]:.3f}", flush=True)
    with atomic_folder(folder) as new:
        model.merge_and_unload().save_pretrained(new)
        frozen.tokenizer.save_pretrained(new)
        write_text(new / ADAPTER, json.dumps({"losses": losses, "seconds": process_time() - started}))


def answer(tuned: Path, texts: Sequence[Conversation], max_new_tokens: int, dtype: Dtype, out: Path) -> None:
    """Let the fine-tune answer the first turn of each conversation as ``drafters regenerate`` does."""
    write_text(
        prompts := out.with_suffix(".prompts.json"),
        json.dumps([{"id": text.id, "messages": text.messages} for text in texts]),
    )
    model, options = ModelOptions(str(tuned), dtype), AnswerOptions(turns="first", max_new_tokens=max_new_tokens)
    started = process_time()
    regenerate(model, options, GREEDY, ServerOptions(), str(out), [str(prompts)], overwrite=False)
    write_text(out.with_suffix(".json"), json.dumps({"seconds": process_time() - started}))


if __name__ == "__main__":
    main(fine_tuned_drafter)
