"""Decode tokens as the continuation of the tokens before them (detokenization)."""

from collections.abc import Sequence

from megatron.tokenizer.types.tokenizer import Tokenizer


def text_after(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text of `tokens` where they follow the tokens `before`.

    SentencePiece leaves out the blank that the first token of a text begins with, and of a
    continuation that blank is a part.
    """
    last = [token for token in before[-1:] if token not in tokenizer.special_ids.values()]
    head = tokenizer.decode(last) if last else ""
    # Bytes of one character may lie on both sides, where there is no text to begin after.
    if not last or head.endswith("\ufffd"):
        return tokenizer.decode(tokens)
    full = tokenizer.decode([*last, *tokens])
    return full[len(head) :] if full.startswith(head) else tokenizer.decode(tokens)
