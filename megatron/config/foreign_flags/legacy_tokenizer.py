"""Flags of other systems about tokenizers, each with its user's sentence."""

from megatron.config.parsing.flags import Legacy

_MULTIMODAL = "models are trained on text alone, so there is no MultimodalTokenizer; leave it out"
_ONE_FILE = "write --tokenizer-type and the files of the tokenizer instead"
_NULL = "NullTokenizer ends documents with the id --vocab-size and pads with nothing; leave it out"

TOKENIZER_LEGACY = (
    Legacy(
        "--trust-remote-code",
        "write --tokenizer-kwargs trust_remote_code true, which runs the Python code in the "
        "tokenizer's directory",
        refused=True,
    ),
    Legacy(
        "--tokenizer-hf-no-use-fast",
        "write --tokenizer-kwargs use_fast false instead",
        refused=True,
    ),
    Legacy("--tokenizer-metadata", _ONE_FILE, takes=1, refused=True),
    Legacy("--metadata-path", _ONE_FILE, takes=1, refused=True),
    Legacy("--null-tokenizer-eod-id", _NULL, takes=1, refused=True),
    Legacy("--null-tokenizer-pad-id", _NULL, takes=1, refused=True),
    Legacy(
        "--sft-tokenizer-prompt-format",
        "conversations become token files with tools/preprocess_data.py --conversations "
        "--chat-template FILE",
        takes=1,
        refused=True,
    ),
    Legacy("--tokenizer-prompt-format", _MULTIMODAL, takes=1, refused=True),
    Legacy("--image-tag-type", _MULTIMODAL, takes=1, refused=True),
    Legacy("--force-system-message", _MULTIMODAL, refused=True),
    Legacy(
        "--use-gigatoken",
        "gigatoken encodes wherever it gives the same ids; --tokenizer-backend chooses",
    ),
)
