"""Write the checkpoints of `torch_dist/` with megatron-core 0.16.0 and 0.19.2, on a CPU.

The package `megatron` of megatron-core has the name of this repository's, so it is installed apart
and the script is run from there. Names of networks choose which are written; hybrid ones need the
later version, which pip installs for Python 3.12 alone:

    pip install --no-deps --target MCORE megatron-core==0.16.0
    PYTHONPATH=MCORE python -P tests/foreign/make_torch_dist.py tests/foreign/torch_dist
    pip install --no-deps --python-version 3.12 --target LATER megatron-core==0.19.2
    PYTHONPATH=LATER python -P tests/foreign/make_torch_dist.py tests/foreign/torch_dist hybrid hybrid_experts

Every archive has a folder of a run, as Megatron-LM lays it out, and `expected.pt` with tokens and
the logits of megatron-core's own network. Weights follow from names: see `values`.
"""

import os
import sys
import tarfile
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
ROWS, VOCAB, LENGTH = 32, 30, 8
LLAMA = {
    "position_embedding_type": "rope",
    "group_query_attention": True,
    "num_query_groups": 2,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
EXPERTS = {
    "num_experts": 4,
    "moe_layer_freq": 1,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_grouped_gemm": False,
}
LATENT = {
    **{"multi_latent_attention": True, "qk_layernorm": True, "group_query_attention": False},
    **{"num_query_groups": None, "kv_lora_rank": 8, "qk_head_dim": 4},
    **{"qk_pos_emb_head_dim": 4, "v_head_dim": 6},
}
NETWORKS = {
    "gpt": {},
    "llama": {**LLAMA, "tensor_model_parallel_size": 2},
    "experts": {**LLAMA, **EXPERTS},
    "some_experts": {**LLAMA, **EXPERTS, "moe_layer_freq": [0, 1]},
    "shared_experts": {
        **{**LLAMA, **EXPERTS, "moe_shared_expert_intermediate_size": 8},
        "moe_shared_expert_gate": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
    },
    "latent": {
        **{**LLAMA, **LATENT, "rope_type": "yarn", "rotary_scaling_factor": 4.0},
        **{"mscale": 1.0, "mscale_all_dim": 1.0, "q_lora_rank": 8},
    },
    "latent_experts": {**LLAMA, **LATENT, **EXPERTS, "moe_layer_freq": [0, 1]},
    "sinks": {
        **{**LLAMA, "swiglu": False, "softmax_type": "learnable", "quick_geglu": True},
        **{"glu_linear_offset": 1.0, "activation_func_clamp_value": 0.5},
    },
    "predictions": {**LLAMA, "mtp_num_layers": 2},
    "bert": {"bert_binary_head": True},
    "t5": {"encoder_num_layers": 2, "decoder_num_layers": 2, "decoder_seq_length": LENGTH},
}
HYBRIDS = {
    "hybrid": {"num_layers": 4, "hybrid_layer_pattern": "*-|*-"},
    "hybrid_experts": {
        **{**LLAMA, **EXPERTS, "num_layers": 4},
        "hybrid_layer_pattern": "*-*E",
    },
}
"""GPTs as a HybridModel of megatron-core, whose layers are half a GPT's."""
SETTINGS = {**NETWORKS, **HYBRIDS}


def values(name, shape):
    """Return multiples of 1/64 between -0.5 and 0.5 that follow from the name; around 1 for norms."""
    size = torch.Size(shape).numel()
    start = crc32(name.encode()) % 1009
    numbers = (torch.arange(size) * 37 + start * 11) % 1009 % 65
    around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
    return ((numbers - 32) / 64 + around).view(shape).float()


def arguments(network):
    """Return the arguments that Megatron-LM saves, as far as they describe the network."""
    from megatron.core.transformer.enums import AttnBackend

    return Namespace(
        **{
            **{"position_embedding_type": "learned_absolute", "swiglu": False},
            **{"group_query_attention": False, "num_query_groups": None},
            **{"untie_embeddings_and_output_weights": False, "normalization": "LayerNorm"},
            **{"add_bias_linear": True, "tensor_model_parallel_size": 1, "num_experts": None},
            **{"seq_length": LENGTH, "max_position_embeddings": LENGTH, "kv_channels": 4},
            **{"norm_epsilon": 1e-5, "bias_gelu_fusion": True, "rotary_base": 10000},
            **{"padded_vocab_size": ROWS, "make_vocab_size_divisible_by": 8},
            **{"bf16": False, "fp16": False, "params_dtype": torch.float32},
            **{"tokenizer_type": "NullTokenizer", "vocab_size": VOCAB - 1},
            **{"consumed_train_samples": 70, "consumed_valid_samples": 3},
            **{"attention_backend": AttnBackend.auto, "openai_gelu": False},
            **{"multi_latent_attention": False, "rotary_interleaved": False, "qk_layernorm": False},
            **{"quick_geglu": False, "mtp_num_layers": None},
        }
        | SIZES
        | SETTINGS[network]
    )


def stub_cuda():
    """Let megatron-core do without a GPU."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    def ignore(*_, **__):
        return None

    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("synchronize", "current_stream", "Stream", "Event"):
        setattr(torch.cuda, name, ignore)
    random._CUDA_RNG_STATE_TRACKER = Namespace(fork=lambda *_, **__: nullcontext())
    random._CUDA_RNG_STATE_TRACKER.is_initialized = lambda: True
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    moe_utils.te_general_gemm = None  # which is not defined without Transformer Engine


def build(network, args):
    """Return the model of a network with weights that follow from their names."""
    from megatron.core import parallel_state
    from megatron.core.activations import quick_gelu
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    same = (
        *("num_query_groups", "add_bias_linear", "normalization", "tensor_model_parallel_size"),
        *("moe_router_topk", "moe_ffn_hidden_size", "moe_router_load_balancing_type"),
        *("moe_layer_freq", "moe_grouped_gemm", "moe_shared_expert_intermediate_size"),
        *("moe_shared_expert_gate", "moe_router_score_function", "moe_router_topk_scaling_factor"),
        *("moe_router_enable_expert_bias", "qk_layernorm", "softmax_type", "glu_linear_offset"),
        *("activation_func_clamp_value", "mtp_num_layers"),
    )
    of_latents = (
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        *("rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim"),
    )
    kind, given = TransformerConfig, {}
    if args.multi_latent_attention:
        # The command line's defaults; the class has others.
        kind, given = MLATransformerConfig, {"rope_type": "rope", "rotary_scaling_factor": 1.0}
        given["q_lora_rank"] = None
        same = (*same, *of_latents)
    activation = gelu_tanh
    if args.swiglu or args.quick_geglu:
        activation = torch.nn.functional.silu if args.swiglu else quick_gelu
    given |= {name: getattr(args, name) for name in same if getattr(args, name, None) is not None}
    config = kind(
        **SIZES | {"num_layers": args.num_layers},
        **given,
        num_moe_experts=args.num_experts,
        gated_linear_unit=args.swiglu or args.quick_geglu,
        activation_func=activation,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        moe_token_dispatcher_type="allgather",
    )
    model = model_of(network, args, config).eval()
    rank, ranks = parallel_state.get_tensor_model_parallel_rank(), args.tensor_model_parallel_size
    with torch.no_grad():
        biases = (each for each in model.named_buffers() if each[0].endswith("expert_bias"))
        for name, parameter in (*model.named_parameters(), *biases):
            shape = list(parameter.shape)
            is_sharded = getattr(parameter, "tensor_model_parallel", False) and ranks > 1
            if is_sharded:
                shape[parameter.partition_dim] *= ranks
            full = values(name, shape)
            if is_sharded and args.swiglu and "linear_fc1" in name:
                full = torch.cat([half.chunk(ranks)[rank] for half in full.chunk(2)])
            elif is_sharded:
                full = full.chunk(ranks, parameter.partition_dim)[rank]
            parameter.copy_(full)
    return model


def gelu_tanh(x):
    """Return GELU as Megatron-LM's fused kernel computes it."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def model_of(network, args, config):
    """Return megatron-core's model with its local layers."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model

    common = {"vocab_size": ROWS, "max_sequence_length": LENGTH}
    if network == "bert":
        return BertModel(
            config=config,
            num_tokentypes=2,
            transformer_layer_spec=bert_layer_local_spec,
            add_binary_head=True,
            share_embeddings_and_output_weights=True,
            **common,
        )
    if network == "t5":
        t5_spec.TENorm = t5_spec.LNImpl  # missing without Transformer Engine
        return T5Model(
            config=config,
            encoder_config=config,
            transformer_encoder_layer_spec=t5_spec.get_t5_encoder_with_local_block_spec(2),
            transformer_decoder_layer_spec=t5_spec.get_t5_decoder_with_local_block_spec(2),
            share_embeddings_and_output_weights=True,
            **common,
        )
    if network in HYBRIDS:
        return hybrid_of(args, config, common)
    if args.num_experts:
        layers = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization
        )
    else:
        layers = get_gpt_layer_local_spec(
            normalization=args.normalization,
            multi_latent_attention=args.multi_latent_attention,
            qk_layernorm=args.qk_layernorm,
        )
    if args.multi_latent_attention:
        of_layers = layers.layer_specs if args.num_experts else [layers]
        for each in of_layers:
            each.submodules.self_attention.submodules.core_attention = core_of_latents()
    if args.mtp_num_layers:
        common["mtp_block_spec"] = get_gpt_mtp_block_spec(
            config, layers, use_transformer_engine=False
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        **common,
    )


def core_of_latents():
    """Return the local core of attention, for values that are not as wide as keys."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    multi_latent_attention.HAVE_TE = False  # which the module takes for granted

    class Core(DotProductAttention):
        def __init__(self, *given, k_channels=None, v_channels=None, **options):
            super().__init__(*given, **options)
            if v_channels:
                heads = self.num_attention_heads_per_partition
                self.hidden_size_per_partition = v_channels * heads

    return Core


def hybrid_of(args, config, common):
    """Return a GPT as a HybridModel, with the local layers of a GPT in place of Transformer Engine's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

    hybrid_block.TENorm = WrappedTorchNorm
    dense = get_gpt_layer_local_submodules(normalization=args.normalization)
    routed = get_gpt_layer_local_submodules(args.num_experts, normalization=args.normalization)
    attention = replace(dense, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
    absent = {"input_layernorm": IdentityOp, "self_attention": IdentityOp}
    absent["self_attn_bda"] = IdentityFuncOp
    stack = hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=replace(dense, **absent)),
        moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=replace(routed, **absent)),
    )
    return HybridModel(
        config=config,
        hybrid_stack_spec=ModuleSpec(module=hybrid_block.HybridStack, submodules=stack),
        hybrid_layer_pattern=args.hybrid_layer_pattern.replace("|", ""),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        **common,
    )


def logits_of(network, model, tokens_bs):
    """Return the logits of every position: [b, s, v]."""
    length = tokens_bs.shape[1]
    positions = torch.arange(length).expand_as(tokens_bs)
    everything = torch.ones_like(tokens_bs)
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    nothing = torch.zeros(len(tokens_bs), 1, length, length, dtype=torch.bool)
    with torch.no_grad():
        if network == "bert":
            types = (positions > length // 2).long()
            return model(tokens_bs, everything, tokentype_ids=types)[0]
        if network == "t5":
            return model(tokens_bs, tokens_bs.flip(1), nothing, causal, nothing)
        if network == "predictions":
            # Which wants labels otherwise.
            model.mtp_process, model.config.mtp_num_layers = False, None
        return model(tokens_bs, positions, causal)


def prepare(rank, ranks, address):
    """Start the process group and the parallel state of megatron-core."""
    import warnings

    from megatron.core import parallel_state

    warnings.filterwarnings("ignore")
    stub_cuda()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{address}", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)


def save(rank, network, folder, address):
    """Save the checkpoint of a network from one of its ranks."""
    from megatron.core import dist_checkpointing

    args = arguments(network)
    prepare(rank, args.tensor_model_parallel_size, address)
    model = build(network, args)
    iteration = folder / "iter_0000007"
    iteration.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    dist_checkpointing.save(
        {**state, "model": model.sharded_state_dict()},
        str(iteration),
        validate_access_integrity=True,
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    dist.destroy_process_group()


def compute(_, network, folder, address):
    """Write the tokens and logits of a network on one rank."""
    args = arguments(network)
    args.tensor_model_parallel_size = 1
    prepare(0, 1, address)
    tokens_bs = torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % VOCAB
    logits = logits_of(network, build(network, args), tokens_bs)
    torch.save({"tokens": tokens_bs, "logits": logits.contiguous()}, folder / "expected.pt")
    dist.destroy_process_group()


def main(output, *networks):
    """Write one archive per network, or for the named ones, into the folder `output`."""
    Path(output).mkdir(exist_ok=True)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it cannot compile the stubs
    for network in networks or NETWORKS:
        settings = SETTINGS[network]
        with TemporaryDirectory() as name:
            folder = Path(name) / network
            ranks = settings.get("tensor_model_parallel_size", 1)
            processes.spawn(save, (network, folder, f"{name}/saved"), nprocs=ranks)
            processes.spawn(compute, (network, folder, f"{name}/computed"), nprocs=1)
            with tarfile.open(Path(output) / f"{network}.tar.xz", "w:xz") as archive:
                archive.add(folder, network)


if __name__ == "__main__":
    main(*sys.argv[1:])
