#!/usr/bin/env bash
# Step 5 of detoxification: finetune the newest checkpoint in CHECKPOINT, a GPT of 1.3B parameters,
# on the token files DATA for ITERS steps of BATCH samples, and save it to OUT. Run again, it
# continues from there.
#
#   bash examples/detxoify_lm/finetune_gpt_distributed-1.3b.sh DATA OUT LR BATCH ITERS CHECKPOINT
#
# As published: LR 2e-5, BATCH 512, ITERS 78. DATA_BLEND is pretraining data, "0.7 one_text_document
# 0.3 other_text_document": the last 2% of its documents are the validation set, without which there
# is none. Variables replace the values after them, further words are flags of pretrain_gpt.py.

set -euo pipefail
export GPUS_PER_NODE=${GPUS_PER_NODE:-8}
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
unset PLAN

data=${1:?the token files} out=${2:?the directory to save to} lr=${3:?the learning rate}
batch=${4:?the global batch size} iters=${5:?the number of steps} checkpoint=${6:?the checkpoint}
read -ra precision <<< "${PRECISION---bf16}"
read -ra blend <<< "${DATA_BLEND:-}"
load=(--load "$checkpoint" --finetune --no-load-optim)
if [[ -e $out/latest ]]; then
    load=(--load "$out")
fi
validation=(--eval-iters 0)
if ((${#blend[@]})); then
    validation=(--data-path2 "${blend[@]}" --eval-iters "${EVAL_ITERS:-50}"
        --eval-interval "${EVAL_INTERVAL:-78}" --log-validation-ppl-to-tensorboard)
fi

launch examples/detxoify_lm/finetune_gpt.py \
    --num-layers "${NUM_LAYERS:-24}" \
    --hidden-size "${HIDDEN_SIZE:-2048}" \
    --num-attention-heads "${NUM_ATTENTION_HEADS:-32}" \
    --seq-length "${SEQ_LENGTH:-2048}" \
    --max-position-embeddings "${SEQ_LENGTH:-2048}" \
    --micro-batch-size "${MICRO_BATCH_SIZE:-4}" \
    --global-batch-size "$batch" \
    --train-iters "$iters" \
    --lr "$lr" \
    --lr-decay-style constant \
    --clip-grad 1.0 \
    --weight-decay 0.1 \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --checkpoint-activations \
    --data-path "$data" \
    --split 100,0,0 \
    --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}" \
    --merge-file "${MERGE_FILE:-gpt2-merges.txt}" \
    "${load[@]}" \
    --save "$out" \
    --save-interval "${SAVE_INTERVAL:-78}" \
    --log-interval "${LOG_INTERVAL:-1}" \
    --tensorboard-dir "${TENSORBOARD_DIR:-tensorboard/$out}" \
    "${validation[@]}" \
    "${precision[@]}" \
    "${@:7}"
