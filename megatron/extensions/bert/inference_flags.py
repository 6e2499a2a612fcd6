"""Use of a trained BERT: masked tokens, scores of sentences, embeddings; flags and checks."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.parsing.declaration import range_problems, setting


@dataclass(frozen=True, kw_only=True)
class FillMaskConfig:
    """Masked tokens, scores of sentences and their embeddings, by a BERT."""

    text: list[str] | None = None
    """Texts, each in quotes; a tab separates two segments."""

    input_file: str | None = None
    """File of texts, one a line."""

    top: int = setting(5, at_least=1)
    """Number of candidates for each [MASK] of a text."""

    output_bert_embeddings: str | None = None
    """Write the embedding of each text to this .npy file instead: the mean of its last hidden
    states, without [CLS] and [SEP], [texts, hidden size] in fp32."""


def fill_mask_problems(options: FillMaskConfig) -> Iterator[str]:
    """Yield why there is nothing to do."""
    if (options.text is None) == (options.input_file is None):
        yield "give the texts with either --text or --input-file"
    yield from range_problems(options)
    file = options.output_bert_embeddings
    if file is not None and not file.endswith(".npy"):
        yield f"--output-bert-embeddings {file} must end in .npy"
