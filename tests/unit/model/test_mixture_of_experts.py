"""A layer with experts against one in plain torch, in one process."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from counted_group import CountedGroup
from host_syncs import HostSyncs
from plain_mixture import PlainMixture
from tiny import tiny_plan, tiny_spec
from torch.testing import assert_close

from megatron.model.initialization import initialise
from megatron.model.layers import experts
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.experts import MixtureOfExperts
from megatron.model.layers.moe_aux_loss import AuxiliaryLoss
from megatron.model.layers.parts import LayerParts
from megatron.model.layers.router import Router, count_choices
from megatron.tensor_parallel import grouped_linear
from megatron.tensor_parallel.grouped_linear import Segments, grouped_product

COEFFICIENT = 0.3
LLAMA = {"activation": "swiglu", "linear_bias": False}
SHARED = {"shared_expert_ffn_hidden_size": 12, "expert_ffn_hidden_size": 6}
SIGMOID = {"router_score": "sigmoid", "router_bias": True, "router_scale": 2.5}
BOTH = ("--num-experts", "4", "--expert-interval", "1", "--moe-loss-coeff", str(COEFFICIENT))
ALL_BEST = ("--disable-moe-token-dropping", "--disable-moe-top2-2nd-expert-sampling")


@pytest.fixture
def pair(group):
    """Return a function to our layer, the plain one, and the lists of their balance losses."""

    def build(*flags, capacity=float("inf"), expert_group=None, **changes):
        k = changes.get("experts_per_token", 1)
        changes.setdefault("router_normalises", k > 1)
        spec = tiny_spec(num_experts=(4, 4), **changes)
        plan = tiny_plan(*BOTH, *flags, "--topk", str(k)).experts
        auxiliary, terms = AuxiliaryLoss(spec.moe.num_experts), []
        parts = LayerParts(group=group, core_attention=core_attention_of(spec))
        ours = MixtureOfExperts(
            spec, parts, number=1, plan=plan, expert_group=expert_group, auxiliary=auxiliary
        )
        plain = PlainMixture(spec, parts, number=1, terms=terms, capacity=capacity)
        for layer in (ours, plain):
            initialise(layer, seed=3, std=1.0, num_layers=2)
        with torch.no_grad():
            for layer in (ours, plain):
                named = [*layer.named_parameters(), *layer.named_buffers()]
                for name, p in named:
                    if name.endswith("bias"):
                        p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view_as(p))
        return ours, plain.double(), auxiliary, terms

    return build


def tokens():
    return torch.randn(10, 3, 8, generator=torch.Generator().manual_seed(0))


def leaf(x):
    return x.clone().requires_grad_()


def load_of(auxiliary):
    return auxiliary.take(counts=True, micro_batches=1, device=torch.device("cpu"))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    "changes",
    [{}, {"residual_experts": True}, LLAMA, LLAMA | SHARED, SHARED | SIGMOID],
    ids=["", "residual", "swiglu", "shared", "sigmoid"],
)
def test_outputs_and_gradients_are_those_of_plain_torch(pair, k, changes):
    ours, plain, auxiliary, terms = pair(*ALL_BEST, experts_per_token=k, **changes)
    x, x_64 = leaf(tokens()), leaf(tokens().double())
    (y, bias), (y_64, _) = ours(x), plain(x_64)
    assert bias is None
    assert_close(y.double(), y_64, rtol=1e-4, atol=1e-5)
    pull = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    auxiliary.scale = 0.5
    (0.5 * (y * pull).sum()).backward()
    (0.5 * ((y_64 * pull).sum() + COEFFICIENT * terms[0])).backward()
    assert load_of(auxiliary).loss == pytest.approx(
        COEFFICIENT * float(terms[0].detach()), rel=1e-5
    )
    assert_close(x.grad.double(), x_64.grad, rtol=1e-4, atol=2e-5)
    theirs = dict(plain.named_parameters())
    assert {*theirs} == {name for name, _ in ours.named_parameters()}
    for name, p in ours.named_parameters():
        expected = theirs[name].grad
        assert_close(p.grad.double(), expected, rtol=1e-4, atol=5e-5, msg=lambda m, n=name: n + m)
    assert theirs["router.weight"].grad.abs().max() > 0.01


def test_no_choice_is_dropped_and_the_loads_are_those_of_the_router(pair):
    ours, plain, auxiliary, _ = pair("--moe-grouped-gemm", experts_per_token=2)
    x = tokens()
    ours(x)
    best = (x.double().flatten(0, 1) @ plain.router.weight.T).topk(2).indices
    load = load_of(auxiliary)
    counts = best.flatten().bincount(minlength=4).double()
    assert (load.dropped, float(load.assigned.sum())) == (0, 60)
    assert torch.equal(load.assigned[0], counts)
    assert load.busiest() == pytest.approx(float(counts.max()) / 15)
    assert 0 < load.entropy() < 1
    assert load_of(auxiliary).loss == 0  # the sums begin anew


def test_evaluation_and_recomputation_count_nothing_twice(pair):
    ours, _, auxiliary, _ = pair(*ALL_BEST, experts_per_token=2)
    with torch.no_grad():
        ours(tokens())
    checkpointed(ours, leaf(tokens())).sum().backward()
    assert load_of(auxiliary).assigned.sum() == 60


def test_the_balance_loss_reaches_the_router_through_recomputation(pair):
    gradients = []
    for wrap in (lambda layer, x: layer(x)[0], checkpointed):
        ours, _, auxiliary, _ = pair(*ALL_BEST, experts_per_token=2)
        wrap(ours, leaf(tokens())).sum().backward()
        gradients.append(ours.router.weight.grad)
        assert load_of(auxiliary).loss > COEFFICIENT / 2
    assert_close(gradients[1], gradients[0])
    ours, _, auxiliary, _ = pair(*ALL_BEST, "--moe-loss-coeff", "0", experts_per_token=2)
    ours(leaf(tokens()))[0].sum().backward()
    assert (ours.router.weight.grad - gradients[0]).abs().max() > 1e-3


def checkpointed(layer, x):
    return torch.utils.checkpoint.checkpoint(lambda x: layer(x)[0], x, use_reentrant=True)


@pytest.mark.parametrize(("factor", "least", "capacity"), [(0.5, 1, 8), (0.1, 6, 6)])
def test_of_two_choices_those_that_come_too_late_pass_by(pair, factor, least, capacity):
    # 30 tokens over 4 experts: an even share of the 60 choices is 15.
    flags = ["--moe-eval-capacity-factor", str(factor), "--moe-min-capacity", str(least)]
    ours, plain, _, _ = pair(*flags, experts_per_token=2, capacity=capacity)
    unlimited = pair(*ALL_BEST, experts_per_token=2)[1]
    y, y_64 = ours.eval()(tokens())[0], plain(tokens().double())[0]
    assert_close(y.double(), y_64, rtol=1e-4, atol=1e-5)
    assert (y_64 - unlimited(tokens().double())[0]).abs().max() > 0.1


@pytest.mark.parametrize("trains", [False, True])
def test_of_single_choices_an_expert_takes_as_many_as_it_may(pair, trains):
    flags = ["--moe-expert-capacity-factor", "0.5", "--moe-min-capacity", "1"]
    ours, plain, auxiliary, _ = pair(*flags)
    x = tokens()
    y = ours.train(trains)(x)[0].flatten(0, 1).double()
    full = plain(x.double())[0].flatten(0, 1)
    took = y.abs().sum(-1) > 0
    assert_close(y[took], full[took], rtol=1e-4, atol=1e-5)
    best = (x.double().flatten(0, 1) @ plain.router.weight.T).argmax(-1)
    counts, taken = best.bincount(minlength=4), best[took].bincount(minlength=4)
    assert taken.tolist() == counts.clamp(max=4).tolist()
    assert counts.max() > 4
    assert load_of(auxiliary).dropped == pytest.approx(float((~took).sum()) / 30)


def test_over_the_capacity_the_least_weights_are_dropped(pair):
    flags = ["--moe-expert-capacity-factor", "0.5", "--moe-token-drop-policy", "probs"]
    ours, plain, _, _ = pair(*flags, "--moe-min-capacity", "1")
    x = tokens()
    y = ours(x)[0].flatten(0, 1)
    chances = (x.double().flatten(0, 1) @ plain.router.weight.T).softmax(-1)
    weights, best = chances.max(-1)
    for expert in range(4):
        of_expert = (best == expert).nonzero().flatten()
        ranked = of_expert[weights[of_expert].argsort(descending=True)]
        assert (y[ranked[:4]].abs().sum(-1) > 0).all()
        assert (y[ranked[4:]] == 0).all()


def test_training_draws_the_second_expert_and_evaluation_nothing(pair):
    ours, *_ = pair("--disable-moe-token-dropping", experts_per_token=2)
    before = torch.get_rng_state()
    first = ours.eval()(tokens())[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(ours(tokens())[0], first)
    ours.train()
    outputs = [ours(tokens())[0] for _ in range(4)]
    assert any(not torch.allclose(y, outputs[0]) for y in outputs[1:])


def router_of(*flags, **changes):
    spec = tiny_spec(num_experts=(8, 8), **changes)
    plan = tiny_plan("--num-experts", "8", "--expert-interval", "1", *flags).experts
    auxiliary = AuxiliaryLoss(spec.moe.num_experts)
    router = Router(spec, number=1, plan=plan, auxiliary=auxiliary)
    initialise(router, seed=2, std=1.0, num_layers=2)
    return router, auxiliary


def many(samples=64):
    x = torch.randn(samples, 2, 8, generator=torch.Generator().manual_seed(1))
    return x + torch.linspace(-1, 1, 8)  # so that some experts are far more likely


BIAS = ("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias", "--topk", "2")


def test_the_bias_evens_out_a_skewed_router():
    changes = {"experts_per_token": 2, "router_score": "sigmoid", "router_bias": True}
    router, auxiliary = router_of(*BIAS, "--moe-router-bias-update-rate", "0.01", **changes)
    x, busiest = many(), []
    for _ in range(150):
        weights = router(x).weights
        load = load_of(auxiliary)
        busiest.append(load.busiest())
        router.finish_step(load.assigned[0])
    assert busiest[0] > 2 > 1.4 > max(busiest[-10:])
    # The bias chooses and does not weigh: each token's weights are still its plain scores.
    routing = router(x)
    logits = x.flatten(0, 1) @ router.weight.T
    assert_close(routing.weights, logits.sigmoid().gather(1, routing.experts))
    assert weights.requires_grad


def test_the_bias_moves_by_one_rate_and_stays_in_32_bits():
    changes = {"experts_per_token": 2, "router_score": "sigmoid", "router_bias": True}
    router, _ = router_of(*BIAS, **changes)
    router.finish_step(torch.tensor([0, 5, 10, 5, 5, 5, 5, 5]))
    expected = torch.tensor([1, 0, -1, 0, 0, 0, 0, 0]) * 1e-3
    assert_close(router.expert_bias, expected)
    router.bfloat16()
    assert (router.weight.dtype, router.expert_bias.dtype) == (torch.bfloat16, torch.float32)
    assert_close(router.expert_bias, expected)
    router.weight.requires_grad_(False)  # frozen
    router.finish_step(torch.tensor([0, 5, 10, 5, 5, 5, 5, 5]))
    assert_close(router.expert_bias, expected)


def test_sinkhorn_chooses_evenly_in_training():
    router, _ = router_of("--moe-router-load-balancing-type", "sinkhorn", "--topk", "1")
    x = many()
    chosen = (router.train(train)(x).experts for train in (True, False))
    even, plain = (count_choices(experts, 8) for experts in chosen)
    assert plain.max() > 32
    assert even.max() < 24  # an even share of the 128 tokens is 16


def test_groups_limit_the_experts_of_a_token():
    changes = {"experts_per_token": 2, "router_groups": 4, "router_groups_per_token": 1}
    router, _ = router_of(
        *("--moe-router-num-groups", "4", "--moe-router-group-topk", "1"), **changes
    )
    experts = router(many()).experts
    assert torch.equal(experts[:, 0] // 2, experts[:, 1] // 2)
    logits = many().flatten(0, 1) @ router.weight.T
    best = logits.softmax(-1).view(-1, 4, 2).sum(-1).argmax(-1)
    assert torch.equal(experts[:, 0] // 2, best)


def test_the_loss_of_a_global_batch_takes_the_choices_of_the_step_so_far():
    flags = ("--moe-router-load-balancing-type", "global_aux_loss", "--moe-loss-coeff", "1")
    router, auxiliary = router_of(*flags)
    batches = [many()[:, :1], many()[:16, 1:].repeat(4, 1, 1), -many()[:, 1:]]
    shares, means, losses = [], [], []
    for x in batches:
        experts = router(x).experts
        losses.append(load_of(auxiliary).loss)
        shares.append(count_choices(experts, 8) / 64)
        means.append((x.flatten(0, 1) @ router.weight.T).softmax(-1).mean(0))
    for step in range(3):
        so_far = torch.stack(shares[: step + 1]).mean(0)
        assert losses[step] == pytest.approx(float(8 * (so_far * means[step]).sum()), rel=1e-5)
    # Neither evaluation nor the steps before count.
    with torch.no_grad():
        router(batches[0])
    router.finish_step(count_choices(experts, 8))
    router(batches[2])
    assert load_of(auxiliary).loss == pytest.approx(
        float(8 * (shares[2] * means[2]).sum()), rel=1e-5
    )


def test_the_loss_of_sequences_is_the_mean_of_theirs():
    router, auxiliary = router_of(
        *("--moe-router-load-balancing-type", "seq_aux_loss"), *("--moe-loss-coeff", "1")
    )
    losses = []
    for sample in (slice(0, 1), slice(1, 2), slice(0, 2)):
        router(many()[:, sample])
        losses.append(load_of(auxiliary).loss)
    assert losses[2] == pytest.approx((losses[0] + losses[1]) / 2)
    router, auxiliary = router_of("--moe-loss-coeff", "1")
    router(many())
    assert load_of(auxiliary).loss != pytest.approx(losses[2], rel=1e-3)


def test_the_z_loss_is_the_mean_square_of_the_log_of_the_sum():
    router, auxiliary = router_of("--moe-z-loss-coeff", "0.5", "--moe-loss-coeff", "0")
    auxiliary.scale = 1.0
    router(many()).weights.sum().mul(0).backward()
    weight = router.weight.detach().clone().requires_grad_()
    z_loss = 0.5 * (many() @ weight.T).logsumexp(-1).square().mean()
    z_loss.backward()
    assert load_of(auxiliary).loss == pytest.approx(float(z_loss), rel=1e-5)
    assert_close(router.weight.grad, weight.grad)


def test_jitter_changes_the_choice_in_training_only():
    router, _ = router_of("--moe-input-jitter-eps", "0.5")
    weights = router(many()).weights
    assert not torch.equal(router(many()).weights, weights)
    router.eval()
    assert torch.equal(router(many()).weights, router(many()).weights)


def test_grouped_products_are_those_of_a_loop():
    x, weight = torch.randn(10, 8).bfloat16(), torch.randn(3, 16, 8).bfloat16()
    segments = Segments(torch.tensor([3, 0, 7]), 10)
    ours = grouped_product(x, weight.mT, None, segments)
    assert_close(ours, torch.cat([x[:3] @ weight[0].T, x[3:] @ weight[2].T]))
    # What GPUs call takes the same arguments.
    assert_close(F.grouped_mm(x, weight.mT, offs=segments.ends), ours, rtol=2e-2, atol=2e-2)


@pytest.fixture
def kernel(monkeypatch):
    """The products of a GPU in bf16."""
    monkeypatch.setattr(grouped_linear, "has_kernel", lambda *_: True)
    monkeypatch.setattr(experts, "has_kernel", lambda *_: True)


def test_rows_after_the_last_group_do_not_count(kernel):
    x, weight = torch.randn(10, 8).bfloat16(), torch.randn(3, 8, 16).bfloat16()
    bias, segments = torch.randn(3, 16).bfloat16(), Segments(torch.tensor([3, 0, 5]), 10)
    y = grouped_product(x, weight, bias, segments)
    assert_close(y[:3], x[:3] @ weight[0] + bias[0], rtol=2e-2, atol=5e-2)
    assert_close(y[3:8], x[3:8] @ weight[2] + bias[2], rtol=2e-2, atol=5e-2)
    assert y.isfinite().all()


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("flags", [(), ("--disable-moe-token-dropping",)], ids=["", "all"])
@pytest.mark.parametrize(("ranks", "waits"), [(1, 0), (2, 1)])
def test_host_waits_of_a_forward_and_backward_pass(pair, kernel, ranks, waits, flags, k):
    group = CountedGroup(ranks) if ranks > 1 else None
    ours, *_ = pair(*flags, expert_group=group, experts_per_token=k)
    ours.bfloat16()
    x = leaf(tokens().bfloat16())
    with HostSyncs() as syncs:
        ours(x)[0].sum().backward()
    assert syncs.found.total() == waits, syncs.found


def test_the_number_of_computed_rows_does_not_depend_on_the_choices(pair, kernel):
    computed = []
    for factor in ("0.5", "1", "4"):
        flags = ("--moe-expert-capacity-factor", factor, "--moe-min-capacity", "1")
        ours, *_ = pair(*flags, experts_per_token=2)
        ours.bfloat16().experts.register_forward_hook(
            lambda _, inputs, y: computed.append((len(y), inputs[1].rows))
        )
        for x in (tokens(), torch.ones(10, 3, 8)):
            ours(x.bfloat16())
    # Of 60 choices; 4 experts have room for 8, 15 and 60 each.
    assert computed == [(32, 32)] * 2 + [(60, 60)] * 4


@pytest.mark.parametrize(
    "flags",
    [("--moe-token-drop-policy", "probs", *ALL_BEST[1:]), ALL_BEST],
    ids=["capacity", "all"],
)
def test_tensor_ranks_that_divide_the_sequence_send_their_own_tokens(flags):
    """Bytes over the expert group: half with two such ranks, an eighth with eight."""
    spec = tiny_spec(num_experts=(4, 4), experts_per_token=2, router_normalises=True)
    plan = tiny_plan(*BOTH, *flags, "--topk", "2").experts
    # Tokens that choose all experts equally often: the first and the one after.
    first = torch.eye(8)[:4].repeat(16, 1).view(16, 4, 8)
    x = 2 * first + first.roll(-1, 1)
    for ranks in (1, 2, 8):
        tensor, divided = CountedGroup(ranks), CountedGroup(2)
        core = core_attention_of(spec)
        parts = LayerParts(group=tensor, core_attention=core, sequence_parallel=ranks > 1)
        layer = MixtureOfExperts(spec, parts, number=1, plan=plan, expert_group=divided)
        initialise(layer, seed=3, std=1.0, num_layers=2)
        with torch.no_grad():
            layer.router.weight.copy_(torch.eye(8)[:4])
        with HostSyncs() as syncs:
            layer(leaf(x[: 16 // ranks]))[0].sum().backward()
        choices, row = 16 * 4 * 2, 8 * 4
        # To the experts and back, forward and backward.
        assert divided.bytes == {"all-to-all": 4 * choices * row // ranks}
        assert syncs.found.total() == 1


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("factor", ["0.4", "1"])
def test_padding_of_a_capacity_changes_nothing(pair, monkeypatch, factor, k):
    """Whether rows are padded, as for the kernel of GPUs, or cut."""
    flags = ["--moe-expert-capacity-factor", factor, "--moe-min-capacity", "1"]
    pull = torch.randn(10, 3, 8, generator=torch.Generator().manual_seed(1))
    found = []
    for is_padded in (False, True):
        ours, *_ = pair(
            *flags, "--moe-token-drop-policy", "probs", *ALL_BEST[1:], experts_per_token=k
        )
        if is_padded:
            monkeypatch.setattr(ours.experts, "takes_padding", lambda x: True)
            monkeypatch.setattr(grouped_linear, "grouped_product", padded_product)
        x = leaf(tokens())
        y = ours(x)[0]
        (y * pull).sum().backward()
        found.append([y, x.grad, *(p.grad for p in ours.parameters())])
    assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def padded_product(x, weight, bias, segments):
    """What the kernel computes, in fp32."""
    numbers = segments.numbers
    return torch.bmm(x[:, None], weight[numbers]).squeeze(1) + bias[numbers]


def test_an_expert_without_tokens_has_a_gradient_of_zero(pair):
    ours, *_ = pair(*ALL_BEST)
    with torch.no_grad():
        ours.router.weight[3] = 0
        ours.router.weight[:3] = torch.eye(8)[:3]
    x = torch.eye(8)[torch.tensor([0, 1, 2])].view(3, 1, 8) * 5
    ours(x)[0].sum().backward()
    grad = ours.experts.dense_h_to_4h.weight.grad
    assert (grad[3] == 0).all()
    assert (grad[:3] != 0).any()


def test_counts_are_those_of_the_choices():
    experts = torch.tensor([[0, 2], [2, 1], [2, 0]])
    assert count_choices(experts, 4).tolist() == [2, 1, 3, 0]


def test_initial_weights_of_experts_do_not_depend_on_their_ranks(group):
    spec = tiny_spec(num_experts=(4, 4), **LLAMA)
    parts = LayerParts(group=group, core_attention=core_attention_of(spec))
    full = MixtureOfExperts(spec, parts, number=1)
    initialise(full, seed=3, std=1.0, num_layers=2)
    for index in range(2):
        rank = SimpleNamespace(size=lambda: 2, rank=lambda index=index: index)
        half = MixtureOfExperts(spec, parts, number=1, expert_group=rank)
        initialise(half, seed=3, std=1.0, num_layers=2)
        for name, p in half.experts.named_parameters():
            expected = full.experts.get_parameter(name).chunk(2)[index]
            assert torch.equal(p, expected), name
