#!/usr/bin/env bash
# Pretrain a GPT of 345M parameters in one process: on a GPU, or on a CPU where there is none.
#
#   DATA_PATH=my_text_document VOCAB_FILE=vocab.json MERGE_FILE=merges.txt \
#       CHECKPOINT_PATH=checkpoints bash examples/pretrain_gpt.sh
#
# Each variable below replaces the value after it; words after the script's name are further flags
# of pretrain_gpt.py. Run again, it goes on from the newest checkpoint. More variables: launch.sh.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# DATA_PATH may be a blend, "0.7 one_text_document 0.3 other_text_document",
# PRECISION is --bf16, --fp16 or, for 32 bits, nothing.
read -ra data_path <<< "${DATA_PATH:?set it to the token files, without .bin and .idx}"
read -ra precision <<< "${PRECISION---bf16}"

launch pretrain_gpt.py \
    --num-layers "${NUM_LAYERS:-24}" \
    --hidden-size "${HIDDEN_SIZE:-1024}" \
    --num-attention-heads "${NUM_ATTENTION_HEADS:-16}" \
    --seq-length "${SEQ_LENGTH:-1024}" \
    --micro-batch-size "${MICRO_BATCH_SIZE:-4}" \
    --global-batch-size "${GLOBAL_BATCH_SIZE:-8}" \
    --train-iters "${TRAIN_ITERS:-500000}" \
    --lr "${LR:-1.5e-4}" \
    --min-lr "${MIN_LR:-1.0e-5}" \
    --lr-decay-style "${LR_DECAY_STYLE:-cosine}" \
    --lr-decay-iters "${LR_DECAY_ITERS:-${TRAIN_ITERS:-320000}}" \
    --lr-warmup-fraction "${LR_WARMUP_FRACTION:-.01}" \
    --weight-decay "${WEIGHT_DECAY:-1e-2}" \
    --clip-grad "${CLIP_GRAD:-1.0}" \
    --checkpoint-activations \
    --data-path "${data_path[@]}" \
    --split "${SPLIT:-949,50,1}" \
    --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}" \
    --merge-file "${MERGE_FILE:-gpt2-merges.txt}" \
    --save "${CHECKPOINT_PATH:-checkpoints}" \
    --load "${CHECKPOINT_PATH:-checkpoints}" \
    --save-interval "${SAVE_INTERVAL:-500}" \
    --log-interval "${LOG_INTERVAL:-10}" \
    --eval-interval "${EVAL_INTERVAL:-100}" \
    --eval-iters "${EVAL_ITERS:-10}" \
    "${precision[@]}" \
    "$@"
