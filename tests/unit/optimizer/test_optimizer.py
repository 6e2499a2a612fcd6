"""Which optimizer, which parameters it decays, and its steps against loops in 64 bits."""

import pytest
import torch
from networks import gpt_steps
from problems import problem
from tiny import tiny_plan, tiny_spec
from torch import nn

from megatron.engine.freezing import freeze
from megatron.model.layers.layer_list import SequentialModel
from megatron.optimizer.build import build_optimizer
from megatron.optimizer.muon import orthogonalize
from megatron.optimizer.param_groups import in_buckets, param_groups
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.tensor_parallel.sharding import mark_transposed


@pytest.fixture
def model(group):
    return SequentialModel(gpt_steps(tiny_spec(), group=group, rng=OrdinaryStream(), mixed=False))


def test_matrices_are_decayed_biases_and_norms_are_not(model):
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    decayed, kept = param_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {name_of[p].split(".", 1)[1] for p in decayed["params"]} == {
        "embed.word_embeddings.weight",
        "embed.position_embeddings.weight",
        "self_attention.query_key_value.weight",
        "self_attention.dense.weight",
        "mlp.dense_h_to_4h.weight",
        "mlp.dense_4h_to_h.weight",
    }
    names = [name_of[p] for p in kept["params"]]
    assert all("layernorm" in n or n.endswith("bias") or n.startswith("6.") for n in names)


def test_every_parameter_is_in_one_group(model):
    grouped = [p for group in param_groups(model, 0.1) for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, model.parameters()))


def test_frozen_parameters_are_left_out(model):
    model.tied_modules["embed"].requires_grad_(False)
    grouped = [p for group in param_groups(model, 0.1) for p in group["params"]]
    assert not {*grouped} & {*model.tied_modules["embed"].parameters()}


def test_the_matrices_of_layers_are_muons_embeddings_are_not(model):
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    layers, embeddings, rest = param_groups(model, 0.1, muon=True)
    assert [g["orthogonal"] for g in (layers, embeddings, rest)] == [True, False, False]
    assert [g["wd_mult"] for g in (layers, embeddings, rest)] == [1.0, 1.0, 0.0]
    assert {name_of[p].split(".")[0] for p in layers["params"]} == {"3", "4"}
    assert all(p.dim() == 2 for p in layers["params"])
    assert all("embeddings" in name_of[p] for p in embeddings["params"])
    assert all(p.dim() == 1 for p in rest["params"])


