"""The options of an evaluation in servers."""

import pytest

from inference.evaluation.served.plan import ServerOptions


@pytest.mark.parametrize(
    "word",
    [
        *("--dtype", "--revision", "--tokenizer", "--tokenizer-revision", "--generation-config", "--config"),
        *("--enable-prefix-caching", "--speculative_config", "--api_key=x", "--speculative-config.method", "--dty"),
    ],
)
def test_engine_arguments_that_the_evaluation_sets_are_refused_in_every_spelling(word):
    with pytest.raises(ValueError, match=f"^--engine-args must not set {word}, which the evaluation sets itself$"):
        ServerOptions(engine_args=f"--max-model-len 64 {word} y").engine_arguments()


def test_other_engine_arguments_are_passed_on():
    words = "--max-model-len 4096 --tokenizer-mode auto --max_num_seqs=8 -O3 --gpu-memory-utilization 0.5"
    assert ServerOptions(engine_args=words).engine_arguments() == words.split()
