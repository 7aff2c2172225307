"""Graphs: emulated, they compute what their function does for other values, and refuse what no GPU could capture."""

import pytest
import torch

from drafters.nn import graph

CPU = torch.device("cpu")


@pytest.fixture
def steps():
    """A function of tensors with a state, its inputs, and what each of three calls with other inputs gives."""
    inputs, state = graph.HostBuffer(3, device=CPU), torch.zeros(4)

    def step():
        state.index_add_(0, inputs.device, torch.ones(3))
        return state * 2, inputs.device[:1] + 1

    return step, inputs, state


def run(call, inputs, state):
    state.zero_()
    results = []
    for numbers in ([0, 1, 2], [3, 3, 3], [2, 1, 1]):
        inputs.numbers[:] = numbers
        inputs.send()
        results.append([tensor.tolist() for tensor in call()])
    return results


def test_a_replayed_graph_computes_what_the_function_does(steps, emulated_graphs):
    step, inputs, state = steps
    assert run(graph.captured(step, CPU), inputs, state) == run(step, inputs, state)
    assert list(emulated_graphs.launches.values()) == [3]


def test_without_a_gpu_a_graph_calls_its_function(steps):
    step, inputs, state = steps
    assert run(graph.captured(step, CPU), inputs, state) == run(step, inputs, state)


def test_results_stay_at_their_addresses(steps, emulated_graphs):
    step, *_ = steps
    call = graph.captured(step, CPU)
    assert len({tuple(tensor.data_ptr() for tensor in call()) for _ in range(5)}) == 1


@pytest.mark.parametrize(
    "function",
    [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x + torch.tensor([1.0])],
)
def test_what_waits_for_the_device_or_comes_from_the_host_is_refused(function, emulated_graphs):
    with pytest.raises(AssertionError, match="cannot capture"):
        graph.captured(lambda: function(torch.ones(3)), CPU)


def test_indices_and_attention_without_dropout_are_captured(emulated_graphs):
    index, states = torch.tensor([2]), torch.arange(12.0).view(1, 1, 6, 2)
    attend = torch.nn.functional.scaled_dot_product_attention
    call = graph.captured(lambda: (states[..., index, :], attend(states[..., index, :], states, states)), CPU)
    index.fill_(4)
    assert [x.tolist() for x in call()] == [[[[[8.0, 9.0]]]], attend(states[..., 4:5, :], states, states).tolist()]


def test_a_number_of_the_host_is_baked_in(emulated_graphs):
    host = {"number": 1}
    call = graph.captured(lambda: torch.ones(1) + host["number"], CPU)
    host["number"] = 5
    assert call().tolist() == [2.0]


def test_an_input_that_has_moved_is_found(emulated_graphs):
    weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    call = graph.captured(lambda: weight * 2, CPU)
    weight.data = torch.zeros(2)
    with pytest.raises(AssertionError, match="has moved"):
        call()
