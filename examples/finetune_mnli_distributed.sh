#!/usr/bin/env bash
# Finetune a pretrained BERT of 345M parameters on MNLI, on GPUS_PER_NODE GPUs; docs/downstream.md
# describes the files. Of several nodes, start it on each, as pretrain_bert_distributed.sh.
#
#   PRETRAINED_CHECKPOINT=bert TRAIN_DATA=MNLI/train.tsv \
#       VALID_DATA="MNLI/dev_matched.tsv MNLI/dev_mismatched.tsv" VOCAB_FILE=bert-vocab.txt \
#       CHECKPOINT_PATH=bert_mnli bash examples/finetune_mnli_distributed.sh
#
# Each variable below replaces the value after it; words after the script's name are further flags
# of tasks/main.py. Run again, it goes on from the newest checkpoint. More variables: launch.sh.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
unset PLAN
export GPUS_PER_NODE=${GPUS_PER_NODE:-8}

read -ra train_data <<< "${TRAIN_DATA:-MNLI/train.tsv}"
read -ra valid_data <<< "${VALID_DATA:-MNLI/dev_matched.tsv MNLI/dev_mismatched.tsv}"
read -ra precision <<< "${PRECISION---fp16}"

launch tasks/main.py \
    --task MNLI \
    --seed 1234 \
    --train-data "${train_data[@]}" \
    --valid-data "${valid_data[@]}" \
    --tokenizer-type BertWordPieceLowerCase \
    --vocab-file "${VOCAB_FILE:-bert-vocab.txt}" \
    --pretrained-checkpoint "${PRETRAINED_CHECKPOINT:?set it to the directory of a BERT}" \
    --epochs "${EPOCHS:-5}" \
    --tensor-model-parallel-size "${TENSOR_PARALLEL:-1}" \
    --num-layers "${NUM_LAYERS:-24}" \
    --hidden-size "${HIDDEN_SIZE:-1024}" \
    --num-attention-heads "${NUM_ATTENTION_HEADS:-16}" \
    --seq-length "${SEQ_LENGTH:-512}" \
    --max-position-embeddings "${MAX_POSITION_EMBEDDINGS:-${SEQ_LENGTH:-512}}" \
    --micro-batch-size "${MICRO_BATCH_SIZE:-8}" \
    --checkpoint-activations \
    --lr "${LR:-5.0e-5}" \
    --lr-decay-style linear \
    --lr-warmup-fraction "${LR_WARMUP_FRACTION:-0.065}" \
    --weight-decay 1.0e-1 \
    --save "${CHECKPOINT_PATH:-checkpoints}" \
    --load "${CHECKPOINT_PATH:-checkpoints}" \
    --save-interval "${SAVE_INTERVAL:-500000}" \
    --log-interval "${LOG_INTERVAL:-10}" \
    --eval-interval "${EVAL_INTERVAL:-100}" \
    --eval-iters "${EVAL_ITERS:-50}" \
    "${precision[@]}" \
    "$@"
