"""Every option of a training run, and how it is seen that it does something.

An entry says which flags turn the option, on top of which others it acts (`on`), and the aspect of
the run that must come out different; see `ranks/observed.py`. "{run}" stands for the run's own
directory, "{files}" for that of `ranks/option_files.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

BASE = """
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16
    --micro-batch-size 2 --global-batch-size 4 --lr 0.01 --train-iters 2 --eval-iters 1
    --init-method-std 0.3 --log-interval 1 --device cpu
    --tokenizer-type NullTokenizer --vocab-size 60 --make-vocab-size-divisible-by 4
    --data-path {files}/corpus --data-cache-path {run}/cache
"""


@dataclass(frozen=True)
class Turned:
    """What turns an option.

    Args:
        flags: added behind those of the base.
        sees: the aspect that changes.
        on: flags that the option acts together with, in the base too.
        without: flags of BASE that neither of the two runs has.
        ranks: how many processes share the run.
        objective: what is learned.
        as_gpu: whether the plan is that for a GPU.
        parts: whether a weight of rank 1 comes to differ from that of rank 0.
        says: part of the error that the turned run must end with, when it sees "error".
        on_says: part of the error that the base ends with, where it cannot run without the option.
    """

    flags: str
    sees: str
    on: str = ""
    without: tuple[str, ...] = ()
    ranks: int = 1
    objective: str = "gpt"
    as_gpu: bool = False
    parts: bool = False
    says: str = ""
    on_says: str = ""


@dataclass(frozen=True)
class Unseen:
    """Why nothing of an option can be seen on a CPU."""

    reason: str


_TRANSFER = {"without": ("--tokenizer-type", "--vocab-size", "--data-path")}
_BYTES = "--vocab-file {files}/vocab.json --merge-file {files}/merges.txt"
_TEXT = f"--tokenizer-type GPT2BPETokenizer {_BYTES} --data-path {{files}}/text"
_SLOW_TEXT = f"{_TEXT} --tokenizer-backend reference"
_FIM = f"{_SLOW_TEXT} --fim-rate 1"
_SHRINKING = f"{_FIM} --data-path {{files}}/letters"
_SPLIT = f"{_FIM} --fim-split-sample <split>"
_TIKTOKEN = "--tokenizer-type TikTokenizer --tiktoken-pattern cl100k --vocab-size 267"
_TIKTOKEN += " --tokenizer-model {files}/tiktoken.json --data-path {files}/digits --fim-rate 1"
_TIKTOKEN += " --tiktoken-num-special-tokens 10 --tiktoken-special-tokens <unk> <s> </s>"
_TIKTOKEN += " <fim_prefix> <fim_middle> <fim_suffix> <pad>"
_HF = "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path {files}/hf"
_HF += " --data-path {files}/corpus"
_ROTARY = "--position-embedding-type rotary"
_STRETCHED = f"{_ROTARY} --use-rope-scaling --rope-original-max-position-embeddings 4096"
_LONGROPE = f"{_STRETCHED} --rope-scaling-type longrope --rope-short-factors 1 1 1 1"
_LONGROPE += " --rope-long-factors 1 1 1 1"
_LORA = "--lora-rank 2 --lr 0.1"
_AHEAD = f"{_ROTARY} --mtp-num-layers 2"
_LATENT = f"{_ROTARY} --multi-latent-attention --kv-lora-rank 4 --qk-head-dim 4 --v-head-dim 4"
_LATENT += " --qk-pos-emb-head-dim 4"
_LATENT_YARN = f"{_LATENT} --rotary-scaling-factor 40"
_MIXTURE = "--num-experts 2 --expert-interval 1"
_SHARED = "--moe-shared-expert-intermediate-size 8"
_SIGMOID = "--moe-router-score-function sigmoid"
_FOUR = "--num-experts 4 --expert-interval 1 --moe-router-topk 1"
_FP16 = "--fp16 --initial-loss-scale 256"
_OVERFLOWS = "--fp16 --initial-loss-scale 1099511627776"
_EXPLODES = "--init-method-std 1e30"
_SAVE = "--save {run}/save --save-interval 2"
_SAVE_EACH = "--train-iters 3 --save {run}/save --save-interval 1"
_RESUME = "--load {files}/checkpoint --train-iters 4"
_WSD = "--train-iters 3 --lr-decay-style WSD --lr-wsd-decay-iters 2"
_DECAY = "--train-iters 3 --weight-decay-incr-style linear"
_DECAY += " --start-weight-decay 0 --end-weight-decay 0.5"
_MUON = "--optimizer muon"
_TB = "--tensorboard-dir {run}/tensorboard"
_WANDB = "--wandb-project p"
_PROFILE = "--train-iters 3 --profile --profile-dir {run}/traces"
_PROFILE += " --profile-step-start 1 --profile-step-end 3"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_TENSOR = "--tensor-model-parallel-size 2"
_STAGES = "--num-layers 4 --pipeline-model-parallel-size 2"
_THREE_LAYERS = "--num-layers 3 --pipeline-model-parallel-size 2"
_SAMPLES = {"on": "--train-samples 12", "without": ("--train-iters",)}
_PAIRS = {
    "on": f"--tokenizer-type GPT2BPETokenizer {_BYTES} --data-path {{files}}/tasks",
    **_TRANSFER,
}
_PAIRS |= {"objective": "multitask"}
_SENTENCES = _TRANSFER | {
    "on": "--vocab-file {files}/bert.txt --data-path {files}/sentences",
    "objective": "bert",
}
_LABELLED = _TRANSFER | {
    "on": "--train-iters 3 --task QNLI --train-data {files}/train.tsv "
    "--valid-data {files}/dev.tsv --vocab-file {files}/bert.txt",
    "objective": "classification",
}
_TAGS = _TRANSFER | {
    "on": "--task token-classification --train-data {files}/words.conll --head-dropout 0.1 "
    "--vocab-file {files}/bert.txt",
    "objective": "token-classification",
}
_SCORED_TAGS = _TAGS | {"on": f"{_TAGS['on']} --valid-data {{files}}/words.conll"}
_CLASSES = _TRANSFER | {
    "on": "--task text-classification --train-data {files}/classes.tsv "
    "--valid-data {files}/classes.tsv --vocab-file {files}/bert.txt",
    "objective": "classification",
}
_SQUAD = "--task question-answering --train-data {files}/squad.json --vocab-file {files}/bert.txt"
_SQUAD += " --valid-data {files}/squad.json --max-query-length 3 --doc-stride 4"
_ANSWERS = _TRANSFER | {"on": _SQUAD, "objective": "question-answering"}
_LONG_ANSWERS = _ANSWERS | {"on": f"{_SQUAD} --valid-data {{files}}/long.json"}
_NO_ANSWERS = _ANSWERS | {
    "on": f"{_SQUAD.replace('squad', 'squad2')} --version-2-with-negative",
}
_WEIGHTED = "--train-weighted-split-paths 'a: 1 0:1 {files}/corpus'"

MODEL = {
    "num_layers": Turned("--num-layers 1", "shapes"),
    "hidden_size": Turned("--hidden-size 32", "shapes"),
    "num_attention_heads": Turned("--num-attention-heads 4", "losses"),
    "seq_length": Turned("--seq-length 8", "sizes"),
    "max_position_embeddings": Turned("--max-position-embeddings 32", "shapes"),
    "ffn_hidden_size": Turned("--ffn-hidden-size 24", "shapes"),
    "kv_channels": Turned("--kv-channels 4", "shapes"),
    "group_query_attention": Turned("--group-query-attention", "shapes"),
    "num_query_groups": Turned(
        "--num-query-groups 2", "shapes", on="--num-attention-heads 4 --group-query-attention"
    ),
    "window_size": Turned("--window-size 4", "losses"),
    "window_attn_skip_freq": Turned("--window-attn-skip-freq 2", "losses", on="--window-size 4"),
    "apply_query_key_layer_scaling": Turned(
        "--no-query-key-layer-scaling", "losses", on="--bf16 --attention-impl fused-softmax"
    ),
    "multi_latent_attention": Turned("--multi-latent-attention", "losses", on=_ROTARY),
    "q_lora_rank": Turned("--q-lora-rank 3", "losses", on=_LATENT),
    "kv_lora_rank": Turned("--kv-lora-rank 6", "losses", on=_LATENT),
    "qk_head_dim": Turned("--qk-head-dim 6", "losses", on=_LATENT),
    "qk_pos_emb_head_dim": Turned("--qk-pos-emb-head-dim 2", "losses", on=_LATENT),
    "v_head_dim": Turned("--v-head-dim 3", "losses", on=_LATENT),
    "attention_latent_norm_epsilon": Turned(
        "--attention-latent-norm-epsilon 0.5", "losses", on=f"{_LATENT} --qk-layernorm"
    ),
    "rope_type": Turned("--rope-type rope", "error", on=_LATENT_YARN, says="contradict"),
    "rotary_scaling_factor": Turned("--rotary-scaling-factor 40", "losses", on=_LATENT),
    "mscale": Turned("--mscale 2", "losses", on=_LATENT_YARN),
    "mscale_all_dim": Turned("--mscale-all-dim 2", "losses", on=_LATENT_YARN),
    "query_pre_attn_scalar": Turned("--query-pre-attn-scalar 2", "losses"),
    "attn_logit_softcapping": Turned("--attn-logit-softcapping 0.1", "losses"),
    "final_logit_softcapping": Turned("--final-logit-softcapping 1", "losses"),
    "softmax_type": Turned("--softmax-type off-by-one", "losses"),
    "qk_layernorm": Turned("--qk-layernorm", "shapes"),
    "qk_layernorm_across_heads": Turned(
        "--qk-layernorm-across-heads", "shapes", on="--qk-layernorm --normalization RMSNorm"
    ),
    "position_embedding_type": Turned("--position-embedding-type alibi", "losses"),
    "use_rotary_position_embeddings": Turned("--use-rotary-position-embeddings", "losses"),
    "add_position_embedding": Turned("--no-position-embedding", "shapes"),
    "rotary_base": Turned("--rotary-base 100", "losses", on=_ROTARY),
    "rotary_local_base": Turned(
        "--rotary-local-base 100", "losses", on=f"{_ROTARY} --window-size 8"
    ),
    "no_rope_freq": Turned("--no-rope-freq 2", "losses", on=_ROTARY),
    "rotary_percent": Turned("--rotary-percent 0.5", "losses", on=_ROTARY),
    "rotary_seq_len_interpolation_factor": Turned(
        "--rotary-seq-len-interpolation-factor 2", "losses", on=_ROTARY
    ),
    "use_rope_scaling": Turned("--use-rope-scaling", "losses", on=_ROTARY),
    "rope_scaling_factor": Turned(
        "--rope-scaling-factor 2", "losses", on=f"{_ROTARY} --use-rope-scaling"
    ),
    "rope_scaling_type": Turned("--rope-scaling-type yarn", "losses", on=_STRETCHED),
    "rope_short_factors": Turned("--rope-short-factors 2 2 2 2", "losses", on=_LONGROPE),
    "rope_long_factors": Turned(
        "--rope-long-factors 2 2 2 2",
        "losses",
        on=f"{_LONGROPE} --rope-original-max-position-embeddings 8",
    ),
    "rope_attention_factor": Turned(
        "--rope-attention-factor 2", "losses", on=f"{_STRETCHED} --rope-scaling-type yarn"
    ),
    "rope_truncation": Turned(
        "--no-rope-truncation", "losses", on=f"{_STRETCHED} --rope-scaling-type yarn"
    ),
    "rope_low_freq_factor": Turned(
        "--rope-low-freq-factor 0.001", "losses", on=f"{_ROTARY} --use-rope-scaling"
    ),
    "rope_high_freq_factor": Turned(
        "--rope-high-freq-factor 10000", "losses", on=f"{_ROTARY} --use-rope-scaling"
    ),
    "rope_original_max_position_embeddings": Turned(
        "--rope-original-max-position-embeddings 16", "losses", on=f"{_ROTARY} --use-rope-scaling"
    ),
    "normalization": Turned("--normalization RMSNorm", "shapes"),
    "norm_epsilon": Turned("--layernorm-epsilon 0.1", "losses"),
    "apply_layernorm_1p": Turned("--apply-layernorm-1p", "weights"),
    "scale_embedding": Turned("--scale-embedding", "losses"),
    "embedding_multiplier": Turned("--embedding-multiplier 3", "losses"),
    "residual_multiplier": Turned("--residual-multiplier 0.3", "losses"),
    "logits_scaling": Turned("--logits-scaling 4", "losses"),
    "embed_layernorm": Turned("--embed-layernorm", "shapes"),
    "apply_residual_connection_post_layernorm": Turned(
        "--apply-residual-connection-post-layernorm", "losses"
    ),
    "sandwich_norm": Turned("--sandwich-norm", "shapes"),
    "input_norm": Turned("--no-input-norm", "shapes", on="--sandwich-norm"),
    "parallel_residual": Turned("--parallel-residual", "losses"),
    "gelu": Turned("--gelu erf", "losses"),
    "openai_gelu": Turned("--openai-gelu", "error", on="--gelu erf", says="--openai-gelu"),
    "onnx_safe": Turned("--onnx-safe True", "losses"),
    "glu_activation": Turned("--glu-activation geglu", "shapes"),
    "swiglu": Turned("--swiglu", "shapes"),
    "quick_geglu": Turned("--quick-geglu", "shapes"),
    "activation_func_clamp_value": Turned(
        "--activation-func-clamp-value 0.1", "losses", on="--swiglu"
    ),
    "glu_linear_offset": Turned("--glu-linear-offset 1", "losses", on="--swiglu"),
    "squared_relu": Turned("--squared-relu", "losses"),
    "relu": Turned("--relu", "losses"),
    "activation": Turned("--activation relu", "losses"),
    "add_bias_linear": Turned("--disable-bias-linear", "shapes"),
    "attention_bias": Turned("--attention-bias off", "shapes"),
    "add_qkv_bias": Turned("--add-qkv-bias", "shapes", on="--disable-bias-linear"),
    "untie_embeddings_and_output_weights": Turned(
        "--untie-embeddings-and-output-weights", "shapes"
    ),
    "fp32_residual_connection": Turned("--fp32-residual-connection", "losses", on="--bf16"),
    "attention_dropout": Turned("--attention-dropout 0.5", "losses"),
    "hidden_dropout": Turned("--hidden-dropout 0.5", "losses"),
    "init_method_std": Turned("--init-method-std 0.1", "losses"),
    "init_method_xavier_uniform": Turned("--init-method-xavier-uniform", "losses"),
}

EXPERTS = {
    "num_experts": Turned("--num-experts 2", "shapes"),
    "expert_interval": Turned("--expert-interval 1", "shapes", on="--num-experts 2"),
    "moe_layer_freq": Turned("--moe-layer-freq 1", "shapes", on="--num-experts 2"),
    "topk": Turned("--topk 2", "losses", on=_MIXTURE),
    "mlp_type": Turned("--mlp-type residual", "shapes", on=_MIXTURE),
    "moe_expert_parallel_size": Turned(
        "--moe-expert-parallel-size 2", "shapes", on=_MIXTURE, ranks=2
    ),
    "moe_train_capacity_factor": Turned("--moe-train-capacity-factor 0.25", "losses", on=_MIXTURE),
    "moe_eval_capacity_factor": Turned("--moe-eval-capacity-factor 0.25", "log", on=_MIXTURE),
    "expert_tensor_parallel_size": Turned(
        "--expert-tensor-parallel-size 1",
        "shapes",
        on=f"{_MIXTURE} --tensor-model-parallel-size 2",
        ranks=2,
    ),
    "moe_expert_capacity_factor": Turned(
        "--moe-expert-capacity-factor 0.25", "losses", on=_MIXTURE
    ),
    "moe_min_capacity": Turned(
        "--moe-min-capacity 8", "losses", on=f"{_MIXTURE} --moe-train-capacity-factor 0.25"
    ),
    "moe_token_dropping": Turned("--disable-moe-token-dropping", "losses", on=_MIXTURE),
    "moe_loss_coeff": Turned("--moe-loss-coeff 1", "losses", on=_MIXTURE),
    "moe_top2_2nd_expert_sampling": Turned(
        "--disable-moe-top2-2nd-expert-sampling",
        "losses",
        on="--num-experts 4 --expert-interval 1 --topk 2",
    ),
    "noisy_gate_policy": Turned("--noisy-gate-policy RSample", "losses", on=_MIXTURE),
    "moe_ffn_hidden_size": Turned("--moe-ffn-hidden-size 8", "shapes", on=_MIXTURE),
    "moe_shared_expert_intermediate_size": Turned(_SHARED, "shapes", on=_MIXTURE),
    "moe_shared_expert_gate": Turned(
        "--moe-shared-expert-gate", "shapes", on=f"{_MIXTURE} {_SHARED}"
    ),
    "moe_grouped_gemm": Turned("--moe-grouped-gemm", "losses", on=_MIXTURE),
    "moe_token_dispatcher_type": Turned(
        "--moe-token-dispatcher-type alltoall", "losses", on=_MIXTURE
    ),
    "moe_router_score_function": Turned(
        "--moe-router-score-function sigmoid", "losses", on=f"{_MIXTURE} --moe-grouped-gemm"
    ),
    "moe_router_pre_softmax": Turned(
        "--moe-router-pre-softmax",
        "losses",
        on=f"{_FOUR} --moe-grouped-gemm --moe-router-topk 2",
    ),
    "moe_router_topk_scaling_factor": Turned(
        "--moe-router-topk-scaling-factor 2.5", "losses", on=_MIXTURE
    ),
    "moe_router_num_groups": Turned(
        "--moe-router-num-groups 4",
        "losses",
        on=f"{_FOUR} --moe-router-group-topk 1",
        on_says="go together",
    ),
    "moe_router_group_topk": Turned(
        "--moe-router-group-topk 1",
        "losses",
        on=f"{_FOUR} --moe-router-num-groups 4",
        on_says="go together",
    ),
    "moe_router_group_best": Turned(
        "--moe-router-group-best 2",
        "losses",
        on=f"{_FOUR} --moe-router-num-groups 2 --moe-router-group-topk 1",
    ),
    "moe_router_enable_expert_bias": Turned(
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.5",
        "losses",
        on=f"{_MIXTURE} {_SIGMOID} --moe-router-topk 1",
    ),
    "moe_router_linear_bias": Turned("--moe-router-linear-bias", "shapes", on=_MIXTURE),
    "moe_router_bias_update_rate": Turned(
        "--moe-router-bias-update-rate 0.5",
        "losses",
        on=f"{_MIXTURE} {_SIGMOID} --moe-router-topk 1 --moe-router-enable-expert-bias",
    ),
    "moe_router_load_balancing_type": Turned(
        "--moe-router-load-balancing-type sinkhorn",
        "losses",
        on=f"{_MIXTURE} --moe-grouped-gemm --moe-router-topk 1",
    ),
    "moe_token_drop_policy": Turned(
        "--moe-token-drop-policy probs",
        "losses",
        on=f"{_MIXTURE} --moe-train-capacity-factor 0.25",
    ),
    "moe_z_loss_coeff": Turned("--moe-z-loss-coeff 1", "losses", on=_MIXTURE),
    "moe_input_jitter_eps": Turned("--moe-input-jitter-eps 0.5", "losses", on=_MIXTURE),
}

LORA = {
    "lora_rank": Turned("--lora-rank 2", "shapes"),
    "lora_alpha": Turned("--lora-alpha 64", "losses", on=_LORA),
    "lora_dropout": Turned("--lora-dropout 0.5", "losses", on=_LORA),
    "lora_target_modules": Turned("--lora-target-modules all-linear", "shapes", on=_LORA),
    "mtp_num_layers": Turned("--mtp-num-layers 1", "shapes", on=_ROTARY),
    "mtp_loss_scaling_factor": Turned("--mtp-loss-scaling-factor 1", "losses", on=_AHEAD),
    "mtp_use_repeated_layer": Turned("--mtp-use-repeated-layer", "shapes", on=_AHEAD),
}

PARALLEL = {
    "plugin": Turned("--plugin no_such_plugin", "error", says="there is no module no_such_plugin"),
    "objective": Turned("--objective gtp", "error", says="did you mean gpt?"),
    "network": Turned("--network gtp", "error", says="did you mean gpt?"),
    "dataset": Turned("--dataset option_dataset", "batches", on="--plugin option_plugin"),
    "hook": Turned("--hook option_hook", "log", on="--plugin option_plugin"),
    "metric": Turned("--metric option_metric", "measures", on="--plugin option_plugin"),
    "world_size": Turned("--world-size 3", "error", says="--world-size 3, but the launcher"),
    "elastic": Turned(
        "--elastic",
        "error",
        without=("--global-batch-size",),
        says="--elastic needs --global-batch",
    ),
    "tensor_model_parallel_size": Turned(_TENSOR, "shapes", ranks=2),
    "pipeline_model_parallel_size": Turned("--pipeline-model-parallel-size 2", "shapes", ranks=2),
    "sequence_parallel": Turned("--sequence-parallel", "kept", on=_TENSOR, ranks=2),
    "ds_sequence_parallel_size": Turned("--ds-sequence-parallel-size 2", "batches", ranks=2),
    "context_parallel_size": Turned("--context-parallel-size 2", "batches", ranks=2),
    "cp_comm_type": Turned(
        "--cp-comm-type a2a", "batches", on="--context-parallel-size 2", ranks=2
    ),
    "num_layers_per_virtual_pipeline_stage": Turned(
        "--num-layers-per-virtual-pipeline-stage 1", "shapes", on=_STAGES, ranks=2
    ),
    "num_virtual_stages_per_pipeline_rank": Turned(
        "--num-virtual-stages-per-pipeline-rank 2", "shapes", on=_STAGES, ranks=2
    ),
    "enable_zbh1_pipeline": Turned(
        "--enable-zbh1-pipeline", "log", on=f"{_STAGES} --timing-log-level 2", ranks=2
    ),
    "pp_partition_method": Turned(
        "--pp-partition-method parameters",
        "shapes",
        on="--num-layers 4 --max-position-embeddings 330 --pipeline-model-parallel-size 2",
        ranks=2,
    ),
    "decoder_first_pipeline_num_layers": Turned(
        "--decoder-first-pipeline-num-layers 1", "shapes", on=_STAGES, ranks=2
    ),
    "decoder_last_pipeline_num_layers": Turned(
        "--decoder-last-pipeline-num-layers 1", "shapes", on=_STAGES, ranks=2
    ),
    "account_for_embedding_in_pipeline_split": Turned(
        "--account-for-embedding-in-pipeline-split", "shapes", on=_THREE_LAYERS, ranks=2
    ),
    "account_for_loss_in_pipeline_split": Turned(
        "--account-for-loss-in-pipeline-split",
        "shapes",
        on=f"{_THREE_LAYERS} --account-for-embedding-in-pipeline-split",
        ranks=2,
    ),
    "pipeline_model_parallel_layout": Turned(
        "--pipeline-model-parallel-layout Et|tttL", "shapes", on=_STAGES, ranks=2
    ),
    "pipeline_model_parallel_split_rank": Turned(
        "--pipeline-model-parallel-split-rank 1", "error", says="is for pretrain_t5.py"
    ),
    "distributed_backend": Turned(
        "--distributed-backend nccl", "error", without=("--device",), says="nccl needs GPUs"
    ),
    "device": Turned("--device cuda", "error", says="no GPU is visible"),
    "local_rank": Turned("--local_rank 7", "error", says="but --local_rank 7"),
}

PRECISION = {
    "fp16": Turned("--fp16", "shapes", as_gpu=True),
    "bf16": Turned("--bf16", "shapes"),
    "loss_scale": Turned("--loss-scale 128", "scales", on="--fp16", as_gpu=True),
    "initial_loss_scale": Turned("--initial-loss-scale 256", "scales", on="--fp16", as_gpu=True),
    "min_loss_scale": Turned(
        "--min-loss-scale 549755813888",
        "error",
        on=f"{_OVERFLOWS} --hysteresis 1",
        as_gpu=True,
        says="even at the least loss scale",
    ),
    "loss_scale_window": Turned("--loss-scale-window 1", "scales", on=_FP16, as_gpu=True),
    "hysteresis": Turned("--hysteresis 1", "scales", on=_OVERFLOWS, as_gpu=True),
    "accumulate_allreduce_grads_in_fp32": Turned(
        "--accumulate-allreduce-grads-in-fp32", "weights", on=_FP16, as_gpu=True
    ),
    "fp8_format": Turned(
        "--fp8-format hybrid", "error", on="--bf16", says="--fp8-format hybrid needs a GPU"
    ),
    "fp8_recipe": Turned(
        "--fp8-recipe rowwise",
        "error",
        on="--bf16 --fp8-format hybrid",
        on_says="needs a GPU",
        says="write --fp8-format e4m3",
    ),
}

OPTIMIZER = {
    "optimizer": Turned("--optimizer sgd", "state"),
    "optimizer_impl": Turned("--optimizer-impl apex", "error", says="needs a GPU to step on"),
    "use_bnb_optimizer": Turned("--use-bnb-optimizer", "error", says="8-bit state needs a GPU"),
    "cpu_optimizer": Turned("--cpu-optimizer", "state"),
    "cpu_torch_adam": Turned("--cpu_torch_adam", "state", on="--cpu-optimizer"),
    "use_distributed_optimizer": Turned("--use-distributed-optimizer", "state", ranks=2),
    "bitfit": Turned("--bitfit", "trained"),
    "freeze": Turned("--freeze mlp embedding", "trained"),
    "weight_decay": Turned("--weight-decay 0.5", "weights"),
    "start_weight_decay": Turned("--start-weight-decay 0.4", "weights", on=_DECAY),
    "end_weight_decay": Turned("--end-weight-decay 0.9", "weights", on=_DECAY),
    "weight_decay_incr_style": Turned("--weight-decay-incr-style cosine", "weights", on=_DECAY),
    "clip_grad": Turned("--clip-grad 0.1", "weights"),
    "adam_beta1": Turned("--adam-beta1 0.5", "weights"),
    "adam_beta2": Turned("--adam-beta2 0.5", "weights"),
    "apply_wd_to_qk_layernorm": Turned(
        "--apply-wd-to-qk-layernorm", "weights", on="--qk-layernorm --weight-decay 0.5"
    ),
    "adam_eps": Turned("--adam-eps 0.1", "weights"),
    "sgd_momentum": Turned("--sgd-momentum 0.1", "weights", on="--optimizer sgd"),
    "lion_beta1": Turned("--lion-beta1 0.5", "weights", on="--optimizer lion"),
    "lion_beta2": Turned("--lion-beta2 0.5", "weights", on="--optimizer lion"),
    "muon_momentum": Turned("--muon-momentum 0.5", "weights", on=_MUON),
    "muon_nesterov": Turned("--muon-nesterov", "weights", on=_MUON),
    "muon_num_ns_steps": Turned("--muon-num-ns-steps 2", "weights", on=_MUON),
    "muon_scale_mode": Turned("--muon-scale-mode unit_rms_norm", "weights", on=_MUON),
    "muon_extra_scale_factor": Turned("--muon-extra-scale-factor 0.2", "weights", on=_MUON),
}

SCHEDULE = {
    "lr": Turned("--lr 0.02", "weights"),
    "decoupled_lr": Turned("--decoupled-lr 0.05", "weights"),
    "decoupled_min_lr": Turned("--decoupled-min-lr 0.02", "weights", on="--decoupled-lr 0.05"),
    "min_lr": Turned("--min-lr 0.005", "rates"),
    "lr_decay_style": Turned("--lr-decay-style constant", "rates"),
    "lr_decay_iters": Turned("--lr-decay-iters 10", "rates"),
    "lr_decay_samples": Turned("--lr-decay-samples 40", "rates", **_SAMPLES),
    "lr_decay_tokens": Turned("--lr-decay-tokens 1000", "rates"),
    "lr_wsd_decay_style": Turned("--lr-wsd-decay-style linear", "rates", on=_WSD),
    "lr_wsd_decay_iters": Turned("--lr-wsd-decay-iters 3", "rates", on=_WSD),
    "lr_wsd_decay_samples": Turned(
        "--lr-wsd-decay-samples 12",
        "rates",
        on="--train-samples 12 --lr-decay-style WSD --lr-wsd-decay-samples 8",
        without=("--train-iters",),
    ),
    "lr_warmup_fraction": Turned("--lr-warmup-fraction 0.7", "rates"),
    "lr_warmup_iters": Turned("--lr-warmup-iters 2", "rates"),
    "lr_warmup_samples": Turned("--lr-warmup-samples 8", "rates", **_SAMPLES),
    "lr_warmup_tokens": Turned("--lr-warmup-tokens 100", "rates"),
    "lr_warmup_init": Turned("--lr-warmup-init 0.001", "rates", on="--lr-warmup-iters 2"),
    "override_opt_param_scheduler": Turned(
        "--override-opt_param-scheduler", "rates", on=f"{_RESUME} --lr 0.02", on_says="schedule"
    ),
    "use_checkpoint_opt_param_scheduler": Turned(
        "--use-checkpoint-opt_param-scheduler",
        "rates",
        on=f"{_RESUME} --lr 0.02",
        on_says="schedule",
    ),
}

TRAINING = {
    "micro_batch_size": Turned("--micro-batch-size 4", "batches"),
    "global_batch_size": Turned("--global-batch-size 2", "sizes"),
    "gradient_accumulation_steps": Turned(
        "--gradient-accumulation-steps 3", "sizes", without=("--global-batch-size",)
    ),
    "rampup_batch_size": Turned("--rampup-batch-size 2 2 8", "sizes", **_SAMPLES),
    "step_batch_size_schedule": Turned(
        "--step-batch-size-schedule 0:4",
        "sizes",
        on="--train-samples 12",
        without=("--train-iters", "--global-batch-size"),
    ),
    "train_iters": Turned("--train-iters 1", "sizes"),
    "train_samples": Turned("--train-samples 8", "sizes", **_SAMPLES),
    "train_tokens": Turned("--train-tokens 50", "sizes"),
    "seed": Turned("--seed 1", "losses"),
    "exit_interval": Turned("--exit-interval 1", "sizes"),
    "exit_duration_in_mins": Turned("--exit-duration-in-mins 1", "sizes"),
    "exit_signal_handler": Turned("--exit-signal-handler", "sizes"),
    "hang_timeout": Turned("--hang-timeout 100", "log", on=_SAVE),
    "chaos": Turned("--chaos seed=1,stall=1,stall_s=0", "log", on=f"{_SAVE} --load {{run}}/save"),
    "max_restarts": Turned("--max-restarts 2", "error", says="--max-restarts needs --save"),
    "distributed_timeout_minutes": Turned("--distributed-timeout-minutes 7", "process"),
    "kill_switch_path": Turned("--kill-switch-path {files}/kill", "sizes"),
    "skip_train_iteration_range": Turned("--skip-train-iteration-range 2-2", "batches"),
    "deterministic_mode": Turned("--deterministic-mode", "process"),
    "check_for_nan_in_loss_and_grad": Turned(
        "--no-check-for-nan-in-loss-and-grad",
        "sizes",
        on=f"{_EXPLODES} --max-nan-steps 2",
        on_says="--max-nan-steps",
    ),
    "max_nan_steps": Turned("--max-nan-steps 2", "error", on=_EXPLODES, says="--max-nan-steps"),
    "replica_check_interval": Turned(
        "--replica-check-interval 1", "error", ranks=2, parts=True, says="differ"
    ),
    "expect_params": Turned("--expect-params 1B", "error", says="a network of"),
    "config": Turned("--config {files}/flags.yaml", "weights"),
    "preset": Turned("--preset pythia-160m", "weights"),
}

EVALUATION = {
    "eval_interval": Turned("--eval-interval 1", "log"),
    "eval_global_batch_size": Turned("--eval-global-batch-size 2", "log"),
    "eval_micro_batch_size": Turned(
        "--eval-micro-batch-size 3", "error", says="4 samples of an evaluated batch are not"
    ),
    "eval_iters": Turned("--eval-iters 2", "log"),
    "eval_only": Turned("--eval-only", "sizes", on=_RESUME),
    "inference": Turned("--inference", "deepspeed", on=f"{_RESUME} --eval-only"),
}

DATA = {
    "data_path": Turned("--data-path {files}/other", "batches"),
    "mock_data": Turned("--mock-data", "batches", without=("--data-path",), on_says="--data-path"),
    "split": Turned("--split 50,25,25", "batches"),
    "train_weighted_split_paths": Turned(
        "--train-weighted-split-paths 'a: 1 0:0.5 {files}/other'",
        "batches",
        on=_WEIGHTED,
        without=("--data-path",),
    ),
    "valid_weighted_split_paths": Turned(
        "--valid-weighted-split-paths 'b: 1 0:1 {files}/other'",
        "log",
        on=_WEIGHTED,
        without=("--data-path",),
    ),
    "test_weighted_split_paths": Turned(
        "--test-weighted-split-paths 'b: 1 0:1 {files}/other'",
        "log",
        on=_WEIGHTED,
        without=("--data-path",),
    ),
    "train_weighted_split_paths_path": Turned(
        "--train-weighted-split-paths-path {files}/paths.txt",
        "batches",
        without=("--data-path",),
        on_says="--data-path is missing",
    ),
    "valid_weighted_split_paths_path": Turned(
        "--valid-weighted-split-paths-path {files}/paths.txt",
        "log",
        on=_WEIGHTED,
        without=("--data-path",),
    ),
    "test_weighted_split_paths_path": Turned(
        "--test-weighted-split-paths-path {files}/paths.txt",
        "log",
        on=_WEIGHTED,
        without=("--data-path",),
    ),
    "dataloader_type": Turned("--dataloader-type cyclic", "batches"),
    "sample_order": Turned("--sample-order megatron-core", "batches", on="--split 1,1,1"),
    "mid_level_dataset_surplus": Turned(
        "--mid-level-dataset-surplus 40 --sample-order megatron-core",
        "batches",
        on="--train-iters 3 --data-path 1 {files}/corpus 1 {files}/other "
        "--sample-order megatron-core",
        without=("--data-path",),
    ),
    "data_impl": Turned("--data-impl lazy", "error", says="is not an index of --dataset-impl lazy"),
    "data_cache_path": Turned("--data-cache-path {run}/elsewhere", "files"),
}

MASKS = {
    "reset_position_ids": Turned("--reset-position-ids", "batches"),
    "reset_attention_mask": Turned("--reset-attention-mask", "losses"),
    "calculate_per_token_loss": Turned(
        "--calculate-per-token-loss", "losses", on="--eod-mask-loss"
    ),
    "eod_mask_loss": Turned("--eod-mask-loss", "losses"),
}

OBJECTIVE = {
    "loss_on_targets_only": Turned("--loss-on-targets-only", "losses", objective="prefix-lm"),
    "reweight_loss_based_on_position_frequency": Turned(
        "--reweight-loss-based-on-position-frequency", "losses", objective="prefix-lm"
    ),
    "norm_target_loss": Turned("--norm-target-loss", "losses", **_PAIRS),
    "prefixlm": Turned("--prefixlm", "losses", **_PAIRS),
}

DOWNSTREAM = {
    "task": Turned("--task MNLI", "error", **_LABELLED, says="MNLI"),
    "train_data": Turned("--train-data {files}/dev.tsv", "batches", **_LABELLED),
    "valid_data": Turned("--valid-data {files}/train.tsv", "log", **_LABELLED),
    "epochs": Turned("--epochs 1", "sizes", **_LABELLED),
    "pretrained_checkpoint": Turned(
        "--pretrained-checkpoint {files}/none", "error", **_LABELLED, says="no such directory"
    ),
    "keep_last_batch": Turned(
        "--keep-last-batch", "sizes", **(_LABELLED | {"on": f"{_LABELLED['on']} --epochs 1"})
    ),
}
TEXT_TASK = {
    "labels": Turned("--labels O B B-X B-Y", "shapes", **_TAGS),
    "num_labels": Turned("--num-labels 5", "shapes", **_CLASSES),
    "negative_label": Turned("--negative-label 0", "log", **_CLASSES),
    "text_column": Turned("--text-column 3", "error", **_TAGS, says="has 2 columns"),
    "label_column": Turned("--label-column 3", "error", **_TAGS, says="has no label"),
    "column_separator": Turned("--column-separator tab", "error", **_TAGS, says="has no label"),
    "header": Turned("--header yes", "batches", **_CLASSES),
    "tag_scheme": Turned("--tag-scheme types", "log", **_SCORED_TAGS),
    "macro_average": Turned("--macro-average all", "log", **_SCORED_TAGS),
    "squad_rules": Turned("--squad-rules 2.0", "log", **_LONG_ANSWERS),
    "head_layers": Turned("--head-layers 3", "shapes", **_TAGS),
    "head_dropout": Turned("--head-dropout 0", "losses", **_TAGS),
    "ignore_extra_tokens": Turned("--ignore-extra-tokens", "batches", **_TAGS),
    "ignore_start_end": Turned("--ignore-start-end", "batches", **_TAGS),
    "class_balancing": Turned("--class-balancing weighted_loss", "batches", **_TAGS),
    "version_2_with_negative": Turned(
        "--version-2-with-negative",
        "error",
        **(_ANSWERS | {"on": _SQUAD.replace("squad", "squad2")}),
        on_says="give --version-2-with-negative",
    ),
    "doc_stride": Turned("--doc-stride 2", "batches", **_ANSWERS),
    "max_query_length": Turned("--max-query-length 2", "batches", **_ANSWERS),
    "max_answer_length": Turned("--max-answer-length 1", "log", **_LONG_ANSWERS),
    "n_best_size": Turned("--n-best-size 1", "log", **_LONG_ANSWERS),
    "null_score_diff_threshold": Turned("--null-score-diff-threshold -1000", "log", **_NO_ANSWERS),
    "output_prediction_file": Unseen("A file is written beside the run."),
    "output_nbest_file": Unseen("A file is written beside the run."),
}

MASKED_LM = {
    "mask_prob": Turned("--mask-prob 0.5", "batches", **_SENTENCES),
    "short_seq_prob": Turned("--short-seq-prob 1", "batches", **_SENTENCES),
    "bert_binary_head": Turned("--bert-no-binary-head", "losses", **_SENTENCES),
    "decoder_seq_length": Turned("--decoder-seq-length 8", "error", says="is for pretrain_t5.py"),
}

ENCODER_DECODER = {
    "decoder_num_layers": Turned("--decoder-num-layers 2", "error", says="is for pretrain_t5.py"),
    "relative_attention_num_buckets": Turned(
        "--relative-attention-num-buckets 8", "error", says="is for pretrain_t5.py"
    ),
    "relative_attention_max_distance": Turned(
        "--relative-attention-max-distance 8", "error", says="is for pretrain_t5.py"
    ),
}

RETRO = {
    "retro_project_dir": Turned("--retro-project-dir {files}/none", "error", says="cannot read"),
    **{
        name: Turned(flags, "error", says="is for pretrain_retro.py")
        for name, flags in {
            "retro_add_retriever": "--retro-add-retriever",
            "retro_chunk_length": "--retro-chunk-length 8",
            "retro_num_neighbors": "--retro-num-neighbors 3",
            "retro_num_retrieved_chunks": "--retro-num-retrieved-chunks 3",
            "retro_encoder_layers": "--retro-encoder-layers 3",
            "retro_encoder_hidden_dropout": "--retro-encoder-hidden-dropout 0",
            "retro_encoder_attention_dropout": "--retro-encoder-attention-dropout 0",
            "retro_attention_gate": "--retro-attention-gate 0",
            "retro_verify_neighbor_count": "--retro-no-verify-neighbor-count",
            "retro_normed_residual": "--retro-normed-residual",
            "retro_final_norm": "--retro-no-final-norm",
        }.items()
    },
}

INSTRUCT = {
    name: Turned(flags, "error", says="is for tools/retro/sft/sft_retro.py")
    for name, flags in {
        "data_folder": "--data-folder x",
        "ft_neighbours": "--ft_neighbours 2",
        "use_retrieved_neighbours": "--use-retrieved-neighbours",
        "reuse_top": "--reuse-top",
        "longform_answer": "--longform-answer",
        "answer_loss_only": "--answer-loss-only",
    }.items()
}

FIM = {
    "fim_rate": Turned("--fim-rate 1", "batches", on=_SLOW_TEXT, **_TRANSFER),
    "fim_spm_rate": Turned("--fim-spm-rate 0", "batches", on=_FIM, **_TRANSFER),
    "fim_split_sample": Turned("--fim-split-sample <split>", "batches", on=_FIM, **_TRANSFER),
    "fragment_fim_rate": Turned("--fragment-fim-rate 1", "batches", on=_SPLIT, **_TRANSFER),
    "no_fim_prefix": Turned("--no-fim-prefix a", "batches", on=_SPLIT, **_TRANSFER),
    "fim_cut": Turned("--fim-cut tokens", "batches", on=_FIM, **_TRANSFER),
    "fim_prefix_token": Turned("--fim-prefix-token <other>", "batches", on=_FIM, **_TRANSFER),
    "fim_middle_token": Turned("--fim-middle-token <other>", "batches", on=_FIM, **_TRANSFER),
    "fim_suffix_token": Turned("--fim-suffix-token <other>", "batches", on=_FIM, **_TRANSFER),
    "fim_pad_token": Turned("--fim-pad-token <other>", "batches", on=_SHRINKING, **_TRANSFER),
}

TOKENIZER = {
    "tokenizer_type": Turned(
        "--tokenizer-type NullTokenizer", "error", on=_TEXT, says="NullTokenizer needs", **_TRANSFER
    ),
    "vocab_file": Turned("--vocab-file {files}/longer.json", "shapes", on=_TEXT, **_TRANSFER),
    "merge_file": Turned("--merge-file {files}/none.txt", "batches", on=_FIM, **_TRANSFER),
    "tokenizer_name_or_path": Turned(
        "--tokenizer-name-or-path {files}/hf_longer", "shapes", on=_HF, **_TRANSFER
    ),
    "tokenizer_model": Turned(
        "--tokenizer-model {files}/tiktoken_other.json", "batches", on=_TIKTOKEN, **_TRANSFER
    ),
    "tokenizer_sentencepiece_legacy": Turned(
        "--tokenizer-sentencepiece-legacy", "error", says="means nothing to --tokenizer-type Null"
    ),
    "tokenizer_hf_no_include_special_tokens": Turned(
        "--tokenizer-hf-no-include-special-tokens",
        "error",
        says="means nothing to --tokenizer-type Null",
    ),
    "tokenizer_kwargs": Turned("--tokenizer-kwargs pad_token <new>", "shapes", on=_HF, **_TRANSFER),
    "vocab_size": Turned("--vocab-size 90", "shapes"),
    "vocab_extra_ids": Turned("--vocab-extra-ids 10", "shapes", on=_HF, **_TRANSFER),
    "tiktoken_pattern": Turned("--tiktoken-pattern v1", "batches", on=_TIKTOKEN, **_TRANSFER),
    "tiktoken_num_special_tokens": Turned(
        "--tiktoken-num-special-tokens 11", "batches", on=_TIKTOKEN, **_TRANSFER
    ),
    "tiktoken_special_tokens": Turned(
        "--tiktoken-special-tokens <unk> <s> </s> <fim_prefix> <fim_suffix> <fim_middle>",
        "batches",
        on=_TIKTOKEN,
        **_TRANSFER,
    ),
    "tokenizer_backend": Turned("--tokenizer-backend fast", "error", says="have a fast backend"),
    "make_vocab_size_divisible_by": Turned("--make-vocab-size-divisible-by 128", "shapes"),
    "pad_vocab_size_to": Turned("--pad-vocab-size-to 100", "shapes"),
    "true_vocab_size": Turned("--true-vocab-size 100", "shapes"),
    "padded_vocab_in_softmax": Turned("--padded-vocab-in-softmax", "losses"),
}

CHECKPOINT = {
    "save": Turned(_SAVE, "files"),
    "save_interval": Turned("--save-interval 1", "files", on=_SAVE),
    "load": Turned("--load {files}/checkpoint", "sizes", on="--train-iters 4"),
    "async_save": Turned("--async-save", "log", on=_SAVE),
    "keep_last": Turned("--keep-last 1", "files", on=_SAVE_EACH),
    "keep_every": Turned("--keep-every 2", "files", on=_SAVE_EACH),
    "ckpt_step": Turned("--ckpt-step 1", "error", on=_RESUME, says="--ckpt-step 1: --load"),
    "use_checkpoint_args": Turned(
        "--use-checkpoint-args", "error", says="--use-checkpoint-args needs --load"
    ),
    "universal_checkpoint": Turned(
        "--universal-checkpoint",
        "sizes",
        on="--load {files}/universal --train-iters 4",
        on_says="holds no complete checkpoint",
    ),
    "reshape_buffer_mb": Turned("--reshape-buffer-mb 1", "log", on=f"{_RESUME} --zero-stage 2"),
    "exit_on_missing_checkpoint": Turned(
        "--exit-on-missing-checkpoint", "error", on=f"{_SAVE} --load {{run}}/save", says="holds no"
    ),
    "finetune": Turned("--finetune", "sizes", on=_RESUME),
    "reset_progress": Turned("--reset-progress", "sizes", on=_RESUME),
    "no_load_optim": Turned("--no-load-optim", "weights", on=_RESUME),
    "no_load_rng": Turned("--no-load-rng", "losses", on=_RESUME),
    "no_save_optim": Turned("--no-save-optim", "saved", on=_SAVE),
    "no_save_rng": Turned("--no-save-rng", "files", on=_SAVE),
}

GUARDS = {
    "spike_policy": Turned("--spike-policy window=9", "error", says="--spike-policy needs --save"),
    "replay_step": Turned("--replay-step 2", "log", on=_RESUME),
}

RECOMPUTE = {
    "recompute_granularity": Turned("--recompute-granularity selective", "kept"),
    "recompute_activations": Turned("--recompute-activations", "kept"),
    "checkpoint_activations": Turned("--checkpoint-activations", "kept"),
    "recompute_method": Turned("--recompute-method block", "kept", on=_FULL),
    "recompute_num_layers": Turned("--recompute-num-layers 2", "kept", on=_FULL),
    "distribute_saved_activations": Turned(
        "--distribute-saved-activations", "deepspeed", on=f"{_TENSOR} {_FULL}", ranks=2
    ),
    "contiguous_checkpointing": Turned(
        "--contiguous-checkpointing",
        "deepspeed",
        on=f"{_TENSOR} {_FULL} --partition-activations",
        ranks=2,
    ),
    "checkpoint_in_cpu": Turned(
        "--checkpoint-in-cpu",
        "deepspeed",
        on=f"{_TENSOR} {_FULL} --partition-activations",
        ranks=2,
    ),
    "synchronize_each_layer": Turned("--synchronize-each-layer", "deepspeed", on=_FULL),
    "profile_backward": Turned("--profile-backward", "messages", on=_FULL),
}

KERNELS = {
    "kernels": Turned("--kernels reference", "log"),
    "attention_impl": Turned("--attention-impl reference", "attention"),
    "use_flash_attn": Turned(
        "--use-flash-attn", "error", without=("--device",), says="--use-flash-attn needs a GPU"
    ),
    "attention_softmax_in_fp32": Turned(
        "--attention-softmax-in-fp32",
        "losses",
        on="--bf16 --attention-impl fused-softmax --no-query-key-layer-scaling",
    ),
    "masked_softmax_fusion": Turned(
        "--no-masked-softmax-fusion", "log", on="--attention-impl fused-softmax"
    ),
    "bias_gelu_fusion": Turned("--no-bias-gelu-fusion", "log"),
    "bias_dropout_fusion": Turned("--no-bias-dropout-fusion", "log"),
    "layer_norm_fusion": Turned("--no-layer-norm-fusion", "log"),
    "rope_fusion": Turned("--no-rope-fusion", "log", on=_ROTARY),
    "cross_entropy_fusion": Turned("--no-cross-entropy-fusion", "log"),
    "loss_chunk_tokens": Turned("--loss-chunk-tokens 5", "kept"),
    "compile": Turned(
        "--compile --recompute-activations", "error", says="--compile decides itself what"
    ),
    "compile_mode": Turned("--compile-mode default", "error", says="is of --compile"),
    "abort_on_unmet_fused_kernel_constraints": Turned(
        "--abort-on-unmet-fused-kernel-constraints", "error", says="Triton needs a GPU"
    ),
}

LOGGING = {
    "log_format": Turned("--log-format compact", "log"),
    "log_interval": Turned("--log-interval 2", "log"),
    "log_params_norm": Turned("--log-params-norm", "measures"),
    "log_num_zeros_in_grad": Turned("--log-num-zeros-in-grad", "measures"),
    "timing_log_level": Turned("--timing-log-level 1", "measures"),
    "slow_rank_factor": Turned("--slow-rank-factor 1.5", "measures", ranks=2),
    "device_peak_tflops": Turned("--device-peak-tflops 1", "log"),
    "log_path": Turned("--log-path {run}/flags", "files"),
    "log_level": Turned("--log-level warning", "log"),
    "log_level_replica": Turned("--log-level-replica info", "log", ranks=2),
    "tensorboard_dir": Turned(_TB, "scalars"),
    "tensorboard_log_interval": Turned("--tensorboard-log-interval 2", "scalars", on=_TB),
    "tensorboard_queue_size": Turned("--tensorboard-queue-size 5", "writers", on=_TB),
    "log_timers_to_tensorboard": Turned("--log-timers-to-tensorboard", "scalars", on=_TB),
    "log_batch_size_to_tensorboard": Turned("--log-batch-size-to-tensorboard", "scalars", on=_TB),
    "log_validation_ppl_to_tensorboard": Turned(
        "--log-validation-ppl-to-tensorboard", "scalars", on=_TB
    ),
    "log_learning_rate_to_tensorboard": Turned(
        "--no-log-learning-rate-to-tensorboard", "scalars", on=_TB
    ),
    "log_loss_scale_to_tensorboard": Turned(
        "--no-log-loss-scale-to-tensorboard", "scalars", on=f"{_FP16} {_TB}", as_gpu=True
    ),
    "wandb_project": Turned(_WANDB, "writers"),
    "wandb_exp_name": Turned("--wandb-exp-name e", "writers", on=_WANDB),
    "wandb_entity": Turned("--wandb-entity e", "writers", on=_WANDB),
    "wandb_save_dir": Turned("--wandb-save-dir {run}/wandb", "writers", on=_WANDB),
    "codecarbon_dir": Turned("--codecarbon-dir {run}/energy", "files"),
    "codecarbon_country_iso_code": Turned(
        "--codecarbon-country-iso-code DEU", "writers", on="--codecarbon-dir {run}/energy"
    ),
}

PROFILING = {
    "profile": Turned("--profile", "files", on=_PROFILE.replace("--profile ", "")),
    "profile_step_start": Turned("--profile-step-start 2", "files", on=_PROFILE),
    "profile_step_end": Turned("--profile-step-end 2", "files", on=_PROFILE),
    "profile_ranks": Turned("--profile-ranks 1", "files", on=_PROFILE, ranks=2),
    "profile_dir": Turned("--profile-dir {run}/elsewhere", "files", on=_PROFILE),
    "nvtx_ranges": Turned("--nvtx-ranges", "error", says="--nvtx-ranges needs GPUs"),
}

DEEPSPEED = {
    "deepspeed_config": Turned("--deepspeed_config {files}/curriculum.json", "sizes"),
    "zero_stage": Turned("--zero-stage 1", "state", ranks=2),
    "zero_reduce_scatter": Turned("--zero-reduce-scatter", "deepspeed", on="--zero-stage 2"),
    "zero_contiguous_gradients": Turned(
        "--zero-contiguous-gradients", "deepspeed", on="--zero-stage 2"
    ),
    "zero_reduce_bucket_size": Turned(
        "--zero-reduce-bucket-size 500", "deepspeed", on="--zero-stage 2"
    ),
    "zero_allgather_bucket_size": Turned(
        "--zero-allgather-bucket-size 500", "deepspeed", on="--zero-stage 2"
    ),
    "remote_device": Turned("--remote-device cpu", "deepspeed", on="--zero-stage 3"),
    "use_pin_memory": Turned(
        "--use-pin-memory", "deepspeed", on="--cpu-optimizer --cpu_torch_adam"
    ),
}

URLS = {
    "object_storage_cache_path": Turned(
        "--object-storage-cache-path {run}/elsewhere",
        "files",
        on="--data-path file://{files}/corpus --object-storage-cache-path {run}/copies",
        without=("--data-path",),
    ),
}

_RECURRENT = "--num-layers 4 --hybrid-layer-pattern MG*- --position-embedding-type none"
_RECURRENT += " --mamba-head-dim 8 --mamba-num-groups 1 --mamba-state-dim 4"
_RECURRENT += " --linear-num-key-heads 1 --linear-num-value-heads 2"
_RECURRENT += " --linear-key-head-dim 4 --linear-value-head-dim 4"
HYBRID = {
    "hybrid_layer_pattern": Turned("--hybrid-layer-pattern MM*-", "shapes", on=_RECURRENT),
    "mamba_state_dim": Turned("--mamba-state-dim 8", "shapes", on=_RECURRENT),
    "mamba_head_dim": Turned("--mamba-head-dim 4", "shapes", on=_RECURRENT),
    "mamba_num_groups": Turned("--mamba-num-groups 2", "shapes", on=_RECURRENT),
    "mamba_num_heads": Turned("--mamba-num-heads 2", "shapes", on=_RECURRENT),
    "mamba_dt_min": Turned("--mamba-dt-min 0.5", "losses", on=_RECURRENT),
    "linear_conv_kernel_dim": Turned("--linear-conv-kernel-dim 3", "shapes", on=_RECURRENT),
    "linear_key_head_dim": Turned("--linear-key-head-dim 8", "shapes", on=_RECURRENT),
    "linear_value_head_dim": Turned("--linear-value-head-dim 8", "shapes", on=_RECURRENT),
    "linear_num_key_heads": Turned("--linear-num-key-heads 2", "shapes", on=_RECURRENT),
    "linear_num_value_heads": Turned("--linear-num-value-heads 4", "shapes", on=_RECURRENT),
    "attention_output_gate": Turned("--attention-output-gate", "shapes", on=_RECURRENT),
}

OPTIONS: Mapping[str, Turned | Unseen] = {
    **MODEL,
    **EXPERTS,
    **LORA,
    **PARALLEL,
    **PRECISION,
    **OPTIMIZER,
    **SCHEDULE,
    **TRAINING,
    **EVALUATION,
    **DATA,
    **MASKS,
    **OBJECTIVE,
    **MASKED_LM,
    **DOWNSTREAM,
    **TEXT_TASK,
    **FIM,
    **MASKED_LM,
    **ENCODER_DECODER,
    **RETRO,
    **HYBRID,
    **INSTRUCT,
    **TOKENIZER,
    **CHECKPOINT,
    **GUARDS,
    **RECOMPUTE,
    **KERNELS,
    **LOGGING,
    **PROFILING,
    **DEEPSPEED,
    **URLS,
}
