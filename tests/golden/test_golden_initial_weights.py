"""Initial weights of every network: a seed gives the same model in every version and layout."""

from collections.abc import Iterator

from golden_files import require_golden
from tiny import Shards, tiny_plan

from megatron.config.architecture.architecture import network_of
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.parts import LayerParts

NETWORKS = {
    "gpt": ("gpt", "--position-embedding-type rotary --swiglu --qk-layernorm"),
    "gpt, drawn evenly": ("gpt", "--init-method-xavier-uniform --embed-layernorm"),
    "gpt with adapters": ("gpt", "--lora-rank 2 --lora-target-modules all-linear"),
    "gpt with experts": (
        "gpt",
        "--num-experts 4 --expert-interval 2 --mlp-type residual --topk 2",
    ),
    "gpt with shared experts": (
        "gpt",
        "--num-experts 4 --expert-interval 1 --moe-shared-expert-intermediate-size 8 "
        "--moe-shared-expert-gate --moe-grouped-gemm",
    ),
    "bert": ("bert", "--untie-embeddings-and-output-weights"),
    "t5": ("t5", "--decoder-num-layers 1 --decoder-seq-length 4"),
    "t5 with relative positions": (
        "t5",
        "--decoder-seq-length 4 --position-embedding-type relative",
    ),
    "retro": ("retro", "--num-layers 7 --retro-add-retriever --retro-chunk-length 3"),
    "classifier": ("classification", "--task QNLI --train-data a --valid-data b"),
}


def lines_of(objective: str, flags: str) -> Iterator[str]:
    """Yield the sum of the absolute values of each parameter, over two tensor-parallel ranks."""
    plan = tiny_plan(
        *flags.split(),
        objective=objective,
        without=("--data-path",) if objective == "classification" else (),
    )
    spec, ranks = plan.model, []
    for rank in range(2):
        parts = LayerParts(group=Shards(rank, 2), core_attention=lambda number: None)
        model = SequentialModel(network_of(spec).layers(spec, parts))
        initialise(
            model,
            seed=plan.training.seed,
            std=spec.init_std,
            num_layers=spec.num_layers,
            xavier=spec.init == "xavier_uniform",
            vocab_size=spec.vocabulary.vocab_size,
        )
        ranks.append(dict(model.named_parameters()))
    for name in ranks[0]:
        sums = [float(rank[name].detach().double().abs().sum()) for rank in ranks]
        yield f"{name} {' '.join(f'{each:.5g}' for each in sums)}"


def test_initial_weights():
    lines = []
    for name, (objective, flags) in NETWORKS.items():
        lines += [f"[{name}]", *lines_of(objective, flags)]
    require_golden("initial_weights.txt", "\n".join(lines) + "\n")
