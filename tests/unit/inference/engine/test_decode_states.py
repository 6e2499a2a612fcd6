"""States that layers keep between decode steps, and a plugin's network that generates with one."""

import importlib.util

import pytest
import torch
from recorded_graph import record
from scripts import forget_plugin
from source import REPOSITORY
from stages import plainly_continued, whole_weights
from test_kv_cache import states_of
from tiny import tiny_spec, with_changes
from torch.testing import assert_close

from megatron.common.registry import NETWORKS
from megatron.inference.engine.beam_search import BeamSearchRequest
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Request
from megatron.inference.loading.loaded_model import lone_groups
from megatron.inference.runner.decode_graphs import StepShape
from megatron.inference.runner.decode_states import DecodeStates
from megatron.inference.runner.model_runner import ModelRunner
from megatron.inference.runner.passes import Decode, Prefill
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.parts import LayerParts, once_per_sequence

FILE = REPOSITORY / "examples/recurrent_network/recurrent_network.py"
PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8], [3, 1, 4, 1, 5, 9, 2]]


def step_of(*positions):
    shape = StepShape(len(positions), min(positions), max(positions) + 1)
    return Decode(torch.tensor(positions), shape)


def test_a_state_is_that_of_the_last_token_of_each_sequence():
    states = states_of(rows=3)
    state = states.state(2, dtype=torch.float64)
    states.start(Prefill(1, (3, 1)))
    x_sbw = torch.arange(12.0).view(3, 2, 2)
    assert state.read() is None
    assert state.lengths.tolist() == [3, 1]
    state.write(state.last(x_sbw))
    states.start(step_of(0, 3, 1))
    assert state.read().tolist() == [[0, 0], [8, 9], [2, 3]]
    assert state.last(torch.ones(1, 3, 2)).shape == (3, 2)


def test_states_move_with_their_sequences():
    states = states_of(rows=3)
    state, texts = states.state(1), states.state(None, 1)
    states.start(Prefill(0, (1, 1)))
    state.write(torch.tensor([[1.0], [2.0]]))
    texts.write(torch.tensor([[[1.0]], [[2.0]]]))
    states.start(Prefill(2, (1,)))
    state.write(torch.tensor([[3.0]]))
    texts.write(torch.tensor([[[3.0], [4.0]]]))  # longer: makes room in all rows
    states.reorder([2, 2, 0], 1)
    states.start(step_of(1, 1, 1))
    assert state.read().flatten().tolist() == [3, 3, 1]
    assert texts.read().squeeze(2).tolist() == [[3, 4], [3, 4], [1, 0]]
    states.copy(2, 0, 1)
    states.start(step_of(1))
    assert texts.read().tolist() == [[[1]]]  # no padding of sequences that have left
    states.clear(slice(0, 1))
    assert state.read().tolist() == [[0]] and texts.read().tolist() == [[[0]]]


def test_what_is_computed_in_prefill_is_read_in_decode_steps():
    states, runs = states_of(rows=1), []
    state = states.state(1)

    def compute():
        runs.append(1)
        return torch.full((1, 1), 7.0)

    for step in (Prefill(0, (2,)), step_of(2), step_of(3)):
        states.start(step)
        assert once_per_sequence(state, compute).tolist() == [[7.0]]
    assert len(runs) == 1
    assert once_per_sequence(None, compute).tolist() == [[7.0]]


def test_states_report_that_one_of_them_grows():
    states = states_of(rows=2)
    states.state(3)
    assert not states.grows
    states.state(None, 1)
    assert states.grows


@pytest.fixture(scope="module")
def recurrent():
    """Return the example plugin, whose network is registered meanwhile."""
    spec = importlib.util.spec_from_file_location("recurrent_network", FILE)
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    yield plugin
    forget_plugin("recurrent_network", NETWORKS, "recurrent")


@pytest.fixture
def network(recurrent, group):
    """Return the spec of a network of the plugin, and the network itself with random weights."""
    flags = (("attention_every", 3),)
    spec = tiny_spec(
        **{"architecture": "recurrent", "num_layers": 3, "own_flags": flags},
        max_position_embeddings=16,
    )
    steps = spec.network.layers(
        spec, LayerParts(group=group, core_attention=core_attention_of(spec))
    )
    model = SequentialModel(steps).eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter) + (parameter.dim() == 1))
    return spec, model


def engine_of(spec, model, *, rows=3, **options):
    runner = ModelRunner(
        spec,
        whole_weights(model),
        groups=lone_groups(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        rows=rows,
        **options,
    )
    return InferenceEngine(runner, rows=rows)


@pytest.mark.parametrize("options", [{}, {"key_rounding": 4, "capture": record}])
def test_a_recurrence_continues_from_its_state(network, options):
    """Sequences of several lengths join, leave and move; steps may be captured."""
    spec, model = network
    engine = engine_of(spec, model, **options)
    greedy = SamplingParams(greedy=True)
    requests = [
        Request(prompt=tuple(prompt), max_new_tokens=4 + number, sampling=greedy)
        for number, prompt in enumerate(PROMPTS)
    ]
    found = [[*done.tokens] for done in engine.generate(requests)]
    expected = [plainly_continued(model, spec, p, 4 + n) for n, p in enumerate(PROMPTS)]
    assert found == expected
    search = BeamSearchRequest.of(requests[0], 1, 1.0)
    assert [*engine.run_alone(search)[0].tokens] == expected[0]


@pytest.mark.parametrize("grows", [True, False])
def test_steps_are_captured_unless_a_state_grows(network, grows, monkeypatch):
    spec, model = network
    monkeypatch.setattr(DecodeStates, "grows", property(lambda states: grows))
    captured = []

    def capture(step):
        captured.append(step)
        return record(step)

    engine = engine_of(spec, model, key_rounding=4, capture=capture)
    [done] = engine.generate([Request(prompt=(1, 2, 3), max_new_tokens=4)])
    assert len(done.tokens) == 4
    assert bool(captured) is not grows


def test_decode_steps_run_one_token(network):
    spec, model = network
    engine = engine_of(spec, model)
    sizes = []
    layer = engine.runner.model.get_submodule("3").mixer
    layer.register_forward_hook(lambda _, inputs, out: sizes.append(len(inputs[0])))
    [*engine.generate([Request(prompt=(1, 2, 3), max_new_tokens=4)])]
    assert sizes == [3, 1, 1, 1]


def test_the_recurrence_is_a_scan(recurrent):
    torch.manual_seed(1)
    a, u, before = torch.rand(7, 2, 3), torch.randn(7, 2, 3), torch.randn(2, 3)
    h, expected = before, []
    for t in range(7):
        h = a[t] * h + u[t]
        expected.append(h)
    assert_close(recurrent.scan(a, u, before), torch.stack(expected))


def test_a_network_that_keeps_nothing_recomputes_its_sequences(recurrent):
    kept = with_changes(tiny_spec(), architecture="gpt").network.caches
    assert kept and not recurrent.Network.caches
