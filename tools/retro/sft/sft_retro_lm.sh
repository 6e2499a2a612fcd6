#!/usr/bin/env bash
# Finetune a Retro of 843M parameters on questions and answers: docs/instruct_retro.md.
#
#   DATA_FOLDER=questions TOKENIZER_MODEL=tokenizer.model \
#       bash tools/retro/sft/sft_retro_lm.sh open_inst 843m 128 5e-6 CHECKPOINT [FLAG...]
#
# Words are the blend, the size, the global batch size, the learning rate and the directory of the
# pretrained Retro. A blend is open_inst, or a value of --data-path in quotes. Each variable below
# replaces the value after it. More variables: examples/launch.sh.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../../examples/launch.sh"

if (($# < 5)); then
    echo "usage: $0 BLEND SIZE GLOBAL_BATCH_SIZE LR CHECKPOINT [FLAG...]" >&2
    exit 2
fi
blend=$1
if [[ $1 == open_inst ]]; then
    blend="0.02 soda 0.02 eli5 0.01 self_instruct_short 0.02 self_instruct_long"
    blend+=" 0.02 unnatural-instructions 0.01 flan_cot 0.05 dolly"
    blend+=" 0.817 oasst-skip-noncode 0.033 oasst-skip-code"
fi
read -ra data_path <<< "$blend"
if [[ $2 != 843m ]]; then
    echo "size $2 is unknown; for another one write 843m and set NUM_LAYERS and the others" >&2
    exit 2
fi

launch tools/retro/sft/sft_retro.py \
    --num-layers "${NUM_LAYERS:-24}" \
    --hidden-size "${HIDDEN_SIZE:-1024}" \
    --num-attention-heads "${NUM_ATTENTION_HEADS:-16}" \
    --seq-length "${SEQ_LENGTH:-4096}" \
    --max-position-embeddings "${SEQ_LENGTH:-4096}" \
    --use-rotary-position-embeddings --rotary-percent 0.5 --no-position-embedding \
    --swiglu --apply-layernorm-1p --disable-bias-linear --untie-embeddings-and-output-weights \
    --attention-dropout 0 --hidden-dropout 0 \
    --retro-add-retriever --retro-num-neighbors "${NUM_NEIGHBORS:-2}" \
    --retro-attention-gate "${ATTENTION_GATE:-0}" \
    --tokenizer-type "${TOKENIZER_TYPE:-GPTSentencePieceTokenizer}" \
    --tokenizer-model "${TOKENIZER_MODEL:-tokenizer.model}" \
    --data-path "${data_path[@]}" \
    --data-folder "${DATA_FOLDER:-questions}" \
    --answer-loss-only --eod-mask-loss --ft_neighbours "${FT_NEIGHBOURS:-1}" \
    --dataloader-type cyclic \
    --micro-batch-size "${MICRO_BATCH_SIZE:-1}" \
    --global-batch-size "$3" \
    --train-iters "${TRAIN_ITERS:-1000}" \
    --lr "$4" --min-lr "$4" --lr-decay-style cosine \
    --adam-beta1 0.9 --adam-beta2 0.98 --weight-decay 0.01 --clip-grad 1.0 --bf16 \
    --log-interval 10 --save-interval 500 --eval-interval 200 --eval-iters "${EVAL_ITERS:-100}" \
    --load "$5" --finetune --no-load-rng --no-load-optim \
    --save "${SAVE:-$5-instructed}" \
    "${@:6}"
