"""The reader of counters, against what the real Prometheus client writes."""

import pytest

from inference.evaluation.served.metrics import read_counts
from inference.results.served_figures import SpeculationCounts

prometheus_client = pytest.importorskip("prometheus_client")
MODELS = ["base", 'a "quoted" one', "braces} 7", "line\nbreak", 'position="9"']


def registry_of(counters):
    registry = prometheus_client.CollectorRegistry()
    for name, values in counters.items():
        labels = ["model_name", "engine", *(["position"] if name.endswith("per_pos") else [])]
        counter = prometheus_client.Counter(name, "About it.", labels, registry=registry)
        for key, value in values.items():
            counter.labels(*key).inc(value)
    return prometheus_client.generate_latest(registry).decode()


@pytest.mark.parametrize("model", MODELS)
def test_counters_of_vllm_are_added_up_over_its_engines(model):
    stem = "vllm:spec_decode_num_"
    counters = {f"{stem}drafts": {(model, "0"): 10, (model, "1"): 5}, f"{stem}draft_tokens": {(model, "0"): 60}}
    counters[f"{stem}accepted_tokens"] = {(model, "0"): 21, (model, "1"): 4}
    per_position = {(model, "0", "0"): 12, (model, "1", "0"): 3, (model, "0", "1"): 9, (model, "1", "1"): 1}
    counters[f"{stem}accepted_tokens_per_pos"] = per_position
    counters["vllm:generation_tokens"] = {(model, "0"): 1000}
    assert read_counts(registry_of(counters)) == SpeculationCounts(60, 25, 15, by_position=[15, 10])
    del counters[f"{stem}drafts"]
    assert read_counts(registry_of(counters)) is None


@pytest.mark.parametrize("text", ["", "<html>", "vllm:spec_decode_num_drafts_total NaN", "{} 1\n\x00", "a{" * 1000])
def test_a_text_without_the_counters_has_none(text):
    assert read_counts(text) is None
