"""Hybrid networks: layers of a pattern, documents, initial values, layouts, weights, and wrong flags."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import spread_network
from family_ranks import compare_families
from networks import gpt_steps
from problems import problem, require_problem
from ranks import run_on_ranks
from tiny import Shards, tiny_plan

from megatron.config.data.masks import MaskPlan
from megatron.config.inference.generation import layout_problems
from megatron.config.network.model_problems import fp8_size_problems
from megatron.config.parallelism.layout import ParallelConfig
from megatron.config.parallelism.precision import PrecisionConfig
from megatron.config.parallelism.recompute_plan import NOTHING
from megatron.extensions.hybrid.gated_attention import GatedAttention
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.objectives.gpt import gpt_batch
from megatron.optimizer.param_groups import param_groups
from megatron.planner.devices import device_of
from megatron.planner.speed import speed_of
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.tensor_parallel.sharding import shard_of

SIZES = (
    *("--network", "hybrid", "--position-embedding-type", "none", "--hidden-size", "16"),
    *("--mamba-head-dim", "4", "--mamba-num-groups", "2", "--mamba-state-dim", "3"),
    *("--linear-key-head-dim", "8", "--linear-value-head-dim", "5", "--seq-length", "20"),
    *("--linear-num-key-heads", "2", "--linear-num-value-heads", "4"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--make-vocab-size-divisible-by", "1"),
)
EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2")
ISOLATED = MaskPlan(reset_positions=True, isolate_documents=True, mask_loss=False)
EOD = 9


def of_pattern(pattern, *flags, world_size=1):
    own = (*SIZES, f"--hybrid-layer-pattern={pattern}", "--num-layers", str(len(pattern)))
    experts = EXPERTS if "E" in pattern else ()
    return tiny_plan(*own, *experts, *flags, vocab_size=30, world_size=world_size).model


def test_two_ranks_compute_what_one_process_computes(tmp_path: Path) -> None:
    specs = {pattern: of_pattern(pattern) for pattern in ("MG*-E", "GM")}
    run_on_ranks(2, compare_families, tmp_path, specs, torch.float64)


@pytest.mark.parametrize("pattern", ["MG", "MG*-E"])
def test_a_document_in_a_sample_is_computed_as_if_it_were_alone(group, pattern):
    # Documents across the borders of chunks, and several in a chunk.
    lengths = (1, 2, 70, 3, 5, 60, 8)
    generator = torch.Generator().manual_seed(5)
    documents = [torch.randint(10, 30, (length,), generator=generator) for length in lengths]
    for document in documents:
        document[-1] = EOD
    model = spread_network(of_pattern(pattern, "--seq-length", "150"), group).double()
    tokens = torch.cat([*documents, torch.tensor([3])])[None]
    packed = model(gpt_batch(tokens, ISOLATED, EOD))[0].split(lengths)
    leaking = model(gpt_batch(tokens))[0].split(lengths)
    for number, document in enumerate(documents):
        alone = model(gpt_batch(torch.cat([document, torch.tensor([3])])[None]))[0]
        torch.testing.assert_close(packed[number], alone)
        assert torch.allclose(leaking[number], alone) == (number == 0)


def test_positions_of_a_plugin_do_not_turn_the_gates(group):
    class Mirror(torch.nn.Module):
        """Scores stay the same when queries and keys are negated."""

        def turn(self, query, key, positions_bs):
            return -query, -key

    spec = of_pattern("*-", "--attention-output-gate", "--position-embedding-type", "rotary")
    model = spread_network(spec, group)
    batch = gpt_batch(torch.randint(30, (2, 21), generator=torch.Generator().manual_seed(1)))
    expected = model(batch)
    (attention,) = (each for each in model.modules() if isinstance(each, GatedAttention))
    attention.own_positions = Mirror()
    torch.testing.assert_close(model(batch), expected)


def test_initial_values_are_in_their_ranges_and_do_not_depend_on_the_layout(group):
    spec = of_pattern("MGM")

    def network(ranks):
        model = SequentialModel(gpt_steps(spec, group=ranks, rng=OrdinaryStream(), mixed=False))
        initialise(model, seed=3, std=0.02, num_layers=1.5)
        return dict(model.named_parameters())

    full, *halves = map(network, (group, Shards(0, 2), Shards(1, 2)))
    for name, parameter in full.items():
        shard = shard_of(halves[0][name])
        parts = [half[name] for half in halves]
        found = torch.cat(parts, shard.dim) if shard else parts[0]
        assert torch.equal(found, parameter), name
    mamba, delta, other = ({n[8:]: p for n, p in full.items() if n[0] == i} for i in "345")
    for layer in (mamba, delta):
        assert 0 <= layer["A_log"].min() < layer["A_log"].max() <= torch.tensor(16.0).log()
        reach = layer["convolution.weight"].abs().max()
        assert 0.4 < reach <= 0.5
    steps = torch.nn.functional.softplus(mamba["dt_bias"])
    assert steps.min() * 1.001 >= 1e-3 and steps.max() <= 0.1001
    assert torch.equal(mamba["D"], torch.ones(8)) and torch.equal(delta["dt_bias"], torch.ones(4))
    assert not torch.equal(mamba["A_log"], other["A_log"])
    assert mamba["out_proj.weight"].detach().std() == pytest.approx(0.02 / 3**0.5, rel=0.15)


def test_every_layer_adds_once_to_the_residual_stream():
    spec = of_pattern("MGM")
    assert spec.network.residual_additions(spec) == 3


@pytest.mark.parametrize(
    ("pattern", "flags"),
    [
        ("MG*-E", ()),
        ("MM", ()),
        ("G-", ("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear")),
        ("*E", ("--attention-output-gate", "--qk-layernorm")),
    ],
)
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_plan_counts_every_weight_of_a_rank(pattern, flags, tensor):
    spec = of_pattern(pattern, *flags)
    with torch.device("meta"):
        steps = gpt_steps(spec, group=Shards(0, tensor), rng=OrdinaryStream(), mixed=False)
        model = SequentialModel(steps)
    entries = spec.network.entries(spec, tensor=tensor)
    by_entry = [0] * len(entries)
    for name, parameter in model.named_parameters():
        number = name.split(".")[0]
        by_entry[int(number) if number.isdigit() else 1] += parameter.numel()
    found = [entry.weights.total * (entry.kind == "block") for entry in entries]
    assert found == [
        n * (entry.kind == "block") for n, entry in zip(by_entry, entries, strict=True)
    ]
    if tensor == 1:
        assert spec.num_parameters == sum(by_entry)


def test_recurrent_layers_cost_the_same_for_each_token():
    flops = {}
    for pattern in ("MG-E", "*-*-"):
        for length in ("20", "40"):
            spec = of_pattern(pattern, "--seq-length", length)
            plan = tiny_plan(*SIZES, "--hybrid-layer-pattern", "M-", vocab_size=30)
            flops[pattern, length] = spec.flops_per_sample(recompute=plan.recompute)
    assert flops["MG-E", "40"] == 2 * flops["MG-E", "20"]
    assert flops["*-*-", "40"] > 2 * flops["*-*-", "20"]


@pytest.mark.parametrize(("pattern", "layers"), [("M-G-", 0), ("M-*-", 1), ("**", 2)])
def test_estimates_count_the_core_of_attention_in_its_layers_alone(pattern, layers):
    plan = tiny_plan(
        *(*SIZES, "--hybrid-layer-pattern", pattern),
        without=("--num-layers",),
        vocab_size=30,
        device="cuda",
    )
    assert plan.model.network.attended_pairs(plan.model) == 20**2 * layers
    speed = speed_of(plan, device_of("a100-80gb"))
    share = 1 - speed.causal_mfu / speed.mfu
    # Products with a key and a value, forward and twice backward; half of the pairs are masked.
    masked = 3 * 2 * 2 * 16 * 20**2 / 2 * layers
    assert share == pytest.approx(masked / plan.model.flops_per_sample(recompute=NOTHING))


def test_muon_leaves_convolutions_to_adam_and_vectors_do_not_decay(group):
    model = spread_network(of_pattern("MG"), group)
    names = {p: name for name, p in model.named_parameters()}
    groups = param_groups(model, 0.1, muon=True)
    orthogonal, decayed, rest = (
        {names[p].split(".", 2)[-1] for g in groups if kind(g) for p in g["params"]}
        for kind in (
            lambda g: g["orthogonal"],
            lambda g: g["weight_decay"] and not g["orthogonal"],
            lambda g: not g["weight_decay"] and not g["orthogonal"],
        )
    )
    assert {"in_proj.weight", "out_proj.weight"} <= orthogonal
    assert "convolution.weight" in decayed - orthogonal
    assert {"A_log", "D", "dt_bias", "norm.weight", "norm_weight", "convolution.bias"} <= rest


def test_weights_of_16_bits_compute_the_recurrence_in_32(group):
    model = spread_network(of_pattern("MG"), group)
    tokens = torch.randint(30, (2, 21), generator=torch.Generator().manual_seed(1))
    expected = model(gpt_batch(tokens))
    found = model.bfloat16()(gpt_batch(tokens))
    assert found.dtype == torch.bfloat16
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("pattern", ["M", "G"])
def test_a_layer_learns_texts_by_heart(group, pattern):
    model = spread_network(of_pattern(pattern), group).train()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    # Two tokens alone: what follows is decided by more of the text than a convolution sees.
    tokens = torch.randint(2, (4, 21), generator=torch.Generator().manual_seed(6))
    for _ in range(150):
        logits = model(gpt_batch(tokens)).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3


def test_a_pattern_decides_which_layers_have_experts():
    spec = of_pattern("-E*E")
    assert spec.moe.num_experts == (1, 4, 1, 4)
    assert spec.own.mamba_state_dim == spec.own.linear_conv_kernel_dim == 0


def test_sizes_have_megatrons_defaults():
    spec = tiny_plan(
        *("--network", "hybrid", "--hybrid-layer-pattern", "MG", "--hidden-size", "256")
    ).model
    assert replace(spec.own, hybrid_layer_pattern="") == type(spec.own)(
        mamba_state_dim=128,
        mamba_head_dim=64,
        mamba_num_groups=8,
        mamba_num_heads=8,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
    )


@pytest.mark.parametrize(
    ("pattern", "flags", "words"),
    [
        ("MG", ("--num-layers", "3"), "--num-layers 3 … MG … write --num-layers 2"),
        ("MD", (), "has D: sparse attention"),
        ("M/M", (), "has /: … multi-token prediction"),
        ("M+", (), "has +: … latent"),
        ("Mx", (), "has x: known are M, G, *, - and E"),
        ("ME", ("--moe-layer-freq", "2"), "--moe-layer-freq: … leave"),
        ("MM", EXPERTS, "--num-experts … no layer with experts"),
        ("M-", ("--mamba-num-groups", "3"), "--mamba-num-groups 3 … 8 heads"),
        ("M-", ("--mamba-head-dim", "5"), "--mamba-head-dim 5 … --mamba-num-heads"),
        ("M-", ("--mamba-state-dim", "0"), "--mamba-state-dim 0 … at least 1"),
        ("M-", ("--tensor-model-parallel-size", "4"), "--mamba-num-groups 2 … size 4"),
        ("G-", ("--linear-num-value-heads", "3"), "--linear-num-value-heads 3 … 2"),
        ("G-", ("--tensor-model-parallel-size", "4"), "--linear-num-key-heads 2 … size 4"),
        ("M-", ("--attention-output-gate",), "--attention-output-gate … has no attention"),
        (
            "**",
            (
                *("--attention-output-gate", "--tensor-model-parallel-size", "2"),
                *("--group-query-attention", "--num-query-groups", "1"),
            ),
            "--attention-output-gate: --num-query-groups 1 … size 2",
        ),
        ("M*", ("--context-parallel-size", "2"), "--context-parallel-size 2 … recurrent"),
        ("G*", ("--ds-sequence-parallel-size", "2"), "--ds-sequence-parallel-size 2 … recurrent"),
        ("ME", (*EXPERTS, "--lora-rank", "2"), "--lora-rank and --num-experts exclude"),
        (
            "MM--",
            ("--lora-rank", "2", "--pipeline-model-parallel-size", "2"),
            "--lora-target-modules query_key_value needs a layer … leaves stage 1 without one",
        ),
        (
            "MM*M",
            ("--lora-rank", "2", "--lora-target-modules", "dense_h_to_4h"),
            "--lora-target-modules dense_h_to_4h trains no layer of this network",
        ),
        ("M*", ("--parallel-residual",), "--parallel-residual … hybrid"),
    ],
)
def test_a_wrong_flag_is_refused(pattern, flags, words):
    with problem(words):
        of_pattern(pattern, *flags, world_size=4)


@pytest.mark.parametrize(
    ("pattern", "flags", "words"),
    [
        ("M-", (), "--mamba-num-groups 2 is not a multiple of --tensor-model-parallel-size 4"),
        ("G-", (), "--linear-num-key-heads 2 is not a multiple of … size 4"),
        ("*-", ("--attention-output-gate",), "--attention-output-gate: … 2 … size 4"),
    ],
)
def test_sizes_that_ranks_cannot_divide_are_refused_in_generation(pattern, flags, words):
    groups = ("--group-query-attention", "--num-query-groups", "2")
    spec = of_pattern(pattern, *groups, *flags)
    parallel = ParallelConfig(tensor_model_parallel_size=4)
    require_problem(words, [*layout_problems(parallel, spec, world_size=4)])
    assert not [*layout_problems(ParallelConfig(tensor_model_parallel_size=2), spec, world_size=2)]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("M-", "rows of the input projection of Mamba-2 on a tensor-parallel rank is 84"),
        ("G-", "features of the value heads of Gated DeltaNet on a tensor-parallel rank is 20"),
    ],
)
def test_fp8_takes_no_other_sizes_of_recurrent_layers(pattern, words):
    precision = PrecisionConfig(bf16=True, fp8_format="hybrid")
    require_problem(words, fp8_size_problems(precision, of_pattern(pattern), tensor=1))


def test_flags_of_hybrids_are_refused_without_the_network():
    with problem("--hybrid-layer-pattern is for hybrid networks: add --network hybrid"):
        tiny_plan("--network", "gpt", "--hybrid-layer-pattern", "MM")
    with problem("--mamba-head-dim is for hybrid networks: add --network hybrid"):
        tiny_plan("--mamba-head-dim", "4")
    with problem("--hybrid-layer-pattern is missing"):
        tiny_plan("--network", "hybrid")
    with problem("--network hybrid: the objective bert … BERT"):
        tiny_plan("--network", "hybrid", objective="bert")


OF_MEGATRON_LM = (
    ("--is-hybrid-model", "--hybrid-attention-ratio", "0.1", "--hybrid-mlp-ratio", "0.5"),
    ("--spec", "megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"),
    ("--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    ("--disable-mamba-mem-eff-path", "--mamba-training-ssm-states-dtype", "fp32"),
)


@pytest.mark.parametrize("flags", OF_MEGATRON_LM)
def test_a_pattern_implies_the_network_and_its_layers(flags):
    for spelling in ("--hybrid-layer-pattern", "--hybrid-override-pattern"):
        words = (*SIZES[2:], spelling, "M-M*", *flags)
        model = tiny_plan(*words, without=("--num-layers",), vocab_size=30).model
        assert (model.architecture, model.num_layers) == ("hybrid", 4)


@pytest.mark.parametrize("flags", OF_MEGATRON_LM[:3])
def test_flags_of_hybrids_without_a_pattern_are_refused(flags):
    with problem("--hybrid-layer-pattern is missing: … M Mamba-2"):
        tiny_plan(*flags)


def test_borders_in_a_pattern_divide_its_layers_into_stages_and_chunks():
    stages = ("--pipeline-model-parallel-size", "2")
    two, four = (
        tiny_plan(
            *(*SIZES, "--hybrid-layer-pattern", pattern, *stages, "--global-batch-size", "8"),
            without=("--num-layers",),
            vocab_size=30,
            world_size=2,
        )
        for pattern in ("M-M|*-M-*", "M|-M*|-M|-*")
    )
    assert two.model.own.hybrid_layer_pattern == "M-M*-M-*"
    assert (two.parallel.partition_method, two.parallel.chunks) == ("layers:3,5", 1)
    assert (four.parallel.partition_method, four.parallel.chunks) == ("layers:1,3,2,2", 2)


@pytest.mark.parametrize(
    ("pattern", "flags", "words"),
    [
        ("M-|M*", (), "--pipeline-model-parallel-size 1: … M-|M* makes 2 stages: write"),
        (
            "M-|M*",
            ("--pipeline-model-parallel-size", "2", "--pp-partition-method", "layers:1,3"),
            "--pp-partition-method layers:1,3: … M-|M* divides the layers",
        ),
        ("M-|M*", ("--pipeline-model-parallel-size", "0"), "--pipeline-model-parallel-size 0"),
        ("M-M/*-/*-", (), "has /: 2 layers of multi-token prediction … write M-M"),
        ("M-M/*-", ("--num-layers", "4"), "--num-layers 4: … has 3 layers: write --num-layers 3"),
    ],
)
def test_borders_and_depths_that_make_no_stages_are_refused(pattern, flags, words):
    words_of_network = (*SIZES, "--hybrid-layer-pattern", pattern)
    with problem(words):
        tiny_plan(*words_of_network, *flags, without=("--num-layers",), world_size=2)
