"""Names of other programs that generate text, and short names of tools' flags, with what to write here.

They are looked up for unknown flags only.
"""

from collections.abc import Mapping

_LENGTH = "write --out-seq-length"
_SAMPLES = (
    "a prompt has one continuation: repeat it in the lines of --sample-input-file; without a prompt, "
    "write --num-samples"
)

GENERATION_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("max-new-tokens", "max-tokens", "max-length", "max-gen-toks"), _LENGTH),
    **dict.fromkeys(("num-return-sequences", "n", "best-of"), _SAMPLES),
    "do-sample": "sampling is the default; --greedy turns it off",
    "num-beams": "write --beam-width",
    "stop": "write --stop-strings",
    "stop-token-ids": "write --stop-tokens",
    "eos-token-id": "write --stop-tokens",
    "model": "write --load",
    "model-path": "write --load",
    "max-model-len": "write --inference-max-seq-length",
    "prompts": "write --sample-input-file, a prompt a line",
    "use-cache": "the KV cache is on unless --recompute is given",
    "batch-size": "write --micro-batch-size",
}
"""By name with hyphens in transformers' generate, vLLM or lm_eval, what to write in place of it."""

_OUTPUT = dict.fromkeys(("out", "output-dir", "save", "output-prefix"), "write --output")

VOCABULARY_NAMES: Mapping[str, str] = {
    **_OUTPUT,
    **dict.fromkeys(("key", "json-keys", "column"), "write --json-key"),
    **dict.fromkeys(("files", "data", "corpus"), "write --input"),
}
"""By name, what to write for the training of a vocabulary."""

PREPROCESSING_NAMES: Mapping[str, str] = {
    "tokenizer": "write --tokenizer-type, and the files or the folder that this type needs",
    "tokenizer-path": "write --tokenizer-type PretrainedFromHF and --tokenizer-name-or-path",
    **dict.fromkeys(("key", "keys", "column", "text-column", "field"), "write --json-keys"),
    **dict.fromkeys(("output", "out", "output-dir", "save"), "write --output-prefix"),
    **dict.fromkeys(("num-workers", "num-proc"), "write --workers"),
}
"""By name, what to write for the preprocessing of texts."""
