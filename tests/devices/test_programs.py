"""What users call, with a base on an accelerator: the results of the host."""

import pytest
import torch

import drafters
from benchmarks import recipes
from data.tokenizer import tokenizer_hash
from drafters import checkpoint
from drafters.checkpoint import DrafterConfig
from inference import Speculation
from inference.drafter_specs import make
from inference.regenerate.answerers import decode_batch
from inference.verifier.base import base_hash
from inference.verifier.runner import Runner
from tests.inference.verifier import test_lossless as lossless

PROMPTS = [list(lossless.prompt_of(length)) for length in (5, 9)]


@pytest.fixture(scope="module")
def folder(make_base, tmp_path_factory):
    """An exported CTC drafter."""
    base, folder = make_base(), tmp_path_factory.mktemp("ctc")
    config = DrafterConfig(
        "drafters.CTC",
        recipes.grouped(drafters.CTC, lossless.CTC),
        base.shape,
        base.name,
        tokenizer_hash(base.tokenizer),
        {},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        checkpoint.save(folder, recipes.build(drafters.CTC, base.shape, lossless.CTC), config)
    return folder


def test_an_exported_drafter_is_loaded_to_the_device_and_saved_from_it(
    folder, make_base, make_pretend_base, accelerator, tmp_path
):
    base = make_pretend_base()
    loaded = make(f"ctc={folder}", Runner(base))
    assert {weight.device for weight in loaded.state_dict().values()} == {accelerator.device}
    checkpoint.save(tmp_path / "again", loaded.float(), checkpoint.read_config(folder))
    names = [path / "model.safetensors" for path in (folder, tmp_path / "again")]
    assert names[0].read_bytes() == names[1].read_bytes()
    assert base_hash(base) == base_hash(make_base())


def test_speculation_inside_transformers_generate_returns_tensors_on_the_device(
    make_base, make_pretend_base, accelerator
):
    options = {"max_new_tokens": 5, "pad_token_id": 0, "repetition_penalty": 1.2}
    prompts = torch.tensor([[0] * 4 + PROMPTS[0], PROMPTS[1]])
    options["attention_mask"] = (prompts > 0).long()
    expected = make_base().model.generate(prompts, **options)
    options["attention_mask"] = options["attention_mask"].to(accelerator.device)
    base = make_pretend_base()
    got = base.model.generate(prompts.to(accelerator.device), custom_generate=Speculation("anpd"), **options)
    assert got.device == accelerator.device and torch.equal(got.cpu(), expected)


def test_a_batch_of_regenerated_answers_is_that_of_the_host(make_base, make_pretend_base, accelerator):
    answers = [decode_batch(base, PROMPTS, [3, 7]) for base in (make_base(), make_pretend_base())]
    assert answers[0] == answers[1]
