#!/usr/bin/env bash
# Pretrain on several languages, each with a weight of its own, and evaluate each by itself.
#
#   LANGUAGES="en:0.6:data/en_text_document fr:0.4:data/fr_text_document" \
#       TOKENIZER=bigscience/tokenizer bash examples/pretrain_multilingual.sh
#
# LANGUAGES lists NAME:WEIGHT:TOKEN_FILES. Training reads the first part of the documents of each,
# up to TRAIN_PART of them, and validation the rest. GPUS_PER_NODE and the like: see launch.sh.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

part=${TRAIN_PART:-0.95} training= validation=()
for language in ${LANGUAGES:?set it to NAME:WEIGHT:TOKEN_FILES of each language, with spaces between them}; do
    IFS=: read -r name weight prefix <<< "$language"
    training+="${training:+, }$weight 0:$part $prefix"
    validation+=("$name: 1 $part:1 $prefix")
done
read -ra precision <<< "${PRECISION---bf16}"

launch pretrain_gpt.py \
    --train-weighted-split-paths "all: $training" \
    --valid-weighted-split-paths "${validation[@]}" \
    --tokenizer-type PretrainedFromHF \
    --tokenizer-name-or-path "${TOKENIZER:?set it to a tokenizer of the Hugging Face hub, or its folder}" \
    --num-layers "${NUM_LAYERS:-24}" \
    --hidden-size "${HIDDEN_SIZE:-2048}" \
    --num-attention-heads "${NUM_ATTENTION_HEADS:-16}" \
    --seq-length "${SEQ_LENGTH:-2048}" \
    --position-embedding-type alibi \
    --embed-layernorm \
    --tensor-model-parallel-size "${TENSOR_PARALLEL:-1}" \
    --pipeline-model-parallel-size "${PIPELINE_PARALLEL:-1}" \
    --zero-stage "${ZERO_STAGE:-1}" \
    --micro-batch-size "${MICRO_BATCH_SIZE:-1}" \
    --global-batch-size "${GLOBAL_BATCH_SIZE:-512}" \
    --train-iters "${TRAIN_ITERS:-100000}" \
    --lr "${LR:-2e-4}" \
    --min-lr "${MIN_LR:-1e-5}" \
    --lr-decay-style "${LR_DECAY_STYLE:-cosine}" \
    --lr-warmup-fraction "${LR_WARMUP_FRACTION:-.01}" \
    --adam-beta2 "${ADAM_BETA2:-0.95}" \
    --weight-decay "${WEIGHT_DECAY:-0.1}" \
    --clip-grad "${CLIP_GRAD:-1.0}" \
    --checkpoint-activations \
    --save "${CHECKPOINT_PATH:-checkpoints}" \
    --load "${CHECKPOINT_PATH:-checkpoints}" \
    --save-interval "${SAVE_INTERVAL:-500}" \
    --log-interval "${LOG_INTERVAL:-10}" \
    --eval-interval "${EVAL_INTERVAL:-1000}" \
    --eval-iters "${EVAL_ITERS:-1}" \
    "${precision[@]}" \
    "$@"
