#!/usr/bin/env bash
# OpenWebText's chain, from fetched pages to token files: one run of all tools in tools/openwebtext.
#
#   PAGES=scraped OUT=owt VOCAB_FILE=vocab.json MERGE_FILE=merges.txt \
#       bash examples/corpora/openwebtext.sh
#
# PAGES is a folder of JSON lines with text and url. Without it, URLS, a folder of lists of URLs, is
# filtered to OUT/urls.txt; FETCH=1 fetches these pages to OUT/pages, or another program does. Run again, the script continues: a step
# whose output is there is left out, unless its options or its input files have changed.
#
#   USER_AGENT            name of the scraper of FETCH=1, with an address for complaints
#   LAMBADA, TASK_FILES   texts of evaluations to take out: LAMBADA's file; "squad FILE race FILE"
#   THRESHOLD             similarity above which documents are duplicates (0.7)
#   DATE, LICENCE         of the source, for the report OUT/corpus.json

set -euo pipefail

tools=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../tools" && pwd)
out=${OUT:?set it to the folder to write}
mkdir -p "$out"

# step OUTPUT COMMAND...: run the command, unless OUTPUT is there and OUTPUT.step shows that it was
# made by the same command from the same files (names, sizes and times of change).
step() {
    local output=$1 now
    shift
    now=$(printf '%q ' "$@"; for word in "$@"; do
        [[ $word == "$output" || ! -e $word ]] || find -L "$word" -type f -printf '\n%p %s %T@' | sort
    done)
    if [[ -e $output && -e $output.step && $(< "$output.step") == "$now" ]]; then
        echo "$output is there"
        return
    fi
    rm -f "$output.step"
    # Tokens of an interrupted run are continued only if nothing before them has changed.
    if [[ ! -e $output.begun || $(< "$output.begun") != "$now" ]]; then
        rm -rf "$out/openwebtext.stage"
        printf '%s' "$now" > "$output.begun"
    fi
    "$@"
    mv "$output.begun" "$output.step"
}

own() {
    python "$tools/openwebtext/$1.py" "${@:2}"
}

fetch() {
    rm -f "$4"
    python "$tools/corpora/fetch.py" "$@" ${USER_AGENT:+--user-agent "$USER_AGENT"}
}

tokenize() {
    python "$tools/preprocess_data.py" "$@" --tokenizer-type GPT2BPETokenizer --append-eod --resume \
        --workers "${WORKERS:-8}"
}

if [[ -n ${URLS:-} ]]; then
    step "$out/urls.txt" own blacklist_urls "$URLS" "$out/urls.txt"
    if [[ -n ${FETCH:-} ]]; then
        PAGES=$out/pages
        mkdir -p "$PAGES"
        step "$PAGES/pages.json" fetch --urls "$out/urls.txt" --pages "$PAGES/pages.json"
    elif [[ -z ${PAGES:-} ]]; then
        echo "run again with FETCH=1, or fetch the pages of $out/urls.txt and give PAGES=FOLDER"
        exit
    fi
fi

: "${PAGES:?set it to the folder of fetched pages, or URLS to that of lists of URLs}"
step "$out/merged.json" \
    own merge_jsons --json_path "$PAGES" --output_file "$out/merged.json"
step "$out/clean.json" \
    own cleanup_dataset "$out/merged.json" "$out/clean.json" \
    --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}" --merge-file "${MERGE_FILE:-gpt2-merges.txt}"
step "$out/pairs.jsonl" \
    own find_duplicates --inputs "$out/clean.json" url --output "$out/pairs.jsonl"
step "$out/groups.jsonl" \
    own group_duplicate_url "$out/pairs.jsonl" "$out/groups.jsonl" "${THRESHOLD:-0.7}"
step "$out/unique.json" \
    own remove_group_duplicates "$out/groups.jsonl" "$out/clean.json" "$out/unique.json"

last=unique
read -ra tasks <<< "${LAMBADA:+lambada}"
read -ra files <<< "${TASK_FILES:-}"
for ((i = 0; i < ${#files[@]}; i += 2)); do
    tasks+=("${files[i]}")
done
if ((${#tasks[@]})); then
    last=decontaminated
    step "$out/$last.json" \
        own filter_ngrams --tasks "${tasks[@]}" --dedup-dataset "$out/unique.json" text \
        ${LAMBADA:+--lambada-path "$LAMBADA"} ${files:+--task-files "${files[@]}"} \
        --output "$out/$last.json"
fi
step "$out/corpus.jsonl" \
    own add_id --input-file "$out/$last.json" --output-file "$out/corpus.jsonl" --id-prefix owt
step "$out/openwebtext_text_document.idx" \
    tokenize --input "$out/corpus.jsonl" --output-prefix "$out/openwebtext" \
    --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}" --merge-file "${MERGE_FILE:-gpt2-merges.txt}"

python - "$out" "${DATE:-}" "${LICENCE:-}" "$last" << 'EOT'
import json, os, sys
folder, date, licence, last = sys.argv[1:]
source = {"name": "OpenWebText", "date": date or None, "licence": licence or None}
counts = {}
for step in ("merged.json", "clean.json", "unique.json", last + ".json", "corpus.jsonl"):
    with open(os.path.join(folder, step), "rb") as lines:
        counts[step.partition(".")[0]] = sum(1 for _ in lines)
if not counts["corpus"]:
    sys.exit(f"error: no document is left: {counts}")
with open(os.path.join(folder, "corpus.json.new"), "w") as file:
    json.dump({"source": source, "documents": counts}, file, indent=2)
os.replace(file.name, os.path.join(folder, "corpus.json"))
print(" | ".join(f"{step}: {count}" for step, count in counts.items()))
EOT
