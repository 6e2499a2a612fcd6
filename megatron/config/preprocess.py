"""What tools/preprocess_data.py reads and writes."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megatron.config.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """The conversion of JSON lines to token files, as the user asked for it."""

    input: list[str]
    """Files with one JSON object a line; several are read one after the other."""

    output_prefix: str
    """Path of the output, to which _KEY_document.bin and .idx are added."""

    json_keys: Annotated[list[str], Spelling("--json-keys", ("--json-key",))] = field(
        default_factory=lambda: ["text"]
    )
    """Keys whose text to convert; each becomes token files of its own."""

    append_eod: bool = False
    """End every document with the tokenizer's end-of-document token."""

    dataset_impl: Literal["mmap"] = "mmap"
    """Format of the token files."""

    workers: int = 1
    """Processes that tokenize. The files do not depend on it."""

    chunk_size: int = 512
    """Lines that a worker gets at a time, fewer if they are long."""

    log_interval: int = 10_000
    """Documents between two lines of progress where there is no terminal for a bar."""
