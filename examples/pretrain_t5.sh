#!/usr/bin/env bash
# Pretrain a T5 of 220M parameters in one process: on a GPU, or on a CPU where there is none.
#
#   DATA_PATH=my-t5_text_sentence VOCAB_FILE=bert-vocab.txt \
#       CHECKPOINT_PATH=checkpoints bash examples/pretrain_t5.sh
#
# Each variable below replaces the value after it; words after the script's name are further flags
# of pretrain_t5.py. Run again, it goes on from the newest checkpoint. More variables: launch.sh.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# DATA_PATH may be a blend, "0.7 one_text_sentence 0.3 other_text_sentence",
# PRECISION is --fp16, --bf16 or, for 32 bits, nothing.
read -ra data_path <<< "${DATA_PATH:?set it to the token files, without .bin and .idx}"
read -ra precision <<< "${PRECISION---fp16}"

launch pretrain_t5.py \
    --num-layers "${NUM_LAYERS:-12}" \
    --decoder-num-layers "${DECODER_NUM_LAYERS:-${NUM_LAYERS:-12}}" \
    --hidden-size "${HIDDEN_SIZE:-768}" \
    --num-attention-heads "${NUM_ATTENTION_HEADS:-12}" \
    --kv-channels "${KV_CHANNELS:-64}" \
    --ffn-hidden-size "${FFN_HIDDEN_SIZE:-3072}" \
    --encoder-seq-length "${SEQ_LENGTH:-512}" \
    --decoder-seq-length "${DECODER_SEQ_LENGTH:-128}" \
    --micro-batch-size "${MICRO_BATCH_SIZE:-16}" \
    --global-batch-size "${GLOBAL_BATCH_SIZE:-16}" \
    --train-iters "${TRAIN_ITERS:-1000000}" \
    --lr "${LR:-1.0e-4}" \
    --min-lr "${MIN_LR:-1.0e-5}" \
    --lr-decay-style "${LR_DECAY_STYLE:-linear}" \
    --lr-decay-iters "${LR_DECAY_ITERS:-${TRAIN_ITERS:-1000000}}" \
    --lr-warmup-fraction "${LR_WARMUP_FRACTION:-.01}" \
    --weight-decay "${WEIGHT_DECAY:-1e-2}" \
    --clip-grad "${CLIP_GRAD:-1.0}" \
    --data-path "${data_path[@]}" \
    --split "${SPLIT:-949,50,1}" \
    --vocab-file "${VOCAB_FILE:-bert-vocab.txt}" \
    --vocab-extra-ids "${VOCAB_EXTRA_IDS:-100}" \
    --save "${CHECKPOINT_PATH:-checkpoints}" \
    --load "${CHECKPOINT_PATH:-checkpoints}" \
    --save-interval "${SAVE_INTERVAL:-10000}" \
    --log-interval "${LOG_INTERVAL:-100}" \
    --eval-interval "${EVAL_INTERVAL:-1000}" \
    --eval-iters "${EVAL_ITERS:-10}" \
    "${precision[@]}" \
    "$@"
