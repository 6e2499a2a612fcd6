"""What a network says of itself is what its layers are; a network of a plugin is one like the others."""

from dataclasses import dataclass, replace

import pytest
import torch
from problems import problem
from scripts import forget_plugin
from tiny import tiny_plan, with_changes

from megatron.checkpointing.hugging_face.families.registry import family_of
from megatron.checkpointing.megatron_lm.networks import form_of
from megatron.checkpointing.parameter_names import ParameterNames
from megatron.common.errors import CheckpointError
from megatron.common.registry import NETWORKS
from megatron.config.architecture.architecture import import_dotted, network_named, network_of
from megatron.config.network.model_spec import flat, spec_of
from megatron.config.network_contract import Network
from megatron.model.gpt import gpt_layers
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import Layer, SequentialModel
from megatron.model.layers.parts import LayerParts
from megatron.planner.memory import memory_of_stages

FLAGS = {
    "t5": ("--decoder-num-layers", "3", "--decoder-seq-length", "4"),
    "retro": ("--num-layers", "9", "--retro-add-retriever", "--retro-chunk-length", "3"),
}
BUILT_IN = ("gpt", "bert", "t5", "retro")


def plan_of(name, *flags):
    return tiny_plan(*FLAGS.get(name, ()), *flags, objective=name)


def steps_of(spec, group):
    return network_of(spec).layers(
        spec, LayerParts(group=group, core_attention=core_attention_of(spec))
    )


def test_networks_are_found_in_the_core_and_in_extensions():
    assert [NETWORKS.extension_with(name) for name in BUILT_IN] == ["", *BUILT_IN[1:]]
    assert [network_named(name).name for name in BUILT_IN] == [*BUILT_IN]


@pytest.mark.parametrize("tied", [(), ("--untie-embeddings-and-output-weights",)])
@pytest.mark.parametrize("name", BUILT_IN)
def test_entries_are_the_layers_and_have_their_weights(name, tied, group):
    if tied and name == "t5":
        pytest.skip("its embeddings are tied")
    spec = plan_of(name, *tied).model
    with torch.device("meta"):
        steps = steps_of(spec, group)
        held = {n: p.numel() for n, p in SequentialModel(steps).named_parameters()}
    entries = network_of(spec).entries(spec)
    names = [(step.cls if isinstance(step, Layer) else step).__name__ for step in steps]
    assert [entry.name for entry in entries] == names
    for index, entry in enumerate(entries):
        if not entry.tie:
            own = [count for n, count in held.items() if n.startswith(f"{index}.")]
            assert entry.weights.total == sum(own), entry.name
    assert spec.num_parameters == sum(held.values())


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_it_names_exists(name):
    network = network_named(name)
    assert form_of(name) is not None
    assert network.use.startswith("tools/")
    assert not network.extends or network.extends in NETWORKS
    assert callable(import_dotted(network.batch_in))


def test_the_flags_of_another_network_are_refused():
    for flags in FLAGS.values():
        with problem("pretrain_"):
            tiny_plan(*flags)


@pytest.fixture
def wide():
    """Register a network of a plugin, with the layers of a GPT."""

    @NETWORKS.register("wide")
    class Wide(Network):
        name = "wide"
        service = "prompts"

        def layers(self, spec, parts):
            return gpt_layers(spec, parts)

    yield "wide"
    forget_plugin("", NETWORKS, "wide")


def test_a_plugins_network_is_trained_in_place_of_that_of_the_objective(wide, group):
    plan = tiny_plan("--network", wide)
    assert (plan.model.architecture, plan.objective.name) == (wide, "gpt")
    with torch.device("meta"):
        model = SequentialModel(steps_of(plan.model, group))
    assert plan.model.num_parameters == sum(p.numel() for p in model.parameters())
    names = ParameterNames.of(plan.model)
    assert names.parameter(names.module("3.mlp.dense_h_to_4h.weight")).startswith("3.")


@dataclass(frozen=True, kw_only=True)
class Scale:
    scale_of_stream: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Renamed:
    hidden_size: int = 1


def test_a_plugins_network_is_its_own_with_or_without_its_part(wide):
    network = NETWORKS.get_class(wide)
    own = Scale(scale_of_stream=0.5)
    network.spec = lambda self, plain, config: replace(plain, own=own)
    with problem("Scale … `own` … `part`"):
        tiny_plan("--network", wide)
    network.part = Scale
    spec = tiny_plan("--network", wide).model
    assert (spec.architecture, spec.own) == (wide, own)
    assert spec_of(flat(spec)) == spec


def test_a_plugins_network_that_contradicts_itself_is_refused(wide):
    network = NETWORKS.get_class(wide)
    own = Renamed(hidden_size=3)
    network.spec = lambda self, plain, config: replace(plain, own=own)
    network.part = Renamed
    with problem("hidden_size"):
        tiny_plan("--network", wide)
    network.name = ""
    with problem("write name = 'wide'"):
        tiny_plan("--network", wide)
    with problem("define layers"):
        Network().layers(spec=None, parts=None)


def test_a_plugins_network_says_what_its_layers_keep(wide):
    plan = tiny_plan("--network", wide)
    (before,) = memory_of_stages(plan)

    def kept_bytes(self, entry, sizes):
        more = sizes.tokens * 1000 if entry.kind == "block" else 0
        return Network.kept_bytes(self, entry, sizes) + more

    NETWORKS.get_class(wide).kept_bytes = kept_bytes
    (after,) = memory_of_stages(plan)
    tokens = plan.batch.micro_batch_size * plan.model.seq_length
    assert after.activations - before.activations == plan.model.num_layers * tokens * 1000


def test_the_embeddings_of_both_stacks_drop_features():
    kept = [
        memory_of_stages(plan_of("t5", "--hidden-dropout", p))[0].activations for p in ("0", "0.1")
    ]
    plan = plan_of("t5")
    length = plan.model.seq_length + plan.model.own.decoder_seq_length
    tokens = plan.batch.micro_batch_size * length
    masks = (kept[1] - kept[0]) / plan.model.hidden_size
    assert masks == tokens  # a byte each; kernels draw those of the layers again


def test_a_plugins_network_is_no_other_programs(wide):
    spec = replace(tiny_plan().model, architecture=wide)
    assert form_of(wide) is None
    with problem("transformers has no wide", CheckpointError):
        family_of(spec)
    with problem("task … WIDE"):
        _ = replace(with_changes(tiny_plan().model, num_outputs=2), architecture=wide).network


def test_a_network_that_the_objective_does_not_train_is_refused():
    with problem("--network bert … objective gpt"):
        tiny_plan("--network", "bert")
