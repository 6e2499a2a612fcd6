#!/usr/bin/env bash
# CodeParrot, a GPT of 110M parameters that writes Python: the run of Hugging Face's tutorial
# (huggingface.co/blog/megatron-training), from JSON lines with the key "content" to checkpoints.
#
#   INPUT=codeparrot_data.json VOCAB_FILE=vocab.json MERGE_FILE=merges.txt \
#       GPUS_PER_NODE=8 bash examples/codeparrot.sh

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

prefix=${OUTPUT_PREFIX:-codeparrot}
data_path=${DATA_PATH:-${prefix}_content_document}
vocab_file=${VOCAB_FILE:-vocab.json} merge_file=${MERGE_FILE:-merges.txt}
read -ra precision <<< "${PRECISION---bf16}"

# Token files are made once. (On several nodes: on one of them, before the run.)
if [[ ! -v PLAN && ! -f $data_path.idx ]]; then
    python "$repository/tools/preprocess_data.py" \
        --input "${INPUT:-codeparrot_data.json}" \
        --output-prefix "$prefix" \
        --json-keys content \
        --tokenizer-type GPT2BPETokenizer \
        --vocab-file "$vocab_file" \
        --merge-file "$merge_file" \
        --dataset-impl mmap \
        --workers "${WORKERS:-32}" \
        --chunk-size 25 \
        --append-eod
fi

launch pretrain_gpt.py \
    --num-layers "${NUM_LAYERS:-12}" \
    --hidden-size "${HIDDEN_SIZE:-768}" \
    --num-attention-heads "${NUM_ATTENTION_HEADS:-12}" \
    --seq-length "${SEQ_LENGTH:-1024}" \
    --micro-batch-size "${MICRO_BATCH_SIZE:-12}" \
    --global-batch-size "${GLOBAL_BATCH_SIZE:-192}" \
    --train-iters "${TRAIN_ITERS:-150000}" \
    --lr "${LR:-0.0005}" \
    --lr-decay-style "${LR_DECAY_STYLE:-cosine}" \
    --lr-decay-iters "${LR_DECAY_ITERS:-${TRAIN_ITERS:-150000}}" \
    --lr-warmup-iters "${LR_WARMUP_ITERS:-2000}" \
    --weight-decay "${WEIGHT_DECAY:-.1}" \
    --adam-beta2 "${ADAM_BETA2:-.999}" \
    --data-path "$data_path" \
    --vocab-file "$vocab_file" \
    --merge-file "$merge_file" \
    --save "${CHECKPOINT_PATH:-codeparrot_checkpoints}" \
    --load "${CHECKPOINT_PATH:-codeparrot_checkpoints}" \
    --save-interval "${SAVE_INTERVAL:-2000}" \
    --log-interval "${LOG_INTERVAL:-10}" \
    --eval-interval "${EVAL_INTERVAL:-200}" \
    --eval-iters "${EVAL_ITERS:-10}" \
    --tensorboard-dir "${TENSORBOARD_PATH:-codeparrot_tensorboard}" \
    "${precision[@]}" \
    "$@"
