#!/usr/bin/env bash
# From the source files of Python's standard library to a small model that writes Python, on this
# machine: with all its GPUs, or with two processes where there is none.
#
#   bash examples/quickstart.sh
#
# Every step prints the command that it runs, and uses what an earlier run of the script has made.
#
#   OUT               folder for everything that is made (quickstart)
#   QUICKSTART_ITERS  optimizer steps (1200)
#   QUICKSTART_MB     megabytes of source text, at most (1000: all there is)
#   VENV, PYTHON      where packages are installed, and with which Python: see tools/venv.sh

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/venv.sh

out=${OUT:-quickstart}
iterations=${QUICKSTART_ITERS:-1200}
megabytes=${QUICKSTART_MB:-1000}
half=$(((iterations + 1) / 2))

step() {
    printf '\n== %s\n' "$1"
}

# The iteration of the newest checkpoint.
saved_iteration() {
    local tag=global_step0
    if [[ -f $out/checkpoints/latest ]]; then
        tag=$(< "$out/checkpoints/latest")
    fi
    echo "${tag#global_step}"
}

# The same command each time: it goes on from the newest checkpoint, and leaves at half-way.
train() {
    run deepspeed --num_gpus "$processes" --master_port "$port" pretrain_gpt.py \
        --config examples/quickstart/gpt.yaml \
        --data-path "$out/corpus_text_document" \
        --vocab-file "$out/tokenizer/vocab.json" --merge-file "$out/tokenizer/merges.txt" \
        --micro-batch-size "$micro_batch" --global-batch-size "$((micro_batch * processes))" \
        --train-iters "$iterations" --exit-interval "$half" \
        --save "$out/checkpoints" --load "$out/checkpoints" --tensorboard-dir "$out/tensorboard"
}

if ((iterations < 10)); then
    echo "error: QUICKSTART_ITERS=$iterations: write at least 10, since each tenth step is logged" >&2
    exit 2
fi
settings="QUICKSTART_ITERS=$iterations QUICKSTART_MB=$megabytes"
if [[ -f $out/settings && $(< "$out/settings") != "$settings" ]]; then
    echo "error: $out was made with $(< "$out/settings"), and this run is one with $settings:" \
        "remove the folder, or give another in OUT" >&2
    exit 2
fi
mkdir -p "$out"
echo "$settings" > "$out/settings"

step "Python packages"
use_python requirements.txt
echo "$(command -v python): $(python --version)"

step "A corpus: one source file a line, as JSON"
if [[ ! -f $out/corpus.jsonl ]]; then
    run python examples/quickstart/make_corpus.py --output "$out/corpus.jsonl" --max-mb "$megabytes"
fi
ls -l "$out/corpus.jsonl"

step "A vocabulary of byte pairs"
if [[ ! -d $out/tokenizer ]]; then
    run python tools/train_tokenizer.py --input "$out/corpus.jsonl" \
        --output "$out/tokenizer" --vocab-size 4096
fi
ls -l "$out"/tokenizer/*

step "Token files"
if [[ ! -f $out/corpus_text_document.idx ]]; then
    run python tools/preprocess_data.py --input "$out/corpus.jsonl" --output-prefix "$out/corpus" \
        --tokenizer-type GPT2BPETokenizer --vocab-file "$out/tokenizer/vocab.json" \
        --merge-file "$out/tokenizer/merges.txt" --append-eod --workers 2
fi
ls -l "$out"/corpus_text_document.*

step "Training, first half"
processes=$(python -c 'import torch; print(torch.cuda.device_count() or 2)')
port=$(python -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])')
micro_batch=$(((8 + processes - 1) / processes))
if (($(saved_iteration) < half)); then
    train
fi
cat "$out/checkpoints/latest" && echo

step "Training, second half: the same command goes on from the checkpoint"
if (($(saved_iteration) < iterations)); then
    train
fi
cat "$out/checkpoints/latest" && echo

step "A continuation of \"def hello_world():\""
run python tools/generate_samples_gpt.py --load "$out/checkpoints" \
    --prompt "def hello_world():" --out-seq-length 128 --temperature 0.8 --top_p 0.9 --seed 1 \
    --sample-output-file "$out/sample.txt"

step "The same model for transformers, and the same words from it"
if [[ ! -d $out/hugging_face ]]; then
    run python tools/convert_checkpoint/to_hf.py --load "$out/checkpoints" \
        --save "$out/hugging_face"
fi
run python tools/generate_samples_gpt.py --load "$out/checkpoints" --device cpu \
    --prompt "def hello_world():" --out-seq-length 32 --greedy \
    --sample-output-file "$out/greedy.txt"
run python examples/quickstart/same_words.py --model "$out/hugging_face" \
    --prompt "def hello_world():" --tokens 32 --expected "$out/greedy.txt"

step "Summary (the whole took $((SECONDS / 60)) min $((SECONDS % 60)) s)"
run python examples/quickstart/summary.py --checkpoints "$out/checkpoints" \
    --tensorboard "$out/tensorboard" --sample "$out/sample.txt" --plot "$out/loss.png"
