#!/usr/bin/env bash
# GPT-3 (arXiv:2005.14165) on 128 nodes of 8 GPUs of 80 GB: the network, the batch ramp and the
# learning rate of the paper, over 300 billion tokens. Start it on each node, here by SLURM:
#
#   export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) DATA_PATH=…
#   srun bash -c 'NODE_RANK=$SLURM_PROCID bash examples/pretrain_gpt3_175B.sh'
#
# Print what it needs, on any machine:
#
#   DATA_PATH=none PLAN="--gpu a100-80gb" bash examples/pretrain_gpt3_175B.sh

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

NNODES=${NNODES:-128} GPUS_PER_NODE=${GPUS_PER_NODE:-8}
read -ra data_path <<< "${DATA_PATH:?set it to the token files, without .bin and .idx}"
read -ra precision <<< "${PRECISION---bf16}"
read -ra ramp <<< "${RAMPUP_BATCH_SIZE:-16 16 5_859_375}"

launch pretrain_gpt.py \
    --tensor-model-parallel-size "${TENSOR_PARALLEL:-8}" \
    --pipeline-model-parallel-size "${PIPELINE_PARALLEL:-16}" \
    --zero-stage "${ZERO_STAGE:-1}" \
    --num-layers "${NUM_LAYERS:-96}" \
    --hidden-size "${HIDDEN_SIZE:-12288}" \
    --num-attention-heads "${NUM_ATTENTION_HEADS:-96}" \
    --seq-length "${SEQ_LENGTH:-2048}" \
    --init-method-std "${INIT_METHOD_STD:-0.006}" \
    --micro-batch-size "${MICRO_BATCH_SIZE:-1}" \
    --global-batch-size "${GLOBAL_BATCH_SIZE:-1536}" \
    --rampup-batch-size "${ramp[@]}" \
    --train-samples "${TRAIN_SAMPLES:-146_484_375}" \
    --lr "${LR:-6.0e-5}" \
    --min-lr "${MIN_LR:-6.0e-6}" \
    --lr-decay-style "${LR_DECAY_STYLE:-cosine}" \
    --lr-decay-samples "${LR_DECAY_SAMPLES:-126_953_125}" \
    --lr-warmup-samples "${LR_WARMUP_SAMPLES:-183_105}" \
    --adam-beta1 "${ADAM_BETA1:-0.9}" \
    --adam-beta2 "${ADAM_BETA2:-0.95}" \
    --weight-decay "${WEIGHT_DECAY:-0.1}" \
    --clip-grad "${CLIP_GRAD:-1.0}" \
    --checkpoint-activations \
    --data-path "${data_path[@]}" \
    --split "${SPLIT:-98,2,0}" \
    --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}" \
    --merge-file "${MERGE_FILE:-gpt2-merges.txt}" \
    --save "${CHECKPOINT_PATH:-checkpoints}" \
    --load "${CHECKPOINT_PATH:-checkpoints}" \
    --save-interval "${SAVE_INTERVAL:-1000}" \
    --log-interval "${LOG_INTERVAL:-10}" \
    --eval-interval "${EVAL_INTERVAL:-1000}" \
    --eval-iters "${EVAL_ITERS:-10}" \
    --tensorboard-dir "${TENSORBOARD_PATH:-tensorboard}" \
    "${precision[@]}" \
    "$@"