def test_bitfit_trains_the_biases_alone(model, group):
    plan = tiny_plan("--bitfit").optimizer
    freeze(model, plan)
    optimizer = build_optimizer(model, plan, 0.1, tensor_group=group)
    trained = {p for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        assert (parameter in trained) == parameter.requires_grad == name.endswith("bias"), name


def test_each_matrix_of_experts_is_made_orthogonal_by_itself(group):
    plan = tiny_plan("--optimizer", "muon", "--muon-scale-mode", "unit_rms_norm").optimizer
    matrices = torch.randn(3, 4, 6)
    experts = nn.Module()
    experts.weight, experts.narrowing = (nn.Parameter(matrices.clone()) for _ in range(2))
    mark_transposed(experts.narrowing)
    optimizer = build_optimizer(experts, plan, 0.1, tensor_group=group)
    gradients = torch.randn(3, 4, 6)
    for p in experts.parameters():
        p.grad = gradients.clone()
    optimizer.step()
    group = optimizer.param_groups[0]
    kept = matrices * (1 - group["lr"] * group["weight_decay"])
    for p, ratio in ((experts.weight, 4 / 6), (experts.narrowing, 6 / 4)):
        for number, gradient in enumerate(gradients):
            moved = kept[number] - 0.1 * ratio**0.5 * orthogonalize(gradient, 5, torch.float32)
            torch.testing.assert_close(p[number].detach(), moved)


LR = 0.1
STEPS = 5
CASES = {
    "adam": "--adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-3",
    "adamw": "--adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-3",
    "fused_adam": "--adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-3",
    "sgd": "--sgd-momentum 0.7",
    "lion": "--lion-beta1 0.8 --lion-beta2 0.9",
    "muon": "--muon-momentum 0.8 --adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-3",
    "dist_muon": "--muon-momentum 0.8 --muon-nesterov --muon-scale-mode unit_rms_norm "
    "--muon-num-ns-steps 3 --muon-extra-scale-factor 0.2 "
    "--adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-3",
}


class Network(nn.Module):
    """One parameter of each kind."""

    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(7, 4)
        self.wide, self.tall = nn.Linear(6, 4), nn.Linear(4, 6)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_a_loop_in_64_bits(name, group):
    torch.manual_seed(0)
    network = Network()
    start = {key: p.detach().double() for key, p in network.named_parameters()}
    flags = ["--optimizer", name, "--weight-decay", "0.2", *CASES[name].split()]
    optimizer = build_optimizer(network, tiny_plan(*flags).optimizer, LR, tensor_group=group)
    gradients = [{k: torch.randn_like(p) for k, p in start.items()} for _ in range(STEPS)]
    for step in gradients:
        for key, p in network.named_parameters():
            p.grad = step[key].float()
        optimizer.step()
    for key, p in network.named_parameters():
        expected = reference(name, key, start[key], [g[key].float().double() for g in gradients])
        torch.testing.assert_close(p.detach().double(), expected, rtol=1e-4, atol=1e-5, msg=key)


def reference(name, key, weight, gradients):
    """Return `weight` after all `gradients`, by the loop of the named optimizer."""
    decay = 0.2 if weight.dim() > 1 else 0.0
    if name == "sgd":
        return sgd(weight, gradients, decay=decay)
    if name == "lion":
        return lion(weight, gradients, decay=decay)
    if name.endswith("muon") and weight.dim() > 1 and "embeddings" not in key:
        if name == "muon":
            scale = max(weight.shape) ** 0.5
            return muon(weight, gradients, decay=decay, scale=scale, steps=5)
        scale = 0.2 * (weight.size(0) / weight.size(1)) ** 0.5
        return muon(weight, gradients, decay=decay, scale=scale, steps=3, nesterov=True)
    return adamw(weight, gradients, decay=decay)


def adamw(weight, gradients, *, decay, beta1=0.8, beta2=0.9, eps=1e-3):
    """Algorithm 2 of arXiv:1711.05101."""
    mean = square = torch.zeros_like(weight)
    for t, gradient in enumerate(gradients, start=1):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        root = (square / (1 - beta2**t)).sqrt() + eps
        weight = weight - LR * decay * weight - LR * mean / (1 - beta1**t) / root
    return weight


def sgd(weight, gradients, *, decay, momentum=0.7):
    velocity = torch.zeros_like(weight)
    for gradient in gradients:
        velocity = momentum * velocity + gradient + decay * weight
        weight = weight - LR * velocity
    return weight


def lion(weight, gradients, *, decay, beta1=0.8, beta2=0.9):
    """Algorithm 2 of arXiv:2302.06675."""
    mean = torch.zeros_like(weight)
    for gradient in gradients:
        direction = torch.sign(beta1 * mean + (1 - beta1) * gradient)
        mean = beta2 * mean + (1 - beta2) * gradient
        weight = weight - LR * (direction + decay * weight)
    return weight


def muon(weight, gradients, *, decay, scale, steps, momentum=0.8, nesterov=False):
    """The loop of Jordan et al. 2024 on singular values: each iteration is a polynomial of them."""
    velocity = torch.zeros_like(weight)
    for gradient in gradients:
        velocity = momentum * velocity + gradient
        ahead = gradient + momentum * velocity if nesterov else velocity
        u, s, vt = torch.linalg.svd(ahead, full_matrices=False)
        s = s / s.norm()
        for _ in range(steps):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        weight = weight - LR * decay * weight - LR * scale * u @ torch.diag(s) @ vt
    return weight


@pytest.mark.parametrize("shape", [(8, 8), (5, 20), (20, 5)])
def test_a_muon_step_is_nearly_orthogonal(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape), 5, torch.float32))
    assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize(
    ("flags", "module", "kind"),
    [
        ("--optimizer-impl apex", "apex.optimizers", "FusedAdam"),
        ("--use-bnb-optimizer", "bitsandbytes.optim", "AdamW8bit"),
        ("--optimizer adam8bit", "bitsandbytes.optim", "AdamW8bit"),
    ],
)
def test_optimizers_of_other_packages_are_taken_when_they_are_there(
    flags, module, kind, group, modules
):
    class Theirs(torch.optim.AdamW):
        def __init__(self, groups, lr, betas, eps, adam_w_mode=True):
            super().__init__(groups, lr=lr, betas=betas, eps=eps)

    modules(module, **{kind: Theirs})
    plan = tiny_plan(*flags.split(), "--adam-beta2", "0.7", device="cuda").optimizer
    optimizer = build_optimizer(nn.Linear(3, 2), plan, 0.3, tensor_group=group)
    assert type(optimizer) is Theirs
    assert {(g["lr"], g["betas"]) for g in optimizer.param_groups} == {(0.3, (0.9, 0.7))}


