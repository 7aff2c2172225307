"""Every name of vLLM that this project relies on, found without starting an engine: run it first with a new version."""

import inspect
import re
from importlib import import_module
from operator import attrgetter
from typing import get_args

import pytest

from inference.vllm.command import CUSTOM, make_launch
from inference.vllm.proposer import Proposer
from inference.vllm.running import COUNTER, OPTIONS
from inference.vllm.served_drafter import METHODS

METADATA, STREAMED = "num_actual_tokens slot_mapping block_table", "token_ids finish_reason"
BACKENDS, PROTOCOLS = "vllm.v1.attention.backends", "vllm.entrypoints.openai"
HOOKS = {  # MODULE:NAME, and its attributes, fields or parameters
    "vllm:SamplingParams": "temperature max_tokens ignore_eos n",
    "vllm:LLM": "generate get_metrics reset_prefix_cache",
    "vllm.config:VllmConfig": "additional_config cache_config model_config parallel_config speculative_config",
    "vllm.config:ModelConfig": "model tokenizer tokenizer_revision hf_text_config try_get_generation_config dtype "
    "enforce_eager is_multimodal_model enable_prompt_embeds",
    "vllm.config:CacheConfig": "num_gpu_blocks block_size",
    "vllm.config:ParallelConfig": "pipeline_parallel_size",
    "vllm.config:SpeculativeConfig": "method model num_speculative_tokens",
    "vllm.distributed:cleanup_dist_env_and_memory": "",
    "vllm.distributed:get_tensor_model_parallel_world_size": "",
    "vllm.distributed:tensor_model_parallel_all_gather": "input_ dim",
    "vllm.forward_context:get_forward_context": "",
    "vllm.forward_context:ForwardContext": "attn_metadata",
    "vllm.platforms:current_platform": "is_cpu",
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": "x cu_num_tokens num_tokens replace_from replace_to",
    "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer": "vllm_config",
    "vllm.v1.engine.llm_engine:LLMEngine": "add_request step abort_request has_unfinished_requests",
    "vllm.model_executor.models.interfaces:SupportsEagle3.set_aux_hidden_state_layers": "layers",
    "vllm.model_executor.models.llama:LlamaForCausalLM.forward": "input_ids positions",
    f"{BACKENDS}.cpu_attn:CPUAttentionMetadata": METADATA,
    f"{BACKENDS}.flash_attn:FlashAttentionMetadata": METADATA,
    f"{BACKENDS}.triton_attn:TritonAttentionMetadata": METADATA,
    f"{PROTOCOLS}.completion.protocol:CompletionRequest": "prompt max_tokens temperature stream return_token_ids",
    f"{PROTOCOLS}.completion.protocol:CompletionResponseStreamChoice": f"{STREAMED} text",
    f"{PROTOCOLS}.chat_completion.protocol:ChatCompletionResponseStreamChoice": f"{STREAMED} delta",
}


@pytest.mark.parametrize(("hook", "names"), HOOKS.items())
def test_vllm_has_each_hook_and_its_names(hook, names):
    module, _, path = hook.partition(":")
    found = attrgetter(path)(import_module(module))
    known = {*dir(found), *(inspect.signature(found).parameters if inspect.isfunction(found) else ())}
    for fields in ("__dataclass_fields__", "model_fields"):
        known |= set(getattr(found, fields, None) or ())
    missing = sorted(set(names.split()) - known)
    assert not missing, f"{hook} has no {missing}"


def test_vllm_calls_a_proposer_with_the_arguments_that_ours_takes():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner.propose_draft_token_ids)
    (call,) = re.findall(rf'"{CUSTOM}":.*?\.propose\((.*?)\)', source, flags=re.DOTALL)
    assert re.findall(r"(\w+)\s*(?:,|$)", call) == list(inspect.signature(Proposer.propose).parameters)[1:]
    for runner in (CPUModelRunner, GPUModelRunner):
        assert "drafter.load_model(self.model)" in inspect.getsource(runner.load_model)


def test_vllm_has_our_methods_the_options_of_our_launch_line_and_the_counters_that_eval_reads():
    from vllm.config.speculative import SpeculativeMethod
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert {CUSTOM, *METHODS} - set(get_args(SpeculativeMethod)) <= {"medusa"}  # which 0.33 removed
    line = make_launch("checkpoints/tiny-chat", "anpd").arguments[2:]
    _, unknown = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args([*line, *OPTIONS])
    assert unknown == ["--port", "8000", "--host", "127.0.0.1"]  # of the server and not of the engine
    source = inspect.getsource(import_module("vllm.v1.spec_decode.metrics"))
    counters = {f"{name}_total" for name in re.findall(r'"(vllm:spec_decode_num_\w+)"', source)}
    assert len([name for name in counters if COUNTER.fullmatch(name)]) == 4
