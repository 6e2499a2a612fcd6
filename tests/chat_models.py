"""A tokenizer with a chat template, as transformers saves it, and a network for its vocabulary."""

import json
from pathlib import Path

from tiny import tiny_spec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
"""The first ids; the end of a document, and the beginning and the end of a turn."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOD, TURN_START, TURN_END = range(3)
SPEC = tiny_spec(
    hidden_size=16,
    ffn_hidden_size=32,
    num_attention_heads=4,
    head_dim=4,
    seq_length=128,
    max_position_embeddings=128,
    vocab_size=len(SPECIAL) + 256 + 2,
    padded_vocab_size=264,
)


def write_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """Write a byte-level tokenizer into `folder`, and return that."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *letters, "th", "the"])}
    backend = Tokenizer(models.BPE(vocab, [("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