@pytest.mark.parametrize(
    ("flags", "module"),
    [("--optimizer-impl apex", "apex.optimizers"), ("--use-bnb-optimizer", "bitsandbytes.optim")],
)
@pytest.mark.parametrize("is_another_package", [True, False])
def test_a_module_that_is_not_there_is_told(flags, module, is_another_package, modules):
    modules(module.partition(".")[0], **({"__path__": []} if is_another_package else {}))
    with problem(f"{module} … --optimizer-impl torch"):
        tiny_plan(*flags.split(), device="cuda")


def test_the_embedding_and_an_untied_output_layer_have_a_learning_rate_of_their_own(group):
    steps = gpt_steps(
        tiny_spec(tied_embeddings=False), group=group, rng=OrdinaryStream(), mixed=False
    )
    model = SequentialModel(steps)
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    groups = param_groups(model, 0.1, embeddings_apart=True)
    (apart,) = (each for each in groups if each.get("embedding"))
    assert len(apart["params"]) == 2
    assert all(name_of[p].endswith("word_embeddings.weight") for p in apart["params"])
    assert sorted(id(p) for each in groups for p in each["params"]) == sorted(map(id, name_of))


def test_the_norms_of_queries_and_keys_decay_where_asked(group):
    steps = gpt_steps(tiny_spec(qk_layernorm=True), group=group, rng=OrdinaryStream(), mixed=False)
    model = SequentialModel(steps)
    name_of = {parameter: name for name, parameter in model.named_parameters()}

    def decayed(**how):
        groups = param_groups(model, 0.1, **how)
        return {name_of[p] for each in groups if each["wd_mult"] for p in each["params"]}

    more = decayed(decays_qk_norms=True) - decayed()
    assert more
    assert all(".q_layernorm." in name or ".k_layernorm." in name for name in more)
    assert len(more) == sum(
        "_layernorm." in n and ("q_" in n or "k_" in n) for n in name_of.values()
    )


@pytest.mark.parametrize(
    ("size", "alone", "expected"),
    [
        (100, (), [[0, 1, 2, 3], [4]]),
        (5, (), [[0], [1, 2], [3], [4]]),
        (1, (), [[0], [1], [2], [3], [4]]),
        (100, (1,), [[0], [1], [2, 3], [4]]),
        (100, (0, 3), [[0], [1, 2], [3], [4]]),
    ],
)
def test_buckets_are_consecutive_whole_parameters_from_the_end(size, alone, expected):
    weights = [nn.Parameter(torch.empty(n)) for n in (4, 2, 3, 7, 1)]
    groups = [{"params": weights[:4], "wd_mult": 1.0}, {"params": weights[4:], "wd_mult": 0.0}]
    buckets = in_buckets(groups, size, frozenset(weights[n] for n in alone))
    numbers = {weight: number for number, weight in enumerate(weights)}
    assert [[numbers[p] for p in bucket["params"]] for bucket in buckets] == expected
    assert [bucket["wd_mult"] for bucket in buckets] == [1.0] * (len(expected) - 1) + [0.0]
