"""Flags of other systems about experts, each with the sentence its user gets."""

from megatron.config.parsing.flags import Legacy

_DISPATCH = "tokens travel to their experts by DeepSpeed's all-to-all; nothing to choose"
_BALANCE = "experts are kept busy by one loss, that of --moe-loss-coeff; leave this flag out"
_STUDENTS = "distillation into students is not built; train the smaller network by itself"

EXPERT_LEGACY = (
    Legacy("--create-moe-param-group", "experts have groups of parameters of their own always"),
    Legacy(
        "--enable-expert-tensor-parallelism",
        "experts are divided over the tensor-parallel ranks like every layer",
    ),
    Legacy("--moe-grouped-gemm", _DISPATCH),
    Legacy("--moe-permute-fusion", _DISPATCH),
    Legacy("--use-tutel", _DISPATCH),
    Legacy("--moe-token-dispatcher-type", _DISPATCH, takes=1),
    Legacy("--moe-router-dtype", "the router computes in 32 bits in every run", takes=1),
    Legacy(
        "--moe-pad-expert-input-to-capacity",
        "what experts take is padded to the same number of tokens always",
    ),
    Legacy(
        "--expert-tensor-parallel-size",
        "experts are divided over the tensor-parallel ranks like every layer; leave this flag out",
        takes=1,
        refused=True,
    ),
    Legacy(
        "--moe-ffn-hidden-size",
        "experts are as wide as --ffn-hidden-size says; leave this flag out",
        takes=1,
        refused=True,
    ),
    Legacy(
        "--moe-shared-expert-intermediate-size",
        "write --mlp-type residual for an MLP that every token passes through",
        takes=1,
        refused=True,
    ),
    Legacy(
        "--moe-input-jitter-eps",
        "write --noisy-gate-policy Jitter, whose noise is 1%",
        takes=1,
        refused=True,
    ),
    Legacy("--moe-z-loss-coeff", _BALANCE, takes=1, refused=True),
    Legacy("--moe-router-load-balancing-type", _BALANCE, takes=1, refused=True),
    Legacy(
        "--moe-router-pre-softmax",
        "the weights of two or more experts are scaled to 1 together; leave this flag out",
        refused=True,
    ),
    Legacy("--num-experts-switch", "write --num-experts instead", takes=1, refused=True),
    Legacy("--mos", _STUDENTS, refused=True),
    Legacy("--kd", _STUDENTS, refused=True),
)
