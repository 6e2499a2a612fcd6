"""Every option of the network changes each network that accepts it; the others refuse it."""

import shlex

import pytest
import torch
from options import BASE, EXPERTS, LORA, MODEL, Turned
from problems import problem
from tiny import with_changes

from megatron.common.errors import ConfigError
from megatron.config.architecture.architecture import network_named, network_of
from megatron.config.architecture.options import ignored_options
from megatron.config.config import parse_config
from megatron.config.network.model_spec import flat
from megatron.config.plan.plan import plan
from megatron.model.initialization import initialise
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.parts import LayerParts
from megatron.tensor_parallel.rng import OrdinaryStream

VOCAB = 60
NETWORKS = {
    "gpt": ("gpt", ""),
    "prefix LM": ("prefix_lm", ""),
    "bert": ("bert", ""),
    "t5": ("t5", "--decoder-seq-length 12"),
    "retro": ("retro", "--num-layers 7 --retro-add-retriever --retro-chunk-length 4"),
    "classifier": ("classification", "--task QNLI --train-data a --valid-data b"),
    "classifier of a decoder": (
        "gpt-classification",
        "--task text-classification --train-data a --labels x y",
    ),
}
OPTIONS = {
    name: entry
    for name, entry in {**MODEL, **LORA, **EXPERTS}.items()
    if isinstance(entry, Turned) and entry.ranks == 1
}
NO_EFFECT = {
    "apply_query_key_layer_scaling": "the result is the same",
    "final_logit_softcapping classifier": "a checkpoint's own head has it, which a task replaces",
    "final_logit_softcapping classifier of a decoder": "the same",
    "logits_scaling classifier of a decoder": "the same",
    "mtp_loss_scaling_factor": "the loss has it, not the network",
    **dict.fromkeys(
        ("moe_router_group_best bert", "moe_router_group_best classifier"),
        "the few tokens here get the same experts",
    ),
}


def model_plan(network, flags):
    objective, own = NETWORKS[network]
    words = shlex.split(BASE.replace("{files}/corpus", "corpus").replace("{run}", "run"))
    if "classification" in objective:
        where = words.index("--data-path")
        del words[where : where + 2]
    # The network's own flags first: of the same flag, the last one counts.
    return plan(
        parse_config([*words, *shlex.split(own), *shlex.split(flags)])[0],
        world_size=1,
        vocab_size=VOCAB,
        device="cpu",
        objective=objective,
    )


def batch_of(spec):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randint(VOCAB, shape, generator=generator)

    b, s = 2, spec.seq_length
    own = flat(spec)
    chunks = s // own["retro_chunk_length"] if own["retro_layers"] else 1
    k, r = own["retro_num_neighbors"], own["retro_retrieved_length"]
    return {
        "tokens": draw(b, s),
        "positions": torch.arange(s).expand(b, s),
        "token_types": torch.zeros(b, s, dtype=torch.long),
        "attention_span": torch.tensor([[[0, s - 1]]]).expand(b, 1, 2),
        "lengths": torch.full((b,), s - 1),
        "decoder_tokens": draw(b, own["decoder_seq_length"]),
        "neighbor_tokens": draw(b, chunks, k, r),
        "neighbor_lengths": torch.full((b, chunks, k), r),
    }


def seen_of(decided, group, *, bf16):
    """Return names, shapes and values of the weights, and the output in training."""
    spec, network = decided.model, network_of(decided.model)
    batch = batch_of(spec)
    if not network.masks_padding:
        del batch["attention_span"]
    parts = LayerParts(
        group=group,
        rng=OrdinaryStream(),
        core_attention=core_attention_of(spec),
        batch_fields=tuple(batch),
    )
    model = SequentialModel(network.layers(spec, parts))
    initialise(
        model, seed=1, std=spec.init_std, num_layers=spec.num_layers, xavier=spec.init != "normal"
    )
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.ones_(parameter)
    model = model.bfloat16() if bf16 else model
    torch.manual_seed(0)
    output = model.train()(batch)
    outputs = output if isinstance(output, tuple) else (output,)
    floats = [x.float() for x in outputs if x is not None]
    sum(x.square().sum() for x in floats).backward()
    return {
        "gradients": [float(p.grad.double().abs().sum()) for p in model.parameters() if bf16],
        "weights": {
            n: (p.shape, float(p.double().abs().sum())) for n, p in model.named_parameters()
        },
        "buffers": [name for name, _ in model.named_buffers()],
        "output": [x.detach().tolist() for x in outputs if x is not None],
    }


@pytest.fixture(scope="module")
def bases():
    """What is seen of networks without an option, by network and flags."""
    return {}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_seen_or_refused(name, network, group, bases):
    entry = OPTIONS[name]
    try:
        turned = model_plan(network, f"{entry.on} {entry.flags}")
    except ConfigError:
        assert network != "gpt" or entry.says
        return
    if entry.on_says:
        with problem(entry.on_says):
            model_plan(network, entry.on)
        return
    base = model_plan(network, entry.on)
    if name in EXPERTS and turned.model == base.model:
        assert turned.experts != base.experts
        return
    if not {name, f"{name} {network}"} & {*NO_EFFECT}:
        bf16 = "--bf16" in entry.on
        if (network, entry.on) not in bases:
            bases[network, entry.on] = seen_of(base, group, bf16=bf16)
        assert seen_of(turned, group, bf16=bf16) != bases[network, entry.on]


def test_networks_that_share_layers_still_refuse_what_they_do_not_read():
    for network in NETWORKS:
        if network in ("t5", "retro"):
            for flags in ("--num-experts 2", "--sandwich-norm", "--parallel-residual"):
                with problem(f"{flags.split()[0]} … leave it out"):
                    model_plan(network, flags)
    with problem("--window-size … decoders … leave it out"):
        model_plan("bert", "--window-size 4")


def test_an_option_that_a_network_does_not_name_is_refused(monkeypatch):
    """As is one that is added later: nothing lists what a network lacks."""
    model_plan("t5", "--qk-layernorm")
    network = network_named("t5")
    monkeypatch.setattr(network, "options", network.options - {"qk_layernorm"})
    with problem("--qk-layernorm … encoder … leave it out"):
        model_plan("t5", "--qk-layernorm")


def test_options_are_fields_of_networks():
    spec = model_plan("gpt", "").model
    names = flat(spec).keys()
    known = [network_named(name).options for name in ("gpt", "bert", "t5", "retro")]
    assert all(options <= names for options in known)
    changed = with_changes(spec, num_experts=(2, 2), router_normalises=True)
    assert ignored_options(changed, spec, network_named("t5").options) == ["num_experts"]
