"""Every name of vLLM that this project relies on, found without starting an engine: run it first with a new version."""

import inspect
import re
from importlib import import_module
from operator import attrgetter
from types import SimpleNamespace
from typing import get_args

import pytest

from inference.server_process import COUNTER
from inference.vllm.command import CUSTOM, OPTIONS, make_launch
from inference.vllm.proposer import Proposer
from inference.vllm.served_drafter import METHODS

STREAMED, PROTOCOLS = "token_ids finish_reason", "vllm.entrypoints.openai"
RUNNER = "vllm.v1.worker.gpu_model_runner"
HOOKS = {  # MODULE:NAME, and its attributes, fields or parameters
    "vllm:SamplingParams": "temperature max_tokens ignore_eos n",
    "vllm:LLM": "generate get_metrics reset_prefix_cache",
    "vllm.config:VllmConfig": "additional_config cache_config model_config parallel_config "
    "scheduler_config speculative_config",
    "vllm.config:ModelConfig": "model tokenizer tokenizer_revision hf_text_config try_get_generation_config dtype "
    "is_multimodal_model enable_prompt_embeds hf_config",
    "vllm.config:ParallelConfig": "pipeline_parallel_size decode_context_parallel_size num_ubatches",
    "vllm.config:SpeculativeConfig": "method model num_speculative_tokens draft_model_config "
    "num_speculative_tokens_per_batch_size",
    "vllm.config:SchedulerConfig": "max_num_seqs",
    "vllm.v1.spec_decode.dynamic.utils:build_dynamic_sd_schedule_lookup": "num_speculative_tokens_per_batch_size "
    "vllm_max_batch_size vllm_num_speculative_tokens",
    "vllm.distributed:cleanup_dist_env_and_memory": "",
    "vllm.distributed:get_tensor_model_parallel_world_size": "",
    "vllm.distributed:tensor_model_parallel_all_gather": "input_ dim",
    "vllm.platforms:current_platform": "is_cpu",
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": "x cu_num_tokens num_tokens replace_from replace_to",
    "vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer": "vllm_config",
    "vllm.v1.engine.llm_engine:LLMEngine": "add_request step abort_request has_unfinished_requests",
    "vllm.model_executor.models.interfaces:SupportsEagle3.set_aux_hidden_state_layers": "layers",
    "vllm.v1.core.sched.output:SchedulerOutput": "total_num_scheduled_tokens",
    "vllm.v1.attention.backend:CommonAttentionMetadata": "block_table_tensor slot_mapping",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "num_blocks kv_cache_groups",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "kv_cache_spec",
    "vllm.v1.kv_cache_interface:KVCacheSpec": "block_size",
    f"{RUNNER}:ExecuteModelState": "scheduler_output hidden_states aux_hidden_states spec_decode_common_attn_metadata",
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
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner.propose_draft_token_ids)
    (call,) = re.findall(rf'"{CUSTOM}":.*?\.propose\((.*?)\)', source, flags=re.DOTALL)
    assert re.findall(r"(\w+)\s*(?:,|$)", call) == list(inspect.signature(Proposer.propose).parameters)[1:]


def test_the_runner_itself_loads_a_proposer_and_then_sets_the_layers_that_it_hands_to_eagle3():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for runner in (CPUModelRunner, GPUModelRunner):
        load = r"\n        (    )*self\.drafter\.load_model\(self\.model\)\n"
        steps = rf"self\.model = .*{load}.*self\._setup_eagle3_aux_hidden_state_outputs\(\)"
        assert re.search(steps, inspect.getsource(runner.load_model), flags=re.DOTALL), runner


def test_the_runner_keeps_after_a_forward_what_it_hands_to_eagle3():
    from vllm.v1.worker.block_table import BlockTable
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner.execute_model)
    forward, unpacked, kept = (
        source.index(step)
        for step in (
            "model_output = self._model_forward(",  # which replays CUDA graphs
            "if self.use_aux_hidden_state_outputs:",
            "self.execute_model_state = ExecuteModelState(",
        )
    )
    assert forward < unpacked < kept
    eagle3 = inspect.getsource(GPUModelRunner.propose_draft_token_ids)
    for tokens in ("self.input_ids.gpu[:{}]", "self._get_positions({})", "[h[:{}] for h in aux_hidden_states]"):
        assert tokens.format("num_scheduled_tokens") in eagle3
    assert "return self.positions[:num_tokens]" in inspect.getsource(GPUModelRunner._get_positions)
    metadata = inspect.getsource(GPUModelRunner._build_attention_metadata)
    assert "spec_decode_common_attn_metadata.unpadded(num_tokens, num_reqs)" in metadata
    assert "self.input_batch.block_table[kv_cache_gid]" in metadata
    assert "self.block_size," in inspect.getsource(BlockTable.compute_slot_mapping)


def test_workers_call_the_methods_of_their_runner_that_a_proposer_follows():
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    assert issubclass(CPUWorker, Worker)
    for method in ("execute_model", "initialize_kv_cache"):
        assert f"self.model_runner.{method}(" in inspect.getsource(Worker)
        assert f"def {method}(" not in inspect.getsource(CPUWorker)


def test_the_layers_of_a_custom_class_reach_the_runner_and_the_key_of_compiled_models():
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    base = ModelConfig("checkpoints/tiny-chat")
    targets = {"target_model_config": base, "target_parallel_config": ParallelConfig()}
    speculative = SpeculativeConfig(method=CUSTOM, model="a.B", num_speculative_tokens=6, **targets)
    assert speculative.draft_model_config is base
    hashes = set[str]()
    for layers in ([2, 5], [3, 5]):
        base.hf_config.eagle_aux_hidden_state_layer_ids = layers
        runner = SimpleNamespace(speculative_config=speculative)
        assert GPUModelRunner._get_eagle3_aux_layers_from_config(runner) == tuple(layers)
        hashes.add(base.compute_hash())
    assert len(hashes) == 2


def test_vllm_refuses_a_custom_class_with_asynchronous_scheduling():
    from vllm.engine.arg_utils import EngineArgs

    speculative = {"method": CUSTOM, "model": "a.B", "num_speculative_tokens": 6}
    arguments = EngineArgs("checkpoints/tiny-chat", speculative_config=speculative, async_scheduling=True)
    with pytest.raises(ValueError, match=r"(?i)async scheduling is (only|not) supported"):
        arguments.create_engine_config()


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
