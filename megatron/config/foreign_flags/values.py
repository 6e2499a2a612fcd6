"""Values that flags of ours have in other systems and not here: what to write instead."""

from collections.abc import Mapping

_ONE_DECAY = "the learning rate warms up once and decays once; write --lr-decay-style cosine"
_ADAM = "write --optimizer adam, which decouples the weight decay (AdamW)"
_BACKEND = "processes communicate with NCCL on GPUs and gloo on CPUs; leave this flag out"
_DATA = (
    "samples are read from token files; write --dataloader-type single or cyclic, or --dataset NAME "
    "with --plugin MODULE for a data set of your own"
)
_OPTIMIZER = (
    "this optimizer is not built; write --optimizer muon, or --plugin MODULE for an optimizer of your "
    "own"
)
_SCALES = (
    "fp8 tensors have one scale for each tensor or each row, not for blocks; write --fp8-recipe "
    "rowwise, the finer of the two"
)


_TABLES: Mapping[str, Mapping[str, str]] = {
    "fp8-recipe": {
        "blockwise mxfp8 custom": _SCALES,
        "delayed": "the scale of an fp8 tensor is computed from the tensor itself, without a "
        "history; write --fp8-recipe tensorwise",
    },
    "moe-router-load-balancing-type": {
        "quantile_balancing": "loads are not balanced by quantiles of the scores; write "
        "--moe-router-load-balancing-type global_aux_loss, or --moe-router-enable-expert-bias to "
        "balance without a loss"
    },
    "moe-router-score-function": {
        "sqrtsoftplus": "router scores are a softmax or a sigmoid; write "
        "--moe-router-score-function sigmoid"
    },
    "moe-token-dispatcher-type": {
        "alltoall_seq deepep hybridep": "write --moe-token-dispatcher-type alltoall"
    },
    "position-embedding-type": {
        "mrope": "text has positions in one dimension; write --position-embedding-type rope",
        "learnable learned": "write --position-embedding-type learned_absolute",
    },
    "dataloader-type": {"external batch": _DATA},
    "optimizer": {
        "soap adaptive_muon": _OPTIMIZER,
        "adamw_torch adamw_torch_fused adamw_hf": _ADAM,
        "adamw_8bit adamw_bnb_8bit paged_adamw_8bit": "write --optimizer adam8bit",
    },
    "lr-decay-style": {
        "constant_with_warmup": "write --lr-decay-style constant; --lr-warmup-iters warms up",
        "inverse_sqrt": "write --lr-decay-style inverse-square-root",
        "warmup_stable_decay": "write --lr-decay-style WSD",
        "cosine_with_restarts polynomial exponential step": _ONE_DECAY,
    },
    "distributed-backend": {"mpi ucc": _BACKEND},
    "recompute-granularity": {
        method: f"write --recompute-granularity full --recompute-method {method}"
        for method in ("uniform", "block")
    },
    "attention-impl": {
        "flash_attention_2 flash_attention_3": "write --attention-impl flash",
        "fused": "write --attention-impl sdpa",
        "unfused": "write --attention-impl fused-softmax",
        "eager local": "write --attention-impl reference",
        "flex_attention": "write --attention-impl flex",
    },
    "rope-scaling-type": {
        "linear": "write --rotary-seq-len-interpolation-factor FACTOR, which divides all positions, "
        "and leave --use-rope-scaling out"
    },
    "glu-activation": {"silu": "write --swiglu", "gelu": "write --glu-activation geglu"},
    "device": {"gpu": "write --device cuda"},
    "log-level": {"10": "write --log-level debug", "20": "write --log-level info"}
    | {"30": "write --log-level warning", "40 50": "write --log-level error"},
}
"""By flag without dashes, and by value, the sentence about it; several values share one."""

FOREIGN_VALUES: Mapping[str, str] = {
    f"{flag} {value}": sentence
    for flag, table in _TABLES.items()
    for values, sentence in table.items()
    for value in values.split()
}
"""By "NAME VALUE", what to write in place of that value of a flag."""
