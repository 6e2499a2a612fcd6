#!/usr/bin/env bash
# Finetune a BioMegatron of 345M parameters to extract relations, on GPUS_PER_NODE GPUs, with the
# settings of NeMo's tutorial on ChemProt; docs/text_tasks.md describes the files.
#
#   PRETRAINED_CHECKPOINT=biomegatron TRAIN_DATA=train.tsv VALID_DATA=dev.tsv VOCAB_FILE=vocab.txt \
#       CHECKPOINT_PATH=relations bash examples/finetune_relations.sh
#
# Each variable below replaces the value after it; words after the script's name are further flags
# of tasks/text_classification.py, or settings of NeMo's. Run again, it goes on from the newest
# checkpoint. More variables: launch.sh.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
unset PLAN
export GPUS_PER_NODE=${GPUS_PER_NODE:-1}

read -ra train_data <<< "${TRAIN_DATA:-train.tsv}"
read -ra valid_data <<< "${VALID_DATA:-dev.tsv}"
read -ra precision <<< "${PRECISION---fp16}"

launch tasks/text_classification.py \
    --seed 1234 \
    --train-data "${train_data[@]}" \
    --valid-data "${valid_data[@]}" \
    --negative-label "${NEGATIVE_LABEL:-false}" \
    --class-balancing weighted_loss \
    --head-layers 2 \
    --tokenizer-type "${TOKENIZER_TYPE:-BertWordPieceLowerCase}" \
    --vocab-file "${VOCAB_FILE:-vocab.txt}" \
    --pretrained-checkpoint "${PRETRAINED_CHECKPOINT:?set it to the directory of a BERT}" \
    --epochs "${EPOCHS:-5}" \
    --tensor-model-parallel-size "${TENSOR_PARALLEL:-1}" \
    --num-layers "${NUM_LAYERS:-24}" \
    --hidden-size "${HIDDEN_SIZE:-1024}" \
    --num-attention-heads "${NUM_ATTENTION_HEADS:-16}" \
    --seq-length "${SEQ_LENGTH:-256}" \
    --max-position-embeddings "${MAX_POSITION_EMBEDDINGS:-512}" \
    --micro-batch-size "${MICRO_BATCH_SIZE:-8}" \
    --lr "${LR:-2.0e-5}" \
    --lr-decay-style linear \
    --lr-warmup-fraction "${LR_WARMUP_FRACTION:-0.1}" \
    --weight-decay 1.0e-2 \
    --save "${CHECKPOINT_PATH:-checkpoints}" \
    --load "${CHECKPOINT_PATH:-checkpoints}" \
    --save-interval "${SAVE_INTERVAL:-500000}" \
    --log-interval "${LOG_INTERVAL:-10}" \
    "${precision[@]}" \
    "$@"
